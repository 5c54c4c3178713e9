"""Decoding fp8 states on the trainer's device, in one kernel.

    x = bfloat16(code * scale)        code: e4m3, scale: float32, one a token and layer

The store's page says how states are encoded. An e4m3 number's bits, moved to where float32 has its exponent's low bits
and mantissa's high bits, are that number times 2^-120, subnormals included; so the kernel needs no fp8 hardware.
Memory-bound: one byte read and two written a value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def decode_states(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode states.

    Args:
        codes: `[..., H]` uint8.
        scales: `[...]` float32.

    Returns:
        `[..., H]` bfloat16.
    """
    return decode_kernel(codes, scales) if codes.is_cuda else decode_reference(codes, scales)


def decode_reference(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The same in plain torch."""
    return (codes.view(torch.float8_e4m3fn).float() * scales[..., None]).to(torch.bfloat16)


def decode_kernel(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The same in Triton."""
    codes, scales = codes.contiguous(), scales.contiguous()
    out = torch.empty(codes.shape, dtype=torch.int16, device=codes.device)
    width = codes.shape[-1]
    block = min(8192, triton.next_power_of_2(width))
    grid = (codes.numel() // width, triton.cdiv(width, block))
    _decode[grid](codes, scales, out, width, block)  # pyright: ignore[reportArgumentType]
    return out.view(torch.bfloat16)


@triton.jit
def _decode(codes, scales, out, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    code = tl.load(codes + row * width + column, mask=inside, other=0).to(tl.int32)
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    # Rounded to nearest even by hand, since Triton's interpreter cuts off where a GPU rounds.
    exact = (value * tl.load(scales + row)).to(tl.int32, bitcast=True)
    rounded = (exact + 0x7FFF + ((exact >> 16) & 1)) >> 16
    tl.store(out + row * width + column, rounded.to(tl.int16), mask=inside)
