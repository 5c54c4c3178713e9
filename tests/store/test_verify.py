"""Every damage to a store is found and named: a flipped byte in any file, files cut, deleted, half copied."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from stores import files_of, filled_store, new_store

from dflash_offline.store import Store, StoreError
from dflash_offline.store.prune import delete_parts
from dflash_offline.store.verify import verify


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole store; tests work on copies."""
    path = tmp_path_factory.mktemp("whole") / request.param
    filled_store(path, encoding=request.param)
    return path


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "s"))


def test_a_whole_store_has_no_problems(copied: Path) -> None:
    before = files_of(copied)
    report = verify(copied, threads=2)
    assert report.problems == []
    assert report.parts == 3
    assert report.bytes == sum(len(content) for name, content in before.items() if name.startswith("parts/h-")) + sum(
        len(content) for name, content in before.items() if name.startswith("parts/t-")
    )
    assert files_of(copied) == before


def damages() -> list[tuple[str, Callable[[bytes, random.Random], bytes | None]]]:
    def flip(content: bytes, rng: random.Random) -> bytes:
        changed = bytearray(content)
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        return bytes(changed)

    return [
        ("a flipped bit", flip),
        ("cut short by one byte", lambda content, rng: content[:-1]),
        ("cut in half", lambda content, rng: content[: len(content) // 2]),
        ("emptied", lambda content, rng: b""),
        ("deleted", lambda content, rng: None),
        ("zeroed", lambda content, rng: bytes(len(content))),
    ]


@pytest.mark.parametrize(("kind", "damage"), damages(), ids=lambda value: value if isinstance(value, str) else "")
def test_damage_to_any_file_is_found_and_named(
    copied: Path, kind: str, damage: Callable[[bytes, random.Random], bytes | None]
) -> None:
    rng = random.Random(kind)
    missed = []
    for name, content in files_of(copied).items():
        if name == "meta/extract.lock" or not content:
            continue
        if kind == "deleted" and name.startswith("meta/") and "head" not in name and name != "meta/zarr.json":
            continue  # derived: what is not there is made anew
        path, changed = copied / name, damage(content, rng)
        path.unlink() if changed is None else path.write_bytes(changed)
        part = name.split("/")[1] if name.startswith(("parts/h-", "parts/t-")) else None
        try:
            report = verify(copied, threads=2)
            named = any((part or name) in problem for problem in report.problems)
            if not named or (part is not None and report.damaged != [part]):
                missed.append((name, report.problems))
        except StoreError as error:
            # Only a root that says nothing stops the search.
            if name != "zarr.json" or "not a dflash store" not in str(error):
                missed.append((name, [str(error)]))
        path.write_bytes(content)
    assert missed == []


def test_all_damage_is_found_in_one_call(copied: Path) -> None:
    (copied / "parts/t-1/tokens/c/0").unlink()
    shard = copied / "parts/t-2/hidden/c/0/0/0"
    content = bytearray(shard.read_bytes())
    content[3] ^= 1
    shard.write_bytes(content)
    shutil.rmtree(copied / "parts/h-0")
    report = verify(copied)
    assert report.damaged == ["h-0", "t-1", "t-2"]
    assert any("h-0" in problem and "manifest" in problem for problem in report.problems)
    assert any("t-2" in problem and "chunk 0, layer index 0" in problem for problem in report.problems)


def test_a_part_half_copied_is_found_and_can_be_deleted(copied: Path) -> None:
    for name in ("zarr.json", "hidden/c/0/0/0"):
        (copied / "parts/t-1" / name).unlink()
    assert verify(copied).damaged == ["t-1"]
    delete_parts(copied, ["t-1"])
    assert verify(copied).problems == []


def test_a_part_under_another_name_is_found(copied: Path) -> None:
    (copied / "parts/t-1").rename(copied / "parts/t-9")
    assert {"t-1", "t-9"} == set(verify(copied).damaged)


def test_an_empty_store_is_whole(tmp_path: Path) -> None:
    store: Store = new_store(tmp_path / "s")
    assert verify(store.place).problems == []
