"""The drafter's loss in fp64, written from its formulas with loops, for tests to hold the real one to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_offline.train.head import LmHead
from dflash_offline.train.loss import BlockLoss, LossSettings, TargetRows, block_loss, default_gamma


@dataclass
class Case:
    """What `block_loss` takes."""

    hidden: Tensor
    lm_head: Tensor
    labels: Tensor
    mask: Tensor
    target: TargetRows

    def loss(self, said: LossSettings, fp8: bool = False) -> BlockLoss:
        """The real loss, perhaps with an LM head in fp8."""
        return block_loss(self.hidden, LmHead(self.lm_head, fp8), self.labels, self.mask, said, self.target)

    def coded(self) -> Case:
        """The same from numbers as they are after a way through fp8, in fp64."""
        hidden, head, final = (decoded(x.detach()) for x in (self.hidden, self.lm_head, self.target.final))
        target = TargetRows(final, self.target.positions)
        return Case(hidden.requires_grad_(), head, self.labels, self.mask, target)


def decoded(x: Tensor) -> Tensor:
    """Rows of the last dimension in e4m3 with a scale each, and back, in fp64."""
    scales = x.double().abs().amax(-1, keepdim=True) / 448
    return (x.double() / scales).to(torch.float8_e4m3fn).double() * scales


def case(
    blocks: int,
    block: int,
    vocabulary: int,
    width: int = 16,
    seed: int = 0,
    supervised: bool = True,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A random one; each block supervises some of its first slots, perhaps none, or no block any."""
    generator = torch.Generator().manual_seed(seed)
    tokens, slots = 7 * blocks, (blocks, block - 1)
    reach = torch.randint(0, block, (blocks, 1), generator=generator) * supervised
    hidden = torch.randn(blocks, block, width, generator=generator).to(device, dtype).requires_grad_()
    head = (0.7 * torch.randn(vocabulary, width, generator=generator)).to(device, dtype)
    final = torch.randn(tokens, width, generator=generator).to(device, dtype)
    positions = torch.randint(tokens, slots, generator=generator).to(device)
    # So that the argmax is sometimes the label, as it hardly is by chance.
    guesses = (hidden.detach()[:, 1:] @ head.T).argmax(-1)
    labels = torch.randint(vocabulary, slots, generator=generator).to(device)
    labels = torch.where(torch.rand(slots, generator=generator).to(device) < 0.4, guesses, labels)
    mask = (torch.arange(block - 1) < reach).to(device)
    return Case(hidden, head, labels, mask, TargetRows(final, positions))


@dataclass
class Exact:
    """What `block_loss` should find, in fp64."""

    numerator: Tensor
    denominator: float
    gradient: Tensor
    correct: list[float]
    supervised: list[float]
    overlap: list[float]


def exact_loss(case: Case, said: LossSettings) -> Exact:
    """The loss, slot by slot."""
    hidden = case.hidden.detach().cpu().double().requires_grad_()
    head, final = case.lm_head.cpu().double(), case.target.final.cpu().double()
    labels, mask, positions = (x.tolist() for x in (case.labels, case.mask, case.target.positions))
    blocks, block = hidden.shape[:2]
    gamma = said.gamma or default_gamma(block)
    fixed = [math.exp(-k / gamma) if said.weights == "decay" else 1.0 for k in range(block - 1)]
    slot_terms = ("cross_entropy", "kl", "total_variation", "lk_log", "lk_mixed")
    of_slots = any(getattr(said, name) for name in slot_terms)
    soft = any(getattr(said, name) for name in (*slot_terms[1:], "expected_length"))
    numerator, denominator = (0 * hidden).sum(), 0.0
    correct, supervised, overlaps = ([0.0] * (block - 1) for _ in range(3))
    for a in range(blocks):
        slots = [k for k in range(block - 1) if mask[a][k]]
        losses, shares, overlap_of = {}, {}, {}
        for k in slots:
            z, zt = hidden[a, k + 1] @ head.T, final[positions[a][k]] @ head.T
            entropy = -torch.log_softmax(z, 0)[labels[a][k]]
            log_q, log_p = (torch.log_softmax(x / said.temperature, 0) for x in (z, zt))
            q, p = log_q.exp(), log_p.exp()
            overlap = torch.minimum(p, q).sum()
            kl, variation = (p * (log_p - log_q)).sum(), (p - q).abs().sum() / 2
            mixture = torch.exp(-3 * overlap.detach())
            losses[k] = (
                said.cross_entropy * entropy
                + said.kl * kl
                + said.total_variation * variation
                - said.lk_log * overlap.log()
                + said.lk_mixed * (mixture * kl + (1 - mixture) * variation)
            )
            alpha = said.dpace_alpha
            shares[k] = (1 - alpha) * math.exp(-entropy.item()) + alpha
            overlap_of[k] = overlap
            correct[k] += int(z.argmax()) == labels[a][k]
            supervised[k] += 1
            overlaps[k] += overlap.item() if soft else 0
        for k in slots:
            weight = fixed[k]
            if said.weights == "dpace":
                weight = sum(math.prod(shares[i] for i in slots if i <= m) for m in slots if m >= k)
            numerator = numerator + weight * losses[k]
            denominator += fixed[k] if of_slots else 0
        factor = said.expected_length * (sum(fixed) if of_slots else 1)
        for k in slots:
            reached = hidden.new_ones(())
            for j in slots:
                reached = reached * overlap_of[j] if j <= k else reached
            numerator = numerator - factor * reached
        if not of_slots:
            denominator += bool(slots)
    (gradient,) = torch.autograd.grad(numerator, hidden)
    return Exact(numerator.detach(), denominator, gradient, correct, supervised, overlaps)


