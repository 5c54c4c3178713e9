"""One training step: micro-batches forward and backward, then an update; on a GPU two CUDA graphs, replayed.

A batch goes into fixed buffers, anchors are drawn, blocks run, the loss's gradient accumulates; the update divides by
the accumulated denominator. With several ranks gradients, numerators and denominators are summed over them first: one
batch an update on each of N ranks, or N batches an update on one, make the same update but for rounding. Nothing waits
for the device: what a step found is copied into pinned memory behind it, and read once it is there. Knows nothing of
epochs, checkpoints or files.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..store import Batch
from .anchors import draw_anchors, supervision
from .attention import Blocks
from .drafter import Drafter
from .graphs import Pool, captured
from .head import LmHead
from .idle import Idle
from .inputs import Inputs
from .loss import BlockLoss, LossSettings, TargetRows, block_loss
from .optimizer import Optimizer
from .ranks import Ranks, alone
from .reduce import GradientSum

REPORTS = 8
"""Reports that may be on their way at a time."""


@dataclass(frozen=True)
class Found:
    """What some micro-batches and the update after them gave, on the host.

    Attributes:
        numerator, denominator: of the loss.
        correct, supervised, overlap: sums by slot, `[B-1]`.
        grad_norm: of the update, before clipping.
        skipped: updates left out since the run began.
        stop: ranks that had been asked to stop.
    """

    numerator: float
    denominator: float
    correct: np.ndarray
    supervised: np.ndarray
    overlap: np.ndarray
    grad_norm: float
    skipped: int
    stop: int

    def __add__(self, later: Found) -> Found:
        """Both together; norm and counts are the later one's."""
        return Found(
            self.numerator + later.numerator,
            self.denominator + later.denominator,
            self.correct + later.correct,
            self.supervised + later.supervised,
            self.overlap + later.overlap,
            later.grad_norm,
            later.skipped,
            later.stop,
        )

    def numbers(self) -> dict[str, float]:
        """Loss, share right of slot 1 and of all supervised slots, and their mean overlap where it was needed."""
        slots = max(float(self.supervised.sum()), 1)
        found = {
            "loss": self.numerator / max(self.denominator, 1e-9),
            "accuracy_slot_1": float(self.correct[0] / max(self.supervised[0], 1)),
            "accuracy": float(self.correct.sum()) / slots,
        }
        return found | {"overlap": float(self.overlap.sum()) / slots} if self.overlap.any() else found


class Report:
    """`Found`, on its way to the host."""

    def __init__(self, values: torch.Tensor, done: torch.cuda.Event | None) -> None:
        self._values, self._done = values, done

    @property
    def ready(self) -> bool:
        """Whether `read` would not wait."""
        return self._done is None or self._done.query()

    def read(self) -> Found:
        """The numbers, waited for if need be."""
        if self._done is not None:
            self._done.synchronize()
        numerator, denominator, norm, skipped, stop = self._values[:5].tolist()
        correct, supervised, overlap = self._values[5:].double().numpy().reshape(3, -1)
        return Found(numerator, denominator, correct, supervised, overlap, norm, int(skipped), int(stop))


class Forward:
    """From the inputs to the loss, and sums over micro-batches.

    Args:
        drafter: on its device, in the dtype to compute in.
        embedding: `[vocabulary, H]`, the target's.
        head: the target's.
        loss: terms and weights.
        inputs: the fixed buffers that batches come in.
        anchors: blocks a micro-batch.
        seed: of the anchors.
    """

    def __init__(
        self,
        drafter: Drafter,
        embedding: torch.Tensor,
        head: LmHead,
        loss: LossSettings,
        inputs: Inputs,
        anchors: int,
        seed: int,
    ) -> None:
        self.inputs, self.drafter = inputs, drafter
        self._embedding, self._head, self._loss = embedding, head, loss
        self._anchors, self._seed = anchors, seed
        block = drafter.settings.block_size
        # Numerator, denominator, then correct, supervised and overlap by slot.
        self.sums = torch.zeros(2 + 3 * (block - 1), device=inputs.device)

    def loss(self) -> BlockLoss:
        """The loss of the batch in the inputs, at the anchors of its number."""
        inputs, drafter = self.inputs, self.drafter
        tokens, mask, doc_start = inputs.tokens, inputs.loss_mask, inputs.doc_start
        block, last = drafter.settings.block_size, len(tokens) - 1
        anchors = draw_anchors(mask, doc_start, self._seed, inputs.number, self._anchors)
        labels, supervised = supervision(anchors, tokens, mask, doc_start, block)
        context = drafter.context(inputs.features, torch.arange(len(tokens), device=inputs.device) - doc_start)
        embedded = drafter.block_inputs(self._embedding, tokens[anchors.clamp(max=last)])
        hidden = drafter.blocks(embedded, context, Blocks.of(anchors, doc_start))
        target = None
        if inputs.final is not None and self._loss.needs_final:
            before = anchors[:, None] + torch.arange(block - 1, device=inputs.device)
            target = TargetRows(inputs.final, before.clamp(max=last))
        found = block_loss(hidden, self._head, labels, supervised, self._loss, target)
        numbers = torch.stack([found.numerator.detach(), found.denominator])
        self.sums += torch.cat([numbers, found.correct, found.supervised, found.overlap])
        return found

    @torch.no_grad()
    def measure(self) -> None:
        """The loss without gradients, added to the sums."""
        self.loss()


