"""Sizes and checksums of whole files, and the seal over them: what finds damage where no chunk checksum looks.

A part lists its files in its own record, the store lists its head's in the root, a plan has a list beside it. Shards
are listed by size alone, since each of their chunks has a checksum.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crc32c import crc32c

from .place import Place

LIST = "files.json"
"""The list beside a plan's files."""
BLOCK = 4 << 20

Sums = dict[str, list[int | None]]
"""Bytes and crc32c (None: not summed as a whole) of each file, by its key below a folder."""


def sum_files(folder: Path, skip: Callable[[str], bool] = lambda name: False) -> Sums:
    """Sum every file below a folder but those that `skip` names; shards are listed by size."""
    found: Sums = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != LIST and not skip(name):
            checksum = None if name.startswith(("hidden/", "final/")) and "/c/" in name else _sum(path)
            found[name] = [path.stat().st_size, checksum]
    return found


def seal(*values: Any) -> int:
    """crc32c of JSON values, whatever the order of their keys."""
    return crc32c(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def check_files(place: Place, folder: str, listed: Sums) -> list[str]:
    """What differs from a list, one sentence each."""
    found = place.files(folder)
    problems = []
    for name, (size, checksum) in listed.items():
        key = f"{folder}/{name}"
        if name not in found:
            problems.append(f"{place}/{key} is missing")
        elif found[name] != size:
            problems.append(f"{place}/{key} has {found[name]:,} bytes where {size:,} are due")
        elif checksum is not None and _sum_key(place, key) != checksum:
            problems.append(f"{place}/{key} does not agree with its checksum: it is damaged")
    return problems


def _sum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(BLOCK):
            checksum = crc32c(piece, checksum)
    return checksum


def _sum_key(place: Place, key: str) -> int:
    blob = place.open(key)
    buffer = memoryview(bytearray(min(BLOCK, blob.size)))
    checksum = 0
    for at in range(0, blob.size, BLOCK):
        view = buffer[: min(BLOCK, blob.size - at)]
        blob.read_into(view, at)
        checksum = crc32c(view, checksum)
    return checksum
