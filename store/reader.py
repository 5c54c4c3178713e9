"""Reading a store: opening it, listing its parts and documents, and reading whole documents of some layers.

Mirrors `writer.py`. Sees the parts that were committed when it was opened. Knows nothing of training.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from pydantic import ValidationError

from .format import FORMAT, MANIFEST, PARTS, ROOT_KEY, Identity, PartRecord, StoreError
from .rows import RowsReader

OPEN_PARTS = 128
"""Parts whose shard files stay open at a time: well under the usual limit of 1,024 descriptors."""


@dataclass(frozen=True)
class Documents:
    """An index of documents, one row each, ordered by part and place.

    Attributes:
        part: `[n]` int64, index into `Store.parts`.
        start: `[n]` int64, first row in the part.
        length: `[n]` int64, tokens.
        ids: `[n]` uint64, content hash.
        tags: `[n]` tag of origin.
    """

    part: np.ndarray
    start: np.ndarray
    length: np.ndarray
    ids: np.ndarray
    tags: list[str]

    def __len__(self) -> int:
        return len(self.length)

    def first(self, count: int) -> Documents:
        """The `count` documents with the smallest ids: the same whatever order the parts came in."""
        keep = np.sort(np.argsort(self.ids, kind="stable")[:count])
        return Documents(
            self.part[keep], self.start[keep], self.length[keep], self.ids[keep], [self.tags[i] for i in keep]
        )


class Part:
    """One committed part, read through its own files, which are opened on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: dict[str, RowsReader] = {}
        self._cached: dict[str, tuple[np.ndarray, dict[str, Any]]] = {}

    def small(self, name: str) -> np.ndarray:
        """One of the arrays of a single chunk: `tokens`, `loss_mask`, `doc_offsets`, `doc_ids`, `doc_tags`."""
        return self._small(name)[0]

    def tags(self) -> list[str]:
        """The tag of each document."""
        codes, attributes = self._small("doc_tags")
        return [attributes["tags"][code] for code in codes]

    def read(self, name: str, start: int, stop: int, layers: tuple[int, ...], out: np.ndarray) -> None:
        """Read rows of `hidden` or `final` into `out`, `[len(layers), stop - start, H]` uint16; layer *indices*."""
        if name not in self._rows:
            checksums = self._small(f"checksums/{name}")[0]
            self._rows[name] = RowsReader(self._folder / name, checksums)
        self._rows[name].read(start, stop, layers, out)

    def close(self) -> None:
        """Close the files and forget what was kept; later reads open them again but repeat no check already made."""
        self._cached.clear()
        for rows in self._rows.values():
            rows.close()

    def _small(self, name: str) -> tuple[np.ndarray, dict[str, Any]]:
        if name not in self._cached:
            self._cached[name] = self._load_small(self._folder / name)
        return self._cached[name]

    def _load_small(self, folder: Path) -> tuple[np.ndarray, dict[str, Any]]:
        try:
            array = zarr.open_array(str(folder), mode="r")
            # zarr-python reads a chunk that is not there as zeros; here that is damage.
            if not folder.joinpath("c", *["0"] * array.ndim).is_file():
                raise StoreError(f"{folder} has lost its chunk: the part is not whole")
            return np.asarray(array[...]), dict(array.attrs)
        except (FileNotFoundError, ValueError) as error:
            raise StoreError(f"{folder} cannot be read ({error}): the part is not whole") from None


