"""The loss against plain cross entropy in fp64, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from dflash_offline.train import loss as loss_module
from dflash_offline.train.loss import block_loss, default_gamma, slot_weights


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_loss_and_gradient_equal_plain_cross_entropy(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss_module.CHUNK_ROWS, "cpu", chunk)
    torch.manual_seed(0)
    hidden = torch.randn(9, 5, 16).requires_grad_()
    head = torch.randn(37, 16)
    labels = torch.randint(0, 37, (9, 4))
    mask = torch.rand(9, 4) < 0.6
    found = block_loss(hidden, head, labels, mask, gamma=3.0)
    (gradient,) = torch.autograd.grad(found.numerator, hidden)

    exact = hidden.detach().double().requires_grad_()
    logits = exact[:, 1:] @ head.double().T
    entropy = F.cross_entropy(logits.reshape(-1, 37), labels.reshape(-1), reduction="none").view(9, 4)
    weights = torch.tensor([math.exp(-(k - 1) / 3.0) for k in range(1, 5)], dtype=torch.float64) * mask
    expected = (weights * entropy).sum()
    (true_gradient,) = torch.autograd.grad(expected, exact)

    torch.testing.assert_close(found.numerator.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-4, atol=1e-6)
    assert float(found.denominator) == pytest.approx(float(weights.sum()))
    assert not gradient[:, 0].any()  # slot 0 predicts nothing
    right = (logits.argmax(-1) == labels) & mask
    assert found.correct.tolist() == right.sum(0).tolist()
    assert found.supervised.tolist() == mask.sum(0).tolist()


def test_an_outer_factor_reaches_the_gradient() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 3, 8).requires_grad_(), torch.randn(11, 8)
    labels, mask = torch.randint(0, 11, (2, 2)), torch.ones(2, 2, dtype=torch.bool)
    found = block_loss(hidden, head, labels, mask, 4.0).numerator
    (once,) = torch.autograd.grad(found, hidden, retain_graph=True)
    (thrice,) = torch.autograd.grad(found * 3, hidden)
    torch.testing.assert_close(thrice, once * 3)


def test_gamma_and_weights_are_as_published() -> None:
    assert [default_gamma(b) for b in (16, 10, 8)] == [7, 5, 4]
    weights = slot_weights(4, 2.0, torch.device("cpu"))
    assert weights.tolist() == pytest.approx([1.0, math.exp(-0.5), math.exp(-1.0)])
