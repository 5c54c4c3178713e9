"""The disk below a folder: its kind of file system, and how fast it really writes and reads.

Knows nothing of stores.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SIZE = 1 << 30
SECONDS = 5.0
BLOCK = 8 << 20
SYNC_EVERY = 64 << 20
"""Bytes between two fsyncs: a slow disk must not hide behind memory, nor overrun the time by much."""
PROBES = 64


@dataclass(frozen=True)
class FileSystem:
    """Attributes:
    kind: as /proc/mounts says it, such as ext4 or nfs4.
    mounted: where.
    """

    kind: str
    mounted: str


@dataclass(frozen=True)
class Speed:
    """Bytes a second, one after the other, through one thread.

    Attributes:
        size: bytes written, then read.
        write: the fsyncs included.
        read: None where the page cache cannot be told to let go of a file.
        cached: the share of the bytes that were in memory all the same when reading began; None when not known.
    """

    size: int
    write: float
    read: float | None
    cached: float | None


def file_system(folder: Path) -> FileSystem | None:
    """The file system a folder is on; None where the system does not say."""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return None
    path = folder.resolve()
    found = None
    for line in lines:
        mounted, kind = line.split()[1:3]
        mounted = mounted.encode().decode("unicode_escape")  # spaces are written \040
        # The last of those that are as deep hides the others.
        if path.is_relative_to(mounted) and (found is None or len(mounted) >= len(found.mounted)):
            found = FileSystem(kind, mounted)
    return found


def measure(folder: Path, size: int = SIZE, seconds: float = SECONDS) -> Speed:
    """Write a file without a name in a folder, make it durable, and read it back from the disk.

    It is gone when this returns, or when the process is killed.

    Args:
        size: bytes at most.
        seconds: for writing and again for reading, at most.

    Raises:
        OSError: the folder cannot be written to, or is full.
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        descriptor = file.fileno()
        written, write = _write(descriptor, size, seconds)
        if not hasattr(os, "posix_fadvise"):
            return Speed(written, write, None, None)
        _drop(descriptor)
        cached = _cached(descriptor, written)
        _drop(descriptor)  # looking has read ahead
        return Speed(written, write, _read(descriptor, written, seconds), cached)


def _write(descriptor: int, size: int, seconds: float) -> tuple[int, float]:
    block = memoryview(os.urandom(min(BLOCK, size)))  # nothing that a file system could compress
    written = 0
    began = time.monotonic()
    while written < size and time.monotonic() - began < seconds:
        written += os.write(descriptor, block[: size - written])
        if written % SYNC_EVERY < BLOCK:
            os.fsync(descriptor)
    os.fsync(descriptor)
    return written, written / (time.monotonic() - began)


def _drop(descriptor: int) -> None:
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _cached(descriptor: int, size: int) -> float | None:
    """The share of a file that can be read without waiting for a disk."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    page, hits = bytearray(1), 0
    for probe in range(PROBES):
        try:
            hits += os.preadv(descriptor, [page], probe * (size // PROBES), os.RWF_NOWAIT)
        except BlockingIOError:
            continue
        except OSError:  # a file system that does not know the question
            return None
    return hits / PROBES


def _read(descriptor: int, size: int, seconds: float) -> float:
    buffer = mmap.mmap(-1, BLOCK)  # on a page: copies to another place are slower
    read = 0
    began = time.monotonic()
    while read < size and time.monotonic() - began < seconds:
        read += os.preadv(descriptor, [buffer], read)
    return read / (time.monotonic() - began)
