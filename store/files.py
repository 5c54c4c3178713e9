"""Files that are whole or absent: fsync and rename, in the order that survives a power cut.

Knows paths and bytes, nothing of what they mean.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def fsync_directory(path: Path) -> None:
    """Make the entries of a directory durable: a new name, or a name that a rename moved."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """Make every file and directory below `root` durable, the deepest first, and the files readable by everybody: some
    libraries make files that only their owner may read.
    """
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fchmod(descriptor, 0o644)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_directory(Path(folder))


def write_atomic(path: Path, content: bytes) -> None:
    """Replace the file `path` with `content`: a reader, or a kill, sees the old file or the new one."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # mkstemp makes files that only the owner may read
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def rename_whole(staged: Path, final: Path) -> bool:
    """Commit a staged directory under its final name.

    Returns False, leaving `staged` where it is, when `final` exists already and is not empty: somebody committed first.
    """
    fsync_tree(staged)
    try:
        os.rename(staged, final)
    except OSError:
        if final.is_dir() and any(final.iterdir()):
            return False
        raise
    fsync_directory(final.parent)
    return True
