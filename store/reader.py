"""Reading a store: opening it, listing its parts and documents, and reading rows of some layers.

Mirrors `writer.py`. Sees the parts that were committed when it was opened or last refreshed. Knows nothing of training.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from .format import FORMAT, PLAN, PLANS, RECORD, ROOT_KEY, Encoding, Identity, PartRecord, StoreError
from .index import EMPTY, DocumentIndex, read_documents, read_manifest, write_documents, write_manifest_file
from .place import Directory, Place, place_of
from .row_reader import Piece, RowsReader, open_rows, pieces
from .small import read_small
from .states import States, empty_states, token_bytes

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
    """One committed part, read through its own files, which are opened on first use. Threads may share it."""

    def __init__(self, place: Place, key: str, encoding: Encoding) -> None:
        self._place, self._key = place, key
        self._encoding: Encoding = encoding
        self._rows: dict[str, RowsReader] = {}
        self._cached: dict[str, tuple[np.ndarray, dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def small(self, name: str) -> np.ndarray:
        """One of the arrays of a single chunk: `tokens`, `loss_mask`, `doc_offsets`, `doc_ids`, `doc_tags`."""
        return self._small(name)[0]

    def tags(self) -> tuple[np.ndarray, list[str]]:
        """The tag of each document, as codes and the names they index."""
        codes, attributes = self._small("doc_tags")
        return codes, attributes["tags"]

    def rows(self, name: str) -> RowsReader:
        """The reader of `hidden` or `final`."""
        checksums = self.small(f"checksums/{name}")
        with self._lock:
            if name not in self._rows:
                self._rows[name] = open_rows(self._place, f"{self._key}/{name}", checksums, self._encoding)
            return self._rows[name]

    def pieces(self, name: str, start: int, stop: int, layers: tuple[int, ...], out: States) -> Iterator[Piece]:
        """What to read for some rows (`row_reader.pieces`), in any order, in any thread."""
        return pieces(self.rows(name), start, stop, layers, out)

    def read(self, name: str, start: int, stop: int, layers: tuple[int, ...], out: States) -> None:
        """Read rows of `hidden` or `final` into `out`, `[len(layers), stop - start, H]`; layer *indices*.

        Raises:
            StoreError: a chunk is missing or damaged.
        """
        for piece in self.pieces(name, start, stop, layers, out):
            piece.read()

    def close(self) -> None:
        """Let go of the files and of what was kept; later reads open them again but repeat no check already made."""
        self._cached = {}
        for rows in list(self._rows.values()):
            rows.close()

    def _small(self, name: str) -> tuple[np.ndarray, dict[str, Any]]:
        found = self._cached.get(name)
        if found is None:
            found = self._cached[name] = read_small(self._place, f"{self._key}/{name}")
        return found


def stored_bytes(identity: Identity, tokens: int) -> int:
    """Bytes of states, token ids and masks of so many tokens."""
    layers = len(identity.layer_ids) + identity.final
    return tokens * (layers * token_bytes(identity.encoding, identity.hidden_size) + 5)


class Store:
    """An opened store; make it with `open_store`. Rows may be read by several threads, the rest by one."""

    def __init__(self, place: Place, identity: Identity, parts_folder: str) -> None:
        self.place = place
        self.identity = identity
        self.parts_folder = parts_folder
        self.parts: list[PartRecord] = []
        self.lost: list[PartRecord] = []
        """Parts that the manifest names and that are not there."""
        self._made: dict[str, Part] = {}
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._index: DocumentIndex | None = None
        self.refresh()

    @property
    def tokens(self) -> int:
        """Tokens in all committed parts."""
        return sum(part.tokens for part in self.parts)

    def bytes_stored(self) -> int:
        """Bytes of states, tokens and masks by count: rows times their size."""
        return stored_bytes(self.identity, self.tokens)

    def planned_tokens(self, split: str) -> int:
        """Tokens of a split once an extraction that is under way, or was left off, has written all of its plan."""
        total = sum(part.tokens for part in self.parts if part.split == split)
        try:
            for key in self.place.folders(PLANS):
                plan = json.loads(self.place.read(f"{PLANS}/{key}/{PLAN}"))
                there = sum(part.tokens for part in self.parts if part.split == split and part.plan == plan["key"])
                total += max(0, plan.get("tokens", {}).get(split, 0) - there)
        except FileNotFoundError:  # a store without plans, or one whose plan is just being replaced
            pass
        return total

    def refresh(self) -> None:
        """See the parts committed since the store was opened. Indices into `parts` change; `Documents` go stale."""
        known = {part.id: part for part in self.parts}
        listed = read_manifest(self.place, self.parts_folder) or {}
        self.parts = self._list_parts({**listed, **known})
        present = {part.id for part in self.parts}
        self.lost = [part for name, part in sorted(listed.items()) if name not in present]
        self._index = None  # the writer may have written a newer one

    def has(self, name: str) -> bool:
        """Whether a part of that id is committed now."""
        return self.place.exists(f"{self.parts_folder}/{name}/{RECORD}")

    def part(self, index: int) -> Part:
        """The part at `index` of `parts`; those used least recently let go of their files."""
        name = self.parts[index].id
        if name not in self._made:
            self._made[name] = Part(self.place, f"{self.parts_folder}/{name}", self.identity.encoding)
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
        wanted = None if parts is None else set(parts)
        if wanted is not None and (lost := wanted - {part.id for part in self.parts}):
            raise StoreError(f"{self.place} no longer holds part {min(lost)}, which the run trained on")
        chosen = [i for i, p in enumerate(self.parts) if p.split == split and (wanted is None or p.id in wanted)]
        index = self._document_index([self.parts[i] for i in chosen])
        counts = [self.parts[i].documents for i in chosen]
        starts = np.concatenate([[0], np.cumsum(index.length)[:-1]]) if len(index.length) else np.zeros(0, np.int64)
        firsts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64) if counts else np.zeros(0, np.int64)
        return Documents(
            part=np.repeat(np.array(chosen, np.int64), counts),
            start=starts - np.repeat(starts[firsts], counts) if counts else starts,
            length=index.length,
            ids=index.ids,
            tags=np.array(index.tags, object)[index.codes].tolist() if index.tags else [],
        )

    def empty_states(self, layers: int, rows: int) -> States:
        """Room for rows of some layers, in the store's encoding."""
        return empty_states(self.identity.encoding, layers, rows, self.identity.hidden_size)

    def layer_indices(self, layer_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Where the given layers stand in `hidden`.

        Raises:
            StoreError: a layer is not in the store.
        """
        for layer in layer_ids:
            if layer not in self.identity.layer_ids:
                held = ", ".join(map(str, self.identity.layer_ids))
                raise StoreError(f"layer {layer} is not in the store {self.place}, which holds layers {held}")
        return tuple(self.identity.layer_ids.index(layer) for layer in layer_ids)

    def close(self) -> None:
        """Let go of all files."""
        for part in self._made.values():
            part.close()

    def _list_parts(self, known: dict[str, PartRecord]) -> list[PartRecord]:
        """The committed parts by name. What is known only saves opening them: folders decide what is there."""
        try:
            names = self.place.folders(self.parts_folder)
        except FileNotFoundError:
            raise StoreError(f"{self.place} has lost its folder {self.parts_folder}: the store is not whole") from None
        found = (known.get(name) or self._read_record(name) for name in names)
        return [record for record in found if record is not None]

    def _read_record(self, name: str) -> PartRecord | None:
        try:
            content = self.place.read(f"{self.parts_folder}/{name}/{RECORD}")
            return PartRecord.model_validate(json.loads(content)["attributes"][ROOT_KEY])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, FileNotFoundError) and not self.place.whole_folders:
                return None
            raise StoreError(f"part {name} of {self.place} is not whole: its record cannot be read") from None

    def _document_index(self, records: list[PartRecord]) -> DocumentIndex:
        """The documents of these parts in this order, from the stored index where it knows them."""
        if self._index is None:
            self._index = read_documents(self.place)
        stored = self._index
        tags = list(stored.tags)
        rows: dict[str, slice] = {}
        columns: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        at = 0
        for record in records:
            if record.id in stored.rows:
                here = stored.rows[record.id]
                columns.append((stored.length[here], stored.ids[here], stored.codes[here]))
            else:
                part = Part(self.place, f"{self.parts_folder}/{record.id}", self.identity.encoding)
                codes, names = part.tags()
                tags += [name for name in names if name not in tags]
                renamed = np.array([tags.index(name) for name in names], np.int32)
                columns.append((np.diff(part.small("doc_offsets")), part.small("doc_ids"), renamed[codes]))
            rows[record.id] = slice(at, at + record.documents)
            at += record.documents
        if not columns:
            return EMPTY
        length, ids, codes = (np.concatenate(column) for column in zip(*columns, strict=True))
        return DocumentIndex(rows, length, ids, codes.astype(np.int32), tags)

    def write_index(self) -> None:
        """Write manifest and document index anew from the parts this store sees.

        One coordinator calls this, under the lock.
        """
        self._index = self._document_index(self.parts)
        write_documents(self.place, self._index)
        write_manifest_file(self.place, self.parts_folder, self.parts)
        self.lost = []


def open_store(location: str | Path | Place) -> Store:
    """Open the store at a path, an address such as `s3://bucket/prefix`, or a place.

    Raises:
        StoreError: there is no store, something else is there, it has another format, or a part has lost its record.
    """
    place = place_of(location)
    return Store(place, *read_root(place))


def read_root(place: Place) -> tuple[Identity, str]:
    """A store's identity and the folder of its parts.

    Raises:
        StoreError: there is no store, something else is there, or it has another format.
    """
    try:
        attributes = json.loads(place.read(RECORD))["attributes"][ROOT_KEY]
        form, folder = attributes["identity"]["format"], attributes.get("parts", "")
    except FileNotFoundError:
        if isinstance(place, Directory) and place.path.exists():
            raise StoreError(f"{place} holds something that is not a dflash store: choose another path") from None
        raise StoreError(f"there is no store at {place}: run `dflash extract` first, or correct [store] path") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise StoreError(f"{place} holds something that is not a dflash store: choose another [store] path") from None
    if form != FORMAT:
        raise StoreError(
            f"{place} has store format {form}, this version of dflash reads format {FORMAT}: "
            "extract to another path, or use the version that made it"
        )
    try:
        identity = Identity.model_validate(attributes["identity"])
    except ValidationError as error:
        raise StoreError(f"{place}: the store's identity is damaged: {error.errors()[0]['msg']}") from None
    return identity, folder
