"""Where a store lies: a directory, or a prefix of an object store; named bytes either way.

Keys are relative paths with `/`. The rest of this room reads, writes and commits through a `Place` and does not ask
which kind it is. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from .files import rename_whole, write_atomic
from .format import LOCK, PLANS, STAGING, StoreError, StoreFullError

READ_BLOCK = 1 << 20
"""Bytes that are read, then summed while they are still in the processor's cache."""

READERS = 8
"""Threads that read files at most; more gain nothing, whether from memory or from a disk."""


class Blob(Protocol):
    """An open file or object, to be read at any place by any thread. It is closed when nobody refers to it any more:
    a thread that still reads is one who does.
    """

    size: int
    block: int
    """How much is best read at a time when it is to be looked at as well."""

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` with what stands at `offset`. Raises EOFError when that goes past the end."""
        ...


class Place(Protocol):
    """A directory or a prefix of an object store."""

    threads: int
    """How many reads are best under way at a time."""

    def read(self, key: str) -> bytes:
        """The whole content. Raises FileNotFoundError."""
        ...

    def open(self, key: str) -> Blob:
        """Open for reading. Raises FileNotFoundError."""
        ...

    def exists(self, key: str) -> bool:
        """Whether there is a file or object of exactly that key."""
        ...

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below, sorted. Raises FileNotFoundError where the folder itself can be lost."""
        ...

    def files(self, prefix: str) -> dict[str, int]:
        """Every file below, by key relative to `prefix`, with its bytes."""
        ...

    def write(self, key: str, content: bytes) -> None:
        """Replace the whole content: a reader, or a kill, sees the old or the new."""
        ...

    def stage(self, name: str) -> Path:
        """A new local folder to fill and commit; the caller removes it."""
        ...

    def commit(self, staged: Path, key: str, last: str) -> bool:
        """Make a staged folder durable and visible at `key`, whole; False if something is there (nothing changes).

        Args:
            last: the file whose presence tells that the folder is whole, where folders cannot be renamed.
        """
        ...

    def remove(self, prefix: str, last: str) -> None:
        """Remove a folder; at no time does a part of it look whole."""
        ...

    def fetch(self, prefix: str) -> Path:
        """A local folder with everything below `prefix`: the folder itself, or a copy while this place lives."""
        ...

    def hold(self) -> Any:
        """A context manager: the only writer from here on; what earlier ones left half written is cleared.

        Raises:
            StoreError: another writer holds the store, or it may not be written.
        """
        ...

    def zarr_store(self) -> Any:
        """What zarr-python opens."""
        ...

    @property
    def whole_folders(self) -> bool:
        """Whether a folder that is not whole means damage; where commits are not renames it is only not committed."""
        ...


def place_of(location: str | Path | Place) -> Place:
    """The place that a path or an address such as `s3://bucket/prefix` names.

    Raises:
        StoreError: the address cannot be used here.
    """
    if isinstance(location, Path) or (isinstance(location, str) and "://" not in location):
        return Directory(Path(location))
    if isinstance(location, str):
        from .objects import object_place

        return object_place(location)
    return location


class LocalBlob:
    """An open file."""

    block = READ_BLOCK

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset`, without the interpreter's lock. Raises EOFError."""
        while view:
            count = os.preadv(self._descriptor, [view], offset)
            if count == 0:
                raise EOFError
            view, offset = view[count:], offset + count

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):  # opening may have failed
            os.close(self._descriptor)


class Directory:
    """A directory on a file system. Commits are renames."""

    whole_folders = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.threads = min(READERS, os.cpu_count() or 1)

    def __str__(self) -> str:
        return str(self.path)

    def read(self, key: str) -> bytes:
        """The whole content. Raises FileNotFoundError."""
        return (self.path / key).read_bytes()

    def open(self, key: str) -> Blob:
        """Open for reading. Raises FileNotFoundError."""
        return LocalBlob(self.path / key)

    def exists(self, key: str) -> bool:
        """Whether there is a file of exactly that key."""
        return (self.path / key).is_file()

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below, sorted. Raises FileNotFoundError."""
        with os.scandir(self.path / prefix) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())

    def files(self, prefix: str) -> dict[str, int]:
        """Every file below, by key relative to `prefix`, with its bytes."""
        root = self.path / prefix
        found = {}
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder, name)
                found[path.relative_to(root).as_posix()] = path.stat().st_size
        return found

    def write(self, key: str, content: bytes) -> None:
        """Replace the whole content, atomically."""
        with clear_errors(self):
            write_atomic(self.path / key, content)

    def stage(self, name: str) -> Path:
        """A new folder in the store's own staging, so that the commit is a rename."""
        with clear_errors(self):
            (self.path / STAGING).mkdir(exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=self.path / STAGING))
            folder.chmod(0o755)
        return folder

    def commit(self, staged: Path, key: str, last: str) -> bool:
        """Fsync all, then rename."""
        with clear_errors(self):
            return rename_whole(staged, self.path / key)

    def remove(self, prefix: str, last: str) -> None:
        """Rename into staging, then delete: a kill half way leaves no part that looks whole."""
        if not (self.path / prefix).is_dir():
            return
        with clear_errors(self):
            doomed = self.stage("removing")
            os.rename(self.path / prefix, doomed / "removed")
            shutil.rmtree(doomed)

    def fetch(self, prefix: str) -> Path:
        """The folder itself."""
        return self.path / prefix

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold a lock of the kernel's: a killed holder frees it."""
        with clear_errors(self):
            for folder in (STAGING, PLANS):  # tools that copy trees drop empty folders
                (self.path / folder).mkdir(exist_ok=True)
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                raise StoreError(f"another command is writing to {self}: wait for it, or stop it") from None
            self._clear_staging()
            try:
                yield
            finally:
                self._clear_staging()
        finally:
            os.close(descriptor)

    def _clear_staging(self) -> None:
        """Remove what is half written. Renamed first: a part whose writer still lives is committed whole or not."""
        doomed = self.stage("removing")
        for number, leftover in enumerate((self.path / STAGING).iterdir()):
            if leftover != doomed:
                with suppress(FileNotFoundError):
                    leftover.rename(doomed / str(number))
        shutil.rmtree(doomed, ignore_errors=True)

    def zarr_store(self) -> Any:
        """zarr-python's own local store."""
        from zarr.storage import LocalStore

        return LocalStore(self.path)


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def clear_errors(place: object) -> Iterator[None]:
    """Turn the system's refusals to write into one sentence that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise StoreFullError(
                f"no room is left for the store {place} ({error.strerror}): nothing of this part was committed; "
                "make room and run the same command again"
            ) from None
        if error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}:
            raise StoreError(
                f"cannot write to the store {place} ({error.strerror}): mount it for writing, or get its owner's leave"
            ) from None
        raise StoreError(f"cannot write to the store {place}: {error.strerror or error}") from None
