"""Norm, rotary position and activation, kernels and references, against formulas written out in fp64.

Under TRITON_INTERPRET=1 on a CPU, and on a GPU as they are; without either, both names run the reference.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_offline.train.kernels.heads import norm_rope, norm_rope_reference
from dflash_offline.train.kernels.norm import add_norm, add_norm_reference, programs
from dflash_offline.train.kernels.swiglu import swiglu, swiglu_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
EPS = 0.1
"""Large enough to be seen in a result."""

few = settings(max_examples=6, deadline=None)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
Formula = Callable[..., "tuple[Tensor | None, ...]"]


def maker(dtype: torch.dtype, seed: int) -> Callable[..., Tensor]:
    """Makes random tensors of a shape."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator).to(DEVICE, dtype)


def gradients(outputs: tuple[Tensor | None, ...], inputs: list[Tensor], slopes: list[Tensor | None]) -> list[Tensor]:
    """Of the outputs that have a slope, times it; the others are left out of the loss."""
    pairs = [(o, s.to(o.dtype)) for o, s in zip(outputs, slopes, strict=True) if o is not None and s is not None]
    return list(torch.autograd.grad([o for o, _ in pairs], inputs, [s for _, s in pairs], allow_unused=True))


def compare(formula: Formula, ours: Formula, inputs: list[Tensor], slopes: list[Tensor | None], near: float) -> None:
    """Values and gradients: `near` is the error's norm by that of what is expected, or of as many ones."""
    exact_inputs = [x.double().detach().requires_grad_() for x in inputs]
    own_inputs = [x.detach().requires_grad_() for x in inputs]
    exact, own = formula(*exact_inputs), ours(*own_inputs)
    exact_slopes = [None if s is None else s.double() for s in slopes]
    pairs = [*zip(exact, own, strict=True)]
    pairs += zip(gradients(exact, exact_inputs, exact_slopes), gradients(own, own_inputs, slopes), strict=True)
    for index, (expected, result) in enumerate(pairs):
        assert (expected is None) == (result is None), index
        if expected is None or result is None:
            continue
        assert result.shape == expected.shape, index
        error, size = (result.double() - expected).norm(), expected.norm() + expected.numel() ** 0.5
        assert error <= near * size, f"{index}: {float(error / size)}"


