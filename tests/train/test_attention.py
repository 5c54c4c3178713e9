"""Anchor-block attention against a brute force written from the design's sentences, one query at a time, in fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_offline.train.attention import Blocks, anchor_attention


def sees_context(slot: int, anchor: int, position: int, document: list[int], window: int | None) -> bool:
    """Slot k sees context position p when p < a, both in the same document, and, with a window, a + k - p < W."""
    if position >= anchor or document[position] != document[anchor]:
        return False
    return window is None or anchor + slot - position < window


def sees_own(slot: int, other: int, window: int | None, causal: bool) -> bool:
    """All of its block in a full layer; in a sliding one j <= k when causal, and |k - j| < W always."""
    if window is None:
        return True
    return abs(slot - other) < window and (other <= slot or not causal)


def brute_force(
    query: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    anchors: list[int],
    document: list[int],
    window: int | None,
    causal: bool,
) -> torch.Tensor:
    count, block, heads, dim = query.shape
    share = heads // block_key.shape[2]
    out = torch.zeros_like(query)
    for a in range(count):
        for k in range(block):
            for h in range(heads):
                keys, values = [], []
                for p in range(len(document)):
                    if anchors[a] < len(document) and sees_context(k, anchors[a], p, document, window):
                        keys.append(context_key[p, h // share])
                        values.append(context_value[p, h // share])
                for j in range(block):
                    if sees_own(k, j, window, causal):
                        keys.append(block_key[a, j, h // share])
                        values.append(block_value[a, j, h // share])
                weights = torch.softmax(torch.stack(keys) @ query[a, k, h] / math.sqrt(dim), 0)
                out[a, k, h] = weights @ torch.stack(values)
    return out


def starts_of(document: list[int]) -> torch.Tensor:
    """Where each position's document starts."""
    return torch.tensor([document.index(d) for d in document])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], int, int | None, bool, int]:
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    total = len(document)
    anchors = sorted(draw(st.sets(st.integers(0, total - 1), max_size=7)))
    missing = draw(st.integers(0 if anchors else 1, 3))
    window = draw(st.sampled_from([None, 1, 2, 3, 5, 100]))
    return document, anchors + [total] * missing, draw(st.integers(2, 5)), window, draw(st.booleans()), total


@given(cases(), st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_equal_the_brute_force(
    case: tuple[list[int], list[int], int, int | None, bool, int], seed: int
) -> None:
    document, anchors, block, window, causal, total = case
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    count, heads, kv_heads, dim = len(anchors), 4, 2, 8
    inputs = (
        draw(count, block, heads, dim),
        draw(count, block, kv_heads, dim),
        draw(count, block, kv_heads, dim),
        draw(total, kv_heads, dim),
        draw(total, kv_heads, dim),
    )
    where = Blocks.of(torch.tensor(anchors), starts_of(document))
    # The reference in this package rounds its softmax to fp32, so fp64 inputs agree to fp32.
    ours = anchor_attention(*inputs, where, window, causal)
    expected = brute_force(*inputs, anchors, document, window, causal)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for mine, true in zip(
        torch.autograd.grad((ours * weights).sum(), inputs, materialize_grads=True, allow_unused=True),
        torch.autograd.grad((expected * weights).sum(), inputs, materialize_grads=True, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("group", [1, 3, 1000])
def test_how_many_anchors_are_taken_at_a_time_does_not_matter(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    document = [number for number in range(6) for _ in range(20)]
    anchors = torch.tensor(sorted(rng.choice(120, 40, replace=False).tolist()))
    where = Blocks.of(anchors, starts_of(document))
    torch.manual_seed(0)
    blocks = (torch.randn(40, 4, 2, 8), torch.randn(40, 4, 1, 8), torch.randn(40, 4, 1, 8))
    context = (torch.randn(120, 1, 8), torch.randn(120, 1, 8))
    expected = anchor_attention(*blocks, *context, where, 7, True)
    monkeypatch.setattr("dflash_offline.train.attention.GROUP", group)
    torch.testing.assert_close(anchor_attention(*blocks, *context, where, 7, True), expected)
