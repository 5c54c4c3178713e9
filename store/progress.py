"""How a long job reports: lines, progress and numbers of the moment, through callbacks, so that no stage knows what a
terminal is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


def _unshown(title: str, unit: str) -> Listener:
    return SILENT


def _unwatched(values: Mapping[str, float]) -> None:
    pass


@dataclass(frozen=True)
class Listener:
    """Where a job reports.

    Attributes:
        say: takes a line of text.
        start: takes the amount to do in all, and how much of it was done before.
        advance: takes the amount just done, and a short note that replaces the last ("loss 2.31"; may be empty).
        phase: takes the title and the unit of something that comes before the job proper and is counted by itself
            ("tokenise", "rows"), and gives a listener for it.
        watch: takes numbers of the moment by name ({"loss": 2.31}); those it leaves out stay as they were told last.
    """

    say: Callable[[str], None]
    start: Callable[[int, int], None]
    advance: Callable[[int, str], None]
    phase: Callable[[str, str], Listener] = _unshown
    watch: Callable[[Mapping[str, float]], None] = _unwatched


SILENT = Listener(lambda line: None, lambda total, done: None, lambda amount, note: None)
"""Reports nowhere."""
