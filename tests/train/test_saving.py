"""Saving beside the training: what is written is the state at the update, and what goes wrong is told in time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_trainer import trainer
from tiny import write_data

from dflash_offline.extract.run import Prepared
from dflash_offline.extract.unit import run_unit
from dflash_offline.store import HELDOUT, Store, open_store
from dflash_offline.store.progress import SILENT
from dflash_offline.train import saving
from dflash_offline.train.checkpoint import CheckpointError, checkpoint_step, checkpoints
from dflash_offline.train.saving import Saver

CPU = torch.device("cpu")


@pytest.fixture
def live() -> dict[str, torch.Tensor]:
    """Shapes and dtypes of all kinds, a scalar and an odd number of bytes among them."""
    return {
        "a": torch.randn(3, 5),
        "count": torch.tensor(7.0),
        "odd": torch.randn(7).to(torch.bfloat16),
        "wide": torch.randn(4, 6, dtype=torch.float64),
    }


def test_what_is_written_is_the_state_at_the_save(
    live: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on, and changes everything, before the first byte is written."""
    moved = threading.Event()
    really = saving.save_checkpoint

    def late(*args: Any) -> None:
        assert moved.wait(30)
        really(*args)

    monkeypatch.setattr(saving, "save_checkpoint", late)
    weights = {name: tensor.clone() for name, tensor in live.items()}
    saver = Saver(live, weights, CPU, SILENT)
    was = {name: tensor.clone() for name, tensor in live.items()}
    there: list[bool] = []
    saver.save(
        tmp_path / "step-00000001", {}, {"position": {}}, lambda: there.append((tmp_path / "step-00000001").is_dir())
    )
    for tensor in [*live.values(), *weights.values()]:
        tensor.zero_()
    assert not list(tmp_path.glob("step-*"))
    moved.set()
    saver.settle()
    assert there == [True]
    for file in ("model.safetensors", "training/optimizer.safetensors"):
        found = load_file(tmp_path / "step-00000001" / file)
        assert found.keys() == was.keys()
        assert all(torch.equal(found[name], was[name]) and found[name].dtype == was[name].dtype for name in was)
    saver.close()


def test_a_save_that_fails_is_told_at_the_next_look_and_the_next_save(
    live: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    saver = Saver(live, live, CPU, SILENT)
    saver.check()
    saver.save(tmp_path / "file/step-00000001", {}, {}, lambda: None)
    for ask in (saver.settle, saver.check, lambda: saver.save(tmp_path / "step-00000002", {}, {}, lambda: None)):
        with pytest.raises(CheckpointError, match="cannot save a checkpoint in"):
            ask()
    saver.close()
    assert not (tmp_path / "step-00000002").exists()


def test_a_run_ends_at_the_next_update_when_a_save_has_failed(
    filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fails(folder: Path, *_: Any) -> None:
        failed.set()
        raise CheckpointError(f"cannot save the checkpoint {folder}: the disk is gone")

    def advance(amount: int, note: str) -> None:
        nonlocal updates
        updates += amount
        if updates > 2:
            assert failed.wait(30)

    updates = 0
    monkeypatch.setattr(saving, "save_checkpoint", fails)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        trainer(filled, tmp_path / "run", save_every=2, steps=1000, listener=replace(SILENT, advance=advance)).run()
    assert updates < 10


def test_a_run_that_waits_for_its_disk_says_so_once(
    filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "LATE", -1.0)
    said: list[str] = []
    trainer(filled, tmp_path / "run", save_every=1, steps=6, listener=replace(SILENT, say=said.append)).run()
    assert sum("waited" in line and "raise train.save_every" in line for line in said) == 1


def test_while_its_store_grows_a_run_saves_and_validates_when_that_is_due_and_not_at_every_epochs_end(
    hybrid: Path, tmp_path: Path, make_store: Callable[..., Prepared]
) -> None:
    prepared = make_store(hybrid, [write_data(tmp_path / "data.jsonl", 60, heldout=6)], tmp_path / "s")
    held = sum(unit.split == HELDOUT for unit in prepared.plan.units)
    for unit in prepared.plan.units[: held + 1]:
        run_unit(prepared.job, unit.id)
    store = open_store(tmp_path / "s")
    changes: dict[str, Any] = {"steps": 14, "keep": 100, "validate_every": 6}
    trainer(store, tmp_path / "run", save_every=5, **changes).run()
    saved = [checkpoint_step(path) for path in checkpoints(tmp_path / "run/checkpoints")]
    last = json.loads((tmp_path / "run/checkpoints/step-00000014/training/state.json").read_text())["position"]
    assert last["epoch"] >= 4
    validated = [json.loads(line)["step"] for line in (tmp_path / "run/validation.jsonl").read_text().splitlines()]
    # Due in the middle of an epoch or at its end, and once more when the run is done.
    assert saved == [5, 10, 14]
    assert validated == [6, 12, 14]


def test_saving_starts_no_threads_that_compute(tmp_path: Path) -> None:
    """A second thread that computes with several makes those of the first sleep between operations: half the speed."""
    program = """
import os, sys, torch
from pathlib import Path
from dflash_offline.store.progress import SILENT
from dflash_offline.train.saving import Saver
def threads(): return len(os.listdir("/proc/self/task"))
torch.set_num_threads(2)
live = {"wide": torch.randn(2000, 1000)}
(live["wide"] + 1).sum()
before = threads()
saver = Saver(live, {"moment": live["wide"] * 2}, torch.device("cpu"), SILENT)
saver.save(Path(sys.argv[1]) / "step-00000001", {}, {"position": {}}, lambda: None)
saver.settle()
print(threads() - before)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr  # the one that saves
