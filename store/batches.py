"""Which documents make up each packed batch: an order fixed by (seed, epoch), whole documents up to a token budget.

Everything here follows from the documents' ids and lengths, so that two runs, or a run and its resumption, see the same
batches. Reads nothing; `prefetch.py` does.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

import numpy as np

from .format import StoreError
from .reader import Documents

OPEN_BINS = 32
"""Batches filled at a time while packing: more waste less and mix documents from further apart."""


def shuffled(documents: Documents, seed: int, epoch: int) -> np.ndarray:
    """An order of the documents that depends on their ids, the seed and the epoch alone."""
    return _order(documents.ids, (seed, epoch))


def check_shares(documents: Documents, shares: Mapping[str, float]) -> None:
    """Every tag that a mixture gives a share to has documents. Raises StoreError, which names the nearest tag."""
    known = sorted(set(documents.tags))
    for tag, share in shares.items():
        if share > 0 and tag not in known:
            close = difflib.get_close_matches(tag, known, 1)
            said = f"did you mean {close[0]}?" if close else f"there are {', '.join(known[:8])}"
            raise StoreError(f"the mixture gives a share to {tag}, a tag of no document in the store: {said}")


def mixed(documents: Documents, shares: Mapping[str, float], seed: int, epoch: int) -> np.ndarray:
    """The documents of one epoch, in order, where tags are weighed; one may come up several times, or not at all.

    An epoch has as many tokens as all documents of the tags with a share, and each tag its share of them. The documents
    of a tag stand in a ring, in an order fixed by the seed, and epoch e takes those that begin in its e-th stretch of
    the ring: so over epochs each comes up equally often, give or take one.

    Args:
        shares: by tag, relative to each other; a tag without one is left out.

    Returns:
        Indices of documents, int64, that depend on ids, lengths and tags, not on how documents lie in parts.
    """
    names, codes = np.unique(np.array(documents.tags, object), return_inverse=True)
    members = {tag: np.flatnonzero(codes == code) for code, tag in enumerate(names) if shares.get(tag, 0) > 0}
    total = sum(int(documents.length[places].sum()) for places in members.values())
    weight = sum(shares[tag] for tag in members)
    drawn, copies = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for tag, places in members.items():
        ring = places[_order(documents.ids[places], (seed,))]
        begins = np.cumsum(documents.length[ring]) - documents.length[ring]
        around = int(documents.length[ring].sum())
        start, stop = (round(total * shares[tag] / weight * edge) for edge in (epoch, epoch + 1))
        # Times that each document begins before a place of the unrolled ring.
        before, after = (np.maximum(0, -((begins - edge) // around)) for edge in (start, stop))
        times = after - before
        drawn.append(np.repeat(ring, times))
        copies.append(np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times))
    places, numbers = np.concatenate(drawn), np.concatenate(copies)
    return places[_order(documents.ids[places], (seed, epoch), numbers)]


def _order(ids: np.ndarray, salts: Sequence[int], copies: np.ndarray | None = None) -> np.ndarray:
    """An order by hashes of ids and salts, and of which copy of a document it is."""
    with np.errstate(over="ignore"):
        keys = ids.astype(np.uint64)
        for salt in (*salts, *([] if copies is None else [copies])):
            keys = _mix(keys ^ _mix(np.zeros_like(keys) + np.asarray(salt, np.uint64) + np.uint64(0x9E3779B97F4A7C15)))
    return np.lexsort((ids, keys) if copies is None else (copies, ids, keys))


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
