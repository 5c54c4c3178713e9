"""Products and fp8 matrices on the CPU against brute force in float64; on a GPU: kernels/products_checks.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dflash_offline.store import DflashError
from dflash_offline.train.kernels.products import joined, product
from dflash_offline.train.kernels.quantise import E4M3, E5M2, quantise, quantise_transposed


def pieces(outs: list[int], width: int, together: bool, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Matrices `[out, width]`, cut from one buffer or each on its own."""
    drawn = torch.randn(sum(outs), width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return [piece if together else piece.clone() for piece in drawn.split(outs)]


def exact(x: Tensor | None) -> np.ndarray:
    assert x is not None
    return x.detach().double().numpy()


def brute(x: Tensor, weights: list[nn.Parameter], dy: Tensor) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """y, dx and each weight's gradient in float64, an element at a time."""
    a, w, slope = exact(x), np.concatenate([exact(weight) for weight in weights]), exact(dy)
    y, dx, dw = np.zeros(slope.shape), np.zeros(a.shape), np.zeros(w.shape)
    for row, out in np.ndindex(*slope.shape):
        for i in range(a.shape[1]):
            y[row, out] += a[row, i] * w[out, i]
            dx[row, i] += slope[row, out] * w[out, i]
            dw[out, i] += slope[row, out] * a[row, i]
    return y, dx, np.split(dw, np.cumsum([weight.shape[0] for weight in weights])[:-1])


@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 5),
    outs=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    together=st.booleans(),
    there=st.sampled_from(["none", "joined", "apart", "some"]),
    wide=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_values_and_gradients(
    rows: int, width: int, outs: list[int], together: bool, there: str, wide: bool, seed: int
) -> None:
    # wide: x and weights in bfloat16, gradients that are there in float32.
    dtype, kept = (torch.bfloat16, torch.float32) if wide else (torch.float64, torch.float64)
    weights = [nn.Parameter(piece) for piece in pieces(outs, width, together, dtype, seed)]
    for i, grad in enumerate(pieces(outs, width, there == "joined", kept, seed + 1)):
        if there in ("joined", "apart") or (there == "some" and i % 2):
            weights[i].grad_dtype = kept
            weights[i].grad = grad
    generator = torch.Generator().manual_seed(seed + 2)
    x = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    dy = torch.randn(rows, sum(outs), generator=generator).to(dtype)
    y, dx, dw = brute(x, weights, dy)
    before = [(weight.grad, 0 if weight.grad is None else exact(weight.grad).copy()) for weight in weights]
    out = product(x, weights)
    out.backward(dy)
    coarse = 2**-6 if wide else 1e-9
    np.testing.assert_allclose(exact(out), y, coarse, coarse)
    np.testing.assert_allclose(exact(x.grad), dx, coarse, coarse)
    for weight, (grad, was), made in zip(weights, before, dw, strict=True):
        assert grad is None or weight.grad is grad, "added in place"
        fine = 1e-5 if wide and grad is not None else coarse
        np.testing.assert_allclose(exact(weight.grad), was + made, fine, fine)


