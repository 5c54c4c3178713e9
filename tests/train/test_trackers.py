"""Trackers beside TensorBoard: asked for, missing, failing, and told nothing twice. Stand-ins record what they hear."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_course import hearing
from test_trainer import metrics, trainer

from dflash_offline.store import Store
from dflash_offline.train.trackers import TrackerError


class Heard:
    """A tracker's module."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.told: list[tuple[int, dict[str, float]]] = []
        self.ended = 0
        self.broken = False

    def init(self, **options: Any) -> Any:
        self.begun.append(options)
        return SimpleNamespace(log=self._log, finish=self._finish)

    def _log(self, values: dict[str, float], step: int) -> None:
        if self.broken:
            raise ConnectionError("no network")
        self.told.append((step, values))

    def _finish(self) -> None:
        self.ended += 1


@pytest.fixture(params=["wandb", "trackio"])
def heard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Heard]:
    module = Heard()
    monkeypatch.setitem(sys.modules, request.param, module)  # pyright: ignore[reportArgumentType]
    return request.param, module


def test_a_tracker_hears_what_metrics_say_and_a_resumed_run_goes_on(
    heard: tuple[str, Heard], filled: Store, tmp_path: Path
) -> None:
    name, module = heard
    trainer(filled, tmp_path / "run", epochs=1, trackers=[name], project="mine").run()
    trainer(filled, tmp_path / "run", epochs=2, trackers=[name], project="mine").run()
    assert [(begun["project"], begun["name"], begun["resume"]) for begun in module.begun] == [
        ("mine", "run", "allow")
    ] * 2
    assert module.begun[0].get("id") == module.begun[1].get("id")
    assert module.begun[0]["config"]["train"]["lr"] == 3e-3
    assert module.ended == 2
    expected = [(row["step"], {k: v for k, v in row.items() if k != "step"}) for row in metrics(tmp_path / "run")]
    assert module.told == expected


def test_what_an_interrupted_run_has_told_is_not_told_again(
    heard: tuple[str, Heard], filled: Store, tmp_path: Path
) -> None:
    name, module = heard
    trainer(filled, tmp_path / "run", epochs=2, trackers=[name]).run()
    told = [step for step, _ in module.told]
    for path in sorted((tmp_path / "run/checkpoints").iterdir())[2:]:
        for file in sorted(path.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        path.rmdir()
    trainer(filled, tmp_path / "run", epochs=2, trackers=[name]).run()
    later = [step for step, _ in module.told][len(told) :]
    assert set(later) <= {told[-1]}


def test_one_that_fails_does_not_end_the_run(heard: tuple[str, Heard], filled: Store, tmp_path: Path) -> None:
    name, module = heard
    module.broken, said = True, []
    trainer(filled, tmp_path / "run", epochs=1, trackers=[name], listener=hearing(said)).run()
    assert [line for line in said if "failed (no network); the run goes on" in line] == [
        f"warning: {name} failed (no network); the run goes on, and metrics.jsonl has everything"
    ]
    assert json.loads((tmp_path / "run/run.json").read_text())["done"]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_one_that_is_not_installed_is_said_before_training(
    name: str, filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TrackerError, match=f"pip install {name}"):
        trainer(filled, tmp_path / "run", trackers=[name]).run()
