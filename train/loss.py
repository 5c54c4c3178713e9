"""The loss of blocks of hidden states through the target's frozen LM head, its gradient made in the forward pass.

Of slot k = 1..B-1 of a block at anchor a: z = LM head(h_k), the drafter's logits; zt = LM head(final[a + k - 1]), the
target's; q = softmax(z / temperature), p = softmax(zt / temperature), overlap o_k = sum over v of min(p_v, q_v).

    cross_entropy     -log softmax(z)[label]                                  (DFlash; always at temperature 1)
    kl                sum of p (log p - log q)
    total_variation   1 - o = sum of |p - q| / 2
    lk_log            -log o                                                  (LK losses, arXiv 2602.23881)
    lk_mixed          m kl + (1 - m) total_variation, m = exp(-3 o) constant  (the same paper's other form)
    expected_length   of a block: -sum over k of o_1 o_2 ... o_k

expected_length is the negative of the expected number of drafted tokens that a target accepts, along the block as it
was drafted and without the token that the target adds itself. No published definition of such a loss is known to us.

The other terms are of slots, and are weighed: `decay` w_k = exp(-(k - 1) / gamma) (DFlash); `none` 1; `dpace` (D-PACE,
arXiv 2605.18810) w_j = sum over supervised m >= j of the product over i <= m of s_i, s_i = (1 - alpha) c_i + alpha,
c_i = softmax(z_i)[label]: without gradient, and never renormalised.

Numerator and denominator are returned apart, for both are summed over accumulation steps and ranks before dividing. The
denominator is the sum of the fixed weights of supervised slots (for `none` and `dpace`: their number), or, if
expected_length is the only term, the number of blocks that have any. Beside other terms expected_length must live with
their denominator: its numerator is then multiplied by the sum of a whole block's fixed weights (B-1 for `none` and
`dpace`), so that whole blocks weigh it exactly as its own denominator would.

Logits exist in fp32 for a few whole blocks at a time, and are never kept; slot 0 costs nothing, and of rows that are
not supervised only the products are computed, for shapes are static. `kernels/loss_rows.py` and `loss_gradient.py` have
what is done to a row, `head.py` the two products. Knows nothing of anchors and batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from torch.autograd.function import once_differentiable

from .head import LmHead
from .kernels.loss_gradient import coded_slopes, slopes
from .kernels.loss_rows import hard_rows, soft_rows

CHUNK_ROWS = {"cpu": 256, "cuda": 1664}
"""Slots whose logits exist at a time, at most. On a GPU 13 tiles of 128 rows, which with 20 tiles of 256 columns of the
gradient (5120 wide) fill the 132 multiprocessors of an H200 twice; 1.65 GB at a vocabulary of 248,320."""
SOFT_CHUNK_ROWS = {"cpu": 128, "cuda": 768}
"""The same where the target's logits exist beside the drafter's: 6 tiles, which fill them once."""
LEAST_OVERLAP = 1e-30
"""Where lk_log takes its logarithm at the least."""


class LossSettings(BaseModel):
    """Section `[loss]`: how much each term counts, and how slots are weighed. Formulas are in this module."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    cross_entropy: float = Field(1.0, ge=0, description="of the target's tokens, as published")
    kl: float = Field(0.0, ge=0, description="KL divergence of the drafter's distributions from the target's")
    total_variation: float = Field(0.0, ge=0, description="total variation distance of the two")
    lk_log: float = Field(0.0, ge=0, description="LK loss: minus the logarithm of the two distributions' overlap")
    lk_mixed: float = Field(0.0, ge=0, description="LK loss: KL at first, total variation as the overlap grows")
    expected_length: float = Field(0.0, ge=0, description="minus the expected number of accepted tokens of a block")
    weights: Literal["decay", "dpace", "none"] = Field(
        "decay", description="of slots. decay: exponential; dpace: by how likely the slot is reached; none: equal"
    )
    gamma: float | None = Field(
        None, gt=0, description="of decay; by default 7, 5, 4 for blocks of 16, 10, 8 (10 for 32)"
    )
    dpace_alpha: float = Field(0.5, gt=0, le=1, description="of dpace: 1 is a plain count, near 0 the drafter's own")
    temperature: float = Field(1.0, gt=0, description="of both distributions, in all terms but cross_entropy")

    @model_validator(mode="after")
    def _some_term(self) -> LossSettings:
        if not (self.of_slots or self.expected_length):
            raise ValueError("every term of the loss is 0: set at least one, for example cross_entropy = 1")
        return self

    @property
    def of_slots(self) -> bool:
        """Whether any term is of slots, not of blocks."""
        return any((self.cross_entropy, self.kl, self.total_variation, self.lk_log, self.lk_mixed))

    @property
    def needs_final(self) -> bool:
        """Whether any term compares with the target's distributions, so that its last hidden states are needed."""
        return any((self.kl, self.total_variation, self.lk_log, self.lk_mixed, self.expected_length))


