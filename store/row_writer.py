"""Writing rows of states into shards: chunks streamed to a file, each summed on the way. `row_reader.py` mirrors it.

One array is `[tokens, layers, H]` or `[tokens, H]`. A shard file is chunks of 256 tokens of one layer, in order (tokens
first, then layers), then Zarr's index of them: one (offset, length) pair of little-endian uint64 a chunk, and the
index's crc32c. The index stands at the end because a file cut short then always fails to open. zarr-python writes the
array's metadata and can read everything; the bytes are written here.
"""

from __future__ import annotations

import os
from concurrent.futures import Executor, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from .format import CHUNK_TOKENS, SHARD_BYTES, Encoding, StoreError
from .place import READ_BLOCK
from .states import States, chunk_bytes, empty_states

if TYPE_CHECKING:
    import zarr

FLUSH_BYTES = 256 << 20
"""What is written to a shard before it is sent on to the disk, so that a commit finds little left to wait for."""


class RowsWriter:
    """Appends rows to a new array, in one pass, with one chunk row of memory.

    Args:
        group: the Zarr group of the part, on a local path.
        folder: where that group lives.
        name: the array's name.
        tokens: rows that will be appended in all.
        layers: size of the middle axis, or None for `[tokens, H]`.
        width: H.
        encoding: how the rows come.
        pool: threads that write the layers of a chunk beside each other.
    """

    def __init__(
        self,
        group: zarr.Group,
        folder: Path,
        name: str,
        tokens: int,
        layers: int | None,
        width: int,
        encoding: Encoding,
        pool: Executor,
    ) -> None:
        inner = () if layers is None else (layers,)
        unit = () if layers is None else (1,)
        self._chunk_bytes = chunk_bytes(encoding, width)
        rows = max(1, SHARD_BYTES // (self._chunk_bytes * (layers or 1)))
        # A small part gets a shard of its own size: the index of a full one would be mostly empty.
        self._chunks_per_shard = min(rows, max(1, -(-tokens // CHUNK_TOKENS)))
        group.create_array(
            name,
            shape=(tokens, *inner, width),
            shards=(self._chunks_per_shard * CHUNK_TOKENS, *inner, width),
            chunks=(CHUNK_TOKENS, *unit, width),
            dtype="uint16",
            serializer=_serializer(encoding),
            compressors=None,
            filters=None,
            fill_value=0,
            attributes={"dtype": "bfloat16", "note": "bit patterns of bfloat16"},
        )
        self._folder = folder / name / "c"
        self._tail = ["0"] * (1 + len(inner))
        self._pool = pool
        self._name, self._tokens, self._layers = name, tokens, layers or 1
        self._pending = empty_states(encoding, self._layers, CHUNK_TOKENS, width)
        self._filled = 0
        self._written = 0
        self._shard = 0
        self._descriptor: int | None = None
        self._index: list[tuple[int, int]] = []
        self._checksums: list[int] = []
        self._synced: list[Future[None]] = []
        self._flushed = 0
        self._flush: Future[None] | None = None

    def append(self, states: States) -> None:
        """Append rows. Whole chunks are written from where they are; what is left over is kept for the next."""
        at = 0
        while at < len(states):
            take = min(CHUNK_TOKENS - self._filled, len(states) - at)
            piece = states.rows(at, at + take)
            at += take
            if take == CHUNK_TOKENS:
                self._write(piece, take)
                continue
            _copy(piece, self._pending.rows(self._filled, self._filled + take))
            self._filled += take
            if self._filled == CHUNK_TOKENS:
                self._write(self._pending, CHUNK_TOKENS)
                self._filled = 0

    def close(self) -> np.ndarray:
        """Write what is left and the last index. Returns the crc32c of every chunk, `[chunks, layers]`, uint32."""
        if self._filled:
            rest = self._pending.rows(self._filled, CHUNK_TOKENS)
            rest.values[:] = 0
            if rest.scales is not None:
                rest.scales[:] = 0
            self._write(self._pending, self._filled)
        if self._descriptor is not None:
            self._end_shard()
        for synced in self._synced:
            synced.result()
        if self._written != self._tokens:
            raise StoreError(f"array {self._name}: {self._written} rows were written where {self._tokens} were due")
        return np.array(self._checksums, np.uint32).reshape(-1, self._layers)

    def abandon(self) -> None:
        """Close the file, whatever state it is in."""
        if self._descriptor is not None:
            if self._flush is not None:
                wait([self._flush])
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, chunk: States, rows: int) -> None:
        """Write 256 rows of every layer, `rows` of them real."""
        if self._descriptor is None:
            path = self._folder.joinpath(str(self._shard), *self._tail)
            path.parent.mkdir(parents=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            self._index = []
        first = len(self._index)
        places = [(first + layer) * self._chunk_bytes for layer in range(self._layers)]
        layers = [chunk.layer(layer) for layer in range(self._layers)]
        self._checksums += self._pool.map(self._write_chunk, layers, places)
        self._index += [(place, self._chunk_bytes) for place in places]
        self._written += rows
        if len(self._index) == self._chunks_per_shard * self._layers:
            self._end_shard()
        elif (len(self._index) - self._flushed) * self._chunk_bytes >= FLUSH_BYTES:
            self._flushed = len(self._index)
            if self._flush is not None:
                self._flush.result()  # one at a time, and none of their errors is lost
            self._flush = self._pool.submit(os.fdatasync, self._descriptor)

    def _write_chunk(self, chunk: States, offset: int) -> int:
        """Write one layer's chunk at its place; returns its crc32c."""
        assert self._descriptor is not None
        checksum = 0
        for array in (chunk.values, chunk.scales):
            view = memoryview(b"") if array is None else _bytes(array)
            for at in range(0, len(view), READ_BLOCK):
                # Summed first, so that writing finds the block in the processor's cache.
                block = view[at : at + READ_BLOCK]
                checksum = crc32c(block, checksum)
                _write_at(self._descriptor, block, offset + at)
            offset += len(view)
        return checksum

    def _end_shard(self) -> None:
        assert self._descriptor is not None
        missing = self._chunks_per_shard * self._layers - len(self._index)
        absent = np.iinfo(np.uint64).max  # Zarr's mark of a chunk that was never written
        pairs = [*self._index, *[(absent, absent)] * missing]
        index = np.array(pairs, "<u8").tobytes()
        tail = memoryview(index + int(crc32c(index)).to_bytes(4, "little"))
        _write_at(self._descriptor, tail, len(self._index) * self._chunk_bytes)
        # Synced beside the writing of the next shard, so that the disk is not left waiting.
        self._synced.append(self._pool.submit(_sync_and_close, self._descriptor, self._flush))
        self._descriptor, self._flush, self._flushed = None, None, 0
        self._shard += 1


def _serializer(encoding: Encoding) -> Any:
    if encoding == "bf16":
        from zarr.codecs import BytesCodec

        return BytesCodec()
    from .codec import Fp8Codec

    return Fp8Codec()


def _bytes(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, without a copy; of another, a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _copy(source: States, target: States) -> None:
    target.values[:] = source.values
    if target.scales is not None:
        target.scales[:] = source.scales


def _sync_and_close(descriptor: int, flush: Future[None] | None) -> None:
    try:
        if flush is not None:  # it came into the pool first, so this waits for work that is under way
            flush.result()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
