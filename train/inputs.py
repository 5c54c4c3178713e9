"""What a drafter is fed, on its device: a batch's states as bfloat16, and the target's two ends.

Knows batches and heads, nothing of losses or of evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..store import Head, States
from ..store.states import Allocate
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


def device_states(states: States, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Stored states on a device, `[layers, T, H]`, through bfloat16; fp8 travels as it is and is decoded there."""
    if states.scales is not None:
        codes, scales = torch.from_numpy(states.values).to(device), torch.from_numpy(states.scales).to(device)
        return decode_states(codes, scales).to(dtype)
    bits = torch.from_numpy(states.values.view(np.int16))
    return bits.to(device).view(torch.bfloat16).to(dtype)


def buffers_for(device: torch.device) -> Allocate | None:
    """How to make the buffers that batches are read into: pinned for a GPU, so that copies run at the bus's speed."""
    if device.type != "cuda":
        return None

    def pinned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = int(np.prod(shape)) * dtype.itemsize
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True).numpy().view(dtype).reshape(shape)

    return pinned
