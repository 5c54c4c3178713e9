"""Runs: exact resumption, accumulation, refusals, and validation that stays the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fill
from safetensors.torch import load_file
from test_drafter import drafter_settings
from tiny import write_data

from dflash_offline.extract.run import Prepared
from dflash_offline.store import HELDOUT, TRAIN, Batch, BatchStream, Store, StoreError, load_head, open_store, pack
from dflash_offline.store.progress import SILENT, Listener
from dflash_offline.train.checkpoint import CheckpointError, checkpoints
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.flat import Flat
from dflash_offline.train.head import LmHead
from dflash_offline.train.inputs import Ends, Inputs
from dflash_offline.train.journal import TrainError
from dflash_offline.train.loss import LossSettings
from dflash_offline.train.optimizer import MasterAdamW
from dflash_offline.train.ranks import Ranks, alone
from dflash_offline.train.settings import TrainSettings
from dflash_offline.train.step import Forward, TrainStep
from dflash_offline.train.trainer import Trainer


def train_settings(**changes: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "epochs": 2,
        "tokens": 256,
        "anchors": 24,
        "save_every": 1,
        "keep": 100,
        "log_every": 1,
        "lr": 3e-3,
        "validate_documents": 4,
    }
    return TrainSettings(**{**values, **changes})


def loss_settings(**changes: Any) -> LossSettings:
    return LossSettings.model_validate(changes)


def trainer(
    store: Store,
    folder: Path,
    drafter: dict[str, Any] | None = None,
    loss: dict[str, Any] | None = None,
    listener: Listener = SILENT,
    ranks: Ranks | None = None,
    begin_from: Path | None = None,
    **changes: Any,
) -> Trainer:
    shape, settings = drafter_settings(**(drafter or {})), train_settings(**changes)
    ranks = ranks or alone(torch.device("cpu"))
    return Trainer(store, shape, loss_settings(**(loss or {})), settings, folder, ranks, listener, begin_from)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    clocks = ("tokens_per_second", "share_waiting_for_data", "slots_per_second", "seconds")
    return [{key: value for key, value in row.items() if key not in clocks} for row in rows]


@pytest.mark.parametrize(
    ("accumulate", "optimizer", "loss"),
    [
        (1, "adamw", {}),
        (3, "adamw", {}),
        (1, "muon", {}),
        (3, "adamw", {"cross_entropy": 0, "kl": 1, "expected_length": 1}),
        (3, "adamw", {"lk_mixed": 1, "weights": "dpace"}),
        (3, "adamw", {"total_variation": 1, "weights": "none"}),
    ],
)
def test_resumed_at_any_step_the_run_ends_bit_identical(
    accumulate: int, optimizer: str, loss: dict[str, Any], filled: Store, tmp_path: Path
) -> None:
    changes = {"accumulate": accumulate, "optimizer": optimizer, "loss": loss}
    whole = trainer(filled, tmp_path / "whole", **changes).run()
    expected = load_file(whole / "training" / "optimizer.safetensors")
    saved = checkpoints(tmp_path / "whole" / "checkpoints")
    assert len(saved) >= 6
    for stop in range(0, len(saved) - 1, 2):  # in the middle of epochs and at their ends
        run = tmp_path / f"cut-{stop}"
        shutil.copytree(tmp_path / "whole", run)
        for later in saved[stop + 1 :]:
            shutil.rmtree(run / "checkpoints" / later.name)
        last = trainer(filled, run, **changes).run()
        assert last.name == whole.name
        for name, tensor in load_file(last / "training" / "optimizer.safetensors").items():
            assert torch.equal(tensor, expected[name]), (stop, name)
        mine, theirs = (load_file(folder / "model.safetensors") for folder in (last, whole))
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        state = (last / "training" / "state.json").read_text()
        assert state == (whole / "training" / "state.json").read_text()
        again = without_times([row for row in metrics(run) if "loss" in row])
        assert again == without_times([row for row in metrics(tmp_path / "whole") if "loss" in row])


def test_a_damaged_last_checkpoint_is_passed_over(filled: Store, tmp_path: Path) -> None:
    whole = trainer(filled, tmp_path / "run").run()
    expected = load_file(whole / "model.safetensors")
    content = (whole / "training/optimizer.safetensors").read_bytes()
    (whole / "training/optimizer.safetensors").write_bytes(content[: len(content) // 2])
    (tmp_path / "run/checkpoints/.saving.abc").mkdir()  # what a kill leaves
    last = trainer(filled, tmp_path / "run").run()
    assert last == whole
    assert all(torch.equal(load_file(last / "model.safetensors")[name], expected[name]) for name in expected)
    load_file(last / "training/optimizer.safetensors")
    assert not (tmp_path / "run/checkpoints/.saving.abc").exists()


def test_a_store_that_grows_keeps_validation_and_schedule(
    hybrid: Path, tmp_path: Path, make_store: Callable[..., Prepared]
) -> None:
    """New parts sort before old ones and shift their places; what was begun stays as it was."""
    fill(make_store(hybrid, [write_data(tmp_path / "one.jsonl", 20, heldout=4)], tmp_path / "s"))
    run = trainer(open_store(tmp_path / "s"), tmp_path / "run", epochs=4)
    before = open_store(tmp_path / "s").documents(HELDOUT).ids.tolist()
    for n in range(4):
        path = write_data(tmp_path / f"more{n}.jsonl", 8, first=100 + 50 * n, heldout=104 + 50 * n)
        fill(make_store(hybrid, [path], tmp_path / "s"))
    run.run()
    states = json.loads((checkpoints(tmp_path / "run/checkpoints")[-1] / "training/state.json").read_text())
    held = states["position"]["heldout"]
    assert len(open_store(tmp_path / "s").documents(HELDOUT)) > len(before)
    assert sorted(open_store(tmp_path / "s").documents(HELDOUT, held).ids.tolist()) == sorted(before)
    assert sum("heldout_loss" in row for row in metrics(tmp_path / "run")) == 4


def test_it_learns(filled: Store, tmp_path: Path) -> None:
    trainer(filled, tmp_path / "run", epochs=6).run()
    losses = [row["loss"] for row in metrics(tmp_path / "run") if "loss" in row]
    assert sum(losses[-3:]) / 3 < sum(losses[:3]) / 3 - 0.5
    assert sum("heldout_accepted_length" in row for row in metrics(tmp_path / "run")) == 6
    assert any((tmp_path / "run" / "tensorboard").iterdir())


def test_a_finished_run_goes_on_with_more_epochs(filled: Store, tmp_path: Path) -> None:
    first = trainer(filled, tmp_path / "run", epochs=1).run()
    assert trainer(filled, tmp_path / "run", epochs=1).run() == first
    assert trainer(filled, tmp_path / "run", epochs=2).run() != first


def test_a_checkpoint_that_cannot_be_resumed_from_neither_goes_nor_counts(filled: Store, tmp_path: Path) -> None:
    saved = trainer(filled, tmp_path / "run", epochs=1, keep=1, keep_best=False).run()
    damaged = saved.with_name("step-90000000")
    shutil.copytree(saved, damaged)
    (damaged / "training/optimizer.safetensors").write_bytes(b"")
    last = trainer(filled, tmp_path / "run", epochs=2, keep=1, keep_best=False).run()
    assert checkpoints(tmp_path / "run/checkpoints") == [last, damaged]


def test_old_checkpoints_are_removed_and_nothing_else(filled: Store, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "mine.txt").write_text("keep me")
    trainer(filled, tmp_path / "run", keep=2).run()
    assert len(checkpoints(tmp_path / "run" / "checkpoints")) == 2
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert len(names) == 3
    assert "mine.txt" in names


def test_accumulated_micro_batches_make_the_update_of_their_union(filled: Store) -> None:
    """Uneven micro-batches: gradients and weights are summed before dividing, whatever the number of slots in each."""
    documents = filled.documents(TRAIN)
    groups = pack(documents.length.tolist(), 256)[:3]
    layers = filled.layer_indices((1, 5))
    head = load_head(filled)

    def gradients(together: bool) -> list[torch.Tensor]:
        drafter = Drafter(drafter_settings(), 32)
        drafter.reset(0)
        flat = Flat(drafter)
        chosen, budget = ([[i for group in groups for i in group]], 768) if together else (groups, 256)
        inputs = Inputs(Batch.empty(filled, budget, 2, False), torch.device("cpu"), torch.float32)
        # 800 anchors: every eligible one is drawn.
        ends = Ends.beside(head, drafter)
        forward = Forward(drafter, ends.embedding, LmHead(ends.lm_head), loss_settings(gamma=3.0), inputs, 800, 0)
        step = TrainStep(forward, MasterAdamW(flat, clip=1e9, weight_decay=0))
        with BatchStream(filled, documents, chosen, budget, layers) as stream:
            for number, batch in enumerate(stream):
                step.load(batch, number)
                step.micro()
        # No update: weights stay, gradients are looked at.
        total = step.report().read().denominator
        return [p.grad / total for p in drafter.parameters() if p.grad is not None]

    for apart, union in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(apart, union, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("accumulate", "kind"), [(1, torch.bfloat16), (2, torch.float32)])
def test_gradients_that_add_up_do_so_in_fp32(accumulate: int, kind: torch.dtype, filled: Store, tmp_path: Path) -> None:
    run = trainer(filled, tmp_path / "run", dtype="bfloat16", accumulate=accumulate, epochs=1)
    assert {p.grad.dtype for p in run._drafter.parameters() if p.grad is not None} == {kind}
    assert {p.dtype for p in run._drafter.parameters()} == {torch.bfloat16}
    run.run()
    losses = [row["loss"] for row in metrics(tmp_path / "run") if "loss" in row]
    assert losses[-1] < losses[0]


def test_a_document_longer_than_a_batch_is_refused_by_name(filled: Store, tmp_path: Path) -> None:
    longest = filled.documents(TRAIN)
    name = f"{int(longest.ids[longest.length.argmax()]):016x}"
    with pytest.raises(StoreError, match=rf"{name}.*more than train\.tokens = 32"):
        trainer(filled, tmp_path / "run", tokens=32).run()


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        ({"layer_ids": [1, 2]}, "layer 2 is not in the store"),
        ({"mask_token_id": 9000}, "outside the vocabulary"),
        ({"mask_token_id": 2}, "is the target's eos_token_id"),
        ({"mask_token_id": 0}, "is the target's pad_token_id"),
    ],
)
def test_a_drafter_that_does_not_fit_the_store_is_refused(
    drafter: dict[str, Any], says: str, filled: Store, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match=says):
        trainer(filled, tmp_path / "run", drafter)
    assert not (tmp_path / "run").exists()


def test_other_settings_are_another_run(filled: Store, tmp_path: Path) -> None:
    trainer(filled, tmp_path / "run", epochs=1).run()
    with pytest.raises(CheckpointError, match=r"train\.lr was 0\.003, now 0\.1"):
        trainer(filled, tmp_path / "run", epochs=1, lr=0.1)
    with pytest.raises(CheckpointError, match=r"drafter\.block_size was 4, now 5"):
        trainer(filled, tmp_path / "run", {"block_size": 5}, epochs=1)


def test_validation_is_the_same_for_every_run_and_epoch(filled: Store, tmp_path: Path) -> None:
    """With a learning rate too small to matter, every validation gives one number, whatever seed and epoch."""
    found = set()
    for seed in (0, 1):
        folder = tmp_path / f"seed-{seed}"
        run = trainer(filled, folder, lr=1e-30, seed=seed)
        run._drafter.reset(7)  # the same weights under both seeds
        state = run._optimizer.state()
        for name, parameter in run._drafter.named_parameters():
            state[f"master.{name}"].copy_(parameter.detach())
        run.run()
        found |= {row["heldout_loss"] for row in metrics(folder) if "heldout_loss" in row}
    assert len(found) == 1
    assert len(filled.documents(HELDOUT)) >= 4


def test_a_run_of_an_earlier_version_is_refused_as_such(filled: Store, tmp_path: Path) -> None:
    last = trainer(filled, tmp_path / "run", epochs=1).run()
    path = last / "training" / "state.json"
    state = json.loads(path.read_text())
    del state["settings"]["loss"]
    path.write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"earlier version of dflash wrote it, without \[loss\]"):
        trainer(filled, tmp_path / "run", epochs=2)


def test_fp8_says_which_width_does_not_fit(filled: Store, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"multiples of 16; drafter\.intermediate_size is 24"):
        trainer(filled, tmp_path / "run", dtype="fp8")
    shape = {"head_dim": 16, "intermediate_size": 32}
    trainer(filled, tmp_path / "run", shape, dtype="fp8", epochs=1).run()
    assert all("loss" in row or "heldout_loss" in row for row in metrics(tmp_path / "run"))
