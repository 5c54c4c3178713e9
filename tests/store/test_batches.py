"""Packing and the batch stream: every document once, in an order that can be resumed, and no thread left behind."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_offline.store import TRAIN, BatchStream, Documents, Store, StoreError, pack
from dflash_offline.store.batches import shuffled


@given(st.lists(st.integers(1, 64), max_size=200), st.integers(64, 200))
def test_packing_takes_every_document_once_within_the_budget(lengths: list[int], budget: int) -> None:
    groups = pack(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in group) <= budget for group in groups)
    assert all(groups)


def test_packing_wastes_little_on_a_realistic_mix() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 0.8, 3000).clip(30, 3072).astype(int).tolist()
    groups = pack(lengths, 3072)
    assert sum(lengths) / (len(groups) * 3072) > 0.98


def test_a_document_over_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="over the budget"):
        pack([10, 65], 64)


def documents_of(ids: list[int]) -> Documents:
    zeros = np.zeros(len(ids), np.int64)
    return Documents(zeros, zeros, zeros + 1, np.array(ids, np.uint64), [""] * len(ids))


def test_the_order_depends_on_ids_seed_and_epoch_alone() -> None:
    ids = np.random.default_rng(1).integers(0, 1 << 63, 200).tolist()
    order = [ids[i] for i in shuffled(documents_of(ids), 3, 1)]
    assert sorted(order) == sorted(ids)
    backwards = ids[::-1]
    assert [backwards[i] for i in shuffled(documents_of(backwards), 3, 1)] == order
    assert [ids[i] for i in shuffled(documents_of(ids), 3, 2)] != order
    assert [ids[i] for i in shuffled(documents_of(ids), 4, 1)] != order


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
                expected = np.zeros((3, length, 32), np.uint16)
                part.read("hidden", start, start + length, (0, 1, 2), expected)
                assert np.array_equal(batch.hidden[:, at : at + length], expected[[0, 2]])
                assert (batch.doc_start[at : at + length] == at).all()
                at += length
                seen += 1
            assert batch.final is not None
            assert batch.final[:at].any(axis=1).all()
            assert batch.used == at
            assert not batch.loss_mask[at:].any()
            assert (batch.doc_start[at:] == 256).all()
    assert seen == len(documents)


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dflash-prefetch"]


def test_closing_early_leaves_no_thread(filled: Store) -> None:
    stream, _, groups = stream_of(filled)
    assert len(groups) > 4
    next(stream)
    stream.close()
    assert not prefetch_threads()


def test_an_error_in_the_thread_reaches_the_consumer(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(type(filled.part(0)), "read", fail)
    stream, _, _ = stream_of(filled)
    with stream, pytest.raises(StoreError, match="the disk is gone"):
        next(stream)
    assert not prefetch_threads()


def test_a_store_without_final_says_so(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filled, "identity", filled.identity.model_copy(update={"final": False}))
    with pytest.raises(StoreError, match="no final states"):
        stream_of(filled, final=True)
