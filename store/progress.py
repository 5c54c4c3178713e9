"""How a long job reports: lines and progress, through callbacks, so that no stage knows what a terminal is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _unshown(title: str, unit: str) -> Listener:
    return SILENT


@dataclass(frozen=True)
class Listener:
    """Where a job reports.

    Attributes:
        say: takes a line of text.
        start: takes the amount to do in all, and how much of it was done before.
        advance: takes the amount just done, and a short note that replaces the last ("loss 2.31"; may be empty).
        phase: takes the title and the unit of something that comes before the job proper and is counted by itself
            ("tokenise", "rows"), and gives a listener for it.
    """

    say: Callable[[str], None]
    start: Callable[[int, int], None]
    advance: Callable[[int, str], None]
    phase: Callable[[str, str], Listener] = _unshown


SILENT = Listener(lambda line: None, lambda total, done: None, lambda amount, note: None)
"""Reports nowhere."""
