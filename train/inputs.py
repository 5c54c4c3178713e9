"""What a drafter is fed, on its device: a batch's states as it computes with them, and the target's two ends.

`Inputs` holds one micro-batch in buffers that never move, for a captured step reads them where they are. The next batch
travels to a staging copy while a step runs on this one. Knows batches and heads, nothing of losses or of evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..store import Batch, Head, States
from ..store.states import Allocate
from .drafter import Drafter
from .fp8 import decode_states


@dataclass(frozen=True)
class Ends:
    """The target's embedding and LM head, `[vocabulary, H]` each, where the drafter computes."""

    embedding: torch.Tensor
    lm_head: torch.Tensor

    @classmethod
    def of(cls, head: Head, device: torch.device, dtype: torch.dtype) -> Ends:
        """Move a head once; a tied one stays one tensor."""
        embedding = head.embedding.to(device, dtype)
        return cls(embedding, embedding if head.lm_head is head.embedding else head.lm_head.to(device, dtype))

    @classmethod
    def beside(cls, head: Head, drafter: Drafter) -> Ends:
        """A head where a drafter is, in its dtype."""
        parameter = next(drafter.parameters())
        return cls.of(head, parameter.device, parameter.dtype)


class Inputs:
    """One micro-batch on a device, in fixed buffers.

    Args:
        like: a batch of the shape to be fed (`Batch.empty`).
        device, dtype: of the drafter.

    Attributes:
        features: `[T, layers * H]`, the states side by side.
        final: `[T, H]`, or None when the batches have none.
        tokens: `[T]` int64.
        loss_mask: `[T]` bool.
        doc_start: `[T]` int64, T in padding.
        number: int64 scalar, the global micro-batch number.
        copied: on a GPU, when the batch loaded last had come there.
    """

    def __init__(self, like: Batch, device: torch.device, dtype: torch.dtype) -> None:
        layers, length, width = like.hidden.values.shape
        self.device = device
        self.features = torch.zeros(length, layers * width, device=device, dtype=dtype)
        self.final = None if like.final is None else torch.zeros(length, width, device=device, dtype=dtype)
        self.tokens = torch.zeros(length, device=device, dtype=torch.int64)
        self.loss_mask = torch.zeros(length, device=device, dtype=torch.bool)
        self.doc_start = torch.full((length,), length, device=device, dtype=torch.int64)
        self.number = torch.zeros((), device=device, dtype=torch.int64)
        pinned = device.type == "cuda"
        # All that is small crosses in one piece: tokens, document starts, mask and number.
        self._small = torch.zeros(3 * length + 1, dtype=torch.int64, pin_memory=pinned)
        if pinned:
            self._staged_small = torch.zeros_like(self._small, device=device, pin_memory=False)
            self._staged = [_like(tensor, device) for tensor in _tensors(like)]
            self._stream = torch.cuda.Stream(device)
            self._taken, self.copied = torch.cuda.Event(), torch.cuda.Event()

    def load(self, batch: Batch, number: int) -> None:
        """Begin to bring a batch over; `take` makes it the one that is computed with. It must stay until `sent`."""
        length = len(batch.tokens)
        small = self._small.numpy()
        small[:length], small[length : 2 * length] = batch.tokens, batch.doc_start
        small[2 * length : -1], small[-1] = batch.loss_mask, number
        if self.device.type != "cuda":
            self._spread(self._small, [tensor.to(self.device) for tensor in _tensors(batch)])
            return
        self._stream.wait_event(self._taken)
        with torch.cuda.stream(self._stream):
            self._staged_small.copy_(self._small, non_blocking=True)
            for staged, tensor in zip(self._staged, _tensors(batch), strict=True):
                staged.copy_(tensor, non_blocking=True)
            self.copied = torch.cuda.Event(enable_timing=True)
            self.copied.record()

    def take(self) -> None:
        """Put the loaded batch into the fixed buffers, in the order of the device's work."""
        if self.device.type != "cuda":
            return
        torch.cuda.current_stream(self.device).wait_event(self.copied)
        self._spread(self._staged_small, self._staged)
        self._taken.record()

    def sent(self) -> None:
        """Wait until the loaded batch's memory may be written again."""
        if self.device.type == "cuda":
            self.copied.synchronize()

    @torch.no_grad()
    def _spread(self, small: torch.Tensor, states: list[torch.Tensor]) -> None:
        length = len(self.tokens)
        self.tokens.copy_(small[:length])
        self.doc_start.copy_(small[length : 2 * length])
        self.loss_mask.copy_(small[2 * length : -1])
        self.number.copy_(small[-1])
        each = len(states) if self.final is None else len(states) // 2
        hidden = _decoded(states[:each])
        self.features.view(length, len(hidden), -1).copy_(hidden.transpose(0, 1))
        # Padding holds what an earlier batch left there, and what is not finite spoils sums even at weight zero.
        padding = (self.doc_start == length)[:, None]
        self.features.masked_fill_(padding, 0)
        if self.final is not None:
            self.final.copy_(_decoded(states[each:])[0])
            self.final.masked_fill_(padding, 0)


def _tensors(batch: Batch) -> list[torch.Tensor]:
    """A batch's states as they are kept: hidden's values (and scales), then those of final."""
    kept = [batch.hidden] if batch.final is None else [batch.hidden, batch.final]
    return [tensor for states in kept for tensor in _stored(states)]


def _stored(states: States) -> list[torch.Tensor]:
    if states.scales is not None:
        return [torch.from_numpy(states.values), torch.from_numpy(states.scales)]
    return [torch.from_numpy(states.values.view(np.int16))]


def _decoded(stored: list[torch.Tensor]) -> torch.Tensor:
    """`[layers, T, H]` bfloat16."""
    return stored[0].view(torch.bfloat16) if len(stored) == 1 else decode_states(stored[0], stored[1])


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


def side_by_side(states: torch.Tensor) -> torch.Tensor:
    """`[T, layers * H]` of `[layers, T, H]`: what a drafter reads at each position."""
    return states.transpose(0, 1).flatten(1)


def buffers_for(device: torch.device) -> Allocate | None:
    """How to make the buffers that batches are read into: pinned for a GPU, so that copies run at the bus's speed."""
    if device.type != "cuda":
        return None

    def pinned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = int(np.prod(shape)) * dtype.itemsize
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True).numpy().view(dtype).reshape(shape)

    return pinned
