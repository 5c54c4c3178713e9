"""Anchor-block attention without a mask tensor: forward kernel and autograd function.

    S = q K^T / sqrt(d)        P = exp(S - lse)        out = P V        K, V: the context a row sees, then its own block

What a row sees is in `train/attention.py`, whose plain form is the reference. A program has a tile of rows, those of
neighbouring slots and blocks under the query heads of one key-value head. It starts with the blocks' own keys, so that
every row has a finite maximum, and then walks context tiles from the first position any of its rows sees to the last;
only tiles at the edges are masked.
Drawing and cost: docs/kernels.md.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .anchor_backward import backward
from .anchor_rows import addresses, own_mask, places, span, tiling
from .launch import launch

LOG2E = tl.constexpr(1.4426950408889634)


def fused_anchor_attention(
    packed: Tensor, context: Tensor, anchors: Tensor, starts: Tensor, heads: int, window: int | None, causal: bool
) -> Tensor:
    """Attention of A blocks of B slots, by kernels.

    Args:
        packed: `[A, B, heads + 2 * kv_heads, d]`, queries, keys and values of the slots.
        context: `[T, 2 * kv_heads, d]`, keys and values of the context.
        anchors, starts: `[A]` int, ascending; a block sees context positions from its start to before its anchor.
        heads: query heads.
        window, causal: as in `train.attention.anchor_attention`.

    Returns:
        `[A, B, heads, d]`.
    """
    return _AnchorAttention.apply(packed, context, anchors, starts, heads, window, causal)


class _AnchorAttention(torch.autograd.Function):
    """Saves inputs, output and each row's log-sum-exp; the backward kernels make the scores again."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, context: Tensor, anchors: Tensor, starts: Tensor, heads: int, window: int | None,
        causal: bool,
    ) -> Tensor:  # fmt: skip
        packed, context = packed.contiguous(), context.contiguous()
        out, lse = forward(packed, context, anchors, starts, heads, window, causal)
        ctx.save_for_backward(packed, context, anchors, starts, out, lse)
        ctx.rules = heads, window, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Any) -> Any:
        packed, context, anchors, starts, out, lse = ctx.saved_tensors
        slope = outputs[0].contiguous()
        return *backward(packed, context, anchors, starts, out, lse, slope, *ctx.rules), *[None] * 5


def forward(
    packed: Tensor, context: Tensor, anchors: Tensor, starts: Tensor, heads: int, window: int | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """The output, and `[A, B, heads]` fp32: each row's log-sum-exp in base 2."""
    count, block, all_heads, dim = packed.shape
    kv_heads = (all_heads - heads) // 2
    per = heads // kv_heads * block
    cut = tiling("forward", packed.dtype, dim)
    out = torch.empty(count, block, heads, dim, dtype=packed.dtype, device=packed.device)
    lse = torch.empty(count, block, heads, dtype=torch.float32, device=packed.device)
    launch(
        _attend, (triton.cdiv(count * per, cut.rows), kv_heads),
        packed, context, anchors, starts, out, lse, count, window or 0, dim**-0.5, heads, kv_heads, dim, block, per,
        cut.rows, cut.keys, cut.own_keys(block, per), max(16, triton.next_power_of_2(dim)), window is not None, causal,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return out, lse


@triton.jit
def _step(query, keys, values, result, top, mass, see, scale, masked: tl.constexpr):
    """Take one tile of keys into the running softmax: `result` and `mass` are relative to the row maximum `top`."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if masked:
        scores = tl.where(see, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(top - higher)
    mass = mass * shrink + tl.sum(weights, 1)
    result = tl.dot(weights.to(values.dtype), values, result * shrink[:, None], input_precision="ieee")
    return result, higher, mass


@triton.jit
def _attend(
    packed, context, anchors, starts, out, lse, count, window, scale, heads, kv_heads, dim: tl.constexpr,
    block: tl.constexpr, per: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr, own: tl.constexpr,
    width: tl.constexpr, windowed: tl.constexpr, causal: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * rows
    kv = tl.program_id(1)
    scale = scale * LOG2E
    total = count * per
    row = first + tl.arange(0, rows)
    exists, low, high = places(anchors, starts, row, total, window, block, per, windowed)
    spot, mine = addresses(row, kv, heads, kv_heads, block, per)
    column = tl.arange(0, width)
    inside = column < dim
    near = exists[:, None] & inside[None, :]
    query = tl.load(packed + (mine * dim)[:, None] + column[None, :], mask=near, other=0)

    # The blocks' own keys and values.
    key = first // per * block + tl.arange(0, own)
    own_at = (key.to(tl.int64) * (heads + 2 * kv_heads) + heads + kv) * dim
    own_near = (key < count * block)[:, None] & inside[None, :]
    own_k = tl.load(packed + own_at[:, None] + column[None, :], mask=own_near, other=0)
    own_v = tl.load(packed + own_at[:, None] + kv_heads * dim + column[None, :], mask=own_near, other=0)
    own_see = own_mask(row[:, None], key[None, :], total, window, block, per, windowed, causal)
    scores = tl.where(own_see, tl.dot(query, tl.trans(own_k), input_precision="ieee") * scale, float("-inf"))
    top = tl.max(scores, 1)
    weights = tl.exp2(scores - top[:, None])
    mass = tl.sum(weights, 1)
    result = tl.dot(weights.to(own_v.dtype), own_v, input_precision="ieee")

    lowest, whole_from, whole_to, tiles = span(exists, low, high, keys)
    tile = tl.arange(0, keys)
    stride = 2 * kv_heads * dim
    source = context + kv * dim + column[None, :]
    for j in range(whole_from, whole_to):
        position = lowest + j * keys + tile
        at = position.to(tl.int64)[:, None] * stride
        k = tl.load(source + at, mask=inside[None, :], other=0)
        v = tl.load(source + kv_heads * dim + at, mask=inside[None, :], other=0)
        result, top, mass = _step(query, k, v, result, top, mass, None, scale, False)
    last = tl.max(tl.where(exists, high, 0), 0)
    for i in range(0, tiles - (whole_to - whole_from)):
        j = tl.where(i < whole_from, i, i + whole_to - whole_from)
        position = lowest + j * keys + tile
        at = position.to(tl.int64)[:, None] * stride
        close = (position < last)[:, None] & inside[None, :]
        k = tl.load(source + at, mask=close, other=0)
        v = tl.load(source + kv_heads * dim + at, mask=close, other=0)
        see = (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None])
        result, top, mass = _step(query, k, v, result, top, mass, see, scale, True)

    tl.store(
        out + (spot * dim)[:, None] + column[None, :], (result / mass[:, None]).to(out.dtype.element_ty), mask=near
    )
    tl.store(lse + spot, top + tl.log2(mass), mask=exists)