def tolerance(*dtypes: torch.dtype) -> float:
    return 1e-2 if torch.bfloat16 in dtypes else 1e-5


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def norm_case(
    rows: int, width: int, with_delta: bool, used: tuple[bool, bool], dtypes: tuple[torch.dtype, ...]
) -> None:
    dtype, weight_dtype = dtypes
    make = maker(dtype, rows * width)
    inputs = [make(rows, width), make(width).to(weight_dtype)] + [make(rows, width)] * with_delta
    # Their strides are those of a transposed tensor, as a gradient's may be.
    slopes = [make(width, rows).t() if each else None for each in used]

    def formula(x: Tensor, weight: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if delta is None else x + delta
        return total, norm(total, weight)

    for function in (add_norm, add_norm_reference):

        def ours(x: Tensor, weight: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
            results = function(x, delta, weight, EPS)  # noqa: B023
            assert all(each.dtype == x.dtype for each in results)
            return results

        compare(formula, ours, inputs, slopes, tolerance(*dtypes))


@each_dtype
@pytest.mark.parametrize("weight_dtype", DTYPES)
@few
@given(
    st.integers(1, 9), st.integers(2, 70), st.booleans(), st.sampled_from([(True, True), (True, False), (False, True)])
)
@example(1, 5, True, (True, True))
@example(3, 64, False, (True, True))
@example(3, 33, True, (True, False))
@example(7, 37, False, (False, True))
def test_norm(
    dtype: torch.dtype, weight_dtype: torch.dtype, rows: int, width: int, with_delta: bool, used: tuple[bool, bool]
) -> None:
    norm_case(rows, width, with_delta, used, (dtype, weight_dtype))


@each_dtype
@pytest.mark.parametrize("width", [3, 4100, 5120])
def test_norm_of_more_rows_than_programs(dtype: torch.dtype, width: int) -> None:
    rows = 2 * programs(torch.empty(0, device=DEVICE), 1 if width > 4096 else 8) + 3
    norm_case(rows, width, True, (True, True), (dtype, dtype))


@each_dtype
def test_norm_of_inputs_that_want_no_gradient(dtype: torch.dtype) -> None:
    # The first layer's: embeddings are frozen, yet their sum with what the layer makes goes on.
    make = maker(dtype, 1)
    x, weight, slope = make(7, 40), make(40).requires_grad_(), make(7, 40)
    total, normed = add_norm(x, None, weight, EPS)
    assert torch.equal(total, x)
    (ours,) = torch.autograd.grad(total * 2 + normed, [weight], slope)
    wide = weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(norm(x.double(), wide), [wide], slope.double())
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance(dtype), atol=10 * tolerance(dtype))


def heads_case(tokens: int, heads: int, kv_heads: int, dim: int, dtypes: tuple[torch.dtype, ...]) -> None:
    dtype, weight_dtype = dtypes
    make = maker(dtype, tokens * dim + heads)
    every = heads + 2 * kv_heads
    angles = torch.arange(tokens, device=DEVICE)[:, None] * 0.7 ** torch.arange(dim // 2, device=DEVICE)
    cos, sin = angles.cos().float(), angles.sin().float()
    inputs = [make(tokens, every, dim), make(dim).to(weight_dtype)] + [make(dim).to(weight_dtype)] * (heads > 0)
    slopes: list[Tensor | None] = [make(tokens, dim, every).transpose(1, 2)]

    def formula(packed: Tensor, k_weight: Tensor, q_weight: Tensor | None = None) -> tuple[Tensor]:
        out = []
        for h in range(every):
            if h >= heads + kv_heads:
                out.append(packed[:, h])
                continue
            y = norm(packed[:, h], k_weight if h >= heads or q_weight is None else q_weight)
            # Number j of a head and number j + d / 2 are the two parts of a complex number, turned by the angle j.
            turned = torch.complex(y[:, : dim // 2], y[:, dim // 2 :]) * torch.complex(cos.double(), sin.double())
            out.append(torch.cat([turned.real, turned.imag], -1))
        return (torch.stack(out, 1),)

    for function in (norm_rope, norm_rope_reference):

        def ours(packed: Tensor, k_weight: Tensor, q_weight: Tensor | None = None) -> tuple[Tensor]:
            result = function(packed, heads, kv_heads, q_weight, k_weight, cos, sin, EPS)  # noqa: B023
            assert result.dtype == packed.dtype
            return (result,)

        compare(formula, ours, inputs, slopes, tolerance(*dtypes))


@each_dtype
@pytest.mark.parametrize("weight_dtype", DTYPES)
@few
@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 4), st.integers(1, 20).map(lambda half: 2 * half))
@example(1, 4, 2, 64)
@example(3, 0, 2, 6)
@example(7, 0, 8, 16)
@example(3, 14, 5, 10)
@example(1, 32, 8, 128)
@example(2, 3, 1, 256)
def test_heads(dtype: torch.dtype, weight_dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, dim: int) -> None:
    heads_case(tokens, heads, kv_heads, dim, (dtype, weight_dtype))


@each_dtype
@pytest.mark.parametrize("heads", [0, 15])
def test_heads_of_more_tokens_than_programs(dtype: torch.dtype, heads: int) -> None:
    heads_case(2 * programs(torch.empty(0, device=DEVICE), 8) + 3, heads, 1, 12, (dtype, dtype))


@each_dtype
@few
@given(st.integers(1, 5), st.integers(1, 90))
@example(1, 1)
@example(3, 1025)
@example(2, 2050)
def test_swiglu(dtype: torch.dtype, rows: int, width: int) -> None:
    make = maker(dtype, rows * width)
    inputs = [make(rows, 2 * width) * 3]

    def formula(gate_up: Tensor) -> tuple[Tensor]:
        gate, up = gate_up[:, :width], gate_up[:, width:]
        return (gate / (1 + (-gate).exp()) * up,)

    for function in (swiglu, swiglu_reference):
        compare(formula, lambda x: (function(x),), inputs, [make(width, rows).t()], tolerance(dtype))  # noqa: B023


@each_dtype
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_swiglu_far_from_zero_is_finite(dtype: torch.dtype) -> None:
    gate_up = torch.tensor([[-200.0, -90, 0, 90, 200, 1, 1, 1, 1, 1]], device=DEVICE, dtype=dtype).requires_grad_()
    out = swiglu(gate_up)
    (gradient,) = torch.autograd.grad(out.sum(), [gate_up])
    torch.testing.assert_close(out, gate_up.new_tensor([[0.0, 0, 0, 90, 200]]))
    expected = [[0, 0, 0.5, 1, 1, 0, 0, 0, 90, 200]]
    torch.testing.assert_close(gradient, gate_up.new_tensor(expected))


@each_dtype
def test_gradients_are_the_same_bits_again(dtype: torch.dtype) -> None:
    make = maker(dtype, 2)
    packed, weight, angles = make(31, 9, 16), make(16), make(31, 8).float()
    runs: list[list[Tensor]] = []
    for _ in range(2):
        x, w = packed.clone().requires_grad_(), weight.clone().requires_grad_()
        out = norm_rope(x, 5, 2, w, w, angles.cos(), angles.sin(), EPS)
        total, normed = add_norm(out.flatten(0, 1), None, w, EPS)
        runs.append(list(torch.autograd.grad((total + normed * normed).sum(), [x, w])))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
