"""The fp8 encoding: e4m3 with one scale a token and layer, half the bytes of bfloat16.

    scale = max|x| / 448        code = e4m3(x / scale)        x' = bfloat16(code * scale)

all in float32, rounded to nearest even. 448 is the largest e4m3 number, so a row's largest value uses the top of the
range. Encoding depends on the row alone: states encoded while extracting equal those converted later. torch is loaded
only to encode, so that a reader of metadata need not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .states import States

if TYPE_CHECKING:
    import torch

LARGEST = 448.0
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
"""Keeps a row of zeros from dividing by zero."""


def encode(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode `[..., H]` on its own device.

    Returns:
        Codes `[..., H]` uint8 and scales `[...]` float32.
    """
    import torch

    exact = states.float()
    scales = (exact.abs().amax(-1) / LARGEST).clamp_min(SMALLEST_SCALE)
    codes = (exact / scales[..., None]).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales


def encode_bits(values: np.ndarray) -> States:
    """Encode bit patterns of bfloat16, `[layers, n, H]` uint16."""
    import torch

    states = torch.from_numpy(np.ascontiguousarray(values).view(np.int16)).view(torch.bfloat16)
    codes, scales = encode(states)
    return States(codes.numpy(), scales.numpy())


def decode_bits(states: States) -> np.ndarray:
    """Decode to bit patterns of bfloat16, `[layers, n, H]` uint16. The reference of the trainer's kernel."""
    assert states.scales is not None
    return _bfloat16_bits(_TABLE[states.values] * states.scales[..., None])


def _bfloat16_bits(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)  # ties go to even
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def _table() -> np.ndarray:
    """The value of every e4m3 code: sign, four bits of exponent (bias 7), three of mantissa; 0x7F is not a number."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[(exponent == 15) & (mantissa == 7)] = np.nan
    return np.where(codes >> 7, -size, size).astype(np.float32)


_TABLE = _table()
