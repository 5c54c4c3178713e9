"""Reading packed batches ahead of their consumer, with a few threads, into a ring of buffers that are used again.

Memory is the ring's and stays so. Knows nothing of how batches were chosen or of what is done with them.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from .format import StoreError
from .reader import Documents, Store
from .row_reader import Piece
from .states import Allocate, States, empty_states


@dataclass
class Batch:
    """Whole documents end to end, then padding. All arrays have the budget's length T.

    Attributes:
        hidden: `[layers, T, H]`, in the store's encoding; rows of padding are undefined.
        final: `[1, T, H]`, or None when it was not asked for.
        tokens: `[T]` int32; 0 in padding.
        loss_mask: `[T]` bool; False in padding.
        doc_start: `[T]` int32, where the token's document starts in the batch; T in padding.
        documents: index in the `Documents` of each document, in order.
        used: tokens that are not padding.
    """

    hidden: States
    final: States | None
    tokens: np.ndarray
    loss_mask: np.ndarray
    doc_start: np.ndarray
    documents: list[int]
    used: int

    @classmethod
    def empty(cls, store: Store, budget: int, layers: int, final: bool, allocate: Allocate | None = None) -> Batch:
        """A batch to be filled."""
        encoding, width = store.identity.encoding, store.identity.hidden_size
        return cls(
            hidden=empty_states(encoding, layers, budget, width, allocate),
            final=empty_states(encoding, 1, budget, width, allocate) if final else None,
            tokens=np.zeros(budget, np.int32),
            loss_mask=np.zeros(budget, bool),
            doc_start=np.full(budget, budget, np.int32),
            documents=[],
            used=0,
        )


class Fetcher:
    """Fills batches with documents, with a few threads. Use as a context manager, or call `close`.

    Args:
        store: where to read.
        documents: what batches are made of.
        layers: layer *indices* in the store.
        threads: how many read at a time; by default what suits the place.
    """

    def __init__(self, store: Store, documents: Documents, layers: tuple[int, ...], threads: int | None = None) -> None:
        self._store, self._documents, self._layers = store, documents, layers
        self._threads = threads or store.place.threads
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="dflash-read")

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def fill(self, batch: Batch, group: Sequence[int]) -> None:
        """Fill a batch with the documents of these indices, in this order.

        Raises:
            StoreError: something is missing or damaged.
        """
        self.read(self._pieces(batch, group))

    def _pieces(self, batch: Batch, group: Sequence[int]) -> Iterator[Piece]:
        """What to read for a batch; everything but states is filled in on the way."""
        at = 0
        for index in group:
            part = self._store.part(int(self._documents.part[index]))
            start, length = int(self._documents.start[index]), int(self._documents.length[index])
            stop, here = start + length, slice(at, at + length)
            yield from part.pieces("hidden", start, stop, self._layers, batch.hidden.rows(at, at + length))
            if batch.final is not None:
                yield from part.pieces("final", start, stop, (0,), batch.final.rows(at, at + length))
            batch.tokens[here] = part.small("tokens")[start:stop]
            batch.loss_mask[here] = part.small("loss_mask")[start:stop]
            batch.doc_start[here] = at
            at += length
        batch.tokens[at:] = 0
        batch.loss_mask[at:] = False
        batch.doc_start[at:] = len(batch.doc_start)
        batch.documents, batch.used = list(group), at

    def read(self, todo: Iterable[Piece]) -> None:
        """Read pieces, whichever thread is free taking the next. Raises the first error, when all have stopped."""
        # Worked out while other threads read already: what to read takes long too, beside eight threads.
        left, turn, failed = iter(todo), threading.Lock(), False

        def work() -> None:
            nonlocal failed
            while True:
                with turn:
                    piece = None if failed else next(left, None)
                if piece is None:
                    return
                try:
                    piece.read()
                except BaseException:
                    failed = True
                    raise

        helpers = [self._pool.submit(work) for _ in range(self._threads - 1)]
        try:
            work()
        finally:
            wait(helpers)
        for helper in helpers:
            helper.result()


class BatchStream:
    """Iterates over batches, a few of them read ahead.

    A batch is valid until the next one is asked for. Use as a context manager, or call `close`; a stream that is only
    dropped ends its threads as well.

    Args:
        store: where to read.
        documents: what to read.
        groups: indices of the documents of each batch, e.g. from `pack`; to go on at a position, those from there on.
        budget: T.
        layers: layer *indices* in the store.
        final: read `final` too.
        ahead: batches kept ready.
        allocate: makes the buffers; by default ordinary memory (a trainer on a GPU gives pinned memory).
        threads: how many read at a time.

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
        allocate: Allocate | None = None,
        threads: int | None = None,
    ) -> None:
        if final and not store.identity.final:
            raise StoreError(f"the store {store.place} keeps no final states, which this run needs")
        self.waited = 0.0
        self._held: Batch | None = None
        self._work = work = _Work(Fetcher(store, documents, layers, threads), groups)
        for _ in range(ahead + 1):
            work.free.put(Batch.empty(store, budget, len(layers), final, allocate))
        # The thread knows the work, not the stream: a stream that nobody refers to any more is finalized, and ends it.
        self._thread = threading.Thread(target=work.run, name="dflash-prefetch", daemon=True)
        weakref.finalize(self, work.stop)
        self._thread.start()

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._held is not None:
            self._work.free.put(self._held)
            self._held = None
        began = time.perf_counter()
        found = self._work.ready.get()
        self.waited += time.perf_counter() - began
        if isinstance(found, Batch):
            self._held = found
            return found
        self._work.ready.put(found)  # an exhausted or failed stream stays so
        if found is None:
            raise StopIteration
        raise found

    def close(self) -> None:
        """Stop reading ahead and wait for the threads to end."""
        self._work.stop()
        self._thread.join()


class _Work:
    """What the reading thread does: takes free buffers, fills them, hands them over."""

    def __init__(self, fetcher: Fetcher, groups: Sequence[Sequence[int]]) -> None:
        self._fetcher, self._groups = fetcher, groups
        self.free: queue.Queue[Batch | None] = queue.Queue()
        self.ready: queue.Queue[Batch | BaseException | None] = queue.Queue()
        self._stopped = False

    def stop(self) -> None:
        """End after the batch under way."""
        self._stopped = True
        self.free.put(None)

    def run(self) -> None:
        """Fill batches until there are no more, or `stop`, or an error, which the consumer gets."""
        with self._fetcher:
            try:
                for group in self._groups:
                    batch = self.free.get()
                    if batch is None or self._stopped:
                        break
                    self._fetcher.fill(batch, group)
                    self.ready.put(batch)
                self.ready.put(None)
            except BaseException as error:
                self.ready.put(error)
