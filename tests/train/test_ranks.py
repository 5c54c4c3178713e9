"""Several processes as one run: the update of their union, local steps averaged, stopping together, one that dies."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_program import STOPPED
from safetensors.torch import load_file
from test_drafter import drafter_settings
from test_trainer import loss_settings, metrics, train_settings, trainer

from dflash_offline.store import TRAIN, Batch, BatchStream, Store, load_head, pack, shuffled
from dflash_offline.train.checkpoint import checkpoints
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.flat import Flat
from dflash_offline.train.head import LmHead
from dflash_offline.train.inputs import Ends, Inputs
from dflash_offline.train.optimizer import MasterAdamW, learning_rate
from dflash_offline.train.ranks import PEER_LOST
from dflash_offline.train.step import Forward, TrainStep

HERE = Path(__file__).parent


def start(count: int, store: Store, folder: Path, **settings: Any) -> list[subprocess.Popen[str]]:
    """Start the ranks of a run, on CPUs."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": paths}
    command = [sys.executable, str(HERE / "rank_program.py"), str(store.place), str(folder), json.dumps(settings)]
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def finish(ranks: list[subprocess.Popen[str]]) -> list[int]:
    """Wait; their exit codes."""
    codes = []
    for rank in ranks:
        rank.communicate(timeout=120)
        codes.append(rank.returncode)
    return codes


def wait_for(rank: subprocess.Popen[str], text: str) -> None:
    assert rank.stdout is not None
    for line in rank.stdout:
        if text in line:
            return
    raise AssertionError(f"it ended without {text!r}")


def last_state(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    last = checkpoints(folder / "checkpoints")[-1]
    state = json.loads((last / "training/state.json").read_text())
    return load_file(last / "training/optimizer.safetensors"), state["position"]


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-3, atol=2e-5, msg=lambda said, n=name: f"{n}: {said}")


@pytest.mark.parametrize(
    ("count", "accumulate", "changes"),
    [
        (2, 1, {}),
        (3, 2, {"loss": {"kl": 1, "expected_length": 1}}),
        (2, 1, {"optimizer": "muon", "tokens": 512, "anchors": 64}),
    ],
)
def test_ranks_make_the_updates_of_one_process_on_the_union(
    count: int, accumulate: int, changes: dict[str, Any], filled: Store, tmp_path: Path
) -> None:
    """Batches differ in slots, and do not come out even: some ranks end an epoch with batches that have no anchors."""
    # A plain step where the rate is that of the optimizer's own sums, so that rounding is not blown up.
    changes = {"epochs": 2, "lr": 1e-3, **changes}
    ranks = start(count, filled, tmp_path / "ranks", accumulate=accumulate, **changes)
    trainer(filled, tmp_path / "one", accumulate=accumulate * count, **changes).run()
    assert finish(ranks) == [0] * count
    (mine, at), (theirs, there) = last_state(tmp_path / "ranks"), last_state(tmp_path / "one")
    assert (at["step"], at["micro"], at["epoch"]) == (there["step"], there["micro"], there["epoch"])
    assert at["micro"] % count or count == 2  # the last update is a smaller one
    assert_close(mine, theirs)
    rows, expected = metrics(tmp_path / "ranks"), metrics(tmp_path / "one")
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        for name in {"loss", "grad_norm", "heldout_loss", "heldout_accepted_length"} & row.keys():
            assert row[name] == pytest.approx(other[name], rel=2e-3), (row["step"], name)
    assert sum("heldout_loss" in row for row in rows) == 2