@dataclass(frozen=True)
class BlockLoss:
    """Attributes:
    numerator: fp32 scalar, differentiable in the hidden states, once.
    denominator: fp32 scalar.
    correct: `[B-1]` float, supervised slots whose largest logit (the lowest of equals) is the label, by slot.
    supervised: `[B-1]` float, supervised slots, by slot.
    overlap: `[B-1]` float, the sum of supervised slots' overlaps, by slot; zeros if no term needs the target.
    """

    numerator: Tensor
    denominator: Tensor
    correct: Tensor
    supervised: Tensor
    overlap: Tensor


@dataclass(frozen=True)
class TargetRows:
    """Where the target's hidden states for each slot are: gathered a chunk at a time, for they are as large as ours.

    Attributes:
        final: `[T, H]`, the input of the target's LM head at each position, in the dtype of the hidden states.
        positions: `[A, B-1]` int64, a + k - 1 for slot k; anything in range where unsupervised.
    """

    final: Tensor
    positions: Tensor


def slot_weights(block: int, gamma: float, device: torch.device) -> Tensor:
    """`[B-1]` fp32: exp(-(k - 1) / gamma) for k = 1..B-1 (DFlash)."""
    return torch.exp(-torch.arange(block - 1, device=device, dtype=torch.float32) / gamma)


def default_gamma(block: int) -> float:
    """gamma as published for a block size; half the block where nothing was published."""
    return {8: 4.0, 10: 5.0, 16: 7.0, 32: 10.0}.get(block, block / 2)


def block_loss(
    hidden: Tensor, head: LmHead, labels: Tensor, mask: Tensor, settings: LossSettings, target: TargetRows | None = None
) -> BlockLoss:
    """The loss of A blocks. Its gradient is made at once, unless none is wanted; `backward` only scales it.

    Args:
        hidden: `[A, B, H]` from `Drafter.blocks`.
        head: the target's.
        labels: `[A, B-1]` int64.
        mask: `[A, B-1]` bool, supervised slots: of each block its first ones.
        settings: terms and weights.
        target: the target's rows, if `settings.needs_final`.

    Raises:
        ValueError: they are needed and not given.
    """
    if settings.needs_final and target is None:
        raise ValueError("these terms of the loss compare with the target: its last hidden states are needed")
    block = hidden.shape[1]
    fixed = slot_weights(block, settings.gamma or default_gamma(block), hidden.device)
    if settings.weights != "decay":
        fixed = torch.ones_like(fixed)
    wanted = hidden.requires_grad and torch.is_grad_enabled()
    found: Any = _HeadLoss.apply(hidden, head, labels, mask, settings, fixed, target, wanted)
    numerator, correct, overlap = found
    denominator = (fixed * mask).sum() if settings.of_slots else mask.any(1).sum().float()
    return BlockLoss(numerator, denominator, correct, mask.sum(0).float(), overlap)


