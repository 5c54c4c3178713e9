"""What a run says of its updates: late numbers in order, updates left out by name, and a run that stops for one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run
from safetensors.torch import load_file
from test_trainer import metrics, trainer
from tiny import write_data

from dflash_offline.store import TRAIN, PartWriter, States, Store
from dflash_offline.store.copy import copy_store
from dflash_offline.store.format import part_id
from dflash_offline.store.progress import SILENT, Listener
from dflash_offline.train.checkpoint import checkpoints
from dflash_offline.train.journal import Journal, TrainError, Update
from dflash_offline.train.meter import Meter
from dflash_offline.train.metrics import Metrics
from dflash_offline.train.step import REPORTS, Report

METER = Meter(torch.device("cpu"), 0.0, SILENT)

ODD = 0xDEAD
"""Id of a document that is added to a store."""


def with_document(store: Store, folder: Path, value: float, supervised: bool) -> Store:
    """A copy of a store, and one more document in it, all states one value.

    With 240 tokens it is alone in a batch of 256. Fuller batches come before it, and less full ones after it.
    """
    copy, length = copy_store(store.place, folder), 240
    identity = copy.identity
    bits = torch.full((len(identity.layer_ids), length, identity.hidden_size), value, dtype=torch.bfloat16)
    states = bits.view(torch.int16).numpy().view(np.uint16)
    with PartWriter(copy, part_id(TRAIN, 999, [ODD]), [length]) as writer:
        writer.append(States(states), States(states[:1]))
        writer.commit(
            split=TRAIN,
            tokens=np.arange(10, 10 + length),
            loss_mask=np.full(length, supervised),
            doc_ids=np.array([ODD], np.uint64),
            doc_tags=["code"],
            plan="plan",
            provenance={},
        )
    copy.refresh()
    copy.write_index()
    return copy


def hearing(said: list[str]) -> Listener:
    return replace(SILENT, say=said.append)


def masters(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "training" / "optimizer.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one if name != "skipped")


@pytest.mark.parametrize(
    ("value", "supervised", "says"),
    [
        # As large as bfloat16 goes: finite, so that a store takes it, and too large to compute with.
        (3e38, True, "the gradient of step {} was not finite (documents 000000000000dead): the update was left out"),
        (1.0, False, "step {} had nothing supervised (documents 000000000000dead): no update was made"),
    ],
    ids=["too-large", "unsupervised"],
)
@pytest.mark.parametrize(("optimizer", "loss"), [("adamw", {"kl": 1}), ("adamw", {}), ("muon", {})])
def test_an_update_left_out_is_named_and_changes_nothing(
    optimizer: str, loss: dict[str, Any], value: float, supervised: bool, says: str, filled: Store, tmp_path: Path
) -> None:
    store, said = with_document(filled, tmp_path / "s", value, supervised), []
    trainer(store, tmp_path / "run", loss=loss, listener=hearing(said), optimizer=optimizer, epochs=1).run()
    saved = checkpoints(tmp_path / "run/checkpoints")
    left_out = [line for line in said if "update was" in line]
    assert len(left_out) == 1
    step = int(left_out[0].partition("step ")[2].split()[0])
    assert left_out[0] == says.format(step)
    assert 1 < step < len(saved)  # the run goes on
    states = [masters(folder) for folder in saved]
    unchanged = [same(one, other) for one, other in pairwise(states)]
    assert unchanged == [number == step for number in range(2, len(saved) + 1)]
    assert [int(state["skipped"]) for state in states] == [int(number >= step) for number in range(1, len(saved) + 1)]
    assert all(tensor.isfinite().all() for tensor in states[-1].values())
    lines = [row for row in metrics(tmp_path / "run") if "loss" in row]
    assert [row["skipped_updates"] for row in lines] == [int(row["step"] >= step) for row in lines]
    assert all(math.isfinite(row["loss"]) for row in lines if row["step"] != step)


def test_a_run_that_is_to_stop_for_it_ends_with_an_error_and_its_checkpoint(
    filled: Store, hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_document(filled, tmp_path / "states", 3e38, supervised=True)
    write_data(tmp_path / "data.jsonl", 2)
    monkeypatch.chdir(tmp_path)
    said = [
        *("drafter.layer_ids=[1, 5]", "drafter.block_size=4", "drafter.num_attention_heads=1"),
        *("train.tokens=256", "train.anchors=24", "train.epochs=1", "train.save_every=1", "train.keep=100"),
    ]
    init = ("init", "--target", str(hybrid), "--data", "data.jsonl")
    assert run(monkeypatch, *init, *(part for each in said for part in ("--set", each))) == 0
    capsys.readouterr()
    assert run(monkeypatch, "train", "--gpus", "cpu", "--set", "train.non_finite=stop") == 1
    error = capsys.readouterr().err
    assert error.startswith("dflash: the gradient of step ")
    assert "not finite (documents 000000000000dead): the run stops" in error
    assert error.count("\n") == 1
    step = int(error.partition("step ")[2].split()[0])
    assert [folder.name for folder in checkpoints(tmp_path / "runs/drafter/checkpoints")] == [
        f"step-{number:08d}" for number in range(1, step)
    ]
    assert int(masters(checkpoints(tmp_path / "runs/drafter/checkpoints")[-1])["skipped"]) == 0
    # As the message advises: it goes on from there.
    assert run(monkeypatch, "train", "--gpus", "cpu") == 0
    assert "update was left out" in capsys.readouterr().out
    assert int(masters(checkpoints(tmp_path / "runs/drafter/checkpoints")[-1])["skipped"]) == 1


class Arrival:
    """In place of a CUDA event."""

    def __init__(self, there: bool = False) -> None:
        self.there = there

    def query(self) -> bool:
        return self.there

    def synchronize(self) -> None:
        self.there = True


def update(step: int, arrival: Any, numbers: Sequence[float], line: dict[str, float] | None) -> Update:
    """An update of a block of 2: numerator, denominator, norm, skipped, stop, and three sums of its one slot."""
    return Update(step, ["d"], 8, Report(torch.tensor(numbers), arrival), line)


def test_numbers_are_taken_as_they_arrive_in_the_order_of_steps(tmp_path: Path) -> None:
    journal = Journal(Metrics(tmp_path, 0), SILENT, METER, 0, stop=False)
    arrivals = [Arrival() for _ in range(REPORTS + 1)]
    for number, arrival in enumerate(arrivals[: REPORTS - 1]):
        line = {"lr": number + 1.0} if number % 2 else None
        journal.add(update(number + 1, arrival, [number, 2, 5, 0, 0, 1, 4, 0], line))
    assert metrics(tmp_path) == []
    assert not any(arrival.there for arrival in arrivals)  # nobody waited
    arrivals[1].there = True  # but the first is still on its way
    journal.add(update(REPORTS, arrivals[REPORTS - 1], [REPORTS - 1, 2, 5, 0, 0, 1, 4, 0], {"lr": float(REPORTS)}))
    # The memory of the first is about to be used again, so that one was waited for, and the second was there.
    assert [arrival.there for arrival in arrivals[:3]] == [True, True, False]
    assert [row["step"] for row in metrics(tmp_path)] == [2]
    journal.settle()
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [row["lr"] for row in rows] == [2, 4, 6, 8]
    # Each line sums what came since the last: numerators 0 + 1, 2 + 3, ... over 2 + 2.
    assert [row["loss"] for row in rows] == [0.25, 1.25, 2.25, 3.25]
    assert {row["accuracy"] for row in rows} == {0.25}
    assert "overlap" not in rows[0]


def test_stopping_leaves_later_updates_unsaid(tmp_path: Path) -> None:
    journal = Journal(Metrics(tmp_path, 0), SILENT, METER, 3, stop=True)
    journal.add(update(7, Arrival(), [1, 2, 5, 3, 0, 1, 4, 0], {"lr": 1.0}))  # 3 were left out before the run began
    journal.add(update(8, Arrival(), [math.nan, 2, math.nan, 4, 0, 1, 4, 0], {"lr": 1.0}))
    journal.add(update(9, Arrival(), [1, 2, 5, 4, 0, 1, 4, 0], {"lr": 1.0}))
    with pytest.raises(TrainError, match=r"gradient of step 8 was not finite \(documents d\)"):
        journal.settle()
    assert [row["step"] for row in metrics(tmp_path)] == [7]


def test_many_documents_are_named_in_part(tmp_path: Path) -> None:
    said: list[str] = []
    journal = Journal(Metrics(tmp_path, 0), hearing(said), METER, 0, stop=True)
    names = [f"d{number}" for number in range(20)]
    nothing = Report(torch.tensor([0.0, 0, math.nan, 1, 0, 0, 0, 0]), None)
    journal.add(Update(1, names, 8, nothing, {"lr": 1.0}))  # nothing supervised is no reason to stop
    assert said == ["step 1 had nothing supervised (documents d0, d1, d2, d3, d4, d5, d6, d7, ...): no update was made"]
    assert "loss" not in metrics(tmp_path)[0]
    assert metrics(tmp_path)[0]["skipped_updates"] == 1
