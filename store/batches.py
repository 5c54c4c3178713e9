"""Packed batches: whole documents filled into a token budget, in an order fixed by (seed, epoch), read ahead.

Everything here follows from the documents' ids, so that two runs, or a run and its resumption, see the same batches.
Knows nothing of anchors or of what is done with a batch.
"""

from __future__ import annotations

import queue
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .format import StoreError
from .reader import Documents, Store

OPEN_BINS = 32
"""Batches filled at a time while packing: more waste less and mix documents from further apart."""


@dataclass
class Batch:
    """Whole documents end to end, then padding. All arrays have the budget's length T.

    Attributes:
        hidden: `[layers, T, H]` uint16, bit patterns of bfloat16; rows of padding are undefined.
        final: `[T, H]` uint16, or None when it was not asked for.
        tokens: `[T]` int32; 0 in padding.
        loss_mask: `[T]` bool; False in padding.
        doc_start: `[T]` int32, where the token's document starts in the batch; T in padding.
        documents: index in the `Documents` of each document, in order.
        used: tokens that are not padding.
    """

    hidden: np.ndarray
    final: np.ndarray | None
    tokens: np.ndarray
    loss_mask: np.ndarray
    doc_start: np.ndarray
    documents: list[int]
    used: int


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


class BatchStream:
    """Iterates over batches, with one thread that reads a few ahead into reused buffers.

    A batch is valid until the next one is asked for. Use as a context manager, or call `close`.

    Args:
        store: where to read.
        documents: what to read.
        groups: indices of the documents of each batch, e.g. from `pack`.
        budget: T.
        layers: layer *indices* in the store.
        final: read `final` too.
        ahead: batches kept ready.

    Attributes:
        waited: seconds the consumer has waited for data so far.
    """

    def __init__(
        self,
        store: Store,
        documents: Documents,
        groups: Sequence[Sequence[int]],
        budget: int,
        layers: tuple[int, ...],
        *,
        final: bool = False,
        ahead: int = 2,
    ) -> None:
        if final and not store.identity.final:
            raise StoreError(f"the store {store.path} keeps no final states, which this run needs")
        self.waited = 0.0
        self._store, self._documents, self._groups = store, documents, groups
        self._budget, self._layers = budget, layers
        self._free: queue.Queue[Batch] = queue.Queue()
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue()
        width = store.identity.hidden_size
        for _ in range(ahead + 1):
            self._free.put(
                Batch(
                    hidden=np.zeros((len(layers), budget, width), np.uint16),
                    final=np.zeros((budget, width), np.uint16) if final else None,
                    tokens=np.zeros(budget, np.int32),
                    loss_mask=np.zeros(budget, bool),
                    doc_start=np.zeros(budget, np.int32),
                    documents=[],
                    used=0,
                )
            )
        self._closing = threading.Event()
        self._held: Batch | None = None
        self._thread = threading.Thread(target=self._work, name="dflash-prefetch", daemon=True)
        self._thread.start()

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._held is not None:
            self._free.put(self._held)
            self._held = None
        began = time.perf_counter()
        found = self._ready.get()
        self.waited += time.perf_counter() - began
        if isinstance(found, Batch):
            self._held = found
            return found
        self._ready.put(found)  # an exhausted or failed stream stays so
        if found is None:
            raise StopIteration
        raise found

    def close(self) -> None:
        """Stop reading ahead and wait for the thread to end."""
        self._closing.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            for group in self._groups:
                batch = self._take_free()
                if batch is None:
                    return
                self._fill(batch, group)
                self._ready.put(batch)
            self._ready.put(None)
        except BaseException as error:
            self._ready.put(error)

    def _take_free(self) -> Batch | None:
        while not self._closing.is_set():
            try:
                return self._free.get(timeout=0.05)
            except queue.Empty:
                continue
        return None

    def _fill(self, batch: Batch, group: Sequence[int]) -> None:
        at = 0
        for index in group:
            part = self._store.part(int(self._documents.part[index]))
            start, length = int(self._documents.start[index]), int(self._documents.length[index])
            rows, here = slice(start, start + length), slice(at, at + length)
            part.read("hidden", start, start + length, self._layers, batch.hidden[:, here])
            if batch.final is not None:
                part.read("final", start, start + length, (0,), batch.final[None, here])
            batch.tokens[here] = part.small("tokens")[rows]
            batch.loss_mask[here] = part.small("loss_mask")[rows]
            batch.doc_start[here] = at
            at += length
        batch.tokens[at:] = 0
        batch.loss_mask[at:] = False
        batch.doc_start[at:] = self._budget
        batch.documents, batch.used = list(group), at