def test_local_steps_are_averaged(filled: Store, tmp_path: Path) -> None:
    """Two ranks that average, against two drafters side by side in one process."""
    assert finish(start(2, filled, tmp_path / "run", epochs=1, sync="average", sync_every=3)) == [0, 0]
    settings = train_settings(epochs=1)
    documents = filled.documents(TRAIN)
    order = shuffled(documents, settings.seed, 0)
    groups = [[int(order[i]) for i in group] for group in pack(documents.length[order].tolist(), settings.tokens)]
    cpu, head = torch.device("cpu"), load_head(filled)
    steps: list[TrainStep] = []
    optimizers: list[MasterAdamW] = []
    for _ in range(2):
        drafter = Drafter(drafter_settings(), 32)
        drafter.reset(settings.seed)
        optimizers.append(MasterAdamW(Flat(drafter, accumulates=False), clip=1.0, weight_decay=0.0))
        inputs = Inputs(Batch.empty(filled, settings.tokens, 2, False), cpu, torch.float32)
        ends = Ends.beside(head, drafter)
        forward = Forward(drafter, ends.embedding, LmHead(ends.lm_head), loss_settings(), inputs, settings.anchors, 0)
        steps.append(TrainStep(forward, optimizers[-1]))
    updates = math.ceil(len(groups) / 2)
    for update in range(updates):
        for rank, step in enumerate(steps):
            number = 2 * update + rank
            if number < len(groups):  # an empty batch updates nothing
                with BatchStream(filled, documents, [groups[number]], settings.tokens, (0, 2)) as stream:
                    for batch in stream:
                        step.load(batch, number)
                        step.micro()
                done = 2 * update
                rate = learning_rate(done, min(done + 2, len(groups)), len(groups), settings.lr, settings.warmup)
                step.update(rate).read()
        if update + 1 in (3, 6, 9, updates):
            for one, other in zip(optimizers[0].buffers, optimizers[1].buffers, strict=True):
                mean = (one + other) / 2
                one.copy_(mean)
                other.copy_(mean)
            count = torch.maximum(optimizers[0].count, optimizers[1].count)
            for optimizer in optimizers:
                optimizer.count.copy_(count)
                optimizer.publish()
    mine, _ = last_state(tmp_path / "run")
    assert_close({name: mine[name] for name in mine if name != "skipped"}, optimizers[0].state())
    # What it validates is what one process finds with the same weights, on all documents.
    last = checkpoints(tmp_path / "run/checkpoints")[-1]
    trainer(filled, tmp_path / "same", begin_from=last, steps=1, lr=1e-12).run()
    one, other = ([row for row in metrics(tmp_path / name) if "heldout_loss" in row][-1] for name in ("run", "same"))
    for name in ("heldout_loss", "heldout_accuracy", "heldout_accepted_length"):
        assert one[name] == pytest.approx(other[name], rel=1e-4)
    saved = [
        json.loads((path / "training/state.json").read_text()) for path in checkpoints(tmp_path / "run/checkpoints")
    ]
    assert {state["position"]["step"] for state in saved} <= {3, 6, 9, updates}  # only where ranks are alike


@pytest.mark.parametrize("sync", ["gradients", "average"])
def test_one_that_is_told_to_stop_stops_all_and_the_run_goes_on_bit_identical(
    sync: str, filled: Store, tmp_path: Path
) -> None:
    changes = {"epochs": 8, "sync": sync, "sync_every": 7, "save_every": 1000, "validate_documents": 0}
    ranks = start(2, filled, tmp_path / "cut", **changes)
    wait_for(ranks[1], "ready")
    ranks[1].send_signal(signal.SIGTERM)
    assert finish(ranks) == [STOPPED, STOPPED]
    _, stopped = last_state(tmp_path / "cut")
    assert 0 < stopped["step"] < stopped["planned"] / 2
    assert finish(start(2, filled, tmp_path / "cut", **changes)) == [0, 0]
    assert finish(start(2, filled, tmp_path / "whole", **changes)) == [0, 0]
    (mine, at), (theirs, there) = last_state(tmp_path / "cut"), last_state(tmp_path / "whole")
    assert at == there
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_another_number_of_ranks_may_go_on(filled: Store, tmp_path: Path) -> None:
    trainer(filled, tmp_path / "run", epochs=1).run()
    _, before = last_state(tmp_path / "run")
    assert finish(start(2, filled, tmp_path / "run", epochs=2)) == [0, 0]
    _, after = last_state(tmp_path / "run")
    assert after["micro"] == after["planned"] > before["micro"]
    assert after["step"] - before["step"] == math.ceil((after["micro"] - before["micro"]) / 2)
    assert after["history"] == [
        {"step": before["step"], "changed": ["train.epochs was 1, now 2", "processes was 1, now 2"]}
    ]


def test_a_rank_that_is_killed_leaves_the_others_with_an_error(filled: Store, tmp_path: Path) -> None:
    ranks = start(2, filled, tmp_path / "run", epochs=1000, save_every=1000)
    wait_for(ranks[1], "ready")
    ranks[1].kill()
    assert finish(ranks) == [PEER_LOST, -signal.SIGKILL]
