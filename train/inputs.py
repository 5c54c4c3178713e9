"""What a drafter is fed, on its device: the batch's states as bfloat16, and the target's two ends.

Knows batches and heads, nothing of losses or of evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..store import Batch, Head


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


def device_states(batch: Batch, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The batch's hidden states `[layers, T, H]` on a device, their bit patterns read as bfloat16."""
    bits = torch.from_numpy(batch.hidden.view(np.int16))
    return bits.to(device).view(torch.bfloat16).to(dtype)
