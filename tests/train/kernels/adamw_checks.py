"""Flat AdamW and the flat norm against AdamW written out in fp64, and both against their plain references.

Run under TRITON_INTERPRET=1, or on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_offline.train.flat import Flat
from dflash_offline.train.kernels.adamw import (
    BLOCK,
    NORM_BLOCK,
    NORM_PROGRAMS,
    adamw,
    adamw_reference,
    squared_norm,
    squared_norm_reference,
)
from dflash_offline.train.kernels.launch import fused
from dflash_offline.train.optimizer import MasterAdamW

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BETAS, EPS = (0.9, 0.999), 1e-8
Update = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
# The interpreter cuts fp32 to bf16 where a GPU rounds.
WEIGHTS = [torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def buffers(size: int, gradients: torch.dtype, weights: torch.dtype) -> Update:
    """Masters, first and second moments, gradients and weights in the middle of a run; the same at each call."""
    generator = torch.Generator().manual_seed(0)
    masters, first, raw = (torch.randn(size, generator=generator).to(DEVICE) for _ in range(3))
    second = torch.rand(size, generator=generator).to(DEVICE)
    return masters, first, second, (raw * 10).to(gradients), masters.to(weights, copy=True)


def scalars(good: bool = True) -> torch.Tensor:
    """good, scale, pace, correction, keep."""
    return torch.tensor([good, 0.02, 3e-3, 0.3, 0.99], device=DEVICE)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return float((found.double() - expected.double()).norm()) <= tolerance * float(expected.double().norm())


def check_update(size: int, matrices: int, gradients: torch.dtype, weights: torch.dtype) -> None:
    found = buffers(size, gradients, weights)
    masters, first, second, gradient, _ = (tensor.double() for tensor in found)
    _, scale, pace, correction, keep = scalars().double().tolist()
    gradient *= scale
    first = 0.9 * first + 0.1 * gradient
    second = 0.999 * second + 0.001 * gradient**2
    decay = torch.where(torch.arange(size, device=DEVICE) < matrices, keep, 1.0)
    masters = masters * decay - pace * first / ((second / correction).sqrt() + EPS)
    plain = buffers(size, gradients, weights)
    adamw(*found, scalars(), matrices, BETAS, EPS)
    adamw_reference(*plain, scalars(), matrices, BETAS, EPS)
    for update in (found, plain):
        for ours, exact in zip(update, (masters, first, second), strict=False):
            assert close(ours, exact, 1e-6)
        assert not update[3].any()
        assert torch.equal(update[4], update[0].to(weights))


def test_kernels_run() -> None:
    assert fused(torch.zeros((), device=DEVICE))


@settings(max_examples=12, deadline=None)
@given(
    size=st.one_of(st.sampled_from([1, BLOCK - 1, BLOCK, BLOCK + 1]), st.integers(1, 3 * BLOCK)),
    share=st.floats(0, 1),
    gradients=st.sampled_from([torch.float32, torch.bfloat16]),
    weights=st.sampled_from(WEIGHTS),
)
def test_an_update_of_any_size(size: int, share: float, gradients: torch.dtype, weights: torch.dtype) -> None:
    check_update(size, round(size * share), gradients, weights)


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16])
def test_a_bad_update_writes_nothing_but_zeros_into_the_gradient(gradients: torch.dtype) -> None:
    found = buffers(BLOCK + 5, gradients, torch.float32)
    found[3][7], found[3][9] = float("nan"), float("inf")
    found[4].add_(1)  # not even the weights are written again
    before = [tensor.clone() for tensor in found]
    numbers = scalars(good=False)
    numbers[1:3] = torch.tensor([float("nan"), float("inf")], device=DEVICE)
    adamw(*found, numbers, BLOCK, BETAS, EPS)
    for place in (0, 1, 2, 4):
        assert torch.equal(found[place], before[place])
    assert not found[3].any()


def test_nothing_outside_the_buffers_is_touched() -> None:
    whole = buffers(BLOCK + 40, torch.float32, torch.float32)
    before = [tensor.clone() for tensor in whole]
    masters, first, second, gradients, weights = (tensor[16 : BLOCK + 19] for tensor in whole)
    adamw(masters, first, second, gradients, weights, scalars(), 3, BETAS, EPS)
    for now, then in zip(whole, before, strict=True):
        assert torch.equal(now[:16], then[:16])
        assert torch.equal(now[BLOCK + 19 :], then[BLOCK + 19 :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, NORM_BLOCK + 3, NORM_PROGRAMS * NORM_BLOCK + 5])
def test_the_norm(size: int, dtype: torch.dtype) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    exact = float(x.double().square().sum())
    assert float(squared_norm(x)) == pytest.approx(exact, rel=1e-6)
    assert float(squared_norm_reference(x)) == pytest.approx(exact, rel=1e-6)
    assert torch.equal(squared_norm(x), squared_norm(x))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_norm_of_what_is_not_finite_is_not_finite(bad: float) -> None:
    x = torch.ones(2 * NORM_BLOCK + 1, device=DEVICE)
    x[-1] = bad
    assert not torch.isfinite(squared_norm(x))


@pytest.mark.skipif(DEVICE == "cpu", reason="more elements than the interpreter can walk")
def test_beyond_what_32_bits_count() -> None:
    size = 2**31 + 4096
    x = torch.zeros(size, device=DEVICE, dtype=torch.bfloat16)
    x[-1] = 3
    assert float(squared_norm(x)) == 9
    masters, first, second = (torch.ones(size, device=DEVICE) for _ in range(3))
    weights = torch.zeros_like(x)
    adamw(masters, first, second, x, weights, scalars(), size, BETAS, EPS)
    assert not x[-4096:].any()
    assert (masters[-4096:] < 1).all()
    assert (weights[-4096:] != 0).all()


def test_the_optimizer_through_kernels_is_torchs_adamw() -> None:
    torch.manual_seed(0)
    ours = torch.nn.Sequential(torch.nn.Linear(40, 70, bias=False), torch.nn.LayerNorm(70)).to(DEVICE)
    theirs = torch.nn.Sequential(torch.nn.Linear(40, 70, bias=False), torch.nn.LayerNorm(70)).to(DEVICE)
    theirs.load_state_dict(ours.state_dict())
    mine = MasterAdamW(Flat(ours), clip=1.0, weight_decay=0.1)
    groups = [
        {"params": list(theirs[0].parameters()), "weight_decay": 0.1},
        {"params": list(theirs[1].parameters()), "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.01)
    x, directions = torch.randn(8, 40, device=DEVICE), torch.randn(8, 70, device=DEVICE)
    for step in range(4):
        size = 100.0 if step % 2 else 0.01
        reference.zero_grad()
        ((ours(x) * directions).sum() * size * 3).backward()
        ((theirs(x) * directions).sum() * size).backward()
        norm = mine.step(torch.tensor(0.01, device=DEVICE), torch.tensor(3.0, device=DEVICE))
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        reference.step()
        assert float(norm) == pytest.approx(float(expected), rel=1e-4)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA graphs")
def test_an_update_in_a_graph_is_the_same_bits() -> None:
    def made() -> tuple[Flat, MasterAdamW]:
        torch.manual_seed(0)
        flat = Flat(torch.nn.Linear(300, 200, bias=True).to(DEVICE, torch.bfloat16))
        return flat, MasterAdamW(flat, clip=1.0, weight_decay=0.1)

    rate, denominator = torch.tensor(0.01, device=DEVICE), torch.tensor(2.0, device=DEVICE)
    (eager, one), (replayed, two) = made(), made()
    made()[1].step(rate, denominator)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = two.step(rate, denominator)
    for step in range(5):
        gradient = torch.full_like(eager.gradients, float("nan")) if step == 3 else torch.randn_like(eager.gradients)
        eager.gradients.copy_(gradient)
        replayed.gradients.copy_(gradient)
        expected = one.step(rate.fill_(0.01 / (step + 1)), denominator)
        graph.replay()
        assert torch.equal(norm, expected) or step == 3
    for name, tensor in one.state().items():
        assert torch.equal(tensor, two.state()[name]), name
    assert torch.equal(eager.weights, replayed.weights)
    assert float(two.skipped) == 1
