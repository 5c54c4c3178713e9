"""Anchor-block attention in plain torch against a brute force written from the design's sentences, in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import Case, brute_force, cases, starts_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_offline.train.attention import Blocks, anchor_attention


@given(cases(), st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_equal_the_brute_force(case: Case, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    heads, kv_heads, dim = 4, 2, 8
    inputs = draw(len(case.anchors), case.block, heads + 2 * kv_heads, dim), draw(len(case.document), 2 * kv_heads, dim)
    where = Blocks.of(torch.tensor(case.anchors), starts_of(case.document))
    # The reference in this package rounds its softmax to fp32, so fp64 inputs agree to fp32.
    ours = anchor_attention(*inputs, where, heads, case.window, case.causal)
    expected = brute_force(*inputs, case, heads)
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
    packed, context = torch.randn(40, 4, 4, 8), torch.randn(120, 2, 8)
    expected = anchor_attention(packed, context, where, 2, 7, True)
    monkeypatch.setattr("dflash_offline.train.attention.GROUP", group)
    torch.testing.assert_close(anchor_attention(packed, context, where, 2, 7, True), expected)
