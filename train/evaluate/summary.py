"""Numbers from walked or decoded turns: accepted length and its interval, acceptance by position and by tag.

Everything comes from counts of each document, which several ranks can add up. Knows rounds and documents only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .walk import Turn

RESAMPLES = 2000
"""Of a bootstrap."""
LEVEL = 0.95
"""Of an interval."""


@dataclass(frozen=True)
class Tally:
    """Counts of each document.

    Attributes:
        turns, produced, rounds: `[D]` int64: turns walked, tokens they produced, rounds they took.
        reached, accepted: `[D, B-1]` int64, by slot: rounds whose turn reached that far, and those that accepted it.
    """

    turns: np.ndarray
    produced: np.ndarray
    rounds: np.ndarray
    reached: np.ndarray
    accepted: np.ndarray

    @classmethod
    def of(cls, turns: Sequence[Turn], documents: int, block: int) -> Tally:
        """Count turns whose `document` is below `documents`, drafted in blocks of B slots."""
        found = cls.from_array(np.zeros((documents, 3 + 2 * (block - 1)), np.int64))
        slots = np.arange(1, block)
        for turn in turns:
            found.turns[turn.document] += 1
            for item in turn.rounds:
                found.produced[turn.document] += item.produced
                found.rounds[turn.document] += 1
                reached = item.anchor + slots < turn.stop
                found.reached[turn.document] += reached
                found.accepted[turn.document] += reached & (item.right >= slots)
        return found

    @classmethod
    def from_array(cls, counts: np.ndarray) -> Tally:
        """Views of what `to_array` gave."""
        slots = (counts.shape[1] - 3) // 2
        return cls(counts[:, 0], counts[:, 1], counts[:, 2], counts[:, 3 : 3 + slots], counts[:, 3 + slots :])

    def to_array(self) -> np.ndarray:
        """`[D, 3 + 2 (B-1)]` int64: such arrays add up over ranks that walked different documents."""
        return np.concatenate([np.stack([self.turns, self.produced, self.rounds], 1), self.reached, self.accepted], 1)


def accepted_length(produced: np.ndarray, rounds: np.ndarray) -> float | None:
    """Tokens produced a round, over all rounds; 1.0 is what no drafter at all gives. None without rounds."""
    total = int(rounds.sum())
    return int(produced.sum()) / total if total else None


def interval(produced: np.ndarray, rounds: np.ndarray) -> tuple[float, float] | None:
    """The 95% interval of the accepted length over documents, by the bootstrap: documents are drawn, not rounds.

    Args:
        produced, rounds: `[D]`, each document's. Those without rounds do not count.

    Returns:
        Low and high, the same at every call; None with fewer than two documents.
    """
    some = rounds > 0
    if some.sum() < 2:
        return None
    tokens, taken = _resampled(np.stack([produced[some], rounds[some]], 1).astype(np.float64))
    return _ends(tokens / taken)


def paired_difference(first: np.ndarray, second: np.ndarray) -> tuple[float, float, float]:
    """How much larger the first drafter's accepted length is, with its 95% interval, on the same documents.

    Both are drawn together, so what a document is like cancels: the interval is much narrower than two apart suggest.

    Args:
        first, second: `[D, 2]`, tokens produced and rounds of each document, in one order.

    Returns:
        Difference, low, high; NaN for what cannot be told.
    """
    both = np.concatenate([first, second], 1).astype(np.float64)
    both = both[(both[:, 1] > 0) & (both[:, 3] > 0)]
    if not len(both):
        return float("nan"), float("nan"), float("nan")
    total = both.sum(0)
    difference = float(total[0] / total[1] - total[2] / total[3])
    if len(both) < 2:
        return difference, float("nan"), float("nan")
    mine, my_rounds, theirs, their_rounds = _resampled(both)
    return difference, *_ends(mine / my_rounds - theirs / their_rounds)


def summarize(found: Tally, tags: Sequence[str]) -> dict[str, Any]:
    """All of it, ready for JSON (a number that does not exist is None). `tags` are the documents'."""
    named = np.array(tags, object)
    by_tag = {
        tag: accepted_length(found.produced[named == tag], found.rounds[named == tag])
        for tag in sorted(set(named[found.turns > 0].tolist()))
    }
    ends = interval(found.produced, found.rounds)
    reached, accepted = found.reached.sum(0).tolist(), found.accepted.sum(0).tolist()
    return {
        "turns": int(found.turns.sum()),
        "rounds": int(found.rounds.sum()),
        "tokens": int(found.produced.sum()),
        "accepted_length": accepted_length(found.produced, found.rounds),
        "accepted_length_interval": ends and list(ends),
        "acceptance_by_position": [right / of if of else None for right, of in zip(accepted, reached, strict=True)],
        "accepted_length_by_tag": by_tag,
    }


def _resampled(counts: np.ndarray) -> np.ndarray:
    """`[columns, RESAMPLES]`: sums of columns over rows drawn with replacement, by a generator of fixed seed."""
    rows = len(counts)
    drawn = np.random.default_rng(0).multinomial(rows, np.full(rows, 1 / rows), RESAMPLES)
    return (drawn @ counts).T


def _ends(values: np.ndarray) -> tuple[float, float]:
    """Where the middle `LEVEL` of the values begins and ends."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
