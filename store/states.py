"""States as they are stored, in memory: arrays of rows for some layers, with scales where the encoding has them.

The unit that the writer takes, the reader fills and the trainer decodes. Knows shapes and bytes, no files.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .format import CHUNK_TOKENS, Encoding

Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]
"""Makes an array of a shape and dtype; its content is undefined."""


@dataclass(frozen=True)
class States:
    """Rows of some layers, encoded.

    Attributes:
        values: `[layers, n, H]`; uint16 bit patterns of bfloat16 (`bf16`), or uint8 patterns of e4m3 (`fp8`).
        scales: `[layers, n]` float32 (`fp8`), or None.
    """

    values: np.ndarray
    scales: np.ndarray | None = None

    def rows(self, start: int, stop: int) -> States:
        """Rows `start..stop` of every layer, a view."""
        scales = None if self.scales is None else self.scales[:, start:stop]
        return States(self.values[:, start:stop], scales)

    def layer(self, index: int) -> States:
        """One layer, a view `[1, n, H]`."""
        scales = None if self.scales is None else self.scales[index : index + 1]
        return States(self.values[index : index + 1], scales)

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def __len__(self) -> int:
        return self.values.shape[1]


def empty_states(encoding: Encoding, layers: int, rows: int, width: int, allocate: Allocate | None = None) -> States:
    """States to be filled, on pages of their own unless `allocate` says otherwise."""
    allocate = allocate or page_aligned
    values = allocate((layers, rows, width), value_dtype(encoding))
    return States(values, allocate((layers, rows), np.dtype(np.float32)) if encoding == "fp8" else None)


def page_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A zeroed array that starts on a page.

    numpy's own arrays start 16 bytes into one, and the kernel copies to such a place several times slower.
    """
    size = int(np.prod(shape)) * dtype.itemsize
    memory = mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, size // dtype.itemsize).reshape(shape)


def value_dtype(encoding: Encoding) -> np.dtype:
    """The dtype of `States.values`."""
    return np.dtype(np.uint8 if encoding == "fp8" else np.uint16)


def chunk_bytes(encoding: Encoding, width: int) -> int:
    """Bytes of one stored chunk: 256 rows of values, then (fp8) their 256 scales."""
    return CHUNK_TOKENS * token_bytes(encoding, width)


def token_bytes(encoding: Encoding, width: int) -> int:
    """Bytes of one token of one layer."""
    return width * value_dtype(encoding).itemsize + (4 if encoding == "fp8" else 0)
