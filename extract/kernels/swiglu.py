"""The MLP's activation.

    y = silu(g) * u        silu(g) = g * sigmoid(g), rounded before the product

g and u are the halves of one product's rows. In fp8 a program takes a whole row and reads it twice, the second time
from the cache: the scale must be known before the first value is written.
"""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .products import Rows, empty_rows


def swiglu(gate_up: Tensor, fp8: bool = False) -> Rows:
    """Rows `[n, I]` from `[n, 2 I]`, the gate's half first."""
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty_rows(count, width, gate_up, fp8)
    block = min(2048, triton.next_power_of_2(width))
    columns = 1 if fp8 else triton.cdiv(width, block)
    scales = out.scales if fp8 else gate_up
    launch(_swiglu, (count, columns), gate_up, out.values, scales, width, fp8, block, num_warps=8 if fp8 else 4)
    return out


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """The same in plain torch."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@triton.jit
def _product(gate_up, row, column, width):
    inside = column < width
    at = gate_up + row * 2 * width + column
    gate = tl.load(at, mask=inside, other=0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0).to(tl.float32)
    return (gate * tl.sigmoid(gate)).to(gate_up.dtype.element_ty).to(tl.float32) * up


@triton.jit
def _swiglu(gate_up, out, scales, width, fp8: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    if fp8:
        largest = tl.zeros([block], tl.float32)
        for start in range(0, width, block):
            largest = tl.maximum(largest, tl.abs(_product(gate_up, row, start + column, width)))
        scale = tl.maximum(tl.max(largest, 0), 448e-12) / 448.0
        for start in range(0, width, block):
            result = _product(gate_up, row, start + column, width) / scale
            tl.store(out + row * width + start + column, result.to(tl.float8e4nv), mask=start + column < width)
        tl.store(scales + row, scale)
    else:
        result = _product(gate_up, row, column, width)
        tl.store(out + row * width + column, result.to(gate_up.dtype.element_ty), mask=column < width)
