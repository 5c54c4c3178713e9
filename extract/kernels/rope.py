"""Norm and rotary position of queries or keys, a head at a time.

    y = rmsnorm(x) (as in norm.py, over a head)
    out = y * cos + rotate_half(y) * sin      for the first `rotary` numbers of a head; the others as they are

rotate_half swaps the halves of those numbers and negates the new first half. Both products are rounded before the sum,
as transformers does. The inputs are read where their product left them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .norm import add_norm_reference


def norm_rope(x: Tensor, weight: Tensor, eps: float, centred: bool, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads after norm and rotation.

    Args:
        x: `[b, n, heads, d]`, last stride 1, rows of the batch one after another.
        weight: `[d]`.
        centred: as in `add_norm`.
        cos, sin: `[n, rotary]`, in the dtype of x.

    Returns:
        `[b, n, heads, d]`, contiguous.
    """
    batch, tokens, heads, dim = x.shape
    out = torch.empty(batch, tokens, heads, dim, dtype=x.dtype, device=x.device)
    head_block = min(8, triton.next_power_of_2(heads))
    grid = batch * tokens, triton.cdiv(heads, head_block)
    launch(
        _norm_rope, grid,
        x, weight, cos, sin, out, tokens, x.stride(0), x.stride(1), x.stride(2), heads, dim, cos.shape[1], eps, centred,
        head_block, triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
    return out


def norm_rope_reference(x: Tensor, weight: Tensor, eps: float, centred: bool, cos: Tensor, sin: Tensor) -> Tensor:
    """The same in plain torch."""
    normed = add_norm_reference(x, None, weight, eps, centred)[1]
    turned, rest = normed.split([cos.shape[1], x.shape[-1] - cos.shape[1]], -1)
    first, second = turned.chunk(2, -1)
    half = torch.cat([-second, first], -1)
    return torch.cat([turned * cos[:, None] + half * sin[:, None], rest], -1)


@triton.jit
def _normed(x, weight, at, column, inside, factor, centred: tl.constexpr):
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32) * factor
    scale = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    if centred:
        result = value * (1 + scale)
    else:
        result = value.to(x.dtype.element_ty).to(tl.float32) * scale
    return result.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _norm_rope(
    x, weight, cos, sin, out, tokens, batch_stride, stride, head_stride, heads, dim, rotary, eps, centred: tl.constexpr,
    head_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = row % tokens
    head = (tl.program_id(1) * head_block + tl.arange(0, head_block))[:, None]
    column = tl.arange(0, block)[None, :]
    inside = (head < heads) & (column < dim)
    start = (row // tokens) * batch_stride + position * stride + head * head_stride
    value = tl.load(x + start + column, mask=inside, other=0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 1) / dim + eps)[:, None]
    own = _normed(x, weight, start + column, column, inside, factor, centred)
    half = rotary // 2
    partner = tl.where(column < half, column + half, tl.where(column < rotary, column - half, column))
    other = _normed(x, weight, start + partner, partner, inside, factor, centred)
    other = tl.where(column < half, -other, other)
    turned = column < rotary
    kind = x.dtype.element_ty
    c = tl.load(cos + position * rotary + column, mask=turned, other=1).to(tl.float32)
    s = tl.load(sin + position * rotary + column, mask=turned, other=0).to(tl.float32)
    result = (own * c).to(kind).to(tl.float32) + (other * s).to(kind).to(tl.float32)
    tl.store(out + (row * heads + head) * dim + column, result.to(kind), mask=inside)