def assert_exact(case: Case, said: LossSettings, tolerance: float = 1e-5) -> None:
    """Values and gradient of the real loss are the exact ones, relative to their size."""
    found, true = case.loss(said), exact_loss(case, said)
    (gradient,) = torch.autograd.grad(found.numerator, case.hidden)
    size = max(float(true.numerator.abs()), 1.0)
    assert abs(found.numerator.item() - float(true.numerator)) <= tolerance * size
    difference = (gradient.cpu().double() - true.gradient).norm()
    assert difference <= 5 * tolerance * true.gradient.norm() + 1e-7
    assert not gradient[:, 0].any()  # slot 0 predicts nothing
    assert not gradient[:, 1:][~case.mask].any()
    assert abs(float(found.denominator) - true.denominator) <= 1e-5 * max(true.denominator, 1.0)
    assert found.correct.tolist() == true.correct
    assert found.supervised.tolist() == true.supervised
    torch.testing.assert_close(found.overlap.cpu(), torch.tensor(true.overlap), rtol=tolerance, atol=tolerance)


def assert_near_in_fp8(case: Case, said: LossSettings, tolerance: float = 1e-4) -> None:
    """The loss with an LM head in fp8 is the exact one of coded numbers, its gradient near it and near that of all.

    Values may differ as sums in fp32 do (on a GPU: in some 14 bits). The gradient has e5m2 and the head transposed
    beside that: an eighth and a sixteenth of each number at most, some 5% and 3% in the mean. Coded states and heads
    are 3% off each in the mean, so logits of size 2 are 0.08 off, and so is each number of a softmax.
    """
    found, coded = case.loss(said, fp8=True), exact_loss(case.coded(), said)
    (gradient,) = torch.autograd.grad(found.numerator, case.hidden)
    assert gradient.dtype == case.hidden.dtype
    assert not gradient[:, 0].any()
    assert not gradient[:, 1:][~case.mask].any()
    size = max(float(coded.numerator.abs()), 1.0)
    assert abs(found.numerator.item() - float(coded.numerator)) <= tolerance * size
    assert abs(float(found.denominator) - coded.denominator) <= 1e-5 * max(coded.denominator, 1.0)
    assert found.supervised.tolist() == coded.supervised
    torch.testing.assert_close(found.overlap.cpu(), torch.tensor(coded.overlap), rtol=tolerance, atol=tolerance)
    for true, most in ((coded, 0.12), (exact_loss(case, said), 0.3)):
        assert (gradient.cpu().double() - true.gradient).norm() <= most * true.gradient.norm() + 1e-7


TERMS = ("cross_entropy", "kl", "total_variation", "lk_log", "lk_mixed", "expected_length")


def settings(**values: Any) -> LossSettings:
    """Settings, only what differs from the defaults."""
    return LossSettings.model_validate(values)


SETTINGS = [
    *(settings(**{"cross_entropy": 0, term: 1.5, "gamma": 3.0}) for term in TERMS),
    settings(weights="dpace"),
    settings(weights="none"),
    settings(cross_entropy=0, kl=1, weights="dpace", dpace_alpha=0.2, temperature=2.0),
    settings(cross_entropy=0, expected_length=1, temperature=0.7),
    settings(cross_entropy=0.3, kl=0.5, expected_length=2, weights="decay", temperature=1.5),
    settings(cross_entropy=0.3, lk_log=0.7, expected_length=2, weights="dpace"),
    settings(cross_entropy=1, kl=1, total_variation=1, lk_log=1, lk_mixed=1, expected_length=1, weights="none"),
]
"""Each term, each way of weighing, and combinations."""


def named(said: LossSettings) -> str:
    """A test's name: the terms and the weights."""
    return "+".join([term for term in TERMS if getattr(said, term)] + [said.weights])
