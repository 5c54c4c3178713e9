"""Rates are of updates that are made, and data that is waited for is told of once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_journal import Arrival

from dflash_offline.store.progress import SILENT
from dflash_offline.train.journal import Journal, Update
from dflash_offline.train.meter import PATIENCE, Meter
from dflash_offline.train.step import Report

CPU = torch.device("cpu")


class Clock:
    """Stands in for the time module, and for a stream that is waited for."""

    def __init__(self) -> None:
        self.now, self.waited = 100.0, 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = Clock()
    monkeypatch.setattr("dflash_offline.train.meter.time", found)
    return found


def update(step: int, arrival: Any, line: dict[str, float] | None = None) -> Update:
    """Of 1,000 tokens and 4 supervised slots."""
    return Update(step, ["d"], 1000, Report(torch.tensor([1.0, 2, 5, 0, 0, 1, 4, 0]), arrival), line)


def test_a_rate_counts_what_is_made_not_what_was_asked_for(clock: Any) -> None:
    told: list[dict[str, float]] = []
    meter = Meter(CPU, 5.0, SILENT)
    meter.follow(clock)
    journal = Journal(None, replace(SILENT, watch=lambda values: told.append(dict(values))), meter, 0, stop=False)
    arrivals = [Arrival() for _ in range(4)]
    for step, arrival in enumerate(arrivals, 1):  # the host asks for all four at once
        journal.add(update(step, arrival, {"lr": 1.0} if step % 2 == 0 else None))
    assert told == []
    clock.now += 2.0
    for arrival in arrivals[:2]:
        arrival.there = True
    journal.add(update(5, Arrival()))
    clock.now += 3.0
    journal.settle()
    assert [line["tokens_per_second"] for line in told] == [2000 / 2.0, 2000 / 3.0]
    assert [line["slots_per_second"] for line in told] == [8 / 2.0, 8 / 3.0]


def test_pauses_are_left_out(clock: Any) -> None:
    meter = Meter(CPU, 5.0, SILENT)
    meter.follow(clock)
    meter.add(600)
    clock.now += 2.0
    with meter.paused():
        clock.now += 50.0
    clock.now += 1.0
    clock.waited += 1.5
    found, seconds = meter.read()
    assert seconds == 3.0
    assert found["tokens_per_second"] == 200.0
    assert found["share_waiting_for_data"] == 0.5
    assert found["seconds"] == 58.0
    clock.now += 1.0
    meter.add(100)
    with meter.paused():
        clock.now += 1.0
        meter.read()  # an update that was still on its way
        clock.now += 30.0
    meter.add(100)
    clock.now += 4.0
    assert meter.read()[0]["tokens_per_second"] == 25.0


def test_waiting_is_told_of_once_and_only_if_it_lasts(clock: Any) -> None:
    said: list[str] = []
    meter = Meter(CPU, 0.0, replace(SILENT, say=said.append))
    meter.follow(clock)

    def lines(count: int, share: float) -> None:
        for _ in range(count):
            clock.now += 10.0
            clock.waited += 10.0 * share
            meter.read()

    lines(PATIENCE - 1, 0.9)
    lines(1, 0.1)
    lines(PATIENCE - 1, 0.9)
    assert said == []
    lines(1, 0.6)
    assert len(said) == 1
    assert said[0].startswith("the run waits for data 60% of the time: ")
    lines(1, 0.0)
    lines(3 * PATIENCE, 0.9)
    assert len(said) == 1
