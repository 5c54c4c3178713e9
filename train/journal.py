"""What a run says of its updates, some steps behind the device: metrics, and updates that were left out.

A step's numbers reach the host a little after it ran, and nobody waits for them; they are taken in the order of the
steps, once they are there. Knows reports and metrics, nothing of data or weights.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..store import DflashError
from ..store.progress import Listener
from .meter import Meter
from .metrics import Metrics
from .step import REPORTS, Found, Report

WATCHED = ("loss", "tokens_per_second", "slots_per_second", "share_waiting_for_data", "gpu_memory_gib")
"""Of a line, what a live view shows."""


class TrainError(DflashError):
    """A run that stops as it was told to; the message is for people."""


@dataclass(frozen=True)
class Update:
    """One update as the host saw it leave.

    Attributes:
        step: updates done, this one included.
        documents: ids of the documents it was made from.
        tokens: theirs, of all ranks.
        report: its numbers, on their way.
        line: what else is to be said of the steps up to this one, or None to say nothing yet.
    """

    step: int
    documents: Sequence[str]
    tokens: int
    report: Report
    line: dict[str, float] | None


class Journal:
    """Takes updates in, writes lines of metrics.

    Args:
        metrics: where lines go; None on a rank that does not lead.
        listener: told of updates that were left out, and what a line says.
        meter: counts updates once they are made, for the lines.
        skipped: updates left out before.
        stop: whether a gradient that is not finite ends the run.
    """

    def __init__(self, metrics: Metrics | None, listener: Listener, meter: Meter, skipped: int, stop: bool) -> None:
        self._metrics, self._listener, self._meter, self._stop = metrics, listener, meter, stop
        self.skipped = skipped
        """Updates left out so far."""
        self._pending: deque[Update] = deque()
        self._sum: Found | None = None
        self.note = ""
        """The last loss, for a progress bar."""
        self.stop: int | None = None
        """The step whose update found that a rank had been asked to stop: the first such."""

    def add(self, update: Update) -> None:
        """Take an update in, and whatever is ready. Raises TrainError as `settle`."""
        self._pending.append(update)
        while self._pending and (self._pending[0].report.ready or len(self._pending) >= REPORTS):
            self._take(self._pending.popleft())

    def settle(self) -> None:
        """Wait for all updates. Raises TrainError where one was not finite and the run is to stop for that."""
        while self._pending:
            self._take(self._pending.popleft())

    def _take(self, update: Update) -> None:
        found = update.report.read()
        self._meter.add(update.tokens)
        if found.stop and self.stop is None:
            self.stop = update.step
        if found.skipped > self.skipped:
            self.skipped = found.skipped
            self._left_out(update, found)
        else:
            self._sum = found if self._sum is None else self._sum + found
        if update.line is not None:
            # Of updates that were made; where none was, there is no loss to tell.
            told, (rates, seconds) = {}, self._meter.read()
            if self._sum is not None:
                slots = float(self._sum.supervised.sum()) / seconds
                told = {**self._sum.numbers(), "grad_norm": self._sum.grad_norm, "slots_per_second": slots}
            told |= update.line | rates
            if self._metrics is not None:
                self._metrics.write(update.step, {**told, "skipped_updates": found.skipped})
            self._listener.watch({name: told[name] for name in WATCHED if name in told})
            self.note = f"loss {told['loss']:.3f}" if "loss" in told else ""
            self._sum = None

    def _left_out(self, update: Update, found: Found) -> None:
        shown = ", ".join(update.documents[:8]) + (", ..." if len(update.documents) > 8 else "")
        if found.denominator > 0 or not math.isfinite(found.denominator):
            said = f"the gradient of step {update.step} was not finite (documents {shown})"
            if self._stop:
                raise TrainError(
                    f"{said}: the run stops, and what it saved stands; look at the data, lower train.lr, or set "
                    "train.non_finite=skip to leave such updates out"
                )
            self._listener.say(f"{said}: the update was left out")
        else:
            self._listener.say(f"step {update.step} had nothing supervised (documents {shown}): no update was made")
