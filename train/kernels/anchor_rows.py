"""What the attention kernels share: which rows a program has, what each sees, and how tiles are sized.

A row is one query: a slot of a block under one query head. The rows of one key-value head are counted block by block,
slot by slot, head by head: as they lie in memory, and so that the rows of a tile share the keys it loads. A tile takes
whole slots, and may begin and end inside a block.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# What a kernel's arguments are when it is compiled is not what their annotations tell a type checker.

from __future__ import annotations

from dataclasses import dataclass, replace

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

    def step(self, share: int) -> int:
        """Rows that a tile takes, those of whole slots with `share` heads each; the others of the tile are idle."""
        return self.rows // share * share

    def own_keys(self, block: int, share: int) -> int:
        """Own keys that a tile of rows may meet, padded to what a matrix product takes."""
        slots = self.rows // share
        whole = slots % block == 0 or block % slots == 0
        blocks = max(1, slots // block) if whole else (slots - 2) // block + 2
        return max(16, triton.next_power_of_2(blocks * block))


def tiling(kind: str, dtype: torch.dtype, dim: int, share: int) -> Tiling:
    """The tiling of a kernel: fixed, never picked at run time; up to a head of 128 by measurement (docs/kernels.md).

    Args:
        kind: "forward", "queries", "own" or "context": the gradients of queries, own keys and the context.
        dtype: of the inputs. float32 is for tests: small tiles.
        dim: head dimension.
        share: query heads of a key-value head.
    """
    cut = _tiling(kind, dtype, dim)
    return replace(cut, rows=max(cut.rows, triton.next_power_of_2(share)))


def _tiling(kind: str, dtype: torch.dtype, dim: int) -> Tiling:
    if dtype == torch.float32:
        return Tiling(16, 16, 4, 1)
    if dim > 128:
        return {
            "forward": Tiling(64, 32, 8, 2),
            "queries": Tiling(64, 32, 8, 2),
            "own": Tiling(32, 16, 4, 1),
            "context": Tiling(32, 64, 8, 2),
        }[kind]
    return {
        "forward": Tiling(64, 32, 4, 3),
        "queries": Tiling(64, 64, 4, 2),
        "own": Tiling(32, 16, 4, 2),
        "context": Tiling(32, 64, 4, 3),
    }[kind]


def limit(window: int | None, context: torch.Tensor, block: int) -> int:
    """A window as kernels take it: no larger than one that hides nothing, so that positions plus it stay small."""
    return 0 if window is None else min(window, len(context) + block)


@triton.jit
def places(anchors, starts, row, exists, window, block: tl.constexpr, share: tl.constexpr, windowed: tl.constexpr):
    """The context that rows see: low <= p < high, or low = high where they see none or do not exist."""
    number = row // (block * share)
    high = tl.load(anchors + number, mask=exists, other=0).to(tl.int32)
    low = tl.load(starts + number, mask=exists, other=0).to(tl.int32)
    if windowed:
        low = tl.maximum(low, high + row // share % block - window + 1)
    return tl.minimum(low, high), high


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
def own_mask(row, key, exists, window, block: tl.constexpr, share: tl.constexpr, windowed: tl.constexpr,
             causal: tl.constexpr):  # fmt: skip
    """Which own keys rows see; `row`, `exists` and `key` broadcast. Keys are counted block by block, slot by slot.

    Rows that do not exist see all, so that nothing becomes NaN.
    """
    slot = row // share
    see = slot // block == key // block
    if windowed:
        if causal:
            see = see & (slot >= key) & (slot < key + window)
        else:
            see = see & (slot < key + window) & (slot > key - window)
    return see | (exists == 0)
