"""Copies: verified, gone on with after an interruption, and never onto something else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from stores import files_of, filled_store, new_store, write_part

from dflash_offline.store import StoreError, open_store
from dflash_offline.store.copy import copy_store
from dflash_offline.store.verify import verify


def contents(store: Path) -> dict[str, bytes]:
    """Every file but the lock, which a copy holds while it is made."""
    return {name: content for name, content in files_of(store).items() if not name.endswith(".lock")}


def test_a_copy_is_the_same_bytes(tmp_path: Path) -> None:
    filled_store(tmp_path / "a")
    copy_store(tmp_path / "a", tmp_path / "b")
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    assert verify(tmp_path / "b").problems == []


def test_a_copy_goes_on_and_takes_in_what_is_new(tmp_path: Path) -> None:
    store = filled_store(tmp_path / "a")
    copy_store(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b/parts/t-1")  # as if it had not come that far
    kept = (tmp_path / "b/parts/t-2/zarr.json").stat().st_mtime_ns
    write_part(store, "t-9", seed=9)
    store.refresh()
    store.write_index()
    copy_store(tmp_path / "a", tmp_path / "b")
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    assert (tmp_path / "b/parts/t-2/zarr.json").stat().st_mtime_ns == kept


def test_damage_is_not_copied(tmp_path: Path) -> None:
    filled_store(tmp_path / "a")
    shard = tmp_path / "a/parts/t-1/final/c/0/0"
    content = bytearray(shard.read_bytes())
    content[100] ^= 8
    shard.write_bytes(content)
    with pytest.raises(StoreError, match=r"part t-1 of .* was not copied: .*checksum"):
        copy_store(tmp_path / "a", tmp_path / "b")
    assert "t-1" not in [part.id for part in open_store(tmp_path / "b").parts]
    assert verify(tmp_path / "b").problems == []
    assert list((tmp_path / "b/meta/staging").iterdir()) == []


def test_a_copy_goes_nowhere_else(tmp_path: Path) -> None:
    filled_store(tmp_path / "a")
    new_store(tmp_path / "other", max_length=99)
    with pytest.raises(StoreError, match="max_length"):
        copy_store(tmp_path / "a", tmp_path / "other")
    same = filled_store(tmp_path / "same", parts=0)
    write_part(same, "t-1", seed=77)
    with pytest.raises(StoreError, match="another part t-1"):
        copy_store(tmp_path / "a", tmp_path / "same")
    with pytest.raises(StoreError, match="to itself"):
        copy_store(tmp_path / "a", tmp_path / "a")
    with pytest.raises(StoreError, match="no store at"):
        copy_store(tmp_path / "nowhere", tmp_path / "b")
