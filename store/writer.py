"""Writing a store: creating it, and committing parts to it, each whole or not at all.

Mirrors `reader.py`. A part is staged in a folder, made durable, then committed under its name by a rename (on an object
store, by a conditional put of its record). Parts never change afterwards. Knows nothing of where states come from.
"""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .files import rename_whole
from .format import (
    FILES_KEY,
    HEAD,
    META,
    PARTS,
    PLANS,
    RECORD,
    ROOT_KEY,
    SEAL_KEY,
    STAGING,
    Identity,
    PartRecord,
    StoreError,
)
from .place import Directory, Place, clear_errors, place_of
from .reader import Store, open_store
from .row_writer import RowsWriter
from .states import States
from .sums import Sums, seal, sum_files

if TYPE_CHECKING:
    import zarr

QUEUE_BYTES = 512 << 20
"""Bytes that may wait to be written."""
WRITERS = 4
"""Threads that write the layers of a part beside each other, and sync its shards."""


def existing_store(location: str | Path | Place, identity: Identity) -> Store | None:
    """Open the store at a location for extension, or None when there is nothing.

    Raises:
        StoreError: the path holds something else, or a store of another identity (the fields are named).
    """
    place = place_of(location)
    if isinstance(place, Directory):
        if place.path.exists() and not place.path.is_dir():
            raise StoreError(f"{place} is a file: give the store a directory of its own")
        if not place.path.is_dir() or not any(place.path.iterdir()):
            return None
    elif not place.exists(RECORD):
        return None
    store = open_store(place)
    if differences := store.identity.differences(identity, "in the store", "now"):
        raise StoreError(
            f"the store {place} was made with other settings ({'; '.join(differences)}): "
            "give this extraction another [store] path, or the settings the store was made with"
        )
    return store


def create_store(
    location: str | Path | Place, identity: Identity, fill_head: Callable[[Path], None], parts: str = PARTS
) -> Store:
    """Open the store at a location for extension, or create it whole.

    Args:
        fill_head: writes the head into the folder it is given (`head.save_head`).
        parts: the folder of the committed parts.

    Raises:
        StoreError: the path holds something else, or a store of another identity (the fields are named).
    """
    place = place_of(location)
    if (store := existing_store(place, identity)) is not None:
        return store
    with clear_errors(place):
        if isinstance(place, Directory):
            path = place.path.resolve()  # a link to an empty directory stays a link
            path.parent.mkdir(parents=True, exist_ok=True)
            staged = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        else:
            staged = place.stage("new")
    try:
        staged.chmod(0o755)
        with clear_errors(place):
            _fill_new(staged, identity, parts, fill_head)
            whole = _commit_new(place, staged)
        if not whole:
            raise StoreError(f"{place} appeared while a store was being created there: run the command again")
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return open_store(place)


def root_attributes(identity: Identity, parts: str, head: Sums) -> dict[str, Any]:
    """The attributes of a store's root group.

    Args:
        parts: the folder of the committed parts.
        head: sums of the head's files.
    """
    said = {"identity": identity.model_dump(mode="json"), "parts": parts}
    return {ROOT_KEY: said, FILES_KEY: head, SEAL_KEY: seal(said, head)}


def _commit_new(place: Place, staged: Path) -> bool:
    if isinstance(place, Directory):
        return rename_whole(staged, place.path.resolve())
    return place.commit(staged, "", RECORD)


def _fill_new(staged: Path, identity: Identity, parts: str, fill_head: Callable[[Path], None]) -> None:
    import zarr

    root = zarr.create_group(str(staged))
    zarr.create_group(str(staged / parts))
    zarr.create_group(str(staged / META))
    (staged / STAGING).mkdir()
    (staged / PLANS).mkdir()
    fill_head(staged / HEAD)
    root.attrs.update(root_attributes(identity, parts, sum_files(staged / HEAD)))


def lock_store(location: str | Path | Place) -> AbstractContextManager[None]:
    """Hold the store as its only writer; clears what earlier ones left half written.

    Raises:
        StoreError: another command holds it, or it may not be written.
    """
    return place_of(location).hold()


class Parts(Protocol):
    """Where parts of one kind lie: a `Store`, or the next generation of one."""

    @property
    def place(self) -> Place:
        """The store's place."""
        ...

    @property
    def identity(self) -> Identity:
        """What the parts hold."""
        ...

    @property
    def parts_folder(self) -> str:
        """The folder they are committed to."""
        ...


