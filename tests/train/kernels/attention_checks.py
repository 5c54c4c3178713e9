"""The attention kernels against a brute force written from the design's sentences, one query at a time, in fp64."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, brute_force, cases, starts_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_offline.train.attention import Blocks, anchor_attention, anchor_attention_reference
from dflash_offline.train.kernels.anchor_attention import fused_anchor_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def compare(case: Case, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int, far: float = 1.0) -> None:
    """Values and gradients of the kernels; context keys are `far` times as long as others."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype).requires_grad_()

    count = len(case.anchors)
    packed = draw(count, case.block, heads + 2 * kv_heads, dim)
    context = draw(len(case.document), 2 * kv_heads, dim)
    with torch.no_grad():
        context[:, :kv_heads] *= far
    where = Blocks.of(torch.tensor(case.anchors, device=DEVICE), starts_of(case.document).to(DEVICE))
    ours = fused_anchor_attention(packed, context, where.anchors, where.starts, heads, case.window, case.causal)
    slope = torch.randn(ours.shape, generator=generator).to(DEVICE, dtype)
    found = [ours, *torch.autograd.grad(ours, (packed, context), slope)]

    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in (packed, context)]
    out = brute_force(exact[0], exact[1], case, heads)
    expected = [out, *torch.autograd.grad(out, exact, slope.cpu().double(), allow_unused=True, materialize_grads=True)]
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for mine, true in zip(found, expected, strict=True):
        assert torch.isfinite(mine).all()
        assert (mine.cpu().double() - true).norm() <= limit * true.norm() + 1e-6


# On a GPU each combination of these has kernels of its own to compile.
SHAPES = [(1, 1), (4, 1), (4, 2), (6, 2)] if DEVICE == "cpu" else [(6, 2)]
BLOCKS = (2, 5) if DEVICE == "cpu" else (5, 5)
DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@given(cases(BLOCKS), st.sampled_from(SHAPES), st.integers(0, 2**16))
@settings(max_examples=8 if DEVICE == "cpu" else 20, deadline=None)
def test_ragged(dtype: torch.dtype, case: Case, shape: tuple[int, int], seed: int) -> None:
    heads, kv_heads = shape
    compare(case, heads, kv_heads, 16, dtype, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "anchors", "block", "window", "causal"),
    [
        ([1], [0], 4, None, True),  # one anchor that sees nothing
        ([3], [2], 16, None, True),  # a document of three tokens
        ([70], list(range(40, 60)), 5, None, False),  # blocks that overlap; slots no multiple of a tile
        ([50, 3, 60], [1, 49, 50, 52, 53, 80, 112], 10, 4, True),  # a window smaller than a block
        ([100], [2, 99], 4, 7, False),  # far apart, with little to see
        ([20, 30], [3, 19, 30, 49], 4, 2**31 - 1, True),  # a window that hides nothing
        ([40, 40], [80, 80, 80], 4, 9, True),  # every anchor missing
    ],
)
def test_unfriendly(
    dtype: torch.dtype, lengths: list[int], anchors: list[int], block: int, window: int | None, causal: bool
) -> None:
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    compare(Case(document, anchors, block, window, causal), 4, 2, 32, dtype, 0)


def test_scores_far_above_those_of_the_own_block() -> None:
    """So far that exp of the difference overflows: some programs must be done again, and some must not."""
    document, anchors = [0] * 60 + [1] * 60, [0, 1, 2, 3, 4, 40, 50, 59, 60, 61, 62, 63, 64, 65, 66, 110]
    compare(Case(document, anchors, 4, None, True), 4, 2, 32, torch.float32, 3, far=60.0)


@pytest.mark.skipif(DEVICE == "cpu", reason="too large for the interpreter")
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("block", [4, 16, 32])
@pytest.mark.parametrize("window", [None, 100])
def test_large_heads(dim: int, block: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(dim + block)
    document = [number for number, length in enumerate([300, 17, 400]) for _ in range(length)]
    anchors = sorted(torch.randperm(717, generator=generator)[:37].tolist())
    packed = torch.randn(37, block, 12, dim, generator=generator).cuda().bfloat16().requires_grad_()
    context = torch.randn(717, 4, dim, generator=generator).cuda().bfloat16().requires_grad_()
    slope = torch.randn(37, block, 8, dim, generator=generator).cuda().bfloat16()
    where = Blocks.of(torch.tensor(anchors).cuda(), starts_of(document).cuda())
    ours = anchor_attention(packed, context, where, 8, window, True)
    found = [ours, *torch.autograd.grad(ours, (packed, context), slope)]
    exact = [tensor.detach().double().requires_grad_() for tensor in (packed, context)]
    out = anchor_attention_reference(exact[0], exact[1], where, 8, window, True)
    for mine, true in zip(found, [out, *torch.autograd.grad(out, exact, slope.double())], strict=True):
        assert (mine.double() - true).norm() < 1e-2 * true.norm()
