"""What saves opening every part: the manifest with the parts' records, and an index of all documents.

Both are derived from the parts and written anew by one coordinator; a part they do not know is read itself, and one
they name that is gone is damage to report. Nothing here decides what is in a store.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from crc32c import crc32c
from pydantic import BaseModel, ValidationError

from .format import DOCUMENTS, MANIFEST, PartRecord
from .place import Place

HEADER = "index"
"""The one entry of the document index's metadata: JSON with its parts, its tags and the crc32c of its arrays."""


class Manifest(BaseModel):
    """The content of `meta/manifest.json`."""

    folder: str
    """The folder of parts it was made from."""
    parts: list[PartRecord]


@dataclass(frozen=True)
class DocumentIndex:
    """Documents of some parts, end to end.

    Attributes:
        rows: for each part id, its slice of the arrays.
        length: `[n]` int64, tokens.
        ids: `[n]` uint64.
        codes: `[n]` int32, index into `tags`.
        tags: names of tags.
    """

    rows: dict[str, slice]
    length: np.ndarray
    ids: np.ndarray
    codes: np.ndarray
    tags: list[str]


EMPTY = DocumentIndex({}, np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.int32), [])


def read_manifest(place: Place, folder: str) -> dict[str, PartRecord] | None:
    """The records in the manifest by part id; None if it is missing, unreadable or of another generation of parts."""
    try:
        manifest = Manifest.model_validate_json(place.read(MANIFEST))
    except (FileNotFoundError, ValidationError):
        return None
    return {part.id: part for part in manifest.parts} if manifest.folder == folder else None


def write_manifest_file(place: Place, folder: str, parts: list[PartRecord]) -> None:
    """Replace the manifest."""
    value = {"folder": folder, "parts": [part.model_dump(mode="json") for part in parts]}
    place.write(MANIFEST, json.dumps(value, indent=1).encode())


def read_documents(place: Place) -> DocumentIndex:
    """The index of documents; an empty one if it is missing or damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        content = place.read(DOCUMENTS)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        header = json.loads(metadata[HEADER])
        arrays = load(content)
        if header["crc32c"] != _sum(arrays["length"], arrays["ids"], arrays["codes"]):
            return EMPTY
        rows, at = {}, 0
        for name, count in header["parts"]:
            rows[name] = slice(at, at + count)
            at += count
        return DocumentIndex(rows, arrays["length"], arrays["ids"], arrays["codes"], header["tags"])
    except (FileNotFoundError, SafetensorError, ValueError, KeyError, TypeError):
        return EMPTY


def write_documents(place: Place, index: DocumentIndex) -> None:
    """Replace the index of documents."""
    from safetensors.numpy import save

    arrays = {"length": index.length, "ids": index.ids, "codes": index.codes}
    header = {
        "parts": [[name, rows.stop - rows.start] for name, rows in index.rows.items()],
        "tags": index.tags,
        "crc32c": _sum(*arrays.values()),
    }
    # One entry: safetensors writes several in no fixed order.
    place.write(DOCUMENTS, save(arrays, {HEADER: json.dumps(header)}))


def _sum(*arrays: np.ndarray) -> int:
    checksum = 0
    for array in arrays:
        checksum = crc32c(np.ascontiguousarray(array).view(np.uint8).data, checksum)
    return checksum
