"""Stores under an s3:// prefix, against a server that speaks the protocol on loopback."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from stores import bits_of, filled_store, new_store, read_all, write_part

from dflash_offline.store import TRAIN, BatchStream, StoreError, load_head, lock_store, open_store, place_of
from dflash_offline.store import objects as objects_module
from dflash_offline.store.copy import copy_store
from dflash_offline.store.index import write_manifest_file
from dflash_offline.store.prune import delete_parts, prune, pruned_identity
from dflash_offline.store.verify import verify

obstore = pytest.importorskip("obstore")


def contents(location: str | Path) -> dict[str, bytes]:
    place = place_of(location)
    return {name: place.read(name) for name in place.files("") if not name.endswith((".lock", "/.keep"))}


def delete(location: str, key: str) -> None:
    """Delete one object behind the store's back."""
    place: Any = place_of(location)
    obstore.delete(place._store, key)


def test_a_store_is_written_and_read_there(prefix: str, tmp_path: Path) -> None:
    store = filled_store(prefix)
    local = filled_store(tmp_path / "s")
    assert contents(prefix) == contents(tmp_path / "s")
    again = open_store(prefix)
    assert again.parts == local.parts
    assert np.array_equal(read_all(again, 1).values, bits_of(1, 2))
    assert verify(prefix).problems == []
    assert load_head(store).embedding.shape == (50, 16)
    documents = again.documents(TRAIN)
    with BatchStream(again, documents, [[0, 1, 2], [3]], 400, (1,), final=True) as stream:
        for batch in stream:
            assert batch.used
    group = zarr.open_group(place_of(prefix).zarr_store(), mode="r")
    assert np.array_equal(np.asarray(group["parts/t-1/hidden"])[:, 1], bits_of(1, 2)[1])


def test_a_part_without_its_record_is_not_committed(prefix: str) -> None:
    store = filled_store(prefix)
    place = store.place
    delete(prefix, "parts/t-1/zarr.json")  # as an upload that was killed leaves it
    write_manifest_file(place, "parts", [])
    assert [part.id for part in open_store(prefix).parts] == ["h-0", "t-2"]
    assert write_part(store, "t-1", seed=1)
    assert not write_part(store, "t-1", seed=5)  # somebody committed first
    assert np.array_equal(read_all(open_store(prefix), 1).values, bits_of(1, 2))
    assert verify(prefix).problems == []


def test_damage_there_is_found(prefix: str) -> None:
    place = filled_store(prefix).place
    content = bytearray(place.read("parts/t-2/hidden/c/0/0/0"))
    content[50] ^= 1
    place.write("parts/t-2/hidden/c/0/0/0", bytes(content))
    delete(prefix, "parts/h-0/tokens/c/0")
    assert verify(prefix).damaged == ["h-0", "t-2"]
    delete_parts(prefix, ["t-2"])
    assert verify(prefix).damaged == ["h-0"]
    assert "parts/t-2/zarr.json" not in place.files("")


def test_copies_there_back_and_across(prefix: str, tmp_path: Path) -> None:
    filled_store(tmp_path / "s")
    copy_store(tmp_path / "s", prefix)
    assert contents(prefix) == contents(tmp_path / "s")
    copy_store(prefix, f"{prefix}-2")
    delete(f"{prefix}-2", "parts/t-1/zarr.json")
    copy_store(prefix, f"{prefix}-2")  # goes on
    copy_store(f"{prefix}-2", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "s")
    shutil.rmtree(tmp_path / "s")


def test_pruning_there(prefix: str, tmp_path: Path) -> None:
    store = filled_store(prefix)
    local = filled_store(tmp_path / "s")
    identity = pruned_identity(store.identity, layers=[1], fp8=True)
    prune(prefix, identity)
    prune(tmp_path / "s", identity)
    assert contents(prefix) == contents(tmp_path / "s")
    assert local.identity != identity


def test_one_writer_at_a_time(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_module, "HEARTBEAT", 0.3)
    new_store(prefix)
    with lock_store(prefix), pytest.raises(StoreError, match="another command"), lock_store(prefix):
        pass
    with lock_store(prefix):
        pass
    place: Any = place_of(prefix)
    place.write("meta/extract.lock", b"somewhere 1 x")  # left by a holder that was killed
    with pytest.raises(StoreError, match=r"another command \(somewhere 1\)"), lock_store(prefix):
        pass
    monkeypatch.setattr(objects_module, "STALE", 2.0)
    threading.Event().wait(3.1)  # the server tells time in seconds
    with lock_store(prefix):
        threading.Event().wait(3.1)  # ours shows signs of life, and is not taken over
        with pytest.raises(StoreError, match="another command"), lock_store(prefix):
            pass
    assert "meta/extract.lock" not in place.files("")


def test_errors_say_what_to_look_at(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="no store at"):
        open_store(prefix)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens there
        with pytest.raises(StoreError, match="credentials and endpoint"):
            open_store(prefix)
    with pytest.raises(StoreError, match="cannot be used as a store"):
        open_store("ftp://somewhere/x")
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    with pytest.raises(StoreError, match=r"pip install 'dflash-offline\[objects\]'"):
        open_store(prefix)
