"""The fp8 encoding as a Zarr codec, so that zarr-python users read bfloat16 bit patterns from an fp8 store.

Registered under the name `dflash.fp8` by this package's entry point. Knows Zarr's interface; `fp8.py` has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from zarr.abc.codec import ArrayBytesCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, NDBuffer
from zarr.registry import register_codec

from .fp8 import decode_bits, encode_bits
from .states import States

NAME = "dflash.fp8"


@dataclass(frozen=True)
class Fp8Codec(ArrayBytesCodec):
    """Array to bytes: uint16 `[..., H]` to the codes of all rows, then one little-endian float32 scale a row."""

    is_fixed_size = True

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read the codec from an array's metadata. It has no settings."""
        return cls()

    def to_dict(self) -> dict[str, Any]:
        """The codec as an array's metadata has it."""
        return {"name": NAME}

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Half the bytes of the rows, and four a row."""
        return input_byte_length // 2 + input_byte_length // 2 // chunk_spec.shape[-1] * 4

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        width, raw = chunk_spec.shape[-1], chunk_data.as_numpy_array()
        rows = int(np.prod(chunk_spec.shape[:-1]))
        codes = raw[: rows * width].view(np.uint8).reshape(1, rows, width)
        scales = np.frombuffer(raw[rows * width :].tobytes(), "<f4").reshape(1, rows)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(
            decode_bits(States(codes, scales)).reshape(chunk_spec.shape)
        )

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer | None:
        width = chunk_spec.shape[-1]
        states = encode_bits(chunk_data.as_numpy_array().reshape(1, -1, width))
        assert states.scales is not None
        content = states.values.tobytes() + states.scales.astype("<f4").tobytes()
        return chunk_spec.prototype.buffer.from_bytes(content)


register_codec(NAME, Fp8Codec)