class Store:
    """An opened store. Make it with `open_store`; one thread reads at a time."""

    def __init__(self, path: Path, identity: Identity, parts: list[PartRecord]) -> None:
        self.path = path
        self.identity = identity
        self.parts = parts
        self._made: dict[str, Part] = {}
        self._recent: OrderedDict[str, None] = OrderedDict()

    @property
    def tokens(self) -> int:
        """Tokens in all committed parts."""
        return sum(part.tokens for part in self.parts)

    def bytes_on_disk(self) -> int:
        """Bytes of states, tokens and masks by count: rows times their size."""
        identity = self.identity
        states = (len(identity.layer_ids) + identity.final) * identity.hidden_size * 2
        return self.tokens * (states + 5)

    def refresh(self) -> None:
        """See the parts committed since the store was opened. Indices into `parts` change; `Documents` go stale."""
        self.parts = _list_parts(self.path)

    def part(self, index: int) -> Part:
        """The part at `index` of `parts`; those used least recently have their files closed."""
        name = self.parts[index].id
        if name not in self._made:
            self._made[name] = Part(self.path / PARTS / name)
        self._recent[name] = None
        self._recent.move_to_end(name)
        if len(self._recent) > OPEN_PARTS:
            oldest, _ = self._recent.popitem(last=False)
            self._made[oldest].close()
        return self._made[name]

    def documents(self, split: str, parts: list[str] | None = None) -> Documents:
        """Index the documents of one split; `parts` limits it to those parts (a resumed run's own list).

        Raises:
            StoreError: a part of the list is not in the store.
        """
        if parts is not None and (lost := set(parts) - {part.id for part in self.parts}):
            raise StoreError(f"{self.path} no longer holds part {min(lost)}, which the run trained on")
        columns: dict[str, list[np.ndarray]] = {"part": [], "start": [], "length": [], "ids": []}
        tags: list[str] = []
        for index, record in enumerate(self.parts):
            if record.split != split or (parts is not None and record.id not in parts):
                continue
            part = self.part(index)
            offsets = part.small("doc_offsets")
            columns["part"].append(np.full(record.documents, index, np.int64))
            columns["start"].append(offsets[:-1])
            columns["length"].append(np.diff(offsets))
            columns["ids"].append(part.small("doc_ids"))
            tags += part.tags()
        empty = np.zeros(0, np.int64)
        joined = {name: np.concatenate(found) if found else empty for name, found in columns.items()}
        return Documents(joined["part"], joined["start"], joined["length"], joined["ids"], tags)

    def layer_indices(self, layer_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Where the given layers stand in `hidden`.

        Raises:
            StoreError: a layer is not in the store.
        """
        for layer in layer_ids:
            if layer not in self.identity.layer_ids:
                held = ", ".join(map(str, self.identity.layer_ids))
                raise StoreError(f"layer {layer} is not in the store {self.path}, which holds layers {held}")
        return tuple(self.identity.layer_ids.index(layer) for layer in layer_ids)

    def close(self) -> None:
        """Close all files."""
        for part in self._made.values():
            part.close()


def open_store(path: Path) -> Store:
    """Open the store at `path`.

    Raises:
        StoreError: there is no store, something else is there, or it has another format.
    """
    if not path.exists():
        raise StoreError(f"there is no store at {path}: run `dflash extract` first, or correct [store] path")
    try:
        attributes = json.loads((path / "zarr.json").read_text())["attributes"][ROOT_KEY]
        form = attributes["identity"]["format"]
    except (OSError, ValueError, KeyError, TypeError):
        raise StoreError(f"{path} holds something that is not a dflash store: choose another [store] path") from None
    if form != FORMAT:
        raise StoreError(f"{path} has store format {form}, this version of dflash reads format {FORMAT}")
    try:
        identity = Identity.model_validate(attributes["identity"])
    except ValidationError as error:
        raise StoreError(f"{path}: the store's identity is damaged: {error.errors()[0]['msg']}") from None
    return Store(path, identity, _list_parts(path))


def _list_parts(path: Path) -> list[PartRecord]:
    """The committed parts by name. The manifest only saves opening them: directories decide what is there."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())["parts"]
        known = {part["id"]: PartRecord.model_validate(part) for part in manifest}
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    records = []
    if not (path / PARTS).is_dir():
        raise StoreError(f"{path} has lost its folder {PARTS}: the store is not whole")
    for folder in sorted(entry for entry in (path / PARTS).iterdir() if entry.is_dir()):
        record = known.get(folder.name)
        if record is None:
            try:
                attributes = json.loads((folder / "zarr.json").read_text())["attributes"]
                record = PartRecord.model_validate(attributes[ROOT_KEY])
            except (OSError, ValueError, KeyError, TypeError):
                raise StoreError(f"part {folder.name} of {path} is not whole: its record cannot be read") from None
        records.append(record)
    return records
