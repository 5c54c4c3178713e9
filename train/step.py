"""One training step: micro-batches forward and backward, then an update.

A batch becomes tensors, anchors are drawn, blocks run, the loss's gradient accumulates; the update divides by the
accumulated denominator. Knows nothing of epochs, checkpoints or files.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..store import Batch, Head
from .anchors import draw_anchors, supervision
from .attention import Blocks
from .drafter import Drafter
from .inputs import Ends, device_states
from .loss import BlockLoss, block_loss
from .muon import MasterMuon
from .optimizer import MasterAdamW


@dataclass
class Totals:
    """Sums over micro-batches: numerator, denominator and, by slot, right and supervised."""

    numerator: torch.Tensor
    denominator: torch.Tensor
    correct: torch.Tensor
    supervised: torch.Tensor

    @classmethod
    def zero(cls, block: int, device: torch.device) -> Totals:
        """Nothing yet."""
        scalar, slots = torch.zeros((), device=device), torch.zeros(block - 1, device=device)
        return cls(scalar, scalar.clone(), slots, slots.clone())

    def add(self, loss: BlockLoss) -> None:
        """Add a micro-batch."""
        self.numerator += loss.numerator.detach()
        self.denominator += loss.denominator
        self.correct += loss.correct
        self.supervised += loss.supervised

    def numbers(self) -> dict[str, float]:
        """Loss, and the share right of slot 1 and of all supervised slots."""
        return {
            "loss": float(self.numerator / self.denominator.clamp(min=1e-9)),
            "accuracy_slot_1": float(self.correct[0] / self.supervised[0].clamp(min=1)),
            "accuracy": float(self.correct.sum() / self.supervised.sum().clamp(min=1)),
        }


class TrainStep:
    """Holds what a step touches.

    Args:
        drafter: on its device, in the dtype to compute in.
        head: the target's ends.
        optimizer: over the drafter's parameters, or None to measure only.
        anchors: blocks a micro-batch.
        gamma: decay of the slot weights.
        seed: of the anchors.
    """

    def __init__(
        self,
        drafter: Drafter,
        head: Head,
        optimizer: MasterAdamW | MasterMuon | None,
        anchors: int,
        gamma: float,
        seed: int,
    ) -> None:
        parameter = next(drafter.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._drafter, self._optimizer = drafter, optimizer
        self._ends = Ends.of(head, self.device, self.dtype)
        self._anchors, self._gamma, self._seed = anchors, gamma, seed
        self._rate = torch.zeros((), device=self.device)
        self._denominator = torch.zeros((), device=self.device)

    def loss(self, batch: Batch, micro_batch: int) -> BlockLoss:
        """The loss of one packed batch, at the anchors of that global micro-batch number."""
        device, drafter = self.device, self._drafter
        tokens = torch.from_numpy(batch.tokens).to(device)
        mask = torch.from_numpy(batch.loss_mask).to(device)
        doc_start = torch.from_numpy(batch.doc_start.astype(np.int64)).to(device)
        number = torch.tensor(micro_batch, device=device)
        anchors = draw_anchors(mask, doc_start, self._seed, number, self._anchors)
        labels, supervised = supervision(anchors, tokens, mask, doc_start, drafter.settings.block_size)
        positions = torch.arange(len(tokens), device=device) - doc_start
        context = drafter.context(device_states(batch.hidden, device, self.dtype), positions)
        first = tokens[anchors.clamp(max=len(tokens) - 1)].long()
        embedded = drafter.block_inputs(self._ends.embedding, first)
        hidden = drafter.blocks(embedded, context, Blocks.of(anchors, doc_start))
        return block_loss(hidden, self._ends.lm_head, labels, supervised, self._gamma)

    def micro(self, batch: Batch, micro_batch: int) -> BlockLoss:
        """Forward and backward of one micro-batch; the gradient of the numerator accumulates."""
        found = self.loss(batch, micro_batch)
        found.numerator.backward()
        self._denominator += found.denominator
        return found

    def update(self, rate: float) -> torch.Tensor:
        """Update the weights from what accumulated. Returns the gradient's norm before clipping."""
        assert self._optimizer is not None
        norm = self._optimizer.step(self._rate.fill_(rate), self._denominator)
        self._denominator.zero_()
        return norm
