"""Room on the disk where a store lies or will lie. Knows paths and bytes, nothing of what is stored."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .format import StoreError
from .place import Directory, Place

RESERVE = 1 << 30
"""Bytes of a disk that extraction leaves free; on a disk below 100 GiB, a hundredth of it."""


def nearest(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def free_space(place: Place) -> int | None:
    """Bytes free where a store lies or will lie; None for an object store, which does not say. Quotas are not seen."""
    return shutil.disk_usage(nearest(place.path)).free if isinstance(place, Directory) else None


def room_left(place: Place) -> int | None:
    """Bytes that may still be written: what is free, less the reserve. None for an object store."""
    if not isinstance(place, Directory):
        return None
    usage = shutil.disk_usage(nearest(place.path))
    return max(0, usage.free - min(RESERVE, usage.total // 100))


def check_writable(place: Place) -> None:
    """Refuse a store that could not be made or extended, without trying. An object store is not asked.

    Raises:
        StoreError: the store, or the folder it would be made in, may not be written.
    """
    if not isinstance(place, Directory):
        return
    folder = nearest(place.path)
    if not folder.is_dir():
        raise StoreError(f"cannot make the store {place}: {folder} is a file; give another [store] path")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StoreError(f"cannot write to {folder} for the store {place}: give another [store] path, or get leave")


def size(count: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
