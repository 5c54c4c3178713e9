"""Gradients of anchor-block attention: of queries, of the blocks' own keys, of the context. No atomics.

    delta = sum(dout * out)     P = exp(S - lse)     dS = P * (dout V^T - delta)
    dQ = dS K / sqrt(d)         dK = dS^T Q / sqrt(d)         dV = P^T dout

The first kernel is cut as the forward one, and makes delta on the way. The second takes a block. The third takes a
tile of context positions and walks the rows of the blocks that see it: anchors are sorted, so these blocks are
contiguous, and counting finds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .anchor_rows import FAR, addresses, own_mask, places, span, tiling
from .launch import launch

LOG2E = tl.constexpr(1.4426950408889634)


def backward(
    packed: Tensor, context: Tensor, anchors: Tensor, starts: Tensor, out: Tensor, lse: Tensor, slope: Tensor,
    heads: int, window: int | None, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of `packed` and `context`, from the forward pass's results and `slope`, the gradient of `out`."""
    count, block, all_heads, dim = packed.shape
    kv_heads = (all_heads - heads) // 2
    per = heads // kv_heads * block
    width = max(16, triton.next_power_of_2(dim))
    delta = torch.empty_like(lse)
    d_packed, d_context = torch.empty_like(packed), torch.empty_like(context)
    limit = window or 0
    cut = tiling("queries", packed.dtype, dim)
    launch(
        _queries, (triton.cdiv(count * per, cut.rows), kv_heads),
        packed, context, anchors, starts, out, lse, slope, delta, d_packed, count, limit, dim**-0.5, heads, kv_heads,
        dim, block, per, cut.rows, cut.keys, cut.own_keys(block, per), width, window is not None, causal,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    cut = tiling("own", packed.dtype, dim)
    launch(
        _own, (count, kv_heads),
        packed, lse, slope, delta, d_packed, limit, dim**-0.5, heads, kv_heads, dim, block, per, cut.rows,
        max(16, triton.next_power_of_2(block)), width, window is not None, causal,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    cut = tiling("context", packed.dtype, dim)
    length = context.shape[0]
    launch(
        _context, (kv_heads, triton.cdiv(length, cut.keys)),
        packed, context, anchors, starts, lse, slope, delta, d_context, length, count, limit, dim**-0.5,
        heads, kv_heads, dim, block, per, cut.rows, cut.keys, max(16, triton.next_power_of_2(count)), width,
        window is not None, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return d_packed, d_context


@triton.jit
def _step(query, slope, keys, values, total, lse, delta, see, scale, masked: tl.constexpr):
    """Add one tile's share to the queries' gradient."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if masked:
        scores = tl.where(see, scores, float("-inf"))
    weights = tl.exp2(scores - lse[:, None])
    d_scores = weights * (tl.dot(slope, tl.trans(values), input_precision="ieee") - delta[:, None])
    return tl.dot(d_scores.to(keys.dtype), keys, total, input_precision="ieee")


@triton.jit
def _queries(
    packed, context, anchors, starts, out, lse, slope, delta, d_packed, count, window, scale, heads, kv_heads,
    dim: tl.constexpr, block: tl.constexpr, per: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
    own: tl.constexpr, width: tl.constexpr, windowed: tl.constexpr, causal: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * rows
    kv = tl.program_id(1)
    base = scale * LOG2E
    row = first + tl.arange(0, rows)
    exists, low, high = places(anchors, starts, row, count * per, window, block, per, windowed)
    spot, mine = addresses(row, kv, heads, kv_heads, block, per)
    column = tl.arange(0, width)
    inside = column < dim
    near = exists[:, None] & inside[None, :]
    query = tl.load(packed + (mine * dim)[:, None] + column[None, :], mask=near, other=0)
    d_out = tl.load(slope + (spot * dim)[:, None] + column[None, :], mask=near, other=0)
    result = tl.load(out + (spot * dim)[:, None] + column[None, :], mask=near, other=0)
    norm = tl.load(lse + spot, mask=exists, other=0)
    share = tl.sum(d_out.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(delta + spot, share, mask=exists)

    key = first // per * block + tl.arange(0, own)
    own_at = (key.to(tl.int64) * (heads + 2 * kv_heads) + heads + kv) * dim
    own_near = (key < count * block)[:, None] & inside[None, :]
    own_k = tl.load(packed + own_at[:, None] + column[None, :], mask=own_near, other=0)
    own_v = tl.load(packed + own_at[:, None] + kv_heads * dim + column[None, :], mask=own_near, other=0)
    own_see = own_mask(row[:, None], key[None, :], count * per, window, block, per, windowed, causal)
    total = tl.zeros([rows, width], tl.float32)
    total = _step(query, d_out, own_k, own_v, total, norm, share, own_see, base, True)

    lowest, whole_from, whole_to, tiles = span(exists, low, high, keys)
    tile = tl.arange(0, keys)
    stride = 2 * kv_heads * dim
    source = context + kv * dim + column[None, :]
    for j in range(whole_from, whole_to):
        at = (lowest + j * keys + tile).to(tl.int64)[:, None] * stride
        k = tl.load(source + at, mask=inside[None, :], other=0)
        v = tl.load(source + kv_heads * dim + at, mask=inside[None, :], other=0)
        total = _step(query, d_out, k, v, total, norm, share, None, base, False)
    last = tl.max(tl.where(exists, high, 0), 0)
    for i in range(0, tiles - (whole_to - whole_from)):
        j = tl.where(i < whole_from, i, i + whole_to - whole_from)
        position = lowest + j * keys + tile
        at = position.to(tl.int64)[:, None] * stride
        close = (position < last)[:, None] & inside[None, :]
        k = tl.load(source + at, mask=close, other=0)
        v = tl.load(source + kv_heads * dim + at, mask=close, other=0)
        see = (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None])
        total = _step(query, d_out, k, v, total, norm, share, see, base, True)
    tl.store(
        d_packed + (mine * dim)[:, None] + column[None, :], (total * scale).to(d_packed.dtype.element_ty), mask=near
    )


@triton.jit
def _key_step(query, d_out, norm, share, keys, values, d_k, d_v, see, scale, masked: tl.constexpr):
    """Add what a tile of rows gives to the gradients of a tile of keys and values; `see` is `[keys, rows]`."""
    scores = tl.dot(keys, tl.trans(query), input_precision="ieee") * scale
    if masked:
        scores = tl.where(see, scores, float("-inf"))
    weights = tl.exp2(scores - norm[None, :])
    d_v = tl.dot(weights.to(d_out.dtype), d_out, d_v, input_precision="ieee")
    d_scores = weights * (tl.dot(values, tl.trans(d_out), input_precision="ieee") - share[None, :])
    d_k = tl.dot(d_scores.to(query.dtype), query, d_k, input_precision="ieee")
    return d_k, d_v


@triton.jit
def _load_rows(packed, slope, lse, delta, row, total, kv, heads, kv_heads, dim: tl.constexpr, block: tl.constexpr,
               per: tl.constexpr, width: tl.constexpr):  # fmt: skip
    """Queries, output gradients, log-sum-exp and delta of rows; zeros for those that are not among `total`."""
    column = tl.arange(0, width)[None, :]
    exists = row < total
    near = exists[:, None] & (column < dim)
    spot, mine = addresses(row, kv, heads, kv_heads, block, per)
    query = tl.load(packed + (mine * dim)[:, None] + column, mask=near, other=0)
    d_out = tl.load(slope + (spot * dim)[:, None] + column, mask=near, other=0)
    return query, d_out, tl.load(lse + spot, mask=exists, other=0), tl.load(delta + spot, mask=exists, other=0)


@triton.jit
def _own(
    packed, lse, slope, delta, d_packed, window, scale, heads, kv_heads, dim: tl.constexpr, block: tl.constexpr,
    per: tl.constexpr, rows: tl.constexpr, own: tl.constexpr, width: tl.constexpr, windowed: tl.constexpr,
    causal: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    kv = tl.program_id(1)
    key = tl.arange(0, own)
    column = tl.arange(0, width)
    near = (key < block)[:, None] & (column < dim)[None, :]
    line = number.to(tl.int64) * block + key
    at = ((line * (heads + 2 * kv_heads) + heads + kv) * dim)[:, None] + column[None, :]
    k = tl.load(packed + at, mask=near, other=0)
    v = tl.load(packed + kv_heads * dim + at, mask=near, other=0)
    d_k = tl.zeros([own, width], tl.float32)
    d_v = tl.zeros([own, width], tl.float32)
    end = (number + 1) * per
    for i in range(0, tl.cdiv(per, rows)):
        row = number * per + i * rows + tl.arange(0, rows)
        query, d_out, norm, share = _load_rows(
            packed, slope, lse, delta, row, end, kv, heads, kv_heads, dim, block, per, width
        )
        see = own_mask(row[None, :], (number * block + key)[:, None], end, window, block, per, windowed, causal)
        d_k, d_v = _key_step(query, d_out, norm, share, k, v, d_k, d_v, see, scale * LOG2E, True)
    kind = d_packed.dtype.element_ty
    tl.store(d_packed + at, (d_k * scale).to(kind), mask=near)
    tl.store(d_packed + kv_heads * dim + at, d_v.to(kind), mask=near)


@triton.jit
def _context(
    packed, context, anchors, starts, lse, slope, delta, d_context, length, count, window, scale, heads, kv_heads,
    dim: tl.constexpr, block: tl.constexpr, per: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
    anchors_width: tl.constexpr, width: tl.constexpr, windowed: tl.constexpr,
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
    number = tl.arange(0, anchors_width)
    listed = number < count
    anchor = tl.load(anchors + number, mask=listed, other=FAR).to(tl.int32)
    start = tl.load(starts + number, mask=listed, other=FAR).to(tl.int32)
    first = tl.sum((anchor <= begin).to(tl.int32), 0)
    last = tl.sum((start < end).to(tl.int32), 0)
    whole_from = tl.sum((anchor < end).to(tl.int32), 0)
    whole_to = tl.sum((start <= begin).to(tl.int32), 0)
    if windowed:
        last = tl.minimum(last, tl.sum((anchor < end + window - 1).to(tl.int32), 0))
        whole_to = tl.minimum(whole_to, tl.sum((anchor + block - 1 < begin + window).to(tl.int32), 0))

    # The same in tiles of rows; a tile is whole when all its rows are.
    base = first * per
    total = tl.maximum(last, first) * per
    tiles = tl.cdiv(total - base, rows)
    from_tile = tl.minimum(tl.cdiv(tl.maximum(whole_from * per - base, 0), rows), tiles)
    to_tile = tl.maximum(tl.maximum(tl.minimum(whole_to * per, total) - base, 0) // rows, from_tile)
    d_k = tl.zeros([keys, width], tl.float32)
    d_v = tl.zeros([keys, width], tl.float32)
    for i in range(from_tile, to_tile):
        row = base + i * rows + tl.arange(0, rows)
        query, d_out, norm, share = _load_rows(
            packed, slope, lse, delta, row, total, kv, heads, kv_heads, dim, block, per, width
        )
        d_k, d_v = _key_step(query, d_out, norm, share, k, v, d_k, d_v, None, scale * LOG2E, False)
    for n in range(0, tiles - (to_tile - from_tile)):
        row = base + tl.where(n < from_tile, n, n + to_tile - from_tile) * rows + tl.arange(0, rows)
        query, d_out, norm, share = _load_rows(
            packed, slope, lse, delta, row, total, kv, heads, kv_heads, dim, block, per, width
        )
        _, low, high = places(anchors, starts, row, total, window, block, per, windowed)
        see = (position[:, None] >= low[None, :]) & (position[:, None] < high[None, :])
        d_k, d_v = _key_step(query, d_out, norm, share, k, v, d_k, d_v, see, scale * LOG2E, True)
    kind = d_context.dtype.element_ty
    tl.store(d_context + at, (d_k * scale).to(kind), mask=near)
    tl.store(d_context + kv_heads * dim + at, d_v.to(kind), mask=near)
