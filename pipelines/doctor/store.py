"""The store's path: whether it can be written, what it lies on, how fast that is, and what that means in tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...store import Identity, StoreError, open_store, place_of
from ...store.format import RECORD, Encoding
from ...store.place import Directory
from ...store.room import free_space, nearest, size
from ...store.states import token_bytes
from ..location import STORE_PATH, ConfigError, located, named_store
from .check import Check, Findings
from .disk import SIZE, FileSystem, Speed, file_system, measure

NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "9p", "wekafs", "afs"}
MEMORY = {"tmpfs", "ramfs"}
LEAST = 64 << 20
"""Bytes below which a measurement says little."""
OTHER_PATH = "give another [store] path, or --store"


@dataclass(frozen=True)
class Need:
    """What is stored of one token: its `bytes`, and `what` that is in words."""

    bytes: int
    what: str


def check_store(folder: Path, store: str | None, found: Findings, disk: bool) -> Iterator[Check]:
    """The store that is named, or that `dflash.toml` names, or where one would lie.

    Args:
        disk: measure its speed.
    """
    try:
        location = located(folder, store) if store else named_store(folder)
    except ConfigError:  # said in a row of its own
        location = located(folder, STORE_PATH)
    place = identity = None
    try:
        place = place_of(location)
        if isinstance(place, Directory):
            made = place.path.is_dir() and any(place.path.iterdir())
        else:
            made = place.exists(RECORD)
        if made:
            store_here = open_store(place)
            identity = store_here.identity
            yield Check("store", "ok", f"{place}: {len(store_here.parts):,} parts, {store_here.tokens:,} tokens")
        else:
            yield Check("store", "ok", f"{place} is not there yet")
    except (StoreError, OSError) as error:
        yield Check("store", "broken", str(error), OTHER_PATH)
    if isinstance(place, Directory):
        yield from _check_disk(nearest(place.path), place, _need(identity, found), disk)


def _check_disk(base: Path, place: Directory, need: Need | None, disk: bool) -> Iterator[Check]:
    try:
        tempfile.TemporaryFile(dir=base).close()
    except OSError as error:
        yield Check("store's folder", "broken", f"{base} cannot be written to: {error.strerror}", OTHER_PATH)
        return
    kind = file_system(base)
    if kind is not None:
        yield _kind(kind)
    free = free_space(place) or 0
    room = f", room for {free // need.bytes:,} tokens of {need.what}" if need else ""
    yield Check("free space", "ok", size(free) + room)
    if not disk:
        return
    if free // 4 < LEAST:
        yield Check("disk speed", "warning", "not measured: too little space is free")
        return
    speed = measure(base, min(SIZE, free // 4))
    yield Check("disk write", "ok", _rate(speed.write, need) + ", fsync included")
    if speed.read is not None:
        yield _reading(speed, speed.read, kind, need)


def _kind(found: FileSystem) -> Check:
    said = f"{found.kind} on {found.mounted}"
    if found.kind in NETWORK or found.kind.startswith("fuse."):
        said += ": a network file system, which other machines may share and slow down"
    elif found.kind in MEMORY:
        said += ": memory, so a restart loses the store"
    elif found.kind == "overlay":
        said += ": a container's own layer, which may go with the container; mount a disk for the store"
    else:
        return Check("file system", "ok", said)
    return Check("file system", "warning", said)


def _reading(speed: Speed, rate: float, kind: FileSystem | None, need: Need | None) -> Check:
    said = _rate(rate, need)
    if kind is not None and kind.kind in MEMORY:
        return Check("disk read", "ok", f"{said}, from memory")
    if speed.cached is None:
        return Check("disk read", "ok", f"{said}, perhaps from memory: this file system does not say")
    if speed.cached > 0.05:
        return Check("disk read", "warning", f"{said}, {100 * speed.cached:.0f}% of it from memory")
    return Check("disk read", "ok", f"{said}, from the disk")


def _rate(rate: float, need: Need | None) -> str:
    return f"{size(rate)}/s" + (f" = {rate / need.bytes:,.0f} tokens a second of {need.what}" if need else "")


def _need(identity: Identity | None, found: Findings) -> Need | None:
    """From the store, else from settings and target, else unknown."""
    if identity is not None:
        return _described(identity.encoding, len(identity.layer_ids), identity.final, identity.hidden_size)
    if found.settings is None or found.target is None:
        return None
    said = found.settings.extract
    return _described(said.encoding, len(said.layer_ids), said.final, found.target.hidden_size)


def _described(encoding: Encoding, layers: int, final: bool, width: int) -> Need:
    what = f"{layers} {encoding} layer{'s' * (layers != 1)}{' and final' * final}"
    return Need((layers + final) * token_bytes(encoding, width), what)
