"""Pruning: what is kept equals what would have been extracted, and a kill at any instant loses nothing."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import bits_of, files_of, filled_store, read_all, run_killed

from dflash_offline.store import StoreError, lock_store, open_store
from dflash_offline.store.fp8 import encode_bits
from dflash_offline.store.prune import delete_parts, prune, pruned_identity
from dflash_offline.store.verify import verify


def parts_of(store: Path) -> dict[str, bytes]:
    """The files of the committed parts, by their key below the folder of parts."""
    folder = store / open_store(store).parts_folder
    return {name: content for name, content in files_of(folder).items() if "/" in name}


@pytest.mark.parametrize(
    ("changes", "identity"),
    [
        ({"fp8": True}, {"encoding": "fp8"}),
        ({"drop_final": True}, {"final": False}),
        ({"layers": [3]}, {"layer_ids": (3,)}),
        ({"layers": [3], "drop_final": True, "fp8": True}, {"layer_ids": (3,), "final": False, "encoding": "fp8"}),
    ],
    ids=str,
)
def test_a_pruned_store_holds_what_was_kept(tmp_path: Path, changes: dict[str, Any], identity: dict[str, Any]) -> None:
    store = filled_store(tmp_path / "s")
    pruned = prune(store.place, pruned_identity(store.identity, **changes))
    assert pruned.identity == store.identity.model_copy(update=identity)
    assert verify(tmp_path / "s").problems == []
    assert not (tmp_path / "s/parts").exists()
    assert [part.id for part in pruned.parts] == ["h-0", "t-1", "t-2"]
    kept = [(1, 3).index(layer) for layer in pruned.identity.layer_ids]
    for number in range(3):
        plain = np.ascontiguousarray(bits_of(number, 2)[kept])
        expected = encode_bits(plain).values if pruned.identity.encoding == "fp8" else plain
        assert np.array_equal(read_all(pruned, number).values, expected)
    assert pruned.bytes_stored() < store.bytes_stored()


def test_converted_parts_are_those_that_fp8_extraction_writes(tmp_path: Path) -> None:
    converted = filled_store(tmp_path / "converted")
    filled_store(tmp_path / "direct", encoding="fp8")
    prune(converted.place, pruned_identity(converted.identity, fp8=True))
    assert parts_of(tmp_path / "converted") == parts_of(tmp_path / "direct")


def test_a_pruned_store_can_be_pruned_again(tmp_path: Path) -> None:
    store = filled_store(tmp_path / "s")
    once = prune(store.place, pruned_identity(store.identity, drop_final=True))
    twice = prune(once.place, pruned_identity(once.identity, layers=[1]))
    assert (once.parts_folder, twice.parts_folder) == ("parts-1", "parts-2")
    assert sorted(entry.name for entry in (tmp_path / "s").iterdir()) == ["meta", "parts-2", "zarr.json"]
    assert np.array_equal(read_all(twice, 1).values, bits_of(1, 2)[:1])


def test_pruning_to_the_same_changes_nothing(tmp_path: Path) -> None:
    store = filled_store(tmp_path / "s")
    before = files_of(tmp_path / "s")
    prune(store.place, store.identity)
    assert {k: v for k, v in files_of(tmp_path / "s").items() if "lock" not in k} == before


def test_what_cannot_be_pruned_is_refused(tmp_path: Path) -> None:
    store = filled_store(tmp_path / "s")
    with pytest.raises(StoreError, match="layer 2 is not in the store"):
        pruned_identity(store.identity, layers=[1, 2])
    with pytest.raises(StoreError, match="at least one layer"):
        pruned_identity(store.identity, layers=[])
    with pytest.raises(StoreError, match="t-7 is not in"):
        delete_parts(store.place, ["t-1", "t-7"])
    assert verify(store.place).parts == 3
    with lock_store(store.place), pytest.raises(StoreError, match="another command is writing"):
        prune(store.place, pruned_identity(store.identity, fp8=True))


def test_damage_stops_pruning_and_nothing_is_lost(tmp_path: Path) -> None:
    store = filled_store(tmp_path / "s")
    shard = tmp_path / "s/parts/t-1/hidden/c/0/0/0"
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    with pytest.raises(StoreError, match=r"t-1.*checksum"):
        prune(store.place, pruned_identity(store.identity, fp8=True))
    assert open_store(tmp_path / "s").identity.encoding == "bf16"
    content[7] ^= 1
    shard.write_bytes(content)
    assert prune(store.place, pruned_identity(store.identity, fp8=True)).identity.encoding == "fp8"
    assert verify(tmp_path / "s").problems == []


def test_a_disk_without_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled_store(tmp_path / "s")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StoreError, match="make room"):
        prune(store.place, pruned_identity(store.identity, fp8=True))
    assert not (tmp_path / "s/parts-1").exists()


def test_deleted_parts_are_gone_from_the_index(tmp_path: Path) -> None:
    store = filled_store(tmp_path / "s")
    delete_parts(store.place, ["t-1"])
    again = open_store(tmp_path / "s")
    assert [part.id for part in again.parts] == ["h-0", "t-2"]
    assert again.lost == []
    assert verify(tmp_path / "s").problems == []


def prune_hard(path: str) -> None:
    """Prune a store, or what is left of it to prune."""
    identity = open_store(path).identity
    prune(path, pruned_identity(identity, layers=[1], fp8=True))


def test_killed_at_random_instants_pruning_goes_on(tmp_path: Path) -> None:
    filled_store(tmp_path / "whole", parts=8)
    for name in ("warm", "calm"):  # the first starts the server of processes, and is slower in every way
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        began = time.monotonic()
        assert run_killed(prune_hard, tmp_path / name, None)
        duration = time.monotonic() - began
    rng = random.Random(int(os.environ.get("DFLASH_TEST_SEED", "0")))
    killed, ended = 0, True
    for number in range(int(os.environ.get("DFLASH_TEST_KILLS", "6"))):
        if ended:
            shutil.rmtree(tmp_path / "hit", ignore_errors=True)
            shutil.copytree(tmp_path / "whole", tmp_path / "hit")
        ended = run_killed(prune_hard, tmp_path / "hit", rng.uniform(0, duration))
        killed += not ended
        assert len(open_store(tmp_path / "hit").parts) == 8
        if ended or number % 3 == 2:
            assert ended or run_killed(prune_hard, tmp_path / "hit", None)
            assert files_of(tmp_path / "hit") == files_of(tmp_path / "calm")
            assert verify(tmp_path / "hit").problems == []
            ended = True
    assert killed, "no kill came in time to interrupt the pruning"