class PartWriter:
    """Writes one part, in a thread of its own. Leaving it without `commit` removes what was staged.

    `append` hands rows over and returns; it waits only when the disk is behind.

    Args:
        store: the store.
        name: the part's id (`format.part_id`).
        lengths: tokens of each document, in order.
        queue_bytes: bytes that may wait to be written; then `append` waits (one piece larger than that waits alone).
    """

    def __init__(self, store: Parts, name: str, lengths: Sequence[int], queue_bytes: int = QUEUE_BYTES) -> None:
        import zarr

        identity = store.identity
        self._store, self._name, self._lengths = store, name, list(lengths)
        self._key = f"{store.parts_folder}/{name}"
        self._folder = store.place.stage(name)
        # Holds the folder itself, whatever is under its name later: a command that takes the store over clears it away,
        # and libraries make folders anew where they find none.
        self._held = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        self._error: BaseException | None = None
        self._pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="dflash-write")
        self._queue: queue.Queue[tuple[States, States | None, Callable[[], None]] | None] = queue.Queue()
        self._waiting, self._queue_bytes = 0, queue_bytes
        self.seconds = 0.0
        self._room = threading.Condition()
        try:
            with clear_errors(store.place):
                self._group = zarr.create_group(str(self._folder))
                tokens, width, encoding = sum(self._lengths), identity.hidden_size, identity.encoding
                layers = len(identity.layer_ids)
                shape = width, encoding, self._pool
                self._rows = {"hidden": RowsWriter(self._group, self._folder, "hidden", tokens, layers, *shape)}
                if identity.final:
                    self._rows["final"] = RowsWriter(self._group, self._folder, "final", tokens, None, *shape)
        except BaseException:
            os.close(self._held)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._thread = threading.Thread(target=self._work, name="dflash-write", daemon=True)
        self._thread.start()

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._error = self._error or StoreError(f"part {self._name} was given up")  # what waits need not be written
        self._finish()
        self._pool.shutdown()
        for rows in self._rows.values():
            rows.abandon()
        os.close(self._held)
        shutil.rmtree(self._folder, ignore_errors=True)

    seconds: float
    """Seconds spent writing so far; `commit` included once it is done."""

    def append(self, hidden: States, final: States | None, written: Callable[[], None] = lambda: None) -> None:
        """Append the states of the next tokens, in the store's encoding: `hidden` of all layers, `final` of one.

        Args:
            written: called, in the writer's thread, once the states are no longer needed, whatever became of them;
                until then they must not change.

        Raises:
            StoreError: `final` is given where the store keeps none, or the other way round; or an earlier piece could
                not be written.
        """
        if (final is not None) != ("final" in self._rows):
            raise StoreError(f"part {self._name}: the store's identity and the final states given do not agree")
        size = hidden.nbytes + (0 if final is None else final.nbytes)
        with self._room:
            self._room.wait_for(lambda: self._waiting == 0 or self._waiting + size <= self._queue_bytes or self._error)
            self._waiting += size
        if self._error is not None:
            raise self._error
        self._queue.put((hidden, final, written))

    def commit(
        self,
        *,
        split: str,
        tokens: np.ndarray,
        loss_mask: np.ndarray,
        doc_ids: np.ndarray,
        doc_tags: Sequence[str],
        plan: str,
        provenance: dict[str, str],
    ) -> bool:
        """Make the part durable and visible. Returns False when the part had been committed before (nothing is
        changed).

        Args:
            tokens: `[tokens]` int32.
            loss_mask: `[tokens]` bool.
            doc_ids: `[documents]` uint64 content hashes.
            doc_tags: tag of origin of each document.

        Raises:
            StoreError: counts of tokens, states and documents do not agree, or there is no room or no leave to write.
        """
        self._finish()
        began = time.perf_counter()
        if self._error is not None:
            raise self._error
        offsets = np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int64)
        counts = {len(tokens), len(loss_mask), int(offsets[-1])}
        if len(counts) != 1 or len(doc_ids) != len(self._lengths) or len(doc_tags) != len(self._lengths):
            raise StoreError(f"part {self._name}: counts of tokens and documents do not agree, nothing was committed")
        tags = sorted(set(doc_tags))
        codes = np.array([tags.index(tag) for tag in doc_tags], np.int32)
        record = PartRecord.model_validate(
            {
                "id": self._name,
                "split": split,
                "documents": len(self._lengths),
                "tokens": int(offsets[-1]),
                "supervised": int(loss_mask.sum()),
                "tags": {tag: int((codes == code).sum()) for code, tag in enumerate(tags)},
                "plan": plan,
                "provenance": provenance,
            }
        )
        with clear_errors(self._store.place):
            checksums = self._group.create_group("checksums")
            for name, rows in self._rows.items():
                _small_array(checksums, name, rows.close())
            _small_array(self._group, "tokens", tokens.astype(np.int32))
            _small_array(self._group, "loss_mask", loss_mask.astype(bool))
            _small_array(self._group, "doc_offsets", offsets)
            _small_array(self._group, "doc_ids", doc_ids.astype(np.uint64))
            _small_array(self._group, "doc_tags", codes, attributes={"tags": tags})
            said, files = record.model_dump(mode="json"), sum_files(self._folder, lambda name: name == RECORD)
            self._group.attrs.update({ROOT_KEY: said, FILES_KEY: files, SEAL_KEY: seal(said, files)})
        with clear_errors(self._store.place):
            if not os.path.samestat(os.fstat(self._held), os.stat(self._folder)):
                raise StoreError(f"part {self._name} was cleared away by a command that took over {self._store.place}")
        fresh = self._store.place.commit(self._folder, self._key, RECORD)
        self.seconds += time.perf_counter() - began
        return fresh

    def _work(self) -> None:
        while (piece := self._queue.get()) is not None:
            hidden, final, written = piece
            began = time.perf_counter()
            try:
                if self._error is None:  # after an error what comes is passed over, so that nobody waits for it
                    with clear_errors(self._store.place):
                        self._rows["hidden"].append(hidden)
                        if final is not None:
                            self._rows["final"].append(final)
            except BaseException as error:
                self._error = error
            finally:
                written()
            self.seconds += time.perf_counter() - began
            with self._room:
                self._waiting -= hidden.nbytes + (0 if final is None else final.nbytes)
                self._room.notify()

    def _finish(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()


def _small_array(group: zarr.Group, name: str, data: np.ndarray, attributes: dict[str, Any] | None = None) -> None:
    """One chunk with a checksum that every Zarr reader verifies; written even when it is all zeros."""
    from zarr.codecs import Crc32cCodec

    group.create_array(
        name,
        data=data,
        chunks=tuple(max(1, n) for n in data.shape),
        compressors=[Crc32cCodec()],
        filters=None,
        attributes=attributes,
        config={"write_empty_chunks": True},
    )
