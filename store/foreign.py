"""Reading states through zarr-python: arrays that somebody compressed, rechunked or wrote otherwise.

The general path, behind the interface of `row_reader.ShardRows`, several times slower. Knows nothing of shard files.
"""

from __future__ import annotations

import numpy as np
from crc32c import crc32c

from .format import CHUNK_TOKENS, Encoding, StoreError
from .place import Place
from .states import States


class ZarrRows:
    """Reads chunks of bfloat16 bit patterns whole, whatever the codecs, and compares the checksum of their plain bytes.

    Raises:
        StoreError: there is no array of 16-bit states, or it is in the fp8 encoding (whose checksums are of encoded
            bytes, which zarr-python does not show).
    """

    def __init__(self, place: Place, key: str, checksums: np.ndarray, encoding: Encoding) -> None:
        import zarr

        try:
            array = zarr.open_array(place.zarr_store(), path=key, mode="r")
        except (FileNotFoundError, ValueError) as error:
            raise StoreError(f"{place}/{key} cannot be read ({error}): the part is not whole") from None
        if array.dtype != np.uint16 or encoding != "bf16":
            raise StoreError(f"{place}/{key}: no layout of states that this version reads")
        self.tokens = array.shape[0]
        self._array, self._checksums = array, checksums
        self._name = f"{place}/{key}"
        self._touched = np.zeros(checksums.shape, bool)

    def read_piece(self, chunk: int, layer: int, low: int, high: int, out: States) -> None:
        """See `row_reader.RowsReader`."""
        first = chunk * CHUNK_TOKENS
        rows = slice(first, min(first + CHUNK_TOKENS, self.tokens))
        found = self._array[rows, layer] if self._array.ndim == 3 else self._array[rows]
        values = np.ascontiguousarray(found)
        if not self._touched[chunk, layer]:
            padding = bytes((CHUNK_TOKENS - len(values)) * values.shape[1] * 2)
            if crc32c(padding, crc32c(values.reshape(-1).view(np.uint8).data)) != int(self._checksums[chunk, layer]):
                raise StoreError(
                    f"{self._name}: checksum of chunk {chunk}, layer index {layer} does not agree: damaged or missing"
                )
            self._touched[chunk, layer] = True
        out.values[0] = values[low:high]

    def check(self, chunk: int, layer: int) -> None:
        """See `row_reader.RowsReader`."""
        self._touched[chunk, layer] = False
        self.read_piece(chunk, layer, 0, 0, States(np.empty((1, 0, self._array.shape[-1]), np.uint16)))

    def close(self) -> None:
        """zarr-python keeps nothing open."""
