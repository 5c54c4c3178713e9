"""A run that is asked to stop: all its ranks stop after the same update, whichever of them was asked.

A rank alone stops at once. Ranks that sum gradients send along, with every update, whether they have been asked. A rank
reads what an update found up to `REPORTS` updates later, so that many updates after the first that found it all know.
Ranks that average ask each other where they average. Knows nothing of checkpoints.
"""

from __future__ import annotations

import threading

import torch

from .ranks import Ranks
from .step import REPORTS, TrainStep


class StopSignal:
    """Args:
    ranks: of the run.
    step: whose updates carry the word.
    averages: whether ranks make updates of their own and meet only now and then.
    """

    def __init__(self, ranks: Ranks, step: TrainStep, averages: bool) -> None:
        self._ranks, self._step, self._averages = ranks, step, averages
        self._asked = threading.Event()
        self._at: int | None = None

    def ask(self) -> None:
        """Ask this rank; from any thread, or a signal's handler."""
        self._asked.set()

    def due(self, step: int, found: int | None, settled: bool) -> bool:
        """Whether all ranks stop after update `step`; each comes to the same answer. Where they average: only then.

        Args:
            found: the first update that is known to have found a rank that had been asked.
            settled: whether all ranks have read of all updates up to here.
        """
        asked = self._asked.is_set()
        if not self._ranks.joined:
            self._at = step if asked else None
        elif self._averages:
            flag = torch.tensor(float(asked), device=self._ranks.device)
            self._ranks.largest(flag)
            self._at = step if bool(flag) else None
        else:
            if asked:
                self._step.ask_to_stop()
            if found is not None:
                self._at = step if settled else found + REPORTS
        return self._at is not None and step >= self._at
