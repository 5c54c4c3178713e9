"""Sizes and hashes of whole files, and the seal over them: what finds damage where no chunk checksum looks.

A part lists its files in its own record, the store lists its head's in the root, a plan has a list beside it. Shards
are listed by size alone, since each of their chunks has a checksum. The hash is sha256: the crc32c of a file that ends
with its own crc32c, as the small arrays do, is the same for every content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crc32c import crc32c

from .place import Place

LIST = "files.json"
"""The list beside a plan's files."""
BLOCK = 4 << 20

Sums = dict[str, tuple[int, str | None]]
"""Bytes and sha256 (None: a shard) of each file, by its key below a folder; in JSON the pairs are lists."""


def sum_files(folder: Path, skip: Callable[[str], bool] = lambda name: False) -> Sums:
    """Sum every file below a folder but those that `skip` names; shards are listed by size."""
    found: Sums = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != LIST and not skip(name):
            digest = None if name.startswith(("hidden/", "final/")) and "/c/" in name else _hash(path)
            found[name] = path.stat().st_size, digest
    return found


def seal(*values: Any) -> int:
    """crc32c of JSON values, whatever the order of their keys."""
    return crc32c(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def check_files(place: Place, folder: str, listed: Sums) -> list[str]:
    """What differs from a list, one sentence each."""
    found = place.files(folder)
    problems = []
    for name, (size, digest) in listed.items():
        key = f"{folder}/{name}"
        if name not in found:
            problems.append(f"{place}/{key} is missing")
        elif found[name] != size:
            problems.append(f"{place}/{key} has {found[name]:,} bytes where {size:,} are due")
        elif digest is not None and _hash_key(place, key) != digest:
            problems.append(f"{place}/{key} does not agree with its hash: it is damaged")
    return problems


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_key(place: Place, key: str) -> str:
    blob = place.open(key)
    buffer = memoryview(bytearray(min(BLOCK, blob.size)))
    digest = hashlib.sha256()
    for at in range(0, blob.size, BLOCK):
        view = buffer[: min(BLOCK, blob.size - at)]
        blob.read_into(view, at)
        digest.update(view)
    return digest.hexdigest()