def combine(
    settings: LossSettings, fixed: Tensor, mask: Tensor, entropy: Tensor, overlap: Tensor, divergence: Tensor
) -> tuple[Tensor, Tensor]:
    """The terms of some blocks, put together.

    Args:
        settings: terms and weights.
        fixed: `[B-1]`, fixed weights.
        mask: `[n, B-1]` bool, supervised slots.
        entropy, overlap, divergence: `[n, B-1]` fp32, each slot's -log softmax(z)[label], o and KL; zeros where
            unsupervised.

    Returns:
        The numerator, and `[3, n, B-1]`: its derivatives in entropy, divergence and total variation (1 - overlap).
    """
    weights = fixed * mask
    if settings.weights == "dpace":
        share = (1 - settings.dpace_alpha) * torch.exp(-entropy) + settings.dpace_alpha
        weights = (share.cumprod(1) * mask).flip(1).cumsum(1).flip(1)
    variation = 1 - overlap
    floored = overlap.clamp(min=LEAST_OVERLAP)
    mixture = torch.exp(-3 * overlap)
    on_divergence = settings.kl + settings.lk_mixed * mixture
    on_variation = settings.total_variation + settings.lk_mixed * (1 - mixture)
    loss = settings.cross_entropy * entropy + on_divergence * divergence + on_variation * variation
    if settings.lk_log:
        loss = loss - settings.lk_log * floored.log()
        on_variation = on_variation + settings.lk_log / floored
    numerator = (weights * loss).sum()
    derivatives = torch.stack([settings.cross_entropy * weights, on_divergence * weights, on_variation * weights])
    if settings.expected_length:
        factor = settings.expected_length * (fixed.sum() if settings.of_slots else 1)
        reached, change = _expected_length(overlap)
        numerator = numerator - factor * reached.sum()
        derivatives[2] += factor * change * mask
    return numerator, derivatives


def _expected_length(overlap: Tensor) -> tuple[Tensor, Tensor]:
    """o_1 ... o_k for each k, and the derivative of their sum in each o_j, `[n, B-1]` both.

    The derivative is o_1 ... o_(j-1) times the sum over k >= j of o_(j+1) ... o_k: nothing is divided by an overlap.
    """
    slots = overlap.shape[1]
    reached = overlap.cumprod(1)
    before = torch.cat([torch.ones_like(reached[:, :1]), reached[:, :-1]], 1)
    own = torch.ones(slots, slots, dtype=torch.bool, device=overlap.device).tril()
    beyond = overlap[:, None].masked_fill(own, 1).cumprod(2).triu().sum(2)  # row j, column k
    return reached, before * beyond


class _HeadLoss(torch.autograd.Function):
    """The numerator, right slots by slot, and overlaps by slot."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: LmHead,
        labels: Tensor,
        mask: Tensor,
        settings: LossSettings,
        fixed: Tensor,
        target: TargetRows | None,
        wanted: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, slots, width = hidden.shape[0], hidden.shape[1] - 1, hidden.shape[2]
        target = target if settings.needs_final else None
        most = (CHUNK_ROWS if target is None else SOFT_CHUNK_ROWS)[hidden.device.type]
        step = min(count, max(1, most // slots))
        # One buffer for all chunks: their logits are most of the memory that a step needs beside its weights.
        logits = hidden.new_empty(step * slots, head.weight.shape[0], dtype=torch.float32)
        target_logits = logits if target is None else torch.empty_like(logits)
        gradient = hidden.new_empty(hidden.shape if wanted else 0)
        if wanted:
            gradient[:, 0] = 0
        known = labels.masked_fill(~mask, -1)
        numerator = hidden.new_zeros((), dtype=torch.float32)
        correct = hidden.new_zeros(slots, dtype=torch.float32)
        overlaps = torch.zeros_like(correct)
        for first in range(0, count, step):
            part = slice(first, first + step)
            rows = hidden[part, 1:].reshape(-1, width)
            label, shape = known[part].reshape(-1), (-1, slots)
            z = head.logits(rows, logits[: len(rows)])
            hard = hard_rows(z, label)
            entropy = (hard.log_norm - hard.chosen).view(shape)
            soft, overlap, divergence = None, torch.zeros_like(entropy), torch.zeros_like(entropy)
            if target is not None:
                final = target.final[target.positions[part].reshape(-1)]
                zt = head.logits(final, target_logits[: len(rows)])
                soft = soft_rows(z, zt, label, 1 / settings.temperature, hard)
                overlap, divergence = soft.overlap.view(shape), soft.divergence.view(shape)
            loss, derivatives = combine(settings, fixed, mask[part], entropy, overlap, divergence)
            numerator += loss
            correct += (hard.best == label).view(shape).sum(0)
            overlaps += overlap.sum(0)
            if wanted:
                given = z, label, hard.log_norm, soft, derivatives.flatten(1)
                slope = coded_slopes(*given) if head.fp8 else slopes(*given, hidden.dtype)
                gradient[part, 1:] = head.back(slope).view(-1, slots, width)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct, overlaps)
        return numerator, correct, overlaps

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # In place, so that no second one of its size exists: torch refuses a second backward pass through it.
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(outputs[0]), None, None, None, None, None, None, None
