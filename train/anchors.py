"""Drawing anchors: which positions of a packed batch start a block, by a hash that CPU and GPU agree on.

Eligible is a supervised position whose next token, in the same document, is supervised. The A eligible positions with
the smallest hashes of (seed, micro-batch number, position) are taken, ties by position, then sorted. Knows only masks.
"""

from __future__ import annotations

import torch

_MASK32 = 0xFFFFFFFF
_POSITION_BITS = 31
_NEVER = torch.iinfo(torch.int64).max


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The 32-bit finalizer of MurmurHash3, on int64 tensors that hold 32-bit values."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK32
    return x ^ (x >> 16)


def eligible(loss_mask: torch.Tensor, doc_start: torch.Tensor) -> torch.Tensor:
    """`[T]` bool: positions that may be anchors, from `loss_mask` `[T]` bool and `doc_start` `[T]` int."""
    following = loss_mask[1:] & (doc_start[1:] == doc_start[:-1])
    return loss_mask & torch.cat([following, following.new_zeros(1)])


def draw_anchors(
    loss_mask: torch.Tensor, doc_start: torch.Tensor, seed: int, micro_batch: torch.Tensor, count: int
) -> torch.Tensor:
    """Draw `count` anchors without replacement.

    Args:
        loss_mask: `[T]` bool.
        doc_start: `[T]` int, where each token's document starts; T in padding.
        micro_batch: the global micro-batch number, an int64 scalar on the device (a captured graph reads it anew).

    Returns:
        `[count]` int64, ascending; T marks those that are missing because too few positions are eligible.
    """
    length = loss_mask.shape[0]
    position = torch.arange(length, device=loss_mask.device)
    salt = _mix((micro_batch + (seed * 0x9E3779B9 & _MASK32)) & _MASK32)
    hashes = _mix(position ^ salt)
    keys = torch.where(eligible(loss_mask, doc_start), (hashes << _POSITION_BITS) | position, _NEVER)
    smallest = keys.sort().values[:count]
    drawn = torch.where(smallest == _NEVER, length, smallest & ((1 << _POSITION_BITS) - 1))
    if count > length:
        drawn = torch.cat([drawn, drawn.new_full((count - length,), length)])
    return drawn.sort().values


def supervision(
    anchors: torch.Tensor, tokens: torch.Tensor, loss_mask: torch.Tensor, doc_start: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What slots 1..B-1 of each block predict, and whether they are supervised.

    A block's supervision ends at the first position that is unsupervised or in another document.

    Returns:
        labels `[A, B-1]` int64 (0 where unsupervised) and mask `[A, B-1]` bool.
    """
    length = tokens.shape[0]
    places = anchors[:, None] + torch.arange(1, block, device=anchors.device)
    inside = places < length
    clamped = places.clamp(max=length - 1)
    start = doc_start[anchors.clamp(max=length - 1)]
    good = inside & loss_mask[clamped] & (doc_start[clamped] == start[:, None])
    mask = good.cumprod(1).bool()
    return torch.where(mask, tokens[clamped].long(), 0), mask
