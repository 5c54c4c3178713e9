"""AdamW against torch's own; what a bad or empty update must not do; the schedule."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from dflash_offline.train.muon import MasterMuon
from dflash_offline.train.optimizer import MasterAdamW, learning_rate


def parameters(dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    return [
        ("matrix", nn.Parameter(torch.randn(6, 5, generator=generator).to(dtype))),
        ("norm", nn.Parameter(torch.ones(5, dtype=dtype))),
    ]


def test_it_is_torchs_adamw_with_clipping_and_division() -> None:
    ours, theirs = parameters(), parameters()
    mine = MasterAdamW(ours, clip=1.0, weight_decay=0.1)
    reference = torch.optim.AdamW(
        [{"params": [theirs[0][1]], "weight_decay": 0.1}, {"params": [theirs[1][1]], "weight_decay": 0.0}], lr=0.01
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        for (_, a), (_, b) in zip(ours, theirs, strict=True):
            gradient = torch.randn(a.shape, generator=generator) * (10 if step % 2 else 0.01)
            a.grad, b.grad = gradient * 7.0, gradient.clone()  # ours is a sum that the denominator divides
        norm = mine.step(torch.tensor(0.01), torch.tensor(7.0))
        expected = torch.nn.utils.clip_grad_norm_([p for _, p in theirs], 1.0)
        reference.step()
        assert float(norm) == pytest.approx(float(expected), rel=1e-5)
    for (_, a), (_, b) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize(("gradient", "denominator"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, 0.0)])
def test_a_bad_or_empty_update_leaves_no_trace(gradient: float, denominator: float, kind: str) -> None:
    named = parameters()
    if kind == "muon":
        optimizer = MasterMuon(named, ratio=5.0, clip=1.0, weight_decay=0.1)
    else:
        optimizer = MasterAdamW(named, clip=1.0, weight_decay=0.1)

    def good_step() -> None:
        for _, parameter in named:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(torch.tensor(0.01), torch.tensor(1.0))

    good_step()
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    for _, parameter in named:
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step(torch.tensor(0.01), torch.tensor(denominator))
    after = optimizer.state()
    assert float(after.pop("skipped")) == float(before.pop("skipped")) + 1
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    good_step()
    assert all(torch.isfinite(tensor).all() for tensor in optimizer.state().values())


def test_norm_weights_in_bf16_move() -> None:
    named = parameters(torch.bfloat16)
    optimizer = MasterAdamW(named, clip=1e9, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        for _, parameter in named:
            noise = torch.randn(parameter.shape, generator=generator) + 0.5
            parameter.grad = noise.to(torch.bfloat16)
        optimizer.step(torch.tensor(1e-5), torch.tensor(1.0))
    # Steps of 1e-5 are far below bf16's spacing of 0.004 under 1.0; only fp32 masters add them up.
    assert (named[1][1] < 1.0).all()


def test_loading_restores_masters_and_weights() -> None:
    named = parameters(torch.bfloat16)
    optimizer = MasterAdamW(named, clip=1.0, weight_decay=0.0)
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(torch.tensor(0.1), torch.tensor(1.0))
    saved = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    fresh = parameters(torch.bfloat16)
    other = MasterAdamW(fresh, clip=1.0, weight_decay=0.0)
    other.load(saved)
    for (_, a), (_, b) in zip(named, fresh, strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(saved[name], tensor) for name, tensor in other.state().items())


def test_the_schedule_warms_up_and_falls_to_zero() -> None:
    rates = [learning_rate(step, 100, 1.0, 0.04) for step in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert 0 < rates[-1] < 0.001
    assert learning_rate(500, 100, 1.0, 0.04) == 0


def test_muon_is_torchs_own_but_for_rounding() -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((12, 40), (40, 12), (16, 16))]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimizer = MasterMuon(
        [(str(index), parameter) for index, parameter in enumerate([*ours, torch.nn.Parameter(torch.ones(3))])],
        ratio=5.0,
        clip=1.0,
        weight_decay=0.1,
    )
    reference = torch.optim.Muon(theirs, lr=0.05, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    before = [parameter.detach().clone() for parameter in ours]
    for _ in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            other.grad = torch.randn_like(mine)
            mine.grad = other.grad * 3
        optimizer.step(torch.tensor(0.01), torch.tensor(3.0))
        reference.step()
    for mine, other, start in zip(ours, theirs, before, strict=True):
        # bfloat16 keeps 8 bits, through fifteen products.
        assert (mine - other).norm() < 0.05 * (other - start).norm()
