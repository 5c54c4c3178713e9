"""Anchor-block attention without a mask tensor: forward kernel and autograd function.

    S = q K^T / sqrt(d)        P = exp(S - lse)        out = P V        K, V: the context a row sees, then its own block

What a row sees is in `train/attention.py`, whose plain form is the reference. A program has a tile of rows, those of
neighbouring slots and blocks under the query heads of one key-value head. It starts with the blocks' own keys and walks
context tiles from the first position any of its rows sees to the last; only tiles at the edges are masked.

P is kept relative to the largest score that a row has among its own keys. A running maximum would be the usual
reference, but scaling `out` anew for every tile costs more than all else that is done to a score; and this one can only
fail where a score passes it by 69 (2^100 in P), which the sum of P shows. Programs where that happens are done again
with a running maximum, by a second launch in which all others end at once.
Drawing and cost: docs/kernels.md.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# What a kernel's arguments are when it is compiled is not what their annotations tell a type checker.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .anchor_backward import backward
from .anchor_rows import limit, own_mask, places, span, tiling
from .launch import launch

LOG2E = tl.constexpr(1.4426950408889634)
LIMIT = tl.constexpr(2.0**100)
"""Mass relative to a row's reference up to which nothing has overflowed."""


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
    def backward(ctx: Any, *outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        packed, context, anchors, starts, out, lse = ctx.saved_tensors
        slope = outputs[0].contiguous()
        return *backward(packed, context, anchors, starts, out, lse, slope, *ctx.rules), *[None] * 5


def forward(
    packed: Tensor, context: Tensor, anchors: Tensor, starts: Tensor, heads: int, window: int | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """The output, and `[A, B, heads]` fp32: each row's log-sum-exp in base 2."""
    count, block, all_heads, dim = packed.shape
    kv_heads = (all_heads - heads) // 2
    share = heads // kv_heads
    cut = tiling("forward", packed.dtype, dim, share)
    step = cut.step(share)
    out = torch.empty(count, block, heads, dim, dtype=packed.dtype, device=packed.device)
    lse = torch.empty(count, block, heads, dtype=torch.float32, device=packed.device)
    grid = triton.cdiv(count * block * share, step), kv_heads
    far = limit(window, context, block)
    overflown = torch.empty(grid, dtype=torch.int32, device=packed.device)
    for quick in (True, False):
        launch(
            _attend, grid,
            packed, context, anchors, starts, out, lse, overflown, count, far, dim**-0.5, kv_heads, dim, block, share,
            step, cut.rows, cut.keys, cut.own_keys(block, share), max(16, triton.next_power_of_2(dim)),
            window is not None, causal, quick, num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
    return out, lse


@triton.jit
def _step(query, keys, values, result, top, mass, see, scale, masked: tl.constexpr):
    """Take one tile of keys into the running softmax: `result` and `mass` are relative to the row maximum `top`."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if masked:
        scores = tl.where(see, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    shrink = tl.exp2(top - higher)
    mass = mass * shrink + tl.sum(weights, 1)
    result = tl.dot(weights.to(values.dtype), values, result * shrink[:, None], input_precision="ieee")
    return result, higher, mass


@triton.jit
def _quick_step(query, keys, values, result, top, mass, see, scale, masked: tl.constexpr):
    """The same with a reference `top` that stays: nothing is scaled anew."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    weights = tl.exp2(scores * scale - top[:, None])
    if masked:
        weights = tl.where(see, weights, 0)
    mass += tl.sum(weights, 1)
    result = tl.dot(weights.to(values.dtype), values, result, input_precision="ieee")
    return result, top, mass


@triton.jit
def _walk(
    query, packed, context, row, exists, low, high, count, window, scale, kv, kv_heads, dim: tl.constexpr,
    block: tl.constexpr, share: tl.constexpr, step: tl.constexpr, keys: tl.constexpr, own: tl.constexpr,
    width: tl.constexpr, windowed: tl.constexpr, causal: tl.constexpr, quick: tl.constexpr,
):  # fmt: skip
    """Softmax over all that rows see: the blocks' own keys, then tiles of the context, whole ones first."""
    column = tl.arange(0, width)
    inside = column < dim
    key = tl.program_id(0) * step // (block * share) * block + tl.arange(0, own)
    wide = (share + 2) * kv_heads
    own_at = ((key.to(tl.int64) * wide + share * kv_heads + kv) * dim)[:, None] + column[None, :]
    own_near = (key < count * block)[:, None] & inside[None, :]
    own_k = tl.load(packed + own_at, mask=own_near, other=0)
    own_v = tl.load(packed + kv_heads * dim + own_at, mask=own_near, other=0)
    own_see = own_mask(row[:, None], key[None, :], exists[:, None], window, block, share, windowed, causal)
    result = tl.zeros([query.shape[0], width], tl.float32)
    top = tl.full([query.shape[0]], float("-inf"), tl.float32)
    mass = tl.zeros([query.shape[0]], tl.float32)
    result, top, mass = _step(query, own_k, own_v, result, top, mass, own_see, scale, True)

    lowest, whole_from, whole_to, tiles = span(exists, low, high, keys)
    last = tl.max(tl.where(exists & (low < high), high, 0), 0)
    tile = tl.arange(0, keys)
    stride = 2 * kv_heads * dim
    source = context + kv * dim + (tile[:, None] * stride + column[None, :])
    origin = lowest.to(tl.int64)
    for j in range(whole_from, whole_to):
        at = source + (origin + j * keys) * stride
        k = tl.load(at, mask=inside[None, :], other=0)
        v = tl.load(at + kv_heads * dim, mask=inside[None, :], other=0)
        if quick:
            result, top, mass = _quick_step(query, k, v, result, top, mass, None, scale, False)
        else:
            result, top, mass = _step(query, k, v, result, top, mass, None, scale, False)
    for i in range(0, tiles - (whole_to - whole_from)):
        j = tl.where(i < whole_from, i, i + whole_to - whole_from)
        position = lowest + j * keys + tile
        close = (position < last)[:, None] & inside[None, :]
        at = source + (origin + j * keys) * stride
        k = tl.load(at, mask=close, other=0)
        v = tl.load(at + kv_heads * dim, mask=close, other=0)
        see = (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None])
        if quick:
            result, top, mass = _quick_step(query, k, v, result, top, mass, see, scale, True)
        else:
            result, top, mass = _step(query, k, v, result, top, mass, see, scale, True)
    return result, top, mass


@triton.jit
def _attend(
    packed, context, anchors, starts, out, lse, overflown, count, window, scale, kv_heads, dim: tl.constexpr,
    block: tl.constexpr, share: tl.constexpr, step: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
    own: tl.constexpr, width: tl.constexpr, windowed: tl.constexpr, causal: tl.constexpr, quick: tl.constexpr,
):  # fmt: skip
    kv = tl.program_id(1)
    flag = overflown + tl.program_id(0) * kv_heads + kv
    if (not quick) and tl.load(flag) == 0:
        return
    number = tl.arange(0, rows)
    row = tl.program_id(0) * step + number
    exists = (number < step) & (row < count * block * share)
    low, high = places(anchors, starts, row, exists, window, block, share, windowed)
    column = tl.arange(0, width)
    near = exists[:, None] & (column < dim)[None, :]
    line = (row // share).to(tl.int64)
    head = kv * share + row % share
    query = tl.load(
        packed + ((line * ((share + 2) * kv_heads) + head) * dim)[:, None] + column[None, :], mask=near, other=0
    )
    result, top, mass = _walk(
        query, packed, context, row, exists, low, high, count, window, scale * LOG2E, kv, kv_heads, dim, block, share,
        step, keys, own, width, windowed, causal, quick,
    )  # fmt: skip
    if quick:
        tl.store(flag, (tl.max(mass, 0) > LIMIT).to(tl.int32))
    spot = line * (share * kv_heads) + head
    result = (result / mass[:, None]).to(out.dtype.element_ty)
    tl.store(out + (spot * dim)[:, None] + column[None, :], result, mask=near)
    tl.store(lse + spot, top + tl.log2(mass), mask=exists)
