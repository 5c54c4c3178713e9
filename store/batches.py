"""Which documents make up each packed batch: an order fixed by (seed, epoch), whole documents up to a token budget.

Everything here follows from the documents' ids and lengths, so that two runs, or a run and its resumption, see the same
batches. Reads nothing; `prefetch.py` does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from .reader import Documents

OPEN_BINS = 32
"""Batches filled at a time while packing: more waste less and mix documents from further apart."""


def shuffled(documents: Documents, seed: int, epoch: int) -> np.ndarray:
    """An order of the documents that depends on their ids, the seed and the epoch alone."""
    with np.errstate(over="ignore"):
        keys = documents.ids.astype(np.uint64)
        for salt in (seed, epoch):
            keys = _mix(keys ^ _mix(np.full_like(keys, salt) + np.uint64(0x9E3779B97F4A7C15)))
    return np.lexsort((documents.ids, keys))


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group indices so that the lengths of each group sum to at most `budget`: best fit, in the given order.

    Raises:
        ValueError: a length is over the budget.
    """
    done: list[list[int]] = []
    bins: list[tuple[int, int, list[int]]] = []  # (room left, number, members), the fullest first
    for index, length in enumerate(lengths):
        if length > budget:
            raise ValueError(f"length {length} at {index} is over the budget of {budget}")
        place = bisect_left(bins, (length,))
        if place < len(bins):
            room, number, members = bins.pop(place)
            members.append(index)
            insort(bins, (room - length, number, members))
            continue
        if len(bins) == OPEN_BINS:
            done.append(bins.pop(0)[2])
        insort(bins, (budget - length, index, [index]))
    return done + [members for _, _, members in bins]


def share(groups: Sequence[Sequence[int]], rank: int, ranks: int) -> list[list[int]]:
    """The batches of one rank of several: every `ranks`-th, the last filled up with empty ones to equal numbers."""
    own = [list(group) for group in groups[rank::ranks]]
    return own + [[]] * (-(-len(groups) // ranks) - len(own))
