"""Hard cross entropy of a block's slots through the target's LM head, gradients made in the forward pass.

Formula: sum over supervised slots k of w_k * (logsumexp(z_k) - z_k[label]), z_k = head h_k, w_k = exp(-(k - 1) /
gamma). Numerator and denominator (the sum of the weights) are returned apart, for they are summed over accumulation
steps before dividing. Logits exist for a few whole blocks at a time, in fp32, and are never kept; slot 0 costs
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CHUNK_ROWS = {"cpu": 256, "cuda": 2048}
"""Slots whose logits exist at a time: few enough for a CPU's cache, enough to fill a GPU."""


@dataclass(frozen=True)
class BlockLoss:
    """Attributes:
    numerator: scalar, differentiable in the hidden states.
    denominator: scalar, the sum of the weights of supervised slots.
    correct: `[B-1]` float, supervised slots whose largest logit is the label, by slot.
    supervised: `[B-1]` float, supervised slots, by slot.
    """

    numerator: torch.Tensor
    denominator: torch.Tensor
    correct: torch.Tensor
    supervised: torch.Tensor


def slot_weights(block: int, gamma: float, device: torch.device) -> torch.Tensor:
    """`[B-1]` fp32: exp(-(k - 1) / gamma) for k = 1..B-1 (DFlash)."""
    return torch.exp(-torch.arange(block - 1, device=device, dtype=torch.float32) / gamma)


def default_gamma(block: int) -> float:
    """gamma as published for a block size; half the block where nothing was published."""
    return {8: 4.0, 10: 5.0, 16: 7.0, 32: 10.0}.get(block, block / 2)


def block_loss(
    hidden: torch.Tensor, lm_head: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, gamma: float
) -> BlockLoss:
    """The loss of A blocks.

    Args:
        hidden: `[A, B, H]` from `Drafter.blocks`.
        lm_head: `[vocabulary, H]`, frozen.
        labels: `[A, B-1]` int64.
        mask: `[A, B-1]` bool, supervised slots.
        gamma: decay of the weights.
    """
    weights = slot_weights(hidden.shape[1], gamma, hidden.device) * mask
    numerator, right = _LinearCrossEntropy.apply(hidden[:, 1:], lm_head, labels, weights)  # pyright: ignore[reportGeneralTypeIssues]
    return BlockLoss(numerator, weights.sum(), (right & mask).sum(0).float(), mask.sum(0).float())


class _LinearCrossEntropy(torch.autograd.Function):
    """sum of weights * cross_entropy(hidden @ lm_head.T, labels), and where the argmax is the label."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, lm_head: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, slots, width = hidden.shape
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden)
        right = torch.empty_like(labels, dtype=torch.bool)
        total = hidden.new_zeros((), dtype=torch.float32)
        step = max(1, CHUNK_ROWS[hidden.device.type] // slots)
        for first in range(0, count, step):
            part = slice(first, first + step)
            rows = hidden[part].reshape(-1, width)
            label = labels[part].reshape(-1, 1)
            weight = weights[part].reshape(-1, 1)
            logits = (rows @ lm_head.T).float()
            right[part] = (logits.argmax(-1, keepdim=True) == label).view(-1, slots)
            log_norm = logits.logsumexp(-1, keepdim=True)
            total += (weight * (log_norm - logits.gather(1, label))).sum()
            if not wanted:
                continue
            slope = (logits - log_norm).exp_().scatter_add_(1, label, torch.full_like(log_norm, -1)).mul_(weight)
            gradient[part] = (slope.to(hidden.dtype) @ lm_head).view(-1, slots, width)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0].to(gradient.dtype), None, None, None
