"""From data files to a tokenised corpus: in several processes where there is much, and once only.

Rows are read here, in chunks, and made into documents wherever there is a free process; what comes out does not depend
on how many there are. Knows nothing of stores or units.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import numpy as np

from ..store.progress import Listener
from .corpora import corpus_key, keep_corpus, kept_corpus
from .corpus import Corpus, Notes, Piece, assemble
from .data import Chunk, DataError, Row, count_rows, read_chunks
from .render import Renderer
from .settings import DataSettings

if TYPE_CHECKING:  # it loads torch, which the processes started here do without
    from .target import TargetInfo

SMALL = 2000
"""Fewer rows are tokenised in this process, sooner than others would have started, and not kept for another run."""

MOST = 16
"""Processes at most."""


@dataclass(frozen=True)
class Encoder:
    """Makes documents of rows; small enough to travel to another process."""

    renderer: Renderer
    settings: DataSettings
    vocab_size: int

    def __call__(self, chunk: Chunk) -> Piece:
        """Tokenise a chunk of rows.

        Raises:
            DataError: a row is malformed or cannot be rendered, or a token id is outside the vocabulary.
        """
        settings = self.settings
        taken: list[tuple[Row, np.ndarray, np.ndarray]] = []
        unsupervised = cut = 0
        for row in chunk.rows():
            if settings.tags is not None and row.tag not in settings.tags:
                continue
            ids, mask = self._ids_and_mask(row)
            if len(ids) > settings.max_length:
                ids, mask = ids[: settings.max_length], mask[: settings.max_length]
                cut += 1
            if (mask[:-1] & mask[1:]).any():
                taken.append((row, ids, mask))
            else:
                unsupervised += 1
        return Piece(
            rows=len(chunk.records),
            tokens=np.concatenate([np.zeros(0, np.int32), *(ids for _, ids, _ in taken)]),
            loss_mask=np.concatenate([np.zeros(0, bool), *(mask for _, _, mask in taken)]),
            lengths=np.array([len(ids) for _, ids, _ in taken], np.int64),
            ids=np.array([_document_id(ids, mask) for _, ids, mask in taken], np.uint64),
            splits=[row.split for row, _, _ in taken],
            tags=[row.tag for row, _, _ in taken],
            places=[row.place for row, _, _ in taken],
            unsupervised=unsupervised,
            cut=cut,
        )

    def _ids_and_mask(self, row: Row) -> tuple[np.ndarray, np.ndarray]:
        if row.messages is not None:
            ids, mask = self.renderer.ids_and_mask(row)
            self._check(row, int(ids.max(initial=0)))
            return ids, mask
        assert row.input_ids is not None
        self._check(row, max(row.input_ids))
        return np.array(row.input_ids, np.int32), np.array(row.loss_mask, bool)

    def _check(self, row: Row, highest: int) -> None:
        if highest >= self.vocab_size:
            raise DataError(f"{row.place}: token id {highest} is outside the vocabulary of {self.vocab_size}")


def tokenise(
    files: list[Path],
    digests: dict[str, str],
    info: TargetInfo,
    renderer: Renderer,
    settings: DataSettings,
    listener: Listener,
    processes: int | None = None,
) -> tuple[Corpus, Notes]:
    """Read and tokenise data files, or take what an earlier run made of the same.

    Args:
        files: what `data.sources` accepts.
        digests: sha256 of each, by name.
        processes: how many tokenise; by default one for each processor this process may use, at most 16, and no more
            than have `SMALL` rows to do.

    Raises:
        DataError: a row cannot be used (the first such is named), or nothing is left to learn from.
    """
    key = corpus_key(digests, renderer, settings, info.vocab_size)
    found = kept_corpus(key)
    if found is not None:
        listener.say("the data was tokenised by an earlier run")
        return found
    encoder = Encoder(renderer, settings, info.vocab_size)
    rows = count_rows(files)
    if not rows:
        raise DataError(f"there are no rows in {', '.join(map(str, files))}")
    if rows < SMALL:
        return assemble(map(encoder, read_chunks(files)), settings)
    if processes is None:
        processes = min(MOST, _processors(), -(-rows // SMALL))
    progress = listener.phase("tokenise", "rows")
    progress.start(rows, 0)
    made = assemble(_told(_pieces(read_chunks(files), encoder, processes), progress), settings)
    try:
        keep_corpus(key, *made)
    except (OSError, RuntimeError) as error:
        listener.say(f"the tokenised data is not kept for another run: the cache folder cannot be written ({error})")
    return made


def _document_id(ids: np.ndarray, mask: np.ndarray) -> int:
    digest = hashlib.sha256(ids.astype("<i4").tobytes() + mask.astype(np.uint8).tobytes()).digest()
    return int.from_bytes(digest[:8], "little")


def _processors() -> int:
    # What a batch system or a container gave this process, where the system can tell.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _told(pieces: Iterable[Piece], progress: Listener) -> Iterator[Piece]:
    for piece in pieces:
        yield piece
        progress.advance(piece.rows, "")


def _pieces(chunks: Iterable[Chunk], encoder: Encoder, processes: int) -> Iterator[Piece]:
    """Encode chunks, in order. The first error in that order is raised, whichever came to light first."""
    if processes == 1:
        yield from map(encoder, chunks)
        return
    # A fork would copy the locks that threads here hold, those of a loaded torch among them.
    context = get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(encoder,))
    waiting: deque[Future[Piece]] = deque()
    try:
        for chunk in _errors_last(chunks):
            waiting.append(_failed(chunk) if isinstance(chunk, DataError) else _submitted(pool, chunk))
            # Two a process: none waits for this one to read, and memory stays within bounds.
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            "a process that tokenised was ended from outside (for want of memory?): run the same command again"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _errors_last(chunks: Iterable[Chunk]) -> Iterator[Chunk | DataError]:
    try:
        yield from chunks
    except DataError as error:
        yield error


def _submitted(pool: ProcessPoolExecutor, chunk: Chunk) -> Future[Piece]:
    # A process that is started here must not hear of Ctrl-C, which goes to all of them: this one ends them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_encode, chunk)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _failed(error: DataError) -> Future[Piece]:
    future: Future[Piece] = Future()
    future.set_exception(error)
    return future


_encoder: Callable[[Chunk], Piece]
"""In a process that tokenises: made once, when it begins."""


def _begin(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # it was killed: nobody would ever ask for more


def _encode(chunk: Chunk) -> Piece:
    return _encoder(chunk)
