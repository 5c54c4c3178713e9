"""Reading rows of states from shards, straight to where they are wanted; mirrors `row_writer.py`, which has the layout.

Arrays that somebody laid out otherwise are read by `foreign.py` behind the same interface. Knows nothing of documents.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from crc32c import crc32c

from .format import CHUNK_TOKENS, Encoding, StoreError
from .place import Blob, Place
from .states import States, chunk_bytes, token_bytes, value_dtype


class RowsReader(Protocol):
    """Reads rows of one array. Several threads may read at a time."""

    tokens: int

    def read_piece(self, chunk: int, layer: int, low: int, high: int, out: States) -> None:
        """Read rows `low..high` of a chunk of one layer (an index) into `out`, `[1, high - low, H]`.

        Raises:
            StoreError: the chunk is missing, cut short or damaged; it is named.
        """
        ...

    def check(self, chunk: int, layer: int) -> None:
        """Compare a chunk's checksum, whether that was done before or not, and keep none of it. Raises StoreError."""
        ...

    def close(self) -> None:
        """Let go of files; reading opens them again, and remembers what was checked."""
        ...


class Piece(NamedTuple):
    """A part of one chunk that somebody wants, and where it is to go."""

    reader: RowsReader
    chunk: int
    layer: int
    low: int
    high: int
    out: States

    def read(self) -> None:
        """Read it."""
        self.reader.read_piece(self.chunk, self.layer, self.low, self.high, self.out)