class TrainStep:
    """Forward, backward and update over fixed buffers.

    Args:
        forward: what is trained.
        optimizer: over the drafter's parameters.
        measured: a second forward to capture beside it, for validation; it shares the graphs' memory.
        ranks: whose gradients are summed at every update; by default there is one.
        pool: memory to share with other graphs (`graphs.new_pool`).
    """

    def __init__(
        self,
        forward: Forward,
        optimizer: Optimizer,
        measured: Forward | None = None,
        ranks: Ranks | None = None,
        pool: Pool = None,
    ) -> None:
        self.device = forward.inputs.device
        self.idle = Idle() if self.device.type == "cuda" else None
        """How long a GPU waited for batches."""
        self._forward, self._optimizer, self._measured = forward, optimizer, measured
        self._ranks = ranks or alone(self.device)
        # Several backward passes an update: their sum is final only after the last, and the update adds it over ranks.
        apart = self._ranks.joined and not optimizer.flat.accumulates
        self._sum = GradientSum(forward.drafter, optimizer.flat, self._ranks) if apart else None
        self._rate, self._norm, self._stop, self._stops = (torch.zeros((), device=self.device) for _ in range(4))
        pinned = self.device.type == "cuda"
        self._slots = [torch.zeros(len(forward.sums) + 3, pin_memory=pinned) for _ in range(REPORTS)]
        self._reports = 0
        skipped = optimizer.skipped.clone()
        works = [self._backward]
        works += [self._apply] if optimizer.capturable else []
        works += [measured.measure] if measured else []
        replays = captured(works, self.device, pool)
        self._micro = replays[0]
        self._update = replays[1] if optimizer.capturable else self._apply
        self._measure = replays[-1]
        # Put right what capturing left; the buffers held no batch, so no weight has moved.
        optimizer.skipped.copy_(skipped)
        for used in (optimizer.flat.gradients, forward.sums, self._norm):
            used.zero_()
        if measured is not None:
            measured.sums.zero_()

    def load(self, batch: Batch, number: int) -> None:
        """Begin to bring a batch to the device, as global micro-batch `number`. It must stay until `sent`."""
        self._forward.inputs.load(batch, number)

    def sent(self) -> None:
        """Wait until the loaded batch's memory may be written again; the device works on."""
        self._forward.inputs.sent()

    def micro(self) -> None:
        """Forward and backward of the loaded batch; the gradient of the numerator accumulates."""
        self._forward.inputs.take()
        if self.idle is not None:
            self.idle.end(self._forward.inputs.copied)
        self._micro()
        if self.idle is not None:
            self.idle.begin()

    def update(self, rate: float) -> Report:
        """Update the weights from what accumulated. Returns what the update found, as `report`."""
        self._rate.fill_(rate)
        self._update()
        report = self.report()
        if self.idle is not None:
            self.idle.begin()
        return report

    def report(self) -> Report:
        """What the micro-batches since the last report gave, on its way to the host.

        Once `REPORTS` more have been asked for, an older one must have been read.
        """
        return self._send(self._forward.sums)

    def ask_to_stop(self) -> None:
        """From the next update on tell all ranks, in what they find, that this one has been asked to stop."""
        self._stop.fill_(1)

    def validate(self, batch: Batch, number: int) -> None:
        """Loss of a batch without gradients, for `validation`."""
        assert self._measured is not None
        self._measured.inputs.load(batch, number)
        self._measured.inputs.take()
        self._measure()
        self._measured.inputs.sent()

    def validation(self, ranks: Ranks) -> Found:
        """What was validated since this was asked for last, by all these ranks, who must all ask."""
        assert self._measured is not None
        ranks.add(self._measured.sums)
        return self._send(self._measured.sums).read()

    def _send(self, sums: torch.Tensor) -> Report:
        values = torch.cat([sums[:2], self._norm[None], self._optimizer.skipped[None], self._stops[None], sums[2:]])
        slot = self._slots[self._reports % REPORTS]
        self._reports += 1
        slot.copy_(values, non_blocking=True)
        sums.zero_()
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return Report(slot if done else slot.clone(), done)

    def _backward(self) -> None:
        self._optimizer.flat.begin()
        self._forward.loss().numerator.backward()
        self._optimizer.flat.end()
        if self._sum is not None:
            self._sum.finish()

    def _apply(self) -> None:
        sums = self._forward.sums
        if self._ranks.joined:
            found = torch.cat([sums, self._stop[None]])
            self._ranks.add(found)
            sums.copy_(found[:-1])
            self._stops.copy_(found[-1])
            if self._sum is None:
                self._ranks.add(self._optimizer.flat.gradients)
        self._norm.copy_(self._optimizer.step(self._rate, sums[1]))
