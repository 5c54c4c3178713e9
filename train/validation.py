"""What a run measures on held-out documents: the loss at fixed anchors, and the walk's accepted length.

The same documents, packed and drafted alike whatever the run's seed, settings or number of ranks, so that runs of one
store compare. Ranks share the batches out, and sum what they found. Writes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..store import BatchStream, Documents, pack
from .evaluate.summary import Tally, summarize
from .evaluate.walk import Turn, Walker
from .ranks import Ranks
from .step import TrainStep

Stream = Callable[[Documents, list[list[int]], int], BatchStream]
"""Reads batches of these documents, grouped so, of that many tokens."""


class Validation:
    """Args:
    step: with a measured forward.
    walker: over the inputs of that forward.
    block: slots of a block.
    heldout: the documents to validate on, as they lie in the store by then: the same each time.
    budget: tokens of a batch.
    ranks: of the run.
    stream: reads batches.
    """

    def __init__(
        self,
        step: TrainStep,
        walker: Walker,
        block: int,
        heldout: Callable[[], Documents],
        budget: int,
        ranks: Ranks,
        stream: Stream,
    ) -> None:
        self._step, self._walker, self._block, self._heldout = step, walker, block, heldout
        self._budget, self._ranks, self._stream = budget, ranks, stream
        documents = heldout()
        self._groups = pack(documents.length.tolist(), budget)
        self._fingerprint = hashlib.sha256(np.sort(documents.ids).astype("<u8").tobytes()).hexdigest()[:16]

    def run(self) -> dict[str, Any] | None:
        """Loss and numbers of `summarize`, with each document's counts; None without documents. All ranks must ask."""
        documents = self._heldout()
        if not len(documents):
            return None
        rank, count = self._ranks.rank, self._ranks.count
        turns: list[Turn] = []
        with self._stream(documents, self._groups[rank::count], self._budget) as stream:
            for number, batch in enumerate(stream):
                self._step.validate(batch, rank + number * count)  # the number that one rank alone would give it
                turns += self._walker.walk(batch, documents)
        loss = self._step.validation(self._ranks).numbers()
        counts = torch.from_numpy(Tally.of(turns, len(documents), self._block).to_array()).to(self._ranks.device)
        self._ranks.add(counts)
        found = Tally.from_array(counts.cpu().numpy())
        each = zip(documents.ids.tolist(), documents.tags, found.produced.tolist(), found.rounds.tolist(), strict=True)
        return {
            **loss,
            **summarize(found, documents.tags),
            "heldout": self._fingerprint,
            "documents": [[f"{id_:016x}", tag, produced, rounds] for id_, tag, produced, rounds in each],
        }


def in_words(found: dict[str, Any]) -> str:
    """Loss and accepted length of what `Validation.run` found, with its interval where there is one."""
    length, interval = found["accepted_length"], found["accepted_length_interval"]
    said = "none" if length is None else f"{length:.2f}"
    between = f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else ""
    return f"held-out loss {found['loss']:.3f}, accepted length {said}{between}"
