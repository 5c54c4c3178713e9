"""Gradients of anchor-block attention: of queries, of the blocks' own keys, of the context. No atomics.

    delta = sum(dout * out)     P = exp(S - lse)     dS = P * (dout V^T - delta)
    dQ = dS K / sqrt(d)         dK = dS^T Q / sqrt(d)         dV = P^T dout

The first kernel is cut as the forward one, and makes delta on the way. The second takes a block. The third takes a
tile of context positions and walks the rows of the blocks that see it: anchors are sorted, so these blocks are
contiguous, and counting finds them.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# What a kernel's arguments are when it is compiled is not what their annotations tell a type checker.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .anchor_rows import FAR, limit, own_mask, places, span, tiling
from .launch import launch

LOG2E = tl.constexpr(1.4426950408889634)


def backward(
    packed: Tensor, context: Tensor, anchors: Tensor, starts: Tensor, out: Tensor, lse: Tensor, slope: Tensor,
    heads: int, window: int | None, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of `packed` and `context`, from the forward pass's results and `slope`, the gradient of `out`."""
    count, block, all_heads, dim = packed.shape
    length = context.shape[0]
    kv_heads = (all_heads - heads) // 2
    share = heads // kv_heads
    width = max(16, triton.next_power_of_2(dim))
    far, windowed, scale = limit(window, context, block), window is not None, dim**-0.5
    delta = torch.empty_like(lse)
    d_packed, d_context = torch.empty_like(packed), torch.empty_like(context)
    cut = tiling("queries", packed.dtype, dim, share)
    launch(
        _queries, (triton.cdiv(count * block * share, cut.step(share)), kv_heads),
        packed, context, anchors, starts, out, lse, slope, delta, d_packed, count, far, scale, kv_heads, dim, block,
        share, cut.step(share), cut.rows, cut.keys, cut.own_keys(block, share), width, windowed, causal,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    cut = tiling("own", packed.dtype, dim, share)
    launch(
        _own, (count, kv_heads),
        packed, lse, slope, delta, d_packed, far, scale, kv_heads, dim, block, share, cut.step(share), cut.rows,
        max(16, triton.next_power_of_2(block)), width, windowed, causal, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    cut = tiling("context", packed.dtype, dim, share)
    launch(
        _context, (kv_heads, triton.cdiv(length, cut.keys)),
        packed, context, anchors, starts, lse, slope, delta, d_context, length, count, far, scale, kv_heads, dim,
        block, share, cut.step(share), cut.rows, cut.keys, max(16, triton.next_power_of_2(count)), width, windowed,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return d_packed, d_context


@triton.jit
def _step(query, slope, keys, values, total, lse, delta, see, scale, masked: tl.constexpr):
    """Add one tile's share to the queries' gradient."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    d_weights = tl.dot(slope, tl.trans(values), input_precision="ieee")
    weights = tl.exp2(scores * scale - lse[:, None])
    if masked:
        weights = tl.where(see, weights, 0)
    d_scores = weights * (d_weights - delta[:, None])
    return tl.dot(d_scores.to(keys.dtype), keys, total, input_precision="ieee")


@triton.jit
def _queries(
    packed, context, anchors, starts, out, lse, slope, delta, d_packed, count, window, scale, kv_heads,
    dim: tl.constexpr, block: tl.constexpr, share: tl.constexpr, step: tl.constexpr, rows: tl.constexpr,
    keys: tl.constexpr, own: tl.constexpr, width: tl.constexpr, windowed: tl.constexpr, causal: tl.constexpr,
):  # fmt: skip
    kv = tl.program_id(1)
    base = scale * LOG2E
    number = tl.arange(0, rows)
    row = tl.program_id(0) * step + number
    exists = (number < step) & (row < count * block * share)
    low, high = places(anchors, starts, row, exists, window, block, share, windowed)
    column = tl.arange(0, width)
    inside = column < dim
    near = exists[:, None] & inside[None, :]
    line = (row // share).to(tl.int64)
    head = kv * share + row % share
    wide = (share + 2) * kv_heads
    spot = line * (share * kv_heads) + head
    mine = ((line * wide + head) * dim)[:, None] + column[None, :]
    result_at = (spot * dim)[:, None] + column[None, :]
    query = tl.load(packed + mine, mask=near, other=0)
    d_out = tl.load(slope + result_at, mask=near, other=0)
    norm = tl.load(lse + spot, mask=exists, other=0)
    result = tl.load(out + result_at, mask=near, other=0)
    portion = tl.sum(d_out.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(delta + spot, portion, mask=exists)

    key = tl.program_id(0) * step // (block * share) * block + tl.arange(0, own)
    own_at = ((key.to(tl.int64) * wide + share * kv_heads + kv) * dim)[:, None] + column[None, :]
    own_near = (key < count * block)[:, None] & inside[None, :]
    own_k = tl.load(packed + own_at, mask=own_near, other=0)
    own_v = tl.load(packed + kv_heads * dim + own_at, mask=own_near, other=0)
    own_see = own_mask(row[:, None], key[None, :], exists[:, None], window, block, share, windowed, causal)
    total = tl.zeros([rows, width], tl.float32)
    total = _step(query, d_out, own_k, own_v, total, norm, portion, own_see, base, True)

    lowest, whole_from, whole_to, tiles = span(exists, low, high, keys)
    tile = tl.arange(0, keys)
    stride = 2 * kv_heads * dim
    source = context + kv * dim + (tile[:, None] * stride + column[None, :])
    origin = lowest.to(tl.int64)
    for j in range(whole_from, whole_to):
        at = source + (origin + j * keys) * stride
        k = tl.load(at, mask=inside[None, :], other=0)
        v = tl.load(at + kv_heads * dim, mask=inside[None, :], other=0)
        total = _step(query, d_out, k, v, total, norm, portion, None, base, False)
    last = tl.max(tl.where(exists & (low < high), high, 0), 0)
    for i in range(0, tiles - (whole_to - whole_from)):
        j = tl.where(i < whole_from, i, i + whole_to - whole_from)
        position = lowest + j * keys + tile
        close = (position < last)[:, None] & inside[None, :]
        at = source + (origin + j * keys) * stride
        k = tl.load(at, mask=close, other=0)
        v = tl.load(at + kv_heads * dim, mask=close, other=0)
        see = (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None])
        total = _step(query, d_out, k, v, total, norm, portion, see, base, True)
    tl.store(d_packed + mine, (total * scale).to(d_packed.dtype.element_ty), mask=near)


@triton.jit
def _key_step(
    packed, slope, lse, delta, line, kv, exists, keys, values, d_k, d_v, see, scale, kv_heads, dim: tl.constexpr,
    share: tl.constexpr, rows: tl.constexpr, width: tl.constexpr, bounded: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Add what a tile of rows gives to the gradients of a tile of keys and values.

    `line` is the tile's first slot; `see` is `[keys, rows]`; without `bounded` all rows exist.
    """
    number = tl.arange(0, rows)
    column = tl.arange(0, width)[None, :]
    near = column < dim
    if bounded:
        near = near & exists[:, None]
    heads = share * kv_heads
    start = line.to(tl.int64) * (heads + 2 * kv_heads) + kv * share
    place = number // share * (heads + 2 * kv_heads) + number % share
    query = tl.load(packed + start * dim + ((place * dim)[:, None] + column), mask=near, other=0)
    start = line.to(tl.int64) * heads + kv * share
    place = number // share * heads + number % share
    d_out = tl.load(slope + start * dim + ((place * dim)[:, None] + column), mask=near, other=0)
    if bounded:
        norm = tl.load(lse + start + place, mask=exists, other=0)
        portion = tl.load(delta + start + place, mask=exists, other=0)
    else:
        norm = tl.load(lse + start + place)
        portion = tl.load(delta + start + place)
    # Both products before anything is done with either: a tenth faster than in the order of the formulas.
    scores = tl.dot(keys, tl.trans(query), input_precision="ieee")
    d_weights = tl.dot(values, tl.trans(d_out), input_precision="ieee")
    weights = tl.exp2(scores * scale - norm[None, :])
    if masked:
        weights = tl.where(see, weights, 0)
    d_scores = weights * (d_weights - portion[None, :])
    d_v = tl.dot(weights.to(d_out.dtype), d_out, d_v, input_precision="ieee")
    d_k = tl.dot(d_scores.to(query.dtype), query, d_k, input_precision="ieee")
    return d_k, d_v


@triton.jit
def _own(
    packed, lse, slope, delta, d_packed, window, scale, kv_heads, dim: tl.constexpr, block: tl.constexpr,
    share: tl.constexpr, step: tl.constexpr, rows: tl.constexpr, own: tl.constexpr, width: tl.constexpr,
    windowed: tl.constexpr, causal: tl.constexpr,
):  # fmt: skip
    kv = tl.program_id(1)
    first = tl.program_id(0) * block
    key = tl.arange(0, own)
    column = tl.arange(0, width)
    near = (key < block)[:, None] & (column < dim)[None, :]
    line = (first + key).to(tl.int64)
    at = ((line * ((share + 2) * kv_heads) + share * kv_heads + kv) * dim)[:, None] + column[None, :]
    k = tl.load(packed + at, mask=near, other=0)
    v = tl.load(packed + kv_heads * dim + at, mask=near, other=0)
    d_k = tl.zeros([own, width], tl.float32)
    d_v = tl.zeros([own, width], tl.float32)
    number = tl.arange(0, rows)
    for i in range(0, tl.cdiv(block * share, step)):
        row = first * share + i * step + number
        exists = (number < step) & (row < (first + block) * share)
        see = own_mask(row[None, :], (first + key)[:, None], exists[None, :], window, block, share, windowed, causal)
        d_k, d_v = _key_step(
            packed, slope, lse, delta, first + i * (step // share), kv, exists, k, v, d_k, d_v, see, scale * LOG2E,
            kv_heads, dim, share, rows, width, True, True,
        )  # fmt: skip
    kind = d_packed.dtype.element_ty
    tl.store(d_packed + at, (d_k * scale).to(kind), mask=near)
    tl.store(d_packed + kv_heads * dim + at, d_v.to(kind), mask=near)


@triton.jit
def _context(
    packed, context, anchors, starts, lse, slope, delta, d_context, length, count, window, scale, kv_heads,
    dim: tl.constexpr, block: tl.constexpr, share: tl.constexpr, step: tl.constexpr, rows: tl.constexpr,
    keys: tl.constexpr, anchors_width: tl.constexpr, width: tl.constexpr, windowed: tl.constexpr,
):  # fmt: skip
    kv = tl.program_id(0)
    begin = tl.program_id(1) * keys
    end = tl.minimum(begin + keys, length)
    position = begin + tl.arange(0, keys)
    column = tl.arange(0, width)
    near = (position < length)[:, None] & (column < dim)[None, :]
    at = (position.to(tl.int64)[:, None] * (2 * kv_heads) + kv) * dim + column[None, :]
    k = tl.load(context + at, mask=near, other=0)
    v = tl.load(context + kv_heads * dim + at, mask=near, other=0)

    # Which blocks see any of these positions, first <= block < last, and which see all of them with every slot.
    each = tl.arange(0, anchors_width)
    listed = each < count
    anchor = tl.load(anchors + each, mask=listed, other=FAR).to(tl.int32)
    start = tl.load(starts + each, mask=listed, other=FAR).to(tl.int32)
    first = tl.sum((anchor <= begin).to(tl.int32), 0)
    last = tl.sum((start < end).to(tl.int32), 0)
    whole_from = tl.sum((anchor < end).to(tl.int32), 0)
    whole_to = tl.sum((start <= begin).to(tl.int32), 0)
    if windowed:
        last = tl.minimum(last, tl.sum((anchor < end + window - 1).to(tl.int32), 0))
        whole_to = tl.minimum(whole_to, tl.sum((anchor + block - 1 < begin + window).to(tl.int32), 0))

    # The same in tiles of rows; a tile is whole when all its rows are.
    base = first * (block * share)
    total = tl.maximum(last, first) * (block * share)
    tiles = tl.cdiv(total - base, step)
    from_tile = tl.minimum(tl.cdiv(tl.maximum(whole_from * (block * share) - base, 0), step), tiles)
    to_tile = tl.maximum(tl.maximum(tl.minimum(whole_to * (block * share), total) - base, 0) // step, from_tile)
    d_k = tl.zeros([keys, width], tl.float32)
    d_v = tl.zeros([keys, width], tl.float32)
    number = tl.arange(0, rows)
    used = number < step
    for i in range(from_tile, to_tile):
        d_k, d_v = _key_step(
            packed, slope, lse, delta, first * block + i * (step // share), kv, used, k, v, d_k, d_v, None,
            scale * LOG2E, kv_heads, dim, share, rows, width, step < rows, False,
        )  # fmt: skip
    for n in range(0, tiles - (to_tile - from_tile)):
        i = tl.where(n < from_tile, n, n + to_tile - from_tile)
        row = base + i * step + number
        exists = used & (row < total)
        low, high = places(anchors, starts, row, exists, window, block, share, windowed)
        see = (position[:, None] >= low[None, :]) & (position[:, None] < high[None, :])
        d_k, d_v = _key_step(
            packed, slope, lse, delta, first * block + i * (step // share), kv, exists, k, v, d_k, d_v, see,
            scale * LOG2E, kv_heads, dim, share, rows, width, True, True,
        )  # fmt: skip
    kind = d_context.dtype.element_ty
    tl.store(d_context + at, (d_k * scale).to(kind), mask=near)
    tl.store(d_context + kv_heads * dim + at, d_v.to(kind), mask=near)
