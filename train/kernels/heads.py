"""Norm of queries and keys and their rotary position, on the rows that one joined product made, both directions.

    y = w * x / sqrt(mean(x^2) + eps)                                        the mean over a head (norm.py)
    out[low]  = y[low]  * cos - y[high] * sin        out[high] = y[high] * cos + y[low] * sin

low and high are a head's halves (Su et al. 2021, halves rotated); values pass through. Backward turns the gradient the
other way, then goes through the norm as norm.py does; from the inputs alone, each value read once. A tile is some heads
of one token, both halves beside each other. Knows nothing of what attention does with the heads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import fused, launch
from .norm import add_norm_reference, programs

HEADS = 16
"""Heads of a tile."""
PROGRAMS = 4
"""Programs of the backward pass that a multiprocessor holds at a time, at a head of 128."""


def norm_rope(
    packed: Tensor, heads: int, kv_heads: int, q_weight: Tensor | None, k_weight: Tensor, cos: Tensor, sin: Tensor,
    eps: float,
) -> Tensor:  # fmt: skip
    """Queries and keys after norm and rotation, values as they are; differentiable in heads and weights.

    Args:
        packed: `[n, heads + 2 * kv_heads, d]`, each token's queries, keys and values; d even.
        heads: query heads; none for a context, of which only keys and values are wanted.
        kv_heads: key heads, and as many of values.
        q_weight: `[d]`, in any floating dtype; None without queries.
        k_weight: `[d]`.
        cos, sin: `[n, d / 2]` fp32, of each token's position.
        eps: of the norm.

    Returns:
        The shape and dtype of packed.
    """
    if not fused(packed):
        return norm_rope_reference(packed, heads, kv_heads, q_weight, k_weight, cos, sin, eps)
    return _NormRope.apply(packed, heads, kv_heads, q_weight, k_weight, cos, sin, eps)


def norm_rope_reference(
    packed: Tensor, heads: int, kv_heads: int, q_weight: Tensor | None, k_weight: Tensor, cos: Tensor, sin: Tensor,
    eps: float,
) -> Tensor:  # fmt: skip
    """The same in plain torch."""
    query, key, value = packed.split([heads, kv_heads, kv_heads], 1)
    parts = [_rotate(add_norm_reference(key, None, k_weight, eps)[1], cos, sin), value]
    if q_weight is not None:
        parts.insert(0, _rotate(add_norm_reference(query, None, q_weight, eps)[1], cos, sin))
    return torch.cat(parts, 1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, heads: int, kv_heads: int, q_weight: Tensor | None, k_weight: Tensor, cos: Tensor,
        sin: Tensor, eps: float,
    ) -> Tensor:  # fmt: skip
        packed, k_weight, cos, sin = (each.contiguous() for each in (packed, k_weight, cos, sin))
        q_weight = None if q_weight is None else q_weight.contiguous()
        out = torch.empty_like(packed)
        tile, warps = _tile(packed)
        grid = (packed.shape[0] * triton.cdiv(packed.shape[1], tile[0]),)
        launch(
            _heads_forward, grid,
            packed, k_weight if q_weight is None else q_weight, k_weight, cos, sin, out, heads, kv_heads,
            packed.shape[2], eps, *tile, num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(packed, q_weight, k_weight, cos, sin)
        ctx.settings = heads, kv_heads, eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        packed, q_weight, k_weight, cos, sin = ctx.saved_tensors
        heads, kv_heads, eps = ctx.settings
        tokens, every, dim = packed.shape
        d_packed = torch.empty_like(packed)
        tile, warps = _tile(packed)
        groups = triton.cdiv(every, tile[0])
        count = groups * max(1, min(tokens, programs(packed, PROGRAMS) // groups))
        sums = torch.empty(count, 2, dim, dtype=torch.float32, device=packed.device)
        launch(
            _heads_backward, (count,),
            packed, k_weight if q_weight is None else q_weight, k_weight, cos, sin, gradients[0].contiguous(), d_packed,
            sums, tokens, heads, kv_heads, dim, eps, *tile, num_warps=warps,
        )  # fmt: skip
        d_q_weight, d_k_weight = sums.sum(0)
        d_q_weight = None if q_weight is None else d_q_weight.to(q_weight.dtype)
        return d_packed, None, None, d_q_weight, d_k_weight.to(k_weight.dtype), None, None, None


def _tile(packed: Tensor) -> tuple[tuple[int, int], int]:
    """A tile's heads and columns (of each half), and the warps for it."""
    _, every, dim = packed.shape
    head_block, block = min(HEADS, triton.next_power_of_2(every)), triton.next_power_of_2(dim // 2)
    return (head_block, block), min(8, max(1, head_block * block // 256))


@triton.jit
def _weights(q_weight, k_weight, offset, is_query, inside):
    query = tl.load(q_weight + offset, mask=inside & is_query, other=0).to(tl.float32)
    key = tl.load(k_weight + offset, mask=inside & ~is_query, other=0).to(tl.float32)
    return tl.where(is_query, query, key)


@triton.jit
def _scale(low, high, dim, eps):
    return tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / dim + eps)[:, None]


@triton.jit
def _heads_forward(
    packed, q_weight, k_weight, cos, sin, out, heads, kv_heads, dim, eps,
    head_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    every, half = heads + 2 * kv_heads, dim // 2
    groups = tl.cdiv(every, head_block)
    token = (tl.program_id(0) // groups).to(tl.int64)
    head = ((tl.program_id(0) % groups) * head_block + tl.arange(0, head_block))[:, None]
    column = tl.arange(0, block)[None, :]
    inside = (head < every) & (column < half)
    at = token * every * dim + head * dim + column
    low = tl.load(packed + at, mask=inside, other=0).to(tl.float32)
    high = tl.load(packed + at + half, mask=inside, other=0).to(tl.float32)
    c = tl.load(cos + token * half + column, mask=column < half, other=0)
    s = tl.load(sin + token * half + column, mask=column < half, other=0)
    kind = packed.dtype.element_ty
    scale = _scale(low, high, dim, eps)
    low_weight = _weights(q_weight, k_weight, column, head < heads, inside)
    high_weight = _weights(q_weight, k_weight, column + half, head < heads, inside)
    y_low = ((low * scale).to(kind).to(tl.float32) * low_weight).to(kind).to(tl.float32)
    y_high = ((high * scale).to(kind).to(tl.float32) * high_weight).to(kind).to(tl.float32)
    turned = head < heads + kv_heads
    tl.store(out + at, tl.where(turned, y_low * c - y_high * s, low).to(kind), mask=inside)
    tl.store(out + at + half, tl.where(turned, y_high * c + y_low * s, high).to(kind), mask=inside)


@triton.jit
def _heads_backward(
    packed, q_weight, k_weight, cos, sin, d_out, d_packed, sums, tokens, heads, kv_heads, dim, eps,
    head_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    # A program keeps to its heads, so a row of its sums is one head's to the end.
    every, half = heads + 2 * kv_heads, dim // 2
    groups = tl.cdiv(every, head_block)
    program = tl.program_id(0)
    head = ((program % groups) * head_block + tl.arange(0, head_block))[:, None]
    column = tl.arange(0, block)[None, :]
    inside = (head < every) & (column < half)
    turned = head < heads + kv_heads
    low_weight = _weights(q_weight, k_weight, column, head < heads, inside)
    high_weight = _weights(q_weight, k_weight, column + half, head < heads, inside)
    low_sum = tl.zeros([head_block, block], tl.float32)
    high_sum = tl.zeros([head_block, block], tl.float32)
    first = (program // groups).to(tl.int64)
    for token in tl.range(first, tokens, tl.num_programs(0) // groups, num_stages=3):  # pyright: ignore[reportGeneralTypeIssues]
        at = token * every * dim + head * dim + column
        low = tl.load(packed + at, mask=inside, other=0).to(tl.float32)
        high = tl.load(packed + at + half, mask=inside, other=0).to(tl.float32)
        slope = tl.load(d_out + at, mask=inside, other=0).to(tl.float32)
        high_slope = tl.load(d_out + at + half, mask=inside, other=0).to(tl.float32)
        c = tl.load(cos + token * half + column, mask=column < half, other=0)
        s = tl.load(sin + token * half + column, mask=column < half, other=0)
        scale = _scale(low, high, dim, eps)
        low *= scale
        high *= scale
        d_low = slope * c + high_slope * s
        d_high = high_slope * c - slope * s
        low_sum += d_low * low
        high_sum += d_high * high
        d_low *= low_weight
        d_high *= high_weight
        mean = ((tl.sum(d_low * low, 1) + tl.sum(d_high * high, 1)) / dim)[:, None]
        d_low = tl.where(turned, (d_low - low * mean) * scale, slope)
        d_high = tl.where(turned, (d_high - high * mean) * scale, high_slope)
        tl.store(d_packed + at, d_low.to(d_packed.dtype.element_ty), mask=inside)
        tl.store(d_packed + at + half, d_high.to(d_packed.dtype.element_ty), mask=inside)
    # Of each program two rows: its queries' sum and its keys'.
    offset = program * 2 * dim + tl.arange(0, block)
    own = tl.arange(0, block) < half
    is_key = turned & (head >= heads)
    tl.store(sums + offset, tl.sum(tl.where(head < heads, low_sum, 0.0), 0), mask=own)
    tl.store(sums + offset + half, tl.sum(tl.where(head < heads, high_sum, 0.0), 0), mask=own)
    tl.store(sums + offset + dim, tl.sum(tl.where(is_key, low_sum, 0.0), 0), mask=own)
    tl.store(sums + offset + dim + half, tl.sum(tl.where(is_key, high_sum, 0.0), 0), mask=own)
