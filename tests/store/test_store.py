"""Parts, identity and opening: what is committed is there, what is not whole never is."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
import threading
import time
from pathlib import Path

import dask.array
import numpy as np
import pytest
import zarr
from stores import (
    IDENTITY,
    LENGTHS,
    bits_of,
    commit,
    files_of,
    new_store,
    read_all,
    run_killed,
    write_part,
    write_parts,
)

from dflash_offline.store import (
    HELDOUT,
    TRAIN,
    PartWriter,
    States,
    StoreError,
    StoreFullError,
    create_store,
    lock_store,
    open_store,
)
from dflash_offline.store.row_writer import RowsWriter
from dflash_offline.store.verify import verify


def test_plain_zarr_python_opens_it(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    write_part(store, "t-0")
    group = zarr.open_group(str(tmp_path / "s"), mode="r")
    part = group["parts/t-0"]
    assert isinstance(part, zarr.Group)
    shapes = {name: array.shape for name, array in part.arrays()}
    assert shapes == {
        "hidden": (327, 2, 16),
        "final": (327, 16),
        "tokens": (327,),
        "loss_mask": (327,),
        "doc_offsets": (4,),
        "doc_ids": (3,),
        "doc_tags": (3,),
    }
    hidden = np.asarray(zarr.open_array(str(tmp_path / "s/parts/t-0/hidden"), mode="r")[...])
    assert np.array_equal(hidden, bits_of(0, 2).swapaxes(0, 1))
    lazy = dask.array.from_zarr(str(tmp_path / "s/parts/t-0/hidden"))
    assert np.array_equal(lazy[290:310, 1].compute(), bits_of(0, 2)[1, 290:310])


def test_committing_twice_changes_nothing(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    assert write_part(store, "t-0", seed=1)
    before = files_of(tmp_path / "s")
    assert not write_part(store, "t-0", seed=2)
    assert files_of(tmp_path / "s") == before


def test_an_error_while_writing_leaves_no_part(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    with pytest.raises(RuntimeError), PartWriter(store, "t-0", [10]):
        raise RuntimeError
    store.refresh()
    assert store.parts == []
    assert list((tmp_path / "s/meta/staging").iterdir()) == []


def test_counts_must_agree(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    with PartWriter(store, "t-0", [10]) as writer, pytest.raises(StoreError, match="do not agree"):
        writer.commit(
            split=TRAIN,
            tokens=np.zeros(9, np.int32),
            loss_mask=np.ones(9, bool),
            doc_ids=np.zeros(1, np.uint64),
            doc_tags=["x"],
            plan="p",
            provenance={},
        )
    assert not (tmp_path / "s/parts/t-0").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [("layer_ids", (1, 4)), ("target_weights", "e" * 64), ("rendering", "enable_thinking=true"), ("final", False)],
)
def test_another_identity_is_refused_by_field(tmp_path: Path, field: str, value: object) -> None:
    new_store(tmp_path / "s")
    before = files_of(tmp_path / "s")
    with pytest.raises(StoreError, match=field):
        new_store(tmp_path / "s", **{field: value})
    assert files_of(tmp_path / "s") == before


def test_a_path_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="not a dflash store"):
        new_store(tmp_path)
    zarr.create_group(str(tmp_path / "other"), attributes={"made": "elsewhere"})
    with pytest.raises(StoreError, match="not a dflash store"):
        open_store(tmp_path / "other")
    with pytest.raises(StoreError, match="is a file"):
        new_store(tmp_path / "notes.txt")
    with pytest.raises(StoreError, match="no store at"):
        open_store(tmp_path / "nowhere")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_failed_creation_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise RuntimeError(str(folder))

    with pytest.raises(RuntimeError):
        create_store(tmp_path / "s", IDENTITY, fail)
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_is_only_a_shortcut(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    for name in ("t-1", "h-0", "t-2"):
        write_part(store, name, seed=ord(name[-1]))
    store.refresh()
    store.write_index()
    assert [part.id for part in open_store(tmp_path / "s").parts] == ["h-0", "t-1", "t-2"]
    records = open_store(tmp_path / "s").parts
    for content in (None, b"", b'{"parts": [{"id": "t-9"}]}'):
        path = tmp_path / "s/meta/manifest.json"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        assert open_store(tmp_path / "s").parts == records
    shutil.rmtree(tmp_path / "s/parts/t-1")
    store.write_index()  # stale: still names t-1
    assert [part.id for part in open_store(tmp_path / "s").parts] == ["h-0", "t-2"]


@pytest.mark.parametrize("lost", ["tokens/c/0", "doc_offsets/zarr.json", "hidden/c/0/0/0", "checksums/hidden/c/0/0"])
def test_a_part_half_copied_is_an_error(tmp_path: Path, lost: str) -> None:
    store = new_store(tmp_path / "s")
    write_part(store, "t-0")
    (tmp_path / "s/parts/t-0" / lost).unlink()

    def read_everything() -> None:
        part = open_store(tmp_path / "s").part(0)
        part.small("tokens")
        part.small("doc_offsets")
        read_all(open_store(tmp_path / "s"), 0)

    with pytest.raises(StoreError, match=r"t-0.*(not whole|missing)"):
        read_everything()


def test_a_part_without_its_record_is_an_error(tmp_path: Path) -> None:
    write_part(new_store(tmp_path / "s"), "t-0")
    (tmp_path / "s/parts/t-0/zarr.json").unlink()
    with pytest.raises(StoreError, match=r"t-0.*not whole"):
        open_store(tmp_path / "s")


def test_small_arrays_are_checked_too(tmp_path: Path) -> None:
    write_part(new_store(tmp_path / "s"), "t-0")
    file = tmp_path / "s/parts/t-0/tokens/c/0"
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match="tokens"):
        open_store(tmp_path / "s").part(0).small("tokens")


def test_two_extractions_cannot_hold_one_store(tmp_path: Path) -> None:
    new_store(tmp_path / "s")
    with lock_store(tmp_path / "s"), pytest.raises(StoreError, match="another"), lock_store(tmp_path / "s"):
        pass
    with lock_store(tmp_path / "s"):
        pass


def test_documents_are_indexed_by_split(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    write_part(store, "h-0", seed=3)
    write_part(store, "t-1", seed=4)
    store.refresh()
    train = store.documents(TRAIN)
    assert train.length.tolist() == [300, 20, 7]
    assert train.start.tolist() == [0, 300, 320]
    assert train.tags == ["code", "chat", "code"]
    assert store.documents(HELDOUT).ids.tolist() == [3000, 3001, 3002]
    with pytest.raises(StoreError, match="no longer holds part t-9"):
        store.documents(TRAIN, ["t-1", "t-9"])
    with pytest.raises(StoreError, match="layer 2 is not in the store"):
        store.layer_indices((1, 2))


def test_a_store_is_read_while_it_is_written(tmp_path: Path) -> None:
    """Every part is whole as soon as it is seen, and what was seen stays."""
    new_store(tmp_path / "s")
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=write_parts, args=(str(tmp_path / "s"),))
    process.start()
    store = open_store(tmp_path / "s")
    seen: list[str] = []
    sizes = set()
    while True:
        ended = not process.is_alive()
        store.refresh()
        names = [part.id for part in store.parts]
        assert set(seen) <= set(names)
        for name in sorted(set(names) - set(seen)):
            read_all(store, names.index(name))
        seen = names
        sizes.add(len(names))
        assert len(store.documents(TRAIN)) == 3 * len(names)
        if ended:
            break
    assert process.exitcode == 0
    assert len(seen) == 12
    assert len(sizes) > 2, "the writer was never seen at work"


def test_killed_at_random_instants_the_store_ends_byte_identical(tmp_path: Path) -> None:
    for name in ("warm", "calm"):  # the first starts the server of processes, and is slower in every way
        began = time.monotonic()
        assert run_killed(write_parts, tmp_path / name, None)
        duration = time.monotonic() - began
    rng = random.Random(int(os.environ.get("DFLASH_TEST_SEED", "0")))
    killed = 0
    for number in range(int(os.environ.get("DFLASH_TEST_KILLS", "6"))):
        ended = run_killed(write_parts, tmp_path / "hit", rng.uniform(0, duration))
        killed += not ended
        if (tmp_path / "hit").exists():
            open_store(tmp_path / "hit")  # opens at every instant
        if ended or number % 3 == 2:
            assert ended or run_killed(write_parts, tmp_path / "hit", None)
            assert files_of(tmp_path / "hit") == files_of(tmp_path / "calm")
            assert verify(tmp_path / "hit").problems == []
            shutil.rmtree(tmp_path / "hit")  # else later kills find little left to write
    assert killed, "no kill came in time to interrupt the writer"


def test_states_are_given_back_whatever_became_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a buffer to come back must not wait for ever when the disk fails."""
    store = new_store(tmp_path / "s")

    def full(self: RowsWriter, states: States) -> None:
        time.sleep(0.3)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RowsWriter, "append", full)
    hidden, final = States(bits_of(0, 2, 327)), States(bits_of(1, 1, 327))
    back = [threading.Event(), threading.Event()]
    with PartWriter(store, "t-0", [327] * 3) as writer:
        for event in back:  # the second waits in the queue when the first fails
            writer.append(hidden, final, event.set)
        assert all(event.wait(20) for event in back)
        with pytest.raises(StoreFullError):
            writer.append(hidden, final)
    assert open_store(tmp_path / "s").parts == []


def test_a_part_whose_folder_was_cleared_away_is_never_committed(tmp_path: Path) -> None:
    """As when a run is stopped while a worker lives on: zarr makes anew the folders that it does not find."""
    store = new_store(tmp_path / "s")
    with PartWriter(store, "t-0", LENGTHS) as writer:
        written = threading.Event()
        writer.append(States(bits_of(0, 2)), States(bits_of(1, 1)), written.set)
        assert written.wait(20)
        with lock_store(tmp_path / "s"):
            pass
        with pytest.raises(StoreError, match="t-0 was cleared away by a command that took over"):
            commit(writer, "t-0", 0, LENGTHS)
    assert open_store(tmp_path / "s").parts == []
    assert list((tmp_path / "s/parts").iterdir()) == [tmp_path / "s/parts/zarr.json"]
