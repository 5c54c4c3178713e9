"""Writing a store: creating it, locking it, and committing parts to it one rename at a time.

Mirrors `reader.py`. A part is staged under `meta/staging`, made durable, then renamed into `parts/`: the rename is the
commit. Parts never change afterwards. Knows nothing of where states come from.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec

from .files import fsync_directory, rename_whole, write_atomic
from .format import LOCK, MANIFEST, META, PARTS, PLANS, ROOT_KEY, STAGING, Identity, PartRecord, StoreError
from .reader import Store, open_store
from .rows import RowsWriter


def existing_store(path: Path, identity: Identity) -> Store | None:
    """Open the store at `path` for extension, or None when there is nothing.

    Raises:
        StoreError: the path holds something else, or a store of another identity (the fields are named).
    """
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path} is a file: give the store a directory of its own")
    if path.is_dir() and any(path.iterdir()):
        store = open_store(path)
        if differences := store.identity.differences(identity):
            raise StoreError(
                f"the store {path} was made with other settings ({'; '.join(differences)}; here = the store): "
                "give this extraction another [store] path, or the settings the store was made with"
            )
        return store
    return None


def create_store(path: Path, identity: Identity, fill_head: Callable[[Path], None]) -> Store:
    """Open the store at `path` for extension, or create it whole.

    Args:
        fill_head: writes the head into the folder it is given (`head.save_head`).

    Raises:
        StoreError: the path holds something else, or a store of another identity (the fields are named).
    """
    if (store := existing_store(path, identity)) is not None:
        return store
    path = path.resolve()  # a link to an empty directory stays a link
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise StoreError(f"cannot create a store at {path}: {error.strerror}") from None
    try:
        staged.chmod(0o755)
        zarr.create_group(str(staged), attributes={ROOT_KEY: {"identity": identity.model_dump(mode="json")}})
        zarr.create_group(str(staged / PARTS))
        zarr.create_group(str(staged / META))
        (staged / STAGING).mkdir()
        (staged / PLANS).mkdir()
        fill_head(staged / "meta" / "head")
        if not rename_whole(staged, path):
            raise StoreError(f"{path} appeared while a store was being created there: run the command again")
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return open_store(path)


@contextmanager
def lock_store(path: Path) -> Iterator[None]:
    """Hold the store for one extraction; clears what earlier ones left half written.

    The lock is the kernel's: a killed holder frees it.

    Raises:
        StoreError: another extraction holds it, or the path may not be written.
    """
    try:
        for folder in (STAGING, PLANS):  # tools that copy trees drop empty folders
            (path / folder).mkdir(exist_ok=True)
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StoreError(f"cannot write to the store {path}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise StoreError(f"another `dflash extract` is writing to {path}: wait for it, or stop it") from None
        for leftover in (path / STAGING).iterdir():
            shutil.rmtree(leftover, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


def write_manifest(store: Store) -> None:
    """Write the manifest anew from the parts the store sees. One coordinator calls this, under the lock."""
    parts = [record.model_dump(mode="json") for record in store.parts]
    write_atomic(store.path / MANIFEST, json.dumps({"parts": parts}, indent=1).encode())


class PartWriter:
    """Writes one part. Use as a context manager: leaving it without `commit` removes what was staged.

    Args:
        store: the store.
        name: the part's id (`format.part_id`).
        lengths: tokens of each document, in order.
    """

    def __init__(self, store: Store, name: str, lengths: Sequence[int]) -> None:
        identity = store.identity
        self._store, self._name, self._lengths = store, name, list(lengths)
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=store.path / STAGING))
            self._folder.chmod(0o755)
        except OSError as error:
            raise StoreError(f"cannot write to the store {store.path}: {error.strerror}") from None
        self._group = zarr.create_group(str(self._folder))
        tokens = sum(self._lengths)
        rows = RowsWriter(self._group, self._folder, "hidden", tokens, len(identity.layer_ids), identity.hidden_size)
        self._rows = {"hidden": rows}
        if identity.final:
            self._rows["final"] = RowsWriter(self._group, self._folder, "final", tokens, None, identity.hidden_size)

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def append(self, hidden: np.ndarray, final: np.ndarray | None) -> None:
        """Append the states of the next tokens: `hidden` `[n, layers, H]`, `final` `[n, H]`, uint16 bit patterns.

        Raises:
            StoreError: `final` is given where the store keeps none, or the other way round.
        """
        if (final is not None) != ("final" in self._rows):
            raise StoreError(f"part {self._name}: the store's identity and the final states given do not agree")
        self._rows["hidden"].append(hidden)
        if final is not None:
            self._rows["final"].append(final)

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
            StoreError: counts of tokens, states and documents do not agree.
        """
        offsets = np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int64)
        counts = {len(tokens), len(loss_mask), int(offsets[-1])}
        if len(counts) != 1 or len(doc_ids) != len(self._lengths) or len(doc_tags) != len(self._lengths):
            raise StoreError(f"part {self._name}: counts of tokens and documents do not agree, nothing was committed")
        checksums = self._group.create_group("checksums")
        for name, rows in self._rows.items():
            _small_array(checksums, name, rows.close())
        tags = sorted(set(doc_tags))
        codes = np.array([tags.index(tag) for tag in doc_tags], np.int32)
        _small_array(self._group, "tokens", tokens.astype(np.int32))
        _small_array(self._group, "loss_mask", loss_mask.astype(bool))
        _small_array(self._group, "doc_offsets", offsets)
        _small_array(self._group, "doc_ids", doc_ids.astype(np.uint64))
        _small_array(self._group, "doc_tags", codes, attributes={"tags": tags})
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
        self._group.attrs[ROOT_KEY] = record.model_dump(mode="json")
        committed = rename_whole(self._folder, self._store.path / PARTS / self._name)
        fsync_directory(self._store.path / STAGING)
        return committed


def _small_array(group: zarr.Group, name: str, data: np.ndarray, attributes: dict[str, Any] | None = None) -> None:
    """One chunk with a checksum that every Zarr reader verifies; written even when it is all zeros."""
    group.create_array(
        name,
        data=data,
        chunks=tuple(max(1, n) for n in data.shape),
        compressors=[Crc32cCodec()],
        filters=None,
        attributes=attributes,
        config={"write_empty_chunks": True},
    )