def pieces(reader: RowsReader, start: int, stop: int, layers: tuple[int, ...], out: States) -> Iterator[Piece]:
    """What to read for rows `start..stop` of some layers (indices) into `out`, `[len(layers), stop - start, H]`."""
    for chunk in range(start // CHUNK_TOKENS, -(-stop // CHUNK_TOKENS)):
        first = chunk * CHUNK_TOKENS
        low, high = max(start, first), min(stop, first + CHUNK_TOKENS)
        rows = out.rows(low - start, high - start)
        for place, layer in enumerate(layers):
            yield Piece(reader, chunk, layer, low - first, high - first, rows.layer(place))


def open_rows(place: Place, key: str, checksums: np.ndarray, encoding: Encoding) -> RowsReader:
    """Open the array at `key`: by byte ranges if it lies as `RowsWriter` writes it, else through zarr-python.

    Raises:
        StoreError: it is missing, or is no array of states.
    """
    try:
        metadata = json.loads(place.read(f"{key}/zarr.json"))
        if _is_plain(metadata, encoding):
            return ShardRows(place, key, metadata, checksums, encoding)
    except (FileNotFoundError, ValueError, KeyError, TypeError, IndexError):
        raise StoreError(f"{place}/{key} has lost its metadata: the part is not whole") from None
    from .foreign import ZarrRows

    return ZarrRows(place, key, checksums, encoding)


class ShardRows:
    """Reads byte ranges of plain shards, straight to where they are wanted.

    Each chunk's checksum is compared the first time it is touched; then only the rows that are wanted are read.
    """

    def __init__(
        self, place: Place, key: str, metadata: dict[str, Any], checksums: np.ndarray, encoding: Encoding
    ) -> None:
        shape, shard = metadata["shape"], metadata["chunk_grid"]["configuration"]["chunk_shape"]
        self.tokens = shape[0]
        self._layers = shape[1] if len(shape) == 3 else 1
        self._width = shape[-1]
        self._tail = "/0" * (len(shape) - 1)
        self._chunks_per_shard = shard[0] // CHUNK_TOKENS
        self._place, self._key, self._checksums = place, key, checksums
        self._chunk_bytes = chunk_bytes(encoding, self._width)
        self._value_bytes = self._width * value_dtype(encoding).itemsize
        self._scale_bytes = token_bytes(encoding, self._width) - self._value_bytes
        chunks = -(-self.tokens // CHUNK_TOKENS)
        if checksums.shape != (chunks, self._layers):
            raise StoreError(f"{place}/{key}: there are not as many checksums as chunks: the part is not whole")
        self._touched = np.zeros(checksums.shape, bool)
        self._lock = threading.Lock()
        self._blobs: dict[int, tuple[Blob, list[tuple[int, int]]]] = {}

    def read_piece(self, chunk: int, layer: int, low: int, high: int, out: States) -> None:
        """See `RowsReader`."""
        shard, within = divmod(chunk, self._chunks_per_shard)
        blob, index = self._open(shard)
        offset, length = index[within * self._layers + layer]
        if length != self._chunk_bytes:
            raise StoreError(f"{self._place}/{self._key}: chunk {chunk} of layer index {layer} is absent")
        try:
            if self._touched[chunk, layer]:
                blob.read_into(_target(out.values), offset + low * self._value_bytes)
                if out.scales is not None:
                    scales = offset + CHUNK_TOKENS * self._value_bytes
                    blob.read_into(_target(out.scales), scales + low * self._scale_bytes)
                return
            checksum = self._read_and_sum(blob, offset, self._segments(low, high, out))
        except EOFError:
            raise StoreError(f"{self._place}/{self._key}: the shard of chunk {chunk} is cut short") from None
        if checksum != int(self._checksums[chunk, layer]):
            raise StoreError(
                f"{self._place}/{self._key}: checksum of chunk {chunk}, layer index {layer} does not agree: "
                "the file is damaged"
            )
        self._touched[chunk, layer] = True

    def check(self, chunk: int, layer: int) -> None:
        """See `RowsReader`."""
        nothing = States(np.empty((1, 0, self._width), np.uint8), np.empty((1, 0), np.float32))
        self._touched[chunk, layer] = False
        self.read_piece(chunk, layer, 0, 0, nothing)

    def close(self) -> None:
        """See `RowsReader`."""
        with self._lock:
            self._blobs = {}

    def _segments(self, low: int, high: int, out: States) -> list[tuple[int, int, memoryview | None]]:
        """The chunk's bytes in order: (start, size, where they are wanted, or None)."""
        found = _cut(0, self._value_bytes, low, high, _target(out.values))
        if self._scale_bytes:
            assert out.scales is not None
            found += _cut(CHUNK_TOKENS * self._value_bytes, self._scale_bytes, low, high, _target(out.scales))
        return found

    def _read_and_sum(self, blob: Blob, offset: int, segments: list[tuple[int, int, memoryview | None]]) -> int:
        """Read a whole chunk block by block, each summed while the cache still has it; returns its crc32c."""
        scratch = _scratch(blob.block)
        checksum = 0
        for start, size, view in segments:
            for at in range(0, size, blob.block):
                count = min(blob.block, size - at)
                block = scratch[:count] if view is None else view[at : at + count]
                blob.read_into(block, offset + start + at)
                checksum = crc32c(block, checksum)
        return checksum

    def _open(self, shard: int) -> tuple[Blob, list[tuple[int, int]]]:
        if (found := self._blobs.get(shard)) is not None:
            return found
        with self._lock:
            if shard not in self._blobs:
                self._blobs[shard] = self._open_shard(shard)
            return self._blobs[shard]

    def _open_shard(self, shard: int) -> tuple[Blob, list[tuple[int, int]]]:
        """A shard's file and its index: offset and length of each chunk."""
        key = f"{self._key}/c/{shard}{self._tail}"
        try:
            blob = self._place.open(key)
        except FileNotFoundError:
            raise StoreError(f"{self._place}/{key} is missing: the part is not whole") from None
        raw = bytearray(self._chunks_per_shard * self._layers * 16 + 4)
        try:
            blob.read_into(memoryview(raw), max(0, blob.size - len(raw)))
            whole = crc32c(raw[:-4]) == int.from_bytes(raw[-4:], "little")
        except EOFError:
            whole = False
        if not whole:
            raise StoreError(
                f"{self._place}/{key}: the shard's index does not agree with its checksum: "
                "the file is damaged or cut short"
            )
        return blob, list(struct.iter_unpack("<QQ", raw[:-4]))


def _is_plain(metadata: dict[str, Any], encoding: Encoding) -> bool:
    """Whether an array's metadata is just what `RowsWriter` makes."""
    shape = metadata["shape"]
    (codec,) = metadata["codecs"][:1]
    settings = codec.get("configuration", {})
    unit = [CHUNK_TOKENS, *[1] * (len(shape) - 2), shape[-1]]
    serializer = {"bf16": "bytes", "fp8": "dflash.fp8"}[encoding]
    return (
        metadata["data_type"] == "uint16"
        and len(metadata["codecs"]) == 1
        and codec["name"] == "sharding_indexed"
        and settings["chunk_shape"] == unit
        and [c["name"] for c in settings["codecs"]] == [serializer]
        and settings["codecs"][0].get("configuration", {}).get("endian", "little") == "little"
        and settings["index_location"] == "end"
        and [c["name"] for c in settings["index_codecs"]] == ["bytes", "crc32c"]
        and metadata["chunk_grid"]["configuration"]["chunk_shape"][1:] == shape[1:]
        and metadata["chunk_key_encoding"]["name"] == "default"
        and metadata["chunk_key_encoding"].get("configuration", {}).get("separator", "/") == "/"
    )


def _cut(base: int, row: int, low: int, high: int, view: memoryview) -> list[tuple[int, int, memoryview | None]]:
    return [
        (base, low * row, None),
        (base + low * row, (high - low) * row, view),
        (base + high * row, (CHUNK_TOKENS - high) * row, None),
    ]


def _target(array: np.ndarray) -> memoryview:
    if not array.flags.c_contiguous:
        raise ValueError("rows are read into contiguous memory only")
    return array.data.cast("B") if array.size else memoryview(b"")


_own = threading.local()


def _scratch(size: int) -> memoryview:
    """This thread's buffer for bytes that are only summed."""
    if len(getattr(_own, "scratch", b"")) < size:
        _own.scratch = memoryview(bytearray(size))
    return _own.scratch