def test_calls_that_share_weights_add_up() -> None:
    # As a layer's blocks, with queries, keys and values, and its context, with keys and values, do.
    weights = [nn.Parameter(piece) for piece in pieces([4, 2, 2], 6, True, torch.float64, 0)]
    for weight, grad in zip(weights, torch.zeros(8, 6, dtype=torch.float64).split([4, 2, 2]), strict=True):
        weight.grad = grad
    x, c = (torch.randn(rows, 6, dtype=torch.float64, requires_grad=True) for rows in (5, 3))
    for _ in range(2):
        (product(x, weights).pow(2).sum() + product(c, weights[1:]).pow(2).sum()).backward()
    plain = [weight.detach().clone().requires_grad_() for weight in weights]
    a, b = x.detach().clone().requires_grad_(), c.detach().clone().requires_grad_()
    (2 * ((a @ torch.cat(plain).T).pow(2).sum() + (b @ torch.cat(plain[1:]).T).pow(2).sum())).backward()
    for ours, theirs in zip([*weights, x, c], [*plain, a, b], strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_what_needs_no_gradient_gets_none() -> None:
    weights = [nn.Parameter(piece) for piece in pieces([2, 3], 4, True, torch.float32, 0)]
    weights[0].requires_grad_(False)
    x = torch.randn(5, 4)
    product(x, weights).sum().backward()
    assert x.grad is None
    assert weights[0].grad is None
    np.testing.assert_allclose(exact(weights[1].grad), np.tile(exact(x).sum(0), (3, 1)), rtol=1e-5)
    with torch.no_grad():
        assert not product(x, weights).requires_grad


def test_joining_takes_only_neighbours() -> None:
    buffer = torch.arange(60.0)
    a, b, c = buffer[6:18].view(4, 3), buffer[18:24].view(2, 3), buffer[27:36].view(3, 3)
    together = joined([a, b])
    assert together is not None
    assert together.data_ptr() == a.data_ptr()
    assert torch.equal(together, torch.cat([a, b]))
    assert joined([b, a]) is None
    assert joined([a, b, c]) is None
    assert joined([a, buffer[18:24].view(3, 2)]) is None
    assert joined([a, a.clone()]) is None
    assert joined([a.T]) is None
    assert joined([a, buffer[18:24].view(2, 3).view(torch.int32)]) is None


def grid(dtype: torch.dtype) -> np.ndarray:
    """Every finite number of e4m3 (bias 7, 448 the largest) or e5m2 (bias 15, 57344) that is not negative."""
    mantissas, bias, largest = (8, 7, 448.0) if dtype == E4M3 else (4, 15, 57344.0)
    small = [m / mantissas * 2.0 ** (1 - bias) for m in range(mantissas)]
    normal = [(1 + m / mantissas) * 2.0 ** (e - bias) for e in range(1, 32) for m in range(mantissas)]
    return np.array([value for value in small + normal if value <= largest])


@given(
    rows=st.integers(1, 4),
    width=st.sampled_from([1, 8, 33]),
    exponent=st.integers(-30, 30),
    dtype=st.sampled_from([E4M3, E5M2]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_quantising_takes_the_nearest_code(rows: int, width: int, exponent: int, dtype: torch.dtype, seed: int) -> None:
    values = np.random.default_rng(seed).standard_t(2, (rows, width)) * 2.0**exponent
    x = torch.from_numpy(values).bfloat16()
    made, numbers = quantise(x, dtype), grid(dtype)
    scales = np.abs(exact(x)).max(1) / numbers[-1]
    np.testing.assert_allclose(exact(made.scales), scales, rtol=1e-6)
    target = exact(x) / exact(made.scales)[:, None]
    best = np.abs(np.abs(target)[..., None] - numbers).min(-1)
    assert (np.abs(exact(made.codes) - target) <= best + 1e-6 * np.abs(target)).all()
    if dtype == E4M3:
        one = made.scales.amax()
        turned = exact(quantise_transposed(x, one))
        target = exact(x).T / float(one)
        best = np.abs(np.abs(target)[..., None] - numbers).min(-1)
        assert turned.shape == (width, rows)
        assert (np.abs(turned - target) <= best + 1e-6 * np.abs(target)).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_zeros_stay_zero_and_what_is_not_finite_shows(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 8)
    x[1, 2], x[2, 3] = torch.inf, torch.nan
    made = quantise(x, dtype)
    decoded = made.codes.float() * made.scales[:, None]
    assert not decoded[0].any()
    assert decoded[1:].isnan().any(1).all()


def test_gradients_that_vanish_in_e4m3_survive_in_e5m2() -> None:
    x = torch.tensor([[1.0, 2e-6]])
    assert quantise(x, E4M3).codes.float()[0, 1] == 0
    assert quantise(x, E5M2).codes.float()[0, 1] > 0


@pytest.mark.parametrize("together", [True, False])
def test_fp8_products_are_those_of_the_quantised_matrices(together: bool) -> None:
    outs, width, rows = [32, 16], 48, 7
    weights = [nn.Parameter(piece) for piece in pieces(outs, width, together, torch.float32, 0)]
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(1), requires_grad=True)
    dy = torch.randn(rows, sum(outs), generator=torch.Generator().manual_seed(2))
    out = product(x, weights, fp8=True)
    out.backward(dy)

    def decoded(matrix: Tensor, dtype: torch.dtype = E4M3) -> np.ndarray:
        made = quantise(matrix.detach(), dtype)
        return exact(made.codes) * exact(made.scales)[:, None]

    w = torch.cat([weight.detach() for weight in weights])
    np.testing.assert_allclose(exact(out), decoded(x) @ decoded(w).T, rtol=1e-5, atol=1e-4)
    # Apart, each weight has a largest scale of its own, and each piece of a gradient's row a scale.
    dx = np.zeros((rows, width))
    for part, weight in zip(*((dy,), (w,)) if together else (dy.split(outs, 1), weights), strict=True):
        largest = float(quantise(weight.detach()).scales.max())
        dx += decoded(part, E5M2) @ (exact((weight.detach() / largest).to(E4M3)) * largest)
    np.testing.assert_allclose(exact(x.grad), dx, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(
        np.concatenate([exact(weight.grad) for weight in weights]), exact(dy).T @ exact(x), rtol=1e-4, atol=1e-4
    )
    far = np.linalg.norm(exact(x.grad) - exact(dy) @ exact(w)) / np.linalg.norm(exact(dy) @ exact(w))
    assert 0 < far < 0.1


def test_fp8_says_which_widths_it_takes() -> None:
    with pytest.raises(DflashError, match="multiples of 16; a weight is 24 x 16"):
        product(torch.zeros(2, 16), [nn.Parameter(torch.zeros(24, 16))], fp8=True)
