"""What a run trains on and for how long: stores that grow, steps instead of epochs, mixtures, changes on the way."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fill
from test_trainer import metrics, trainer
from tiny import write_data

from dflash_offline.extract.run import Prepared
from dflash_offline.extract.unit import run_unit
from dflash_offline.store import HELDOUT, TRAIN, Store, StoreError, open_store
from dflash_offline.store.progress import SILENT, Listener
from dflash_offline.train.checkpoint import checkpoints
from dflash_offline.train.optimizer import learning_rate


def hearing(said: list[str]) -> Listener:
    return replace(SILENT, say=said.append)


def position(folder: Path) -> dict[str, Any]:
    last = checkpoints(folder / "checkpoints")[-1]
    return json.loads((last / "training/state.json").read_text())["position"]


def trained(folder: Path) -> list[dict[str, Any]]:
    return [row for row in metrics(folder) if "lr" in row]


@pytest.fixture
def begun(hybrid: Path, tmp_path: Path, make_store: Callable[..., Prepared]) -> Prepared:
    """A store whose extraction has written its held-out units and two others."""
    prepared = make_store(hybrid, [write_data(tmp_path / "data.jsonl", 60, heldout=6)], tmp_path / "s")
    units = prepared.plan.units
    held = sum(unit.split == HELDOUT for unit in units)
    assert len(units) > held + 4
    for unit in units[: held + 2]:
        run_unit(prepared.job, unit.id)
    return prepared


def test_a_store_knows_what_is_planned(begun: Prepared) -> None:
    store = open_store(begun.store.place)
    planned = {split: store.planned_tokens(split) for split in (HELDOUT, TRAIN)}
    assert planned[HELDOUT] == sum(part.tokens for part in store.parts if part.split == HELDOUT)
    fill(begun)
    whole = open_store(begun.store.place)
    assert planned[TRAIN] == sum(part.tokens for part in whole.parts if part.split == TRAIN)
    assert {split: whole.planned_tokens(split) for split in (HELDOUT, TRAIN)} == planned


def test_training_beside_extraction_takes_new_parts_between_epochs_and_is_planned_for_all(
    begun: Prepared, tmp_path: Path
) -> None:
    said: list[str] = []
    store = open_store(begun.store.place)
    rest = iter([unit for unit in begun.plan.units if not store.has(unit.id)])

    def advance(amount: int, note: str) -> None:
        """The extraction goes on while the run trains: a unit an update."""
        if (unit := next(rest, None)) is not None:
            run_unit(begun.job, unit.id)

    planned = store.planned_tokens(TRAIN)
    listener = replace(hearing(said), advance=advance)
    trainer(store, tmp_path / "run", epochs=3, listener=listener).run()
    assert any(f"of {planned:,} tokens planned" in line for line in said)
    assert any("trains on" in line and "of them new" in line for line in said)
    after = trainer(open_store(store.place), tmp_path / "whole", epochs=3)
    after.run()
    grown, whole = position(tmp_path / "run"), position(tmp_path / "whole")
    assert grown["micro"] == grown["planned"]
    # As the few documents pack that are there when it is planned: the long ones, which are extracted first.
    assert grown["planned"] == pytest.approx(whole["planned"], rel=0.35)
    assert grown["epoch"] >= 3  # its first pass was short
    rates = [row["lr"] for row in trained(tmp_path / "run")]
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 0.05 * max(rates)
    validated = [json.loads(line) for line in (tmp_path / "run/validation.jsonl").read_text().splitlines()]
    assert len({row["heldout"] for row in validated}) == 1


def test_held_out_documents_still_to_come_are_warned_of(
    hybrid: Path, tmp_path: Path, make_store: Callable[..., Prepared]
) -> None:
    data = write_data(tmp_path / "data.jsonl", 40, heldout=20)
    prepared = make_store(hybrid, [data], tmp_path / "s", unit_tokens=200)
    held = [unit for unit in prepared.plan.units if unit.split == HELDOUT]
    train = [unit for unit in prepared.plan.units if unit.split == TRAIN]
    for unit in [held[0], *train]:
        run_unit(prepared.job, unit.id)
    said: list[str] = []
    trainer(open_store(tmp_path / "s"), tmp_path / "run", epochs=1, listener=hearing(said)).run()
    assert any("are still to be extracted: this run validates without them" in line for line in said)


@pytest.mark.parametrize(("steps", "epochs"), [(3, 1), (7, 1), (25, 1), (4, 10**9)])
def test_steps_in_place_of_epochs(steps: int, epochs: int, filled: Store, tmp_path: Path) -> None:
    """Whose number then means nothing, and costs nothing."""
    trainer(filled, tmp_path / "run", steps=steps, epochs=epochs).run()
    rows = trained(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert [row["lr"] for row in rows] == [learning_rate(i, i + 1, steps, 3e-3, 0.04) for i in range(steps)]
    assert metrics(tmp_path / "run")[-1]["step"] == steps
    assert "heldout_loss" in metrics(tmp_path / "run")[-1]


def test_more_steps_and_epochs_are_recorded_and_go_on_where_it_ended(filled: Store, tmp_path: Path) -> None:
    said: list[str] = []
    trainer(filled, tmp_path / "run", steps=5).run()
    trainer(filled, tmp_path / "run", steps=9, listener=hearing(said)).run()
    assert "from step 5 on: train.steps was 5, now 9" in said
    trainer(filled, tmp_path / "run", epochs=3).run()
    at = position(tmp_path / "run")
    assert at["micro"] == at["planned"]
    assert at["epoch"] == 3
    assert at["history"] == [
        {"step": 5, "changed": ["train.steps was 5, now 9"]},
        {"step": 9, "changed": ["train.epochs was 2, now 3", "train.steps was 9, now not set"]},
    ]
    assert json.loads((tmp_path / "run/run.json").read_text())["history"] == at["history"]
    said.clear()
    trainer(filled, tmp_path / "run", epochs=3, listener=hearing(said)).run()
    assert any("is done, with" in line for line in said)
    said.clear()
    trainer(filled, tmp_path / "run", epochs=1, listener=hearing(said)).run()  # fewer: nothing is undone
    assert position(tmp_path / "run") == at


def test_a_mixture_trains_on_each_tags_share(filled: Store, tmp_path: Path) -> None:
    documents = filled.documents(TRAIN)
    tokens = {
        tag: sum(int(n) for n, t in zip(documents.length, documents.tags, strict=True) if t == tag)
        for tag in ("code", "chat")
    }
    run = trainer(filled, tmp_path / "run", mixture={"code": 1, "chat": 3}, epochs=1)
    epoch = run._course.begin()
    used = {"code": 0, "chat": 0}
    for group in epoch.groups:
        for index in group:
            used[documents.tags[index]] += int(documents.length[index])
    longest = int(documents.length.max())
    total = sum(tokens.values())
    assert used["chat"] == pytest.approx(0.75 * total, abs=longest)
    assert used["code"] == pytest.approx(0.25 * total, abs=longest)
    run.run()
    assert math.isfinite(trained(tmp_path / "run")[-1]["loss"])
    with pytest.raises(StoreError, match="chat"):
        trainer(filled, tmp_path / "other", mixture={"chta": 1})


def test_a_warm_start_begins_with_the_other_runs_weights(filled: Store, tmp_path: Path) -> None:
    first = trainer(filled, tmp_path / "first", epochs=1).run()
    said: list[str] = []
    run = trainer(filled, tmp_path / "second", begin_from=first, epochs=1, lr=1e-30, listener=hearing(said))
    last = run.run()
    from safetensors.torch import load_file

    mine, theirs = (load_file(folder / "model.safetensors") for folder in (last, first))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert f"beginning with the weights of {first}" in said
