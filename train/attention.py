"""Anchor-block attention: each block sees its document before the anchor, and itself.

Formula: slot k of a block at anchor a sees context position p when doc_start(a) <= p < a and, with a window W,
a + k - p < W; it sees slot j of its own block always in a full layer, and in a sliding layer when |k - j| < W and, if
causal, j <= k. Softmax over both together, scaled by head_dim ** -0.5.

The plain PyTorch form here is exact and differentiable; on a GPU `kernels/anchor_attention.py` computes the same.
Sorted anchors are the contract of both: neighbours then share most of their context, so the plain form takes anchors a
few at a time and multiplies only the context that those can see.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .kernels.anchor_attention import fused_anchor_attention
from .kernels.launch import fused

GROUP = 32
"""Anchors handled at a time."""


@dataclass(frozen=True)
class Blocks:
    """Where the blocks of a call stand.

    Attributes:
        anchors: `[A]` int64, ascending: a block sees context positions before its anchor, which may be T.
        starts: `[A]` int64, ascending: from where it sees them, its document's start. At or after the anchor: none.
    """

    anchors: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, anchors: torch.Tensor, doc_start: torch.Tensor) -> Blocks:
        """Look up the document starts in `doc_start` `[T]`; T marks a missing anchor, which sees no context."""
        length = doc_start.shape[0]
        starts = doc_start[anchors.clamp(max=length - 1)].long()
        return cls(anchors, torch.where(anchors < length, starts, anchors))


def anchor_attention(
    packed: torch.Tensor, context: torch.Tensor, blocks: Blocks, heads: int, window: int | None, causal: bool
) -> torch.Tensor:
    """Attention of A blocks of B slots.

    Args:
        packed: `[A, B, heads + 2 * kv_heads, d]`: queries, keys and values of each slot.
        context: `[T, 2 * kv_heads, d]`: keys and values of each context position.
        heads: query heads.
        window: W of a sliding layer, None for a full one.
        causal: whether slots of a sliding layer see only slots up to their own; a full layer ignores it.

    Returns:
        `[A, B, heads, d]`, in the dtype of `packed`; softmax in fp32.
    """
    if fused(packed):
        return fused_anchor_attention(packed, context, blocks.anchors, blocks.starts, heads, window, causal)
    return anchor_attention_reference(packed, context, blocks, heads, window, causal)


def anchor_attention_reference(
    packed: torch.Tensor, context: torch.Tensor, blocks: Blocks, heads: int, window: int | None, causal: bool
) -> torch.Tensor:
    """The same in plain torch, on the host's time: it looks at where anchors stand."""
    kv_heads = (packed.shape[2] - heads) // 2
    query, block_key, block_value = packed.split([heads, kv_heads, kv_heads], 2)
    context_key, context_value = context.split(kv_heads, 1)
    anchors, starts = blocks.anchors.tolist(), blocks.starts.tolist()
    outputs = []
    for first in range(0, len(anchors), GROUP):
        group = slice(first, first + GROUP)
        seen = [(s, a) for s, a in zip(starts[group], anchors[group], strict=True) if s < a]
        low = min((s for s, _ in seen), default=0)
        high = max((a for _, a in seen), default=0)
        outputs.append(
            _attend(
                query[group],
                block_key[group],
                block_value[group],
                context_key[low:high],
                context_value[low:high],
                blocks.anchors[group] - low,
                blocks.starts[group] - low,
                window,
                causal,
            )
        )
    return torch.cat(outputs)


def _attend(
    query: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    anchors: torch.Tensor,
    starts: torch.Tensor,
    window: int | None,
    causal: bool,
) -> torch.Tensor:
    count, block, heads, dim = query.shape
    kv_heads = block_key.shape[2]
    length = context_key.shape[0]
    slot = torch.arange(block, device=query.device)
    position = torch.arange(length, device=query.device)

    before = (position >= starts[:, None]) & (position < anchors[:, None])
    see_context = before[:, None, :].expand(count, block, length)
    gap = slot[:, None] - slot
    see_own = torch.ones_like(gap, dtype=torch.bool)
    if window is not None:
        see_context = see_context & (anchors[:, None, None] + slot[:, None] - position < window)
        see_own = (gap >= 0) & (gap < window) if causal else gap.abs() < window
    hidden = ~torch.cat([see_context, see_own.expand(count, block, block)], -1)[None, :, None]

    # Query heads that share a key-value head stand together: [kv_heads, A, heads a group * B, d].
    share = heads // kv_heads
    rows = share * block
    grouped = (
        query.reshape(count, block, kv_heads, share, dim).permute(2, 0, 3, 1, 4).reshape(kv_heads, count, rows, dim)
    )
    flat = grouped.view(kv_heads, count * rows, dim)
    on_context = (flat @ context_key.permute(1, 2, 0)).view(kv_heads, count, rows, length)
    on_own = grouped @ block_key.permute(2, 0, 3, 1)
    scores = torch.cat([on_context, on_own], -1).view(kv_heads, count, share, block, length + block)
    weights = torch.softmax((scores.float() * dim**-0.5).masked_fill(hidden, float("-inf")), -1).to(query.dtype)
    to_context, to_own = weights.view(kv_heads, count, rows, length + block).split([length, block], -1)
    out = (to_context.reshape(kv_heads, count * rows, length) @ context_value.transpose(0, 1)).view(grouped.shape)
    out = out + to_own @ block_value.permute(2, 0, 1, 3)
    return out.view(kv_heads, count, share, block, dim).permute(1, 3, 0, 2, 4).reshape(count, block, heads, dim)
