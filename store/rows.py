"""Rows of 16-bit states in shards: a writer that streams chunks to a file, and the reader that mirrors it.

One array is `[tokens, layers, H]` or `[tokens, H]` of uint16 bit patterns. A shard file is chunks of 256 tokens of one
layer, in order (tokens first, then layers), then Zarr's index of them: one (offset, length) pair of little-endian
uint64 a chunk, and the index's crc32c. The index stands at the end because a file cut short then always fails to open.
zarr-python writes the array's metadata and can read everything; the bytes are written and read here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import zarr
from crc32c import crc32c

from .format import CHUNK_TOKENS, SHARD_BYTES, StoreError


class RowsWriter:
    """Appends rows to a new array, in one pass, with one chunk row of memory.

    Args:
        group: the Zarr group of the part, on a local path.
        folder: where that group lives.
        name: the array's name.
        tokens: rows that will be appended in all.
        layers: size of the middle axis, or None for `[tokens, H]`.
        width: H.
    """

    def __init__(self, group: zarr.Group, folder: Path, name: str, tokens: int, layers: int | None, width: int) -> None:
        inner = () if layers is None else (layers,)
        unit = () if layers is None else (1,)
        chunk_bytes = CHUNK_TOKENS * (layers or 1) * width * 2
        rows = max(1, SHARD_BYTES // chunk_bytes)
        # A small part gets a shard of its own size: the index of a full one would be mostly empty.
        self._chunks_per_shard = min(rows, max(1, -(-tokens // CHUNK_TOKENS)))
        group.create_array(
            name,
            shape=(tokens, *inner, width),
            shards=(self._chunks_per_shard * CHUNK_TOKENS, *inner, width),
            chunks=(CHUNK_TOKENS, *unit, width),
            dtype="uint16",
            compressors=None,
            filters=None,
            fill_value=0,
            attributes={"dtype": "bfloat16", "note": "bit patterns of bfloat16"},
        )
        self._folder = folder / name / "c"
        self._tail = ["0"] * (1 + len(inner))
        self._name, self._tokens, self._layers, self._width = name, tokens, layers, width
        self._buffer = np.zeros((layers or 1, CHUNK_TOKENS, width), np.uint16)
        self._filled = 0
        self._written = 0
        self._shard = 0
        self._file: BinaryIO | None = None
        self._index: list[tuple[int, int]] = []
        self._checksums: list[int] = []

    def append(self, rows: np.ndarray) -> None:
        """Append rows `[n, layers, H]` (or `[n, H]`), uint16."""
        rows = rows.reshape(rows.shape[0], self._layers or 1, self._width)
        at = 0
        while at < rows.shape[0]:
            take = min(CHUNK_TOKENS - self._filled, rows.shape[0] - at)
            self._buffer[:, self._filled : self._filled + take] = rows[at : at + take].swapaxes(0, 1)
            self._filled += take
            at += take
            if self._filled == CHUNK_TOKENS:
                self._flush()

    def close(self) -> np.ndarray:
        """Write what is left and the last index. Returns the crc32c of every chunk, `[chunks, layers]`, uint32."""
        if self._filled:
            self._buffer[:, self._filled :] = 0
            self._flush()
        if self._file is not None:
            self._end_shard()
        if self._written != self._tokens:
            raise StoreError(f"array {self._name}: {self._written} rows were written where {self._tokens} were due")
        return np.array(self._checksums, np.uint32).reshape(-1, self._layers or 1)

    def _flush(self) -> None:
        if self._file is None:
            path = self._folder.joinpath(str(self._shard), *self._tail)
            path.parent.mkdir(parents=True)
            self._file = path.open("xb")
            self._index = []
        for layer in self._buffer:
            self._index.append((self._file.tell(), layer.nbytes))
            self._checksums.append(crc32c(layer.data))
            self._file.write(layer.data)
        self._written += self._filled
        self._filled = 0
        if len(self._index) == self._chunks_per_shard * (self._layers or 1):
            self._end_shard()

    def _end_shard(self) -> None:
        assert self._file is not None
        missing = self._chunks_per_shard * (self._layers or 1) - len(self._index)
        absent = np.iinfo(np.uint64).max  # Zarr's mark of a chunk that was never written
        pairs = [*self._index, *[(absent, absent)] * missing]
        index = np.array(pairs, "<u8").tobytes()
        self._file.write(index + int(crc32c(index)).to_bytes(4, "little"))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self._shard += 1


class RowsReader:
    """Reads runs of rows of some layers straight from the shard files.

    Each chunk's checksum is compared the first time this reader touches it; a missing chunk is an error, never zeros.

    Args:
        folder: the array's folder.
        checksums: `[chunks, layers]` uint32, as `RowsWriter.close` returned them.
    """

    def __init__(self, folder: Path, checksums: np.ndarray) -> None:
        array = zarr.open_array(str(folder), mode="r")
        assert array.shards is not None
        self.tokens = array.shape[0]
        self.layers = array.shape[1] if array.ndim == 3 else 1
        self.width = array.shape[-1]
        if array.dtype != np.uint16 or array.chunks[0] != CHUNK_TOKENS:
            raise StoreError(f"{folder}: not an array of plain 16-bit states in chunks of {CHUNK_TOKENS} tokens")
        self._chunks_per_shard = array.shards[0] // CHUNK_TOKENS
        self._tail = ["0"] * (array.ndim - 1)
        self._folder = folder
        self._checksums = checksums
        self._touched = np.zeros(checksums.shape, bool)
        self._files: dict[int, tuple[int, np.ndarray]] = {}

    def read(self, start: int, stop: int, layers: tuple[int, ...], out: np.ndarray) -> None:
        """Read rows `start..stop` of the given layer *indices* into `out`, `[len(layers), stop - start, H]` uint16.

        Raises:
            StoreError: a shard is missing or cut short, a chunk is absent, or its checksum does not agree.
        """
        for chunk in range(start // CHUNK_TOKENS, -(-stop // CHUNK_TOKENS)):
            first = chunk * CHUNK_TOKENS
            low, high = max(start, first), min(stop, first + CHUNK_TOKENS)
            for row, layer in enumerate(layers):
                self._read_piece(chunk, layer, low - first, high - first, out[row, low - start : high - start])

    def close(self) -> None:
        """Close the shard files."""
        for descriptor, _ in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _read_piece(self, chunk: int, layer: int, low: int, high: int, out: np.ndarray) -> None:
        shard, within = divmod(chunk, self._chunks_per_shard)
        descriptor, index = self._open(shard)
        offset, length = (int(x) for x in index[within * self.layers + layer])
        row_bytes = self.width * 2
        if length != CHUNK_TOKENS * row_bytes:
            raise StoreError(f"{self._folder}: chunk {chunk} of layer index {layer} is absent")
        if self._touched[chunk, layer]:
            self._fill(descriptor, offset + low * row_bytes, out, chunk)
            return
        whole = np.empty((CHUNK_TOKENS, self.width), np.uint16)
        self._fill(descriptor, offset, whole, chunk)
        if crc32c(whole.data) != int(self._checksums[chunk, layer]):
            raise StoreError(
                f"{self._folder}: checksum of chunk {chunk}, layer index {layer} does not agree: the file is damaged"
            )
        self._touched[chunk, layer] = True
        out[:] = whole[low:high]

    def _fill(self, descriptor: int, offset: int, out: np.ndarray, chunk: int) -> None:
        view = out.data.cast("B")
        while view:
            count = os.preadv(descriptor, [view], offset)
            if count == 0:
                raise StoreError(f"{self._folder}: the shard of chunk {chunk} is cut short")
            view, offset = view[count:], offset + count

    def _open(self, shard: int) -> tuple[int, np.ndarray]:
        if shard not in self._files:
            path = self._folder.joinpath("c", str(shard), *self._tail)
            entries = self._chunks_per_shard * self.layers
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                raise StoreError(f"{path} is missing: the part is not whole") from None
            size = os.fstat(descriptor).st_size
            raw = os.pread(descriptor, entries * 16 + 4, max(0, size - entries * 16 - 4))
            if len(raw) != entries * 16 + 4 or crc32c(raw[:-4]) != int.from_bytes(raw[-4:], "little"):
                os.close(descriptor)
                raise StoreError(f"{path}: the shard's index does not agree with its checksum: the file is damaged")
            self._files[shard] = descriptor, np.frombuffer(raw[:-4], "<u8").reshape(entries, 2)
        return self._files[shard]
