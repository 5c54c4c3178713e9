"""Making a store smaller: fewer layers, no `final`, fp8 in place of bf16, or fewer parts.

Parts never change; what is kept of them is written as a new generation, part by part, beside the old one. The root's
record then names the new folder, and that is the commit: a kill before it leaves the old store, to be gone on with, and
a kill after it leaves the new one. Only then is the old generation removed.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .format import FILES_KEY, PARTS, RECORD, ROOT_KEY, Identity, StoreError
from .fp8 import encode_bits
from .index import write_manifest_file
from .place import Directory, Place, place_of
from .progress import SILENT, Listener
from .reader import Store, open_store, read_root, stored_bytes
from .states import States, empty_states
from .writer import PartWriter, root_attributes

ROWS = 4096
"""Tokens rewritten at a time."""


@dataclass(frozen=True)
class Generation:
    """The parts that are being written (`writer.Parts`)."""

    place: Place
    identity: Identity
    parts_folder: str


def pruned_identity(
    identity: Identity, *, layers: Sequence[int] | None = None, drop_final: bool = False, fp8: bool = False
) -> Identity:
    """The identity of a store with only these layers (ids, in the store's order), without `final`, in fp8.

    Raises:
        StoreError: a layer is not in the store, or none is left.
    """
    changes = {}
    if layers is not None:
        if absent := [layer for layer in layers if layer not in identity.layer_ids]:
            held = ", ".join(map(str, identity.layer_ids))
            raise StoreError(f"layer {absent[0]} is not in the store, which holds layers {held}")
        kept = tuple(layer for layer in identity.layer_ids if layer in layers)
        if not kept:
            raise StoreError("at least one layer must be kept: to be rid of the store, delete its folder")
        changes["layer_ids"] = kept
        if identity.num_layers - 1 not in kept:
            changes["last_layer"] = None
    if drop_final:
        changes["final"] = False
    if fp8:
        changes["encoding"] = "fp8"
    return identity.model_copy(update=changes)


def delete_parts(location: str | Path | Place, names: Sequence[str]) -> None:
    """Delete parts by id, damaged ones too. An extraction with the same data makes them again.

    Raises:
        StoreError: there is no such part (none is deleted then), or the store is held or may not be written.
    """
    place = place_of(location)
    _, folder = read_root(place)
    with place.hold():
        present = set(place.folders(folder))
        if absent := [name for name in names if name not in present]:
            raise StoreError(
                f"part {absent[0]} is not in {place}: `dflash store verify` names damaged ones, the folder {folder} all"
            )
        # First out of the manifest, which is believed where looking at every part would take long.
        write_manifest_file(place, folder, [])
        for name in names:
            place.remove(f"{folder}/{name}", RECORD)
        _write_index(place)


def prune(location: str | Path | Place, identity: Identity, listener: Listener = SILENT) -> Store:
    """Rewrite a store to a smaller identity (`pruned_identity`).

    Args:
        listener: progress counts tokens.

    Raises:
        StoreError: there is no room for the new generation beside the old, a part is damaged, or the store is held or
            may not be written.
    """
    place = place_of(location)
    with place.hold():
        store = open_store(place)
        _clear_old(place, store.parts_folder)
        if identity == store.identity:
            store.write_index()  # the commit of an interrupted call may be all that it came to
            return store
        _check_room(store, identity)
        new = Generation(place, identity, _next_folder(store.parts_folder))
        done = _begin(new)
        listener.start(store.tokens, sum(part.tokens for part in store.parts if part.id in done))
        for index, record in enumerate(store.parts):
            if record.id not in done:
                _rewrite(store, index, new)
                listener.advance(record.tokens, record.id)
        root = json.loads(place.read(RECORD))
        root["attributes"] |= root_attributes(identity, new.parts_folder, root["attributes"][FILES_KEY])
        place.write(RECORD, json.dumps(root, indent=2).encode())  # the commit
        _write_index(place)
        _clear_old(place, new.parts_folder)
    return open_store(place)


def _next_folder(folder: str) -> str:
    return f"{PARTS}-{_number(folder) + 1}"


def _number(folder: str) -> int:
    """The generation of a folder of parts: `parts` is 0, `parts-3` is 3; a folder of another name comes after all."""
    tail = folder.partition("-")[2] or "0"
    return int(tail) if tail.isdigit() else sys.maxsize


def _begin(new: Generation) -> set[str]:
    """Make the new folder, or go on with one that was begun for the same identity. Returns the parts that it has."""
    place, folder = new.place, new.parts_folder
    wanted = {"generation": new.identity.model_dump(mode="json")}
    try:
        if json.loads(place.read(f"{folder}/{RECORD}"))["attributes"][ROOT_KEY] == wanted:
            return {name for name in place.folders(folder) if place.exists(f"{folder}/{name}/{RECORD}")}
    except (FileNotFoundError, ValueError, KeyError):
        pass
    place.remove(folder, RECORD)
    staged = place.stage(folder)
    try:
        import zarr

        zarr.create_group(str(staged), attributes={ROOT_KEY: wanted})
        place.commit(staged, folder, RECORD)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return set()


def _rewrite(store: Store, index: int, new: Generation) -> None:
    record, part = store.parts[index], store.part(index)
    offsets = part.small("doc_offsets")
    layers = store.layer_indices(new.identity.layer_ids)
    codes, tags = part.tags()
    with PartWriter(new, record.id, (offsets[1:] - offsets[:-1]).tolist()) as writer:
        for start in range(0, record.tokens, ROWS):
            stop = min(start + ROWS, record.tokens)
            hidden = _read(store, index, "hidden", layers, start, stop, new)
            final = _read(store, index, "final", (0,), start, stop, new) if new.identity.final else None
            writer.append(hidden, final)
        writer.commit(
            split=record.split,
            tokens=part.small("tokens"),
            loss_mask=part.small("loss_mask"),
            doc_ids=part.small("doc_ids"),
            doc_tags=[tags[code] for code in codes],
            plan=record.plan,
            provenance=record.provenance,
        )
    part.close()


def _read(
    store: Store, index: int, name: str, layers: tuple[int, ...], start: int, stop: int, new: Generation
) -> States:
    # Fresh memory each time: the writer's thread may not have written the last rows yet.
    encoding, width = store.identity.encoding, store.identity.hidden_size
    rows = empty_states(encoding, len(layers), stop - start, width)
    store.part(index).read(name, start, stop, layers, rows)
    return rows if encoding == new.identity.encoding else encode_bits(rows.values)


def _check_room(store: Store, identity: Identity) -> None:
    if not isinstance(store.place, Directory):
        return
    need = stored_bytes(identity, store.tokens)
    free = shutil.disk_usage(store.place.path).free
    if need > free:
        raise StoreError(
            f"pruning {store.place} needs {need / 1e9:,.1f} GB beside what is there, {free / 1e9:,.1f} GB are free: "
            "make room, or copy the store to a larger disk and prune it there"
        )


def _clear_old(place: Place, current: str) -> None:
    """Remove the generations before the current one, which an interrupted call left."""
    for name in place.folders(""):
        if name.partition("-")[0] == PARTS and _number(name) < _number(current):
            place.remove(name, RECORD)


def _write_index(place: Place) -> None:
    """Write the index anew, unless a part's record cannot be read: then the index waits until the part is gone."""
    try:
        store = open_store(place)
    except StoreError:
        return
    store.write_index()
