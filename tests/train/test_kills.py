"""Runs that are killed at any instant, told to stop, or out of disk, and go on as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stores import run_killed, small_disk
from test_trainer import metrics, trainer, without_times

from dflash_offline.store import Store, open_store
from dflash_offline.train.checkpoint import CheckpointError, checkpoints
from dflash_offline.train.trainer import Stopped

SETTINGS: dict[str, Any] = {"epochs": 6, "save_every": 2, "keep": 2, "keep_every": 10, "validate_every": 7}
HERE = Path(__file__).parent


def train_there(folder: str) -> None:
    """A run in `folder`/run from the store that `folder`/store names."""
    trainer(open_store((Path(folder) / "store").read_text()), Path(folder) / "run", **SETTINGS).run()


def same_weights(one: Path, other: Path) -> bool:
    mine, theirs = (load_file(folder / "training/optimizer.safetensors") for folder in (one, other))
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_killed_at_random_steps_a_run_ends_bit_identical(filled: Store, tmp_path: Path) -> None:
    (tmp_path / "store").write_text(str(filled.place))
    began = time.monotonic()
    whole = trainer(filled, tmp_path / "whole", **SETTINGS).run()
    took = time.monotonic() - began
    rng = random.Random(int(os.environ.get("DFLASH_TEST_SEED", "0")))
    kills = 0
    for _ in range(int(os.environ.get("DFLASH_TEST_KILLS", "10"))):
        kills += not run_killed(train_there, tmp_path, 0.3 + rng.uniform(0, 0.5 * took))
    assert kills > 0
    assert run_killed(train_there, tmp_path, None)
    last = checkpoints(tmp_path / "run/checkpoints")[-1]
    assert last.name == whole.name
    assert same_weights(last, whole)
    assert (last / "training/state.json").read_text() == (whole / "training/state.json").read_text()
    assert without_times(metrics(tmp_path / "run")) == without_times(metrics(tmp_path / "whole"))
    names = ("validation.jsonl",)
    assert all((tmp_path / "run" / n).read_text() == (tmp_path / "whole" / n).read_text() for n in names)
    left = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert sorted(left) == sorted(path.name for path in (tmp_path / "whole/checkpoints").iterdir())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_told_to_stop_a_run_saves_and_goes_on_bit_identical(accumulate: int, filled: Store, tmp_path: Path) -> None:
    changes: dict[str, Any] = {**SETTINGS, "save_every": 1000, "accumulate": accumulate}
    whole = trainer(filled, tmp_path / "whole", **changes).run()
    run = trainer(filled, tmp_path / "run", **changes)
    threading.Timer(0.2, run.ask_to_stop).start()
    with pytest.raises(Stopped, match="are saved"):
        run.run()
    described = json.loads((tmp_path / "run/run.json").read_text())
    assert 0 < described["step"] < described["updates"]
    assert not described["done"]
    last = trainer(filled, tmp_path / "run", **changes).run()
    assert same_weights(last, whole)
    assert without_times(metrics(tmp_path / "run")) == without_times(metrics(tmp_path / "whole"))
    assert json.loads((tmp_path / "run/run.json").read_text())["done"]


def test_asked_at_every_step_a_run_still_gets_through(filled: Store, tmp_path: Path) -> None:
    """One update a call: at an epoch's end, too, what belongs to it is done by the next call."""
    changes: dict[str, Any] = {"epochs": 2, "save_every": 1000, "validate_every": 3}
    whole = trainer(filled, tmp_path / "whole", **changes).run()
    calls = 0
    while True:
        run = trainer(filled, tmp_path / "run", **changes)
        run.ask_to_stop()
        calls += 1
        try:
            last = run.run()
            break
        except Stopped:
            continue
    assert calls >= json.loads((whole / "training/state.json").read_text())["position"]["step"]
    assert same_weights(last, whole)
    both = [[row for row in metrics(tmp_path / name) if "heldout_loss" in row] for name in ("run", "whole")]
    assert both[0] == both[1]


