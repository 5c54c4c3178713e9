"""The batch stream: whole documents into reused buffers, and no thread or file left behind however it ends."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import filled_store

from dflash_offline.store import TRAIN, BatchStream, Documents, Fetcher, Store, StoreError, pack
from dflash_offline.store.fp8 import decode_bits


def stream_of(store: Store, budget: int = 256, **options: Any) -> tuple[BatchStream, Documents, list[list[int]]]:
    documents = store.documents(TRAIN)
    groups = pack(documents.length.tolist(), budget)
    return BatchStream(store, documents, groups, budget, (0, 2), **options), documents, groups


def test_batches_hold_whole_documents_and_padding(filled: Store) -> None:
    stream, documents, groups = stream_of(filled, final=True)
    seen = 0
    with stream:
        for batch, group in zip(stream, groups, strict=True):
            assert batch.documents == group
            at = 0
            for index in group:
                part, length = filled.part(int(documents.part[index])), int(documents.length[index])
                start = int(documents.start[index])
                assert np.array_equal(batch.tokens[at : at + length], part.small("tokens")[start : start + length])
                expected = filled.empty_states(3, length)
                part.read("hidden", start, start + length, (0, 1, 2), expected)
                assert np.array_equal(batch.hidden.rows(at, at + length).values, expected.values[[0, 2]])
                assert (batch.doc_start[at : at + length] == at).all()
                at += length
                seen += 1
            assert batch.final is not None
            assert batch.final.values[0, :at].any(axis=1).all()
            assert batch.used == at
            assert not batch.loss_mask[at:].any()
            assert (batch.doc_start[at:] == 256).all()
    assert seen == len(documents)


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dflash-")]


def open_shards(store: Path) -> list[str]:
    """Shard files of a store that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith(str(store)) and "/c/" in target:
            found.append(target)
    return found


def test_closing_early_leaves_no_thread(filled: Store) -> None:
    stream, _, groups = stream_of(filled)
    assert len(groups) > 4
    next(stream)
    assert our_threads()
    stream.close()
    assert not our_threads()


def test_a_consumer_that_just_stops_leaves_no_thread_or_file(tmp_path: Path) -> None:
    def consume() -> None:
        store = filled_store(tmp_path / "s", parts=8)
        documents = store.documents(TRAIN)
        stream = BatchStream(store, documents, [[i] for i in range(len(documents))], 300, (0, 1))
        next(stream)
        assert open_shards(tmp_path)
        assert our_threads()  # then it forgets the stream

    consume()
    gc.collect()
    until = time.monotonic() + 10
    while (our_threads() or open_shards(tmp_path)) and time.monotonic() < until:
        time.sleep(0.01)
        gc.collect()
    assert not our_threads()
    assert not open_shards(tmp_path)


def test_an_error_in_a_reading_thread_reaches_the_consumer(tmp_path: Path) -> None:
    store = filled_store(tmp_path / "s", parts=4)
    documents = store.documents(TRAIN)
    shard = tmp_path / "s/parts/t-2/hidden/c/0/0/0"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    groups = pack(documents.length.tolist(), 400)
    with (
        BatchStream(store, documents, groups, 400, (0, 1), threads=3) as stream,
        pytest.raises(StoreError, match=r"t-2.*checksum"),
    ):
        for _ in stream:
            pass
    assert not our_threads()


def test_buffers_are_used_again(filled: Store) -> None:
    stream, _, groups = stream_of(filled, ahead=2)
    with stream:
        seen = {id(batch.hidden.values) for batch in stream}
    assert len(groups) > 3
    assert len(seen) <= 3


def test_a_stream_goes_on_at_any_position(filled: Store) -> None:
    documents = filled.documents(TRAIN)
    groups = pack(documents.length.tolist(), 256)

    def batches(first: int) -> list[bytes]:
        with BatchStream(filled, documents, groups[first:], 256, (0,)) as stream:
            return [batch.hidden.rows(0, batch.used).values.tobytes() for batch in stream]

    whole = batches(0)
    for position in (1, len(groups) - 1, len(groups)):
        assert batches(position) == whole[position:]


def test_an_empty_batch_is_all_padding(filled: Store) -> None:
    documents = filled.documents(TRAIN)
    with BatchStream(filled, documents, [[0], []], 256, (0,)) as stream:
        assert next(stream).used > 0
        batch = next(stream)
        assert batch.used == 0
        assert not batch.loss_mask.any()
        assert (batch.doc_start == 256).all()


def test_fp8_batches_come_encoded(tmp_path: Path) -> None:
    plain = filled_store(tmp_path / "bf16")
    small = filled_store(tmp_path / "fp8", encoding="fp8")
    documents = small.documents(TRAIN)
    with (
        BatchStream(small, documents, [[0, 1]], 400, (1,), final=True) as stream,
        BatchStream(plain, documents, [[0, 1]], 400, (1,), final=True) as exact,
    ):
        ours, theirs = next(stream), next(exact)
        for found, expected in ((ours.hidden, theirs.hidden), (ours.final, theirs.final)):
            assert found is not None
            assert expected is not None
            assert found.values.dtype == np.uint8
            floats = [
                (bits.astype(np.uint32) << 16).view(np.float32)
                for bits in (decode_bits(found.rows(0, ours.used)), expected.rows(0, ours.used).values)
            ]
            assert np.abs(floats[0] - floats[1]).max() <= 2**-4 * np.abs(floats[1]).max()


def test_more_parts_than_may_stay_open_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_offline.store.reader.OPEN_PARTS", 2)
    store = filled_store(tmp_path / "s", parts=9)
    documents = store.documents(TRAIN)
    group = list(range(len(documents)))
    with BatchStream(store, documents, [group], int(documents.length.sum()), (0, 1), threads=4) as stream:
        batch = next(stream)
        at = 0
        for index in group:
            out = store.empty_states(2, int(documents.length[index]))
            start = int(documents.start[index])
            store.part(int(documents.part[index])).read("hidden", start, start + len(out), (0, 1), out)
            assert np.array_equal(batch.hidden.rows(at, at + len(out)).values, out.values)
            at += len(out)
        del batch
    with Fetcher(store, documents, (0,), threads=2):
        pass  # closing an idle one ends its threads
    assert not our_threads()


def test_a_store_without_final_says_so(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filled, "identity", filled.identity.model_copy(update={"final": False}))
    with pytest.raises(StoreError, match="no final states"):
        stream_of(filled, final=True)
