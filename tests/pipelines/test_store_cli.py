"""`dflash store ...` as a user meets it: tables and JSON, exit codes, and questions before anything is dropped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from stores import filled_store, write_part

from dflash_offline.store import Store, open_store
from dflash_offline.store.index import DocumentIndex, write_documents, write_manifest_file

LIGHT = """
import sys
from dflash_offline.pipelines.cli import main
sys.argv = ["dflash", *sys.argv[1:]]
try:
    main()
finally:
    print("loaded", *sorted({"torch", "zarr", "transformers", "distributed"} & set(sys.modules)), file=sys.stderr)
"""


def dflash(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `dflash` in a process of its own, which says what it loaded."""
    command = [sys.executable, "-c", LIGHT, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return filled_store(tmp_path / "s")


def test_info_and_stats_load_nothing_heavy(store: Store, tmp_path: Path) -> None:
    for command in ("info", "stats"):
        done = dflash(tmp_path, "store", command, "s", "--json")
        assert done.stderr.strip() == "loaded"
        assert json.loads(done.stdout)["path"] == "s"
        assert dflash(tmp_path, "store", command, "s").returncode == 0
    info = json.loads(dflash(tmp_path, "store", "info", "s", "--json").stdout)
    assert info["splits"]["train"] == {"documents": 6, "tokens": 654, "supervised_tokens": 436}
    assert info["identity"]["layer_ids"] == [1, 3]
    (tmp_path / "dflash.toml").write_text('[store]\npath = "s"\n')
    assert json.loads(dflash(tmp_path, "store", "info", "--json").stdout)["parts"] == 3


def test_stats_count_by_tag_and_length(store: Store, tmp_path: Path) -> None:
    found = json.loads(dflash(tmp_path, "store", "stats", "s", "--json").stdout)
    assert found["tokens"] == 3 * 327
    assert found["tags"] == [
        {"tag": "code", "documents": 6, "tokens": 3 * 307, "share": pytest.approx(307 / 327)},
        {"tag": "chat", "documents": 3, "tokens": 3 * 20, "share": pytest.approx(20 / 327)},
    ]
    assert [(row["from"], row["to"], row["documents"]) for row in found["lengths"]] == [
        (1, 128, 6),
        (129, 256, 0),
        (257, 512, 3),
    ]
    shown = dflash(tmp_path, "store", "stats", "s").stdout
    assert "93.9%" in shown
    assert shown.index("code") < shown.index("chat")


def test_info_on_half_a_million_documents_reads_the_manifest_only(store: Store, tmp_path: Path) -> None:
    record = store.parts[1]
    records = [record.model_copy(update={"id": f"t-{n:06d}-{n:012x}", "documents": 50}) for n in range(10_000)]
    write_manifest_file(store.place, "parts", records)
    for part in records:
        (tmp_path / "s/parts" / part.id).mkdir()  # without a file in it: opening one would fail
    done = dflash(tmp_path, "store", "info", "s", "--json")
    found = json.loads(done.stdout)
    assert found["splits"]["train"]["documents"] == 500_006
    assert found["lost_parts"] == []


def test_documents_of_many_parts_come_from_the_index(store: Store) -> None:
    names = [f"t-{n:06d}-{n:012x}" for n in range(2_000)]
    write_manifest_file(store.place, "parts", [store.parts[1].model_copy(update={"id": name}) for name in names])
    index = store._document_index(store.parts[1:2])
    rows = {name: slice(3 * n, 3 * n + 3) for n, name in enumerate(names)}
    length, ids, codes = (column.repeat(2_000) for column in (index.length, index.ids, index.codes))
    write_documents(store.place, DocumentIndex(rows, length, ids, codes, index.tags))
    place = store.place
    for name in names:
        (Path(str(place)) / "parts" / name).mkdir()
    assert len(open_store(place).documents("train")) == 6_000 + 6


def test_a_lost_part_is_said(store: Store, tmp_path: Path) -> None:
    (tmp_path / "s/parts/t-1").rename(tmp_path / "gone")
    done = dflash(tmp_path, "store", "info", "s")
    assert "warning: 1 of these parts are in the manifest only (t-1, ...)" in done.stdout
    assert json.loads(dflash(tmp_path, "store", "info", "s", "--json").stdout)["lost_parts"] == ["t-1"]


def test_verify_exits_by_what_it_finds(store: Store, tmp_path: Path) -> None:
    done = dflash(tmp_path, "store", "verify", "s")
    assert done.returncode == 0
    assert "3 parts are whole" in done.stdout
    shard = tmp_path / "s/parts/t-2/hidden/c/0/0/0"
    content = bytearray(shard.read_bytes())
    content[3] ^= 1
    shard.write_bytes(content)
    done = dflash(tmp_path, "store", "verify", "s", "--threads", "2")
    assert done.returncode == 1
    assert "checksum of chunk 0, layer index 0 does not agree" in done.stdout
    assert "dflash store prune s --delete-part t-2" in done.stdout
    done = dflash(tmp_path, "store", "verify", "s", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert (found["whole"], found["damaged"]) == (False, ["t-2"])


def test_prune_asks_before_it_drops(store: Store, tmp_path: Path) -> None:
    done = dflash(tmp_path, "store", "prune", "s", "--layers", "3", "--fp8")
    assert done.returncode == 1
    assert "nothing was done; say --yes" in done.stderr
    assert open_store(tmp_path / "s").identity == store.identity
    done = dflash(tmp_path, "store", "prune", "s", "--layers", "3", "--fp8", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bytes"] < found["bytes_before"]
    assert open_store(tmp_path / "s").identity.layer_ids == (3,)
    done = dflash(tmp_path, "store", "prune", "s", "--delete-part", "t-1", "--delete-part", "t-2", "--yes")
    assert done.returncode == 0, done.stderr
    assert [part.id for part in open_store(tmp_path / "s").parts] == ["h-0"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("info", "nowhere"), "no store at nowhere"),
        (("info",), "no dflash.toml"),
        (("verify", "nowhere"), "no store at nowhere"),
        (("prune", "s"), "say what to prune"),
        (("prune", "s", "--layers", "1,x"), "write ids with commas"),
        (("prune", "s", "--layers", "7"), "layer 7 is not in the store"),
        (("prune", "s", "--delete-part", "t-9", "--yes"), "part t-9 is not in s"),
        (("prune", "s", "--delete-part", "t-1", "--fp8"), "goes by itself"),
        (("copy", "s", "s"), "to itself"),
        (("copy", "nowhere", "b"), "no store at nowhere"),
        (("stats", "ftp://x/y"), "cannot be used as a store"),
    ],
)
def test_wrong_arguments_are_one_sentence(store: Store, tmp_path: Path, command: tuple[str, ...], says: str) -> None:
    done = dflash(tmp_path, "store", *command)
    assert done.returncode == 1
    error = done.stderr.splitlines()[0]
    assert error.startswith("dflash: ")
    assert says in error
    assert len(done.stderr.splitlines()) == 2  # the second says what was loaded


def test_copy_says_what_it_made(store: Store, tmp_path: Path) -> None:
    done = dflash(tmp_path, "store", "copy", "s", "b", "--json")
    assert json.loads(done.stdout) == {"path": "b", "parts": 3, "tokens": 981}
    write_part(store, "t-7", seed=7)
    assert "4 parts" in dflash(tmp_path, "store", "copy", "s", "b").stdout
