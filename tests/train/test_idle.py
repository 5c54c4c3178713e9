"""What a GPU waited for: between the end of work and a batch that came later, and nothing else."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from dflash_offline.train.idle import Idle

CLOCK = [0.0]


class Event:
    """A CUDA event of a GPU whose time is `CLOCK`: recorded work is done at once, or at a time of its own."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at = float("nan")

    def record(self, at: float | None = None) -> None:
        self.at = CLOCK[0] if at is None else at

    def query(self) -> bool:
        return self.at <= CLOCK[0]

    def elapsed_time(self, later: Event) -> float:
        return 1000 * (later.at - self.at)


def arrival(at: float) -> Any:
    event = Event(True)
    event.record(at)
    return event


def test_only_batches_that_come_late_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    CLOCK[0] = 10.0
    idle = Idle()
    idle.end(arrival(9.0))  # the first of all: nothing was done before it
    assert idle.seconds() == 0
    for since, came, total in ((10.0, 12.5, 2.5), (13.0, 11.0, 2.5), (20.0, 20.5, 3.0)):
        CLOCK[0] = since
        idle.begin()
        idle.end(arrival(came))
        CLOCK[0] = max(since, came) - 0.1
        idle.seconds()  # not all of it has happened: nothing is added, nothing is lost
        CLOCK[0] = max(since, came)
        assert idle.seconds() == pytest.approx(total)
        assert idle.seconds() == pytest.approx(total)
    idle.begin()
    CLOCK[0] = 30.0
    idle.begin()  # what lay between was something else, a validation
    idle.end(arrival(31.0))
    CLOCK[0] = 40.0
    assert idle.seconds() == pytest.approx(4.0)


@pytest.mark.gpu
def test_events_of_a_gpu_tell() -> None:
    idle, side = Idle(), torch.cuda.Stream()
    for late in (False, True):
        torch.cuda._sleep(20_000_000)
        idle.begin()
        if late:
            torch.cuda.synchronize()
            time.sleep(0.01)
        with torch.cuda.stream(side):
            came = torch.cuda.Event(enable_timing=True)
            came.record()
        idle.end(came)
        torch.cuda.synchronize()
        assert (idle.seconds() > 0) == late
