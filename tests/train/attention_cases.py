"""Ragged cases of anchor-block attention, and a brute force written from the design's sentences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st


@dataclass(frozen=True)
class Case:
    """Documents as a number a position, anchors (the context's length where one is missing), and the layer's rules."""

    document: list[int]
    anchors: list[int]
    block: int
    window: int | None
    causal: bool


@st.composite
def cases(draw: st.DrawFn, blocks: tuple[int, int] = (2, 5)) -> Case:
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    total = len(document)
    anchors = sorted(draw(st.sets(st.integers(0, total - 1), max_size=7)))
    missing = draw(st.integers(0 if anchors else 1, 3))
    window = draw(st.sampled_from([None, 1, 2, 3, 5, 100]))
    return Case(document, anchors + [total] * missing, draw(st.integers(*blocks)), window, draw(st.booleans()))


def sees_context(slot: int, anchor: int, position: int, case: Case) -> bool:
    """Slot k sees context position p when p < a, both in the same document, and, with a window, a + k - p < W."""
    if anchor >= len(case.document) or position >= anchor or case.document[position] != case.document[anchor]:
        return False
    return case.window is None or anchor + slot - position < case.window


def sees_own(slot: int, other: int, case: Case) -> bool:
    """All of its block in a full layer; in a sliding one j <= k when causal, and |k - j| < W always."""
    if case.window is None:
        return True
    return abs(slot - other) < case.window and (other <= slot or not case.causal)


def brute_force(packed: torch.Tensor, context: torch.Tensor, case: Case, heads: int) -> torch.Tensor:
    """`[A, B, heads, d]`, one query at a time."""
    count, block, all_heads, dim = packed.shape
    kv_heads = (all_heads - heads) // 2
    share = heads // kv_heads
    rows = []
    for a in range(count):
        for k in range(block):
            places = [p for p in range(len(case.document)) if sees_context(k, case.anchors[a], p, case)]
            slots = [j for j in range(block) if sees_own(k, j, case)]
            for h in range(heads):
                kv = h // share
                keys = torch.cat([context[places, kv], packed[a, slots, heads + kv]])
                values = torch.cat([context[places, kv_heads + kv], packed[a, slots, heads + kv_heads + kv]])
                rows.append(torch.softmax(keys @ packed[a, k, h] / math.sqrt(dim), 0) @ values)
    return torch.stack(rows).view(count, block, heads, dim)


def starts_of(document: list[int]) -> torch.Tensor:
    """Where each position's document starts."""
    return torch.tensor([document.index(d) for d in document])