def test_a_checkpoint_that_was_giving_way_when_killed_is_put_back(filled: Store, tmp_path: Path) -> None:
    whole = trainer(filled, tmp_path / "run", epochs=1, keep=1).run()
    whole.rename(whole.with_name(f".removing.{whole.name}"))
    half = whole.with_name(".removing.step-00000001")
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"")
    assert trainer(filled, tmp_path / "run", epochs=1, keep=1).run() == whole
    assert [path.name for path in whole.parent.iterdir()] == [whole.name]


def test_two_processes_do_not_train_into_one_folder(
    filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_offline.train.run_folder.PATIENCE", 0.3)
    first = trainer(filled, tmp_path / "run", epochs=1)
    with pytest.raises(CheckpointError, match="another `dflash train` works in"):
        trainer(filled, tmp_path / "run", epochs=1)
    first.run()
    trainer(filled, tmp_path / "run", epochs=1).run()


FULL_DISK = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1].split(":")
from test_trainer import trainer
from dflash_offline.store import open_store
from dflash_offline.train.checkpoint import CheckpointError
try:
    trainer(open_store(sys.argv[2]), Path(sys.argv[3]) / "disk/run", epochs=6, save_every=2, keep=100).run()
except CheckpointError as error:
    print(error)
    sys.exit(1)
"""


def test_a_full_disk_leaves_the_last_whole_checkpoint_and_says_so(filled: Store, tmp_path: Path) -> None:
    if not small_disk(tmp_path):
        pytest.skip("mounting needs user namespaces")
    (tmp_path / "disk").mkdir()
    (tmp_path / "program.py").write_text(FULL_DISK)
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    run = f'"{sys.executable}" {tmp_path}/program.py "{paths}" "{filled.place}" "{tmp_path}"'
    script = f"""
mount -t tmpfs -o size=1m none {tmp_path}/disk
{run}; echo "left $?"; ls {tmp_path}/disk/run/checkpoints
mount -o remount,size=60m {tmp_path}/disk
{run}; echo "left $?"
cp -r {tmp_path}/disk/run {tmp_path}/saved
"""
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False)
    said = done.stdout.splitlines()
    assert "no room is left on the disk; make room and run the same command again" in said[0], done.stderr
    assert said[1] == "left 1"
    assert said[2].startswith("step-")
    assert said[-1] == "left 0"
    whole = trainer(filled, tmp_path / "whole", epochs=6, save_every=2, keep=1).run()
    assert same_weights(checkpoints(tmp_path / "saved/checkpoints")[-1], whole)


def test_the_rules_keep_the_last_the_multiples_and_the_best_and_nothing_else_goes(
    filled: Store, tmp_path: Path
) -> None:
    saved = tmp_path / "run/checkpoints"
    (saved / "step-best").mkdir(parents=True)
    (saved / "mine.txt").write_text("keep me")
    changes: dict[str, Any] = {"epochs": 6, "save_every": 1, "keep": 2, "keep_every": 5}
    run = trainer(filled, tmp_path / "run", **changes)
    run.run()
    steps = [int(path.name[5:]) for path in checkpoints(saved)]
    validated = [json.loads(line) for line in (tmp_path / "run/validation.jsonl").read_text().splitlines()]
    best = max((row["accepted_length"], row["step"]) for row in validated)[1]
    last = steps[-1]
    assert steps == sorted({last - 1, last, best} | {step for step in range(1, last + 1) if step % 5 == 0})
    assert (saved / "mine.txt").exists()
    assert (saved / "step-best").is_dir()
    (saved / "step-00000005/notes.txt").write_text("of a person")
    trainer(filled, tmp_path / "run", **{**changes, "epochs": 7, "keep_every": None}).run()
    assert (saved / "step-00000005/notes.txt").exists()
    assert not (saved / "step-00000010").exists()
