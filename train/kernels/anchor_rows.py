"""What the attention kernels share: which rows a program has, what each sees, and how tiles are sized.

A row is one query: a slot of a block under one query head. The rows of one key-value head are counted block by block,
head by head, slot by slot, so the rows of a tile share the keys it loads; a tile may begin and end inside a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

FAR = tl.constexpr(1 << 30)
"""Beyond every position."""


@dataclass(frozen=True)
class Tiling:
    """How one kernel is cut.

    Attributes:
        rows: rows of a tile, a power of two.
        keys: context positions of a tile, a power of two.
        warps, stages: Triton's.
    """

    rows: int
    keys: int
    warps: int
    stages: int

    def own_keys(self, block: int, per: int) -> int:
        """Own keys that a tile of rows may meet, padded to what a matrix product takes."""
        whole = self.rows % per == 0 or per % self.rows == 0
        blocks = max(1, self.rows // per) if whole else (self.rows - 2) // per + 2
        return max(16, triton.next_power_of_2(blocks * block))


def tiling(kind: str, dtype: torch.dtype, dim: int) -> Tiling:
    """The tiling of a kernel, chosen by measurement on an H200 (docs/kernels.md), never at run time.

    Args:
        kind: "forward", "queries", "own" or "context": the gradients of queries, own keys and the context.
        dtype: of the inputs. float32 is for tests: small tiles.
        dim: head dimension.
    """
    if dtype == torch.float32:
        return Tiling(16, 16, 4, 1)
    if dim > 128:
        return {
            "forward": Tiling(128, 32, 8, 2),
            "queries": Tiling(64, 32, 8, 2),
            "own": Tiling(32, 16, 4, 1),
            "context": Tiling(32, 64, 8, 2),
        }[kind]
    return {
        "forward": Tiling(128, 64, 8, 3),
        "queries": Tiling(64, 64, 4, 2),
        "own": Tiling(64, 16, 4, 1),
        "context": Tiling(64, 64, 4, 2),
    }[kind]


@triton.jit
def places(anchors, starts, row, total, window, block: tl.constexpr, per: tl.constexpr, windowed: tl.constexpr):
    """Of rows, whether they exist (are among `total`) and the context they see: low <= p < high, or low = high."""
    exists = row < total
    high = tl.load(anchors + row // per, mask=exists, other=0).to(tl.int32)
    low = tl.load(starts + row // per, mask=exists, other=0).to(tl.int32)
    if windowed:
        low = tl.maximum(low, high + row % block - window + 1)
    return exists, tl.minimum(low, high), high


@triton.jit
def addresses(row, kv, heads, kv_heads, block: tl.constexpr, per: tl.constexpr):
    """Of rows, their head's place in `[A, B, heads]` and in `[A, B, heads + 2 * kv_heads]`, counted in heads."""
    line = (row // per).to(tl.int64) * block + row % block
    head = kv * (per // block) + row % per // block
    return line * heads + head, line * (heads + 2 * kv_heads) + head


@triton.jit
def span(exists, low, high, keys: tl.constexpr):
    """The tiles that rows walk: where they begin, how many there are, and which of them every row sees whole.

    Returns lowest, whole_from, whole_to, tiles: tile j covers positions from lowest + j * keys, and needs a mask unless
    whole_from <= j < whole_to.
    """
    sees = exists & (low < high)
    lowest = tl.min(tl.where(sees, low, FAR), 0)
    tiles = tl.cdiv(tl.maximum(tl.max(tl.where(sees, high, 0), 0) - lowest, 0), keys)
    common_low = tl.max(tl.where(exists, tl.where(sees, low, FAR), 0), 0)
    common_high = tl.min(tl.where(exists, high, FAR), 0)
    whole_from = tl.minimum(tl.cdiv(tl.maximum(common_low - lowest, 0), keys), tiles)
    whole_to = tl.minimum(tl.maximum(tl.maximum(common_high - lowest, 0) // keys, whole_from), tiles)
    return lowest, whole_from, whole_to, tiles


@triton.jit
def own_mask(row, key, total, window, block: tl.constexpr, per: tl.constexpr, windowed: tl.constexpr,
             causal: tl.constexpr):  # fmt: skip
    """Which own keys rows see; `row` and `key` broadcast. Keys are counted block by block, slot by slot.

    Rows that do not exist see all, so that nothing becomes NaN.
    """
    see = (row // per) == (key // block)
    if windowed:
        gap = row % block - key % block
        if causal:
            see = see & (gap >= 0) & (gap < window)
        else:
            see = see & (gap < window) & (gap > -window)
    return see | (row >= total)
