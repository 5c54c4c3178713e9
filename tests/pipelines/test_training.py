"""`dflash train` on several processes: stopped and gone on with, a rank killed; and beside an extraction."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import run
from tiny import write_data

from dflash_offline.pipelines.config import load_settings
from dflash_offline.pipelines.stages import drafter_folder, run_name, wait_for_documents
from dflash_offline.store import Store, StoreError
from dflash_offline.store.progress import SILENT
from dflash_offline.train.checkpoint import checkpoints


@pytest.fixture
def work(hybrid: Path, filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a `dflash.toml` whose store is there; the current one."""
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "data.jsonl", 6)
    small = {"store.path": filled.place, "drafter.layer_ids": [1, 5], "drafter.block_size": 4, "train.tokens": 512}
    few = {"train.anchors": 8, "train.epochs": 5000, "train.save_every": 100_000, "train.log_every": 1}
    changes = [word for key, value in (small | few).items() for word in ("--set", f"{key}={value}")]
    assert run(monkeypatch, "init", "--target", str(hybrid), "--data", "data.jsonl", *changes) == 0
    return tmp_path


def started(folder: Path, said: list[str], *more: str, until: str = "watch") -> subprocess.Popen[str]:
    """`dflash train` on two processes, once it has made an update; what it said until then goes to `said`.

    Or, with `until = "say"`, once it has said something.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "dflash_offline.pipelines.cli", "train", "--gpus", "cpu,cpu", "--json", *more],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    follow(process, said, until)
    return process


def follow(process: subprocess.Popen[str], said: list[str], until: str) -> None:
    assert process.stdout
    for line in process.stdout:
        content: dict[str, Any] = json.loads(line)
        said.append(content.get("say", ""))
        if until in content:
            return
    raise AssertionError(process.communicate()[1])


def children(pid: int) -> list[int]:
    """Processes that a process has started, whichever of its threads did."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def test_ranks_stop_together_go_on_and_end_with_one_that_is_killed(work: Path) -> None:
    said: list[str] = []
    with started(work, said) as process:
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "dflash: stopped; run the same command again to go on\n"
    saved = checkpoints(work / "runs/drafter/checkpoints")[-1]

    with started(work, said) as process:
        ranks = children(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith("dflash: rank 1 (CPU) was killed by SIGKILL")
    assert len(errors.splitlines()) == 1
    assert f"resuming from {saved}" in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_ranks_wait_together_and_are_stopped_there_too(work: Path, filled: Store) -> None:
    later = "--wait", "--set", f"store.path={work / 'later'}"
    said: list[str] = []
    for stop in (True, False):
        with started(work, said, *later, until="say") as process:
            if not stop:
                shutil.copytree(str(filled.place), work / "later")
                follow(process, said, "watch")
            process.terminate()
            _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert errors == "dflash: stopped; run the same command again to go on\n"
    assert said[:2] == [f"waiting for the first training documents of {work / 'later'}"] * 2


def test_a_run_is_named_by_what_differs(work: Path) -> None:
    changed = ["train.run=runs/wide", "train.lr=3e-4", "drafter.block_size=8"]
    changed += ["train.log_every=1", 'train.trackers=["trackio"]', "store.path=there"]
    assert run_name(load_settings(work, changed), changed) == "wide lr=3e-4 block_size=8"
    assert run_name(load_settings(work, []), []) == "drafter"
    changed = [*changed, "train.name=mine"]
    assert run_name(load_settings(work, changed), changed) == "mine"


def test_where_a_drafter_to_begin_from_lies(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "some/drafter").mkdir(parents=True)
    assert drafter_folder(work, None, SILENT) is None
    assert drafter_folder(work, "some/drafter", SILENT) == work / "some/drafter"
    assert drafter_folder(work, "gone", SILENT) == work / "gone"
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: f"/hub/{name}")
    assert drafter_folder(work, "maker/drafter", SILENT) == Path("/hub/maker/drafter")

    def offline(name: str, **_: object) -> str:
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    told: list[str] = []
    assert drafter_folder(work, "maker/drafter", replace(SILENT, say=told.append)) == work / "maker/drafter"
    assert "no route" in told[0]


@pytest.mark.parametrize("begin", [lambda path: None, Path.mkdir])
def test_waiting_for_a_store_says_so_once(begin: Callable[[Path], None], filled: Store, tmp_path: Path) -> None:
    begin(tmp_path / "states")
    said: list[str] = []
    appeared = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        shutil.copytree(str(filled.place), tmp_path / "copy")
        heldout = [part.id for part in filled.parts if part.split != "train"]
        whole = tmp_path / "copy" / filled.parts_folder
        aside = tmp_path / "aside"
        aside.mkdir()
        for name in [part.id for part in filled.parts if part.id not in heldout]:
            (whole / name).rename(aside / name)
        (tmp_path / "copy").rename(tmp_path / "states")

        def commit() -> None:
            appeared.set()
            for part in aside.iterdir():
                part.rename(tmp_path / "states" / filled.parts_folder / part.name)

        threading.Timer(0.3, commit).start()

    wait_for_documents(str(tmp_path / "states"), say, seconds=0.02)
    assert appeared.is_set()  # held-out documents alone are not enough
    assert said == [f"waiting for the first training documents of {tmp_path / 'states'}"]
    wait_for_documents(str(tmp_path / "states"), said.append)
    assert len(said) == 1


def test_waiting_for_what_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "states").mkdir()
    (tmp_path / "states/notes.txt").touch()
    for path in (tmp_path / "states", tmp_path / "states/notes.txt"):
        with pytest.raises(StoreError, match="not a dflash store"):
            wait_for_documents(str(path), print)
