"""Matrices in fp8: codes with one float32 scale a row, or, transposed, with one scale for the whole matrix.

    scale = max|row| / largest        code = fp8(x * (1 / scale))        x' = code * scale

largest is 448 for e4m3 (three bits of mantissa: values, weights) and 57344 for e5m2 (two bits, but down to 2^-16:
gradients). All in float32, rounded to nearest even. A store's encoding divides by the scale instead; the codes differ
only where a value lies on the border of two. A value that is not finite becomes not-a-number and spreads through
products as it would in bf16.

Memory-bound: a row is read twice, the second time from the cache, so 2 bytes read and one written a value. Triton's
interpreter knows no fp8, so the kernels run on a GPU only and the plain references everywhere else; tests interpret
the kernels with float16 for codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Keeps a row of zeros from dividing by zero."""


@dataclass(frozen=True)
class Rows:
    """A matrix in fp8.

    Attributes:
        codes: `[n, width]`, `E4M3` or `E5M2`.
        scales: `[n]` float32; a value is code * scale.
    """

    codes: Tensor
    scales: Tensor


def quantise(x: Tensor, dtype: torch.dtype = E4M3) -> Rows:
    """Rows of `[n, width]` in fp8, each with its own scale. Rows may lie apart, their values may not."""
    return (quantise_kernel if x.is_cuda else quantise_reference)(x, dtype)


def quantise_reference(x: Tensor, dtype: torch.dtype = E4M3) -> Rows:
    """The same in plain torch."""
    exact = x.float()
    scales = (exact.abs().amax(1) / torch.finfo(dtype).max).clamp_min(SMALLEST_SCALE)
    return Rows((exact * (1 / scales)[:, None]).to(dtype), scales)


def quantise_kernel(x: Tensor, dtype: torch.dtype = E4M3) -> Rows:
    """The same in Triton."""
    assert x.stride(1) == 1
    count, width = x.shape
    codes = torch.empty(count, width, dtype=dtype, device=x.device)
    scales = torch.empty(count, dtype=torch.float32, device=x.device)
    if x.numel():
        block = min(4096, triton.next_power_of_2(width))
        largest = torch.finfo(dtype).max
        warps = 8 if block >= 2048 else 4
        launch(
            _quantise, (count,), x, codes, scales, width, x.stride(0), largest, SMALLEST_SCALE, block, num_warps=warps
        )
    return Rows(codes, scales)


def quantise_transposed(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """The transpose in fp8, row-major, all of it with one scale.

    Args:
        x: `[rows, columns]`.
        scale: float32, one number on the device of x, at least max|x| / largest: the largest scale of the rows, say.
        dtype: `E4M3` or `E5M2`.

    Returns:
        `[columns, rows]` codes.
    """
    return (quantise_transposed_kernel if x.is_cuda else quantise_transposed_reference)(x, scale, dtype)


def quantise_transposed_reference(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """The same in plain torch."""
    return (x.float() * (1 / scale)).T.contiguous().to(dtype)


def quantise_transposed_kernel(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """The same in Triton."""
    assert x.stride(1) == 1
    rows, columns = x.shape
    codes = torch.empty(columns, rows, dtype=dtype, device=x.device)
    if x.numel():
        # Rows, which a vocabulary makes many of, on the axis of a grid that has room for them.
        grid = (triton.cdiv(rows, _TILE_ROWS), triton.cdiv(columns, _TILE_COLUMNS))
        launch(_transpose, grid, x, codes, scale, rows, columns, x.stride(0), _TILE_ROWS, _TILE_COLUMNS, num_warps=8)
    return codes


_TILE_ROWS, _TILE_COLUMNS = 128, 64
"""Of the transposing kernel: both what it reads and what it writes are then runs of 128 bytes."""


@triton.jit
def _quantise(x, codes, scales, width, stride, largest_code, smallest, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    largest = tl.zeros([block], tl.float32)
    for start in range(0, width, block):
        value = tl.load(x + row * stride + start + column, mask=start + column < width, other=0)
        largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
    # Exact divisions, two a row: the reference's scales to the last bit.
    scale = tl.maximum(tl.div_rn(tl.max(largest, 0), largest_code), smallest)
    inverse = tl.div_rn(1.0, scale)
    for start in range(0, width, block):
        inside = start + column < width
        value = tl.load(x + row * stride + start + column, mask=inside, other=0).to(tl.float32)
        tl.store(codes + row * width + start + column, (value * inverse).to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _transpose(x, codes, scale, rows, columns, stride, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    inverse = tl.div_rn(1.0, tl.load(scale))
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    value = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0).to(tl.float32)
    code = tl.trans((value * inverse).to(codes.dtype.element_ty))
    inside = (column[:, None] < columns) & (row[None, :] < rows)
    tl.store(codes + column[:, None] * rows + row[None, :], code, mask=inside)
