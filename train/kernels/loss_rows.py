"""What a loss needs to know of rows of logits: norms, the largest, and how near two distributions are.

    log_norm = log sum exp(s z)        best = argmax z, the lowest of equals        chosen = z[label]

    q = softmax(s z), p = softmax(s zt):
    overlap = sum min(p, q)        divergence = sum p (log p - log q)        below = sum of q where q < p

z is the drafter's row, zt the target's, s one over a temperature. One program a row, which it reads once: each lane
keeps its own maximum and its sum relative to that, and the lanes meet at the end. A row whose label is negative is not
read; its numbers are zeros. Bound by memory: four bytes read a logit and statistic. Knows nothing of blocks and terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import fused, launch

TILE = 2048
"""Logits that a program takes at a time: 8 a thread, so that what it keeps of each lane fits 48 to 64 registers."""
STAGES = 4
"""Tiles that a program has in hand: one at work, the others on their way to shared memory; 1 reads none ahead.

Compiled for an H100 or H200 (sm_90), a loop that reads nothing ahead has each load of 16 bytes right before its use,
however many of them an iteration holds, so that a thread waits with 16 bytes on their way; the memory of an H200 needs
some 25 KB a multiprocessor. Reading ahead are copies to shared memory (cp.async, 16 bytes a thread), 8 KB a tile: with
4, `_hard_rows` keeps up to 120 KB on their way (5 programs of 48 registers a thread), `_soft_rows`, which reads two
rows, up to 192 (4 programs of 55). `bench/loss.py --stages` measures it."""


@dataclass(frozen=True)
class HardRows:
    """Of rows of logits, `[n]` each: `log_norm` fp32, `best` int32, `chosen` fp32 (formulas above)."""

    log_norm: Tensor
    best: Tensor
    chosen: Tensor


@dataclass(frozen=True)
class SoftRows:
    """Of rows of the drafter's logits beside the target's (formulas above).

    Attributes:
        target: `[n, V]` fp32, the target's logits.
        scale: one over the temperature.
        log_norm, target_log_norm: `[n]` fp32, of both at that temperature.
        overlap, divergence, below: `[n]` fp32.
    """

    target: Tensor
    scale: float
    log_norm: Tensor
    target_log_norm: Tensor
    overlap: Tensor
    divergence: Tensor
    below: Tensor


def hard_rows(logits: Tensor, labels: Tensor, scale: float = 1.0) -> HardRows:
    """Norm, argmax and the label's logit of each row.

    Args:
        logits: `[n, V]` fp32, contiguous.
        labels: `[n]` int64; negative where a row is to be left alone.
        scale: one over the temperature of the norm.
    """
    if not fused(logits):
        return hard_rows_reference(logits, labels, scale)
    count, width = logits.shape
    log_norm, chosen = logits.new_zeros(2, count)
    best = torch.zeros(count, dtype=torch.int32, device=logits.device)
    launch(
        _hard_rows, (count,), logits, labels, log_norm, best, chosen, width, scale, stages=STAGES, **tiles(width, TILE)
    )  # fmt: skip
    return HardRows(log_norm, best, chosen)


def hard_rows_reference(logits: Tensor, labels: Tensor, scale: float = 1.0) -> HardRows:
    """The same in plain torch."""
    read = labels >= 0
    log_norm = (logits * scale if scale != 1 else logits).logsumexp(-1)
    chosen = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return HardRows(log_norm.where(read, 0), (logits.argmax(-1) * read).int(), chosen.where(read, 0))


def soft_rows(logits: Tensor, target: Tensor, labels: Tensor, scale: float, hard: HardRows) -> SoftRows:
    """The two distributions of each row, compared.

    Args:
        logits: `[n, V]` fp32, contiguous, the drafter's.
        target: the same of the target.
        labels: `[n]` int64; negative where a row is to be left alone.
        scale: one over the temperature of both.
        hard: of the drafter's logits at temperature 1; any other costs one more reading of them.
    """
    log_norm = hard.log_norm if scale == 1 else hard_rows(logits, labels, scale).log_norm
    target_log_norm = hard_rows(target, labels, scale).log_norm
    if fused(logits):
        count, width = logits.shape
        found = logits.new_zeros(3, count)
        launch(
            _soft_rows, (count,), logits, target, labels, log_norm, target_log_norm, found, count, width, scale,
            stages=STAGES, **tiles(width, TILE),
        )  # fmt: skip
    else:
        found = soft_rows_reference(logits, target, labels, scale, log_norm, target_log_norm)
    return SoftRows(target, scale, log_norm, target_log_norm, *found)


def soft_rows_reference(
    logits: Tensor, target: Tensor, labels: Tensor, scale: float, log_norm: Tensor, target_log_norm: Tensor
) -> Tensor:
    """The same in plain torch: overlap, divergence and below, `[3, n]`."""
    log_q = logits * scale - log_norm[:, None]
    log_p = target * scale - target_log_norm[:, None]
    q, p = log_q.exp(), log_p.exp()
    below = (q * (q < p)).sum(-1)
    found = torch.stack([torch.minimum(p, q).sum(-1), (p * (log_p - log_q)).sum(-1), below])
    return found.where(labels >= 0, 0)


def tiles(width: int, most: int) -> dict[str, int]:
    """How a program walks a row of that width, at most so many numbers at a time: a kernel's `block`, and its warps."""
    block = min(most, triton.next_power_of_2(width))
    return {"block": block, "num_warps": 8 if block >= 2048 else 4}


@triton.jit
def _hard_rows(
    logits, labels, log_norm, best, chosen, width, scale, block: tl.constexpr, stages: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    if label < 0:
        return
    source = logits + row * width
    column = tl.arange(0, block)
    # Below any logit, and yet not -inf: a difference of two infinities would be no number.
    largest = tl.full([block], -1e38, tl.float32)
    total = tl.zeros([block], tl.float32)
    place = tl.zeros([block], tl.int32)  # where the tile of the largest begins
    fall = -1.4426950408889634 * scale  # exp(-s x) = 2^(x fall)
    for start in tl.range(0, width, block, num_stages=stages):  # pyright: ignore[reportGeneralTypeIssues]
        value = tl.load(source + start + column, mask=start + column < width, other=-float("inf"))
        above = value > largest
        # One exponential serves both cases: it scales the sum when the maximum moves, and is the new term otherwise.
        shrink = tl.exp2(tl.abs(value - largest) * fall)
        total = tl.where(above, total * shrink + 1, total + shrink)
        place = tl.where(above, start, place)
        largest = tl.where(above, value, largest)
    top = tl.max(largest, 0)
    norm = top * scale + tl.log(tl.sum(total * tl.exp((largest - top) * scale), 0))
    tl.store(log_norm + row, norm)
    tl.store(best + row, tl.min(tl.where(largest == top, place + column, width), 0))
    tl.store(chosen + row, tl.load(source + label))


@triton.jit
def _soft_rows(
    logits, target, labels, log_norm, target_log_norm, found, count, width, scale,
    block: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(labels + row) < 0:
        return
    drafter_norm, target_norm = tl.load(log_norm + row), tl.load(target_log_norm + row)
    column = tl.arange(0, block)
    overlap = tl.zeros([block], tl.float32)
    divergence = tl.zeros([block], tl.float32)
    below = tl.zeros([block], tl.float32)
    for start in tl.range(0, width, block, num_stages=stages):  # pyright: ignore[reportGeneralTypeIssues]
        at = start + column
        inside = at < width
        log_q = tl.load(logits + row * width + at, mask=inside, other=0) * scale - drafter_norm
        log_p = tl.load(target + row * width + at, mask=inside, other=0) * scale - target_norm
        q = tl.where(inside, tl.exp(log_q), 0)
        p = tl.where(inside, tl.exp(log_p), 0)
        overlap += tl.minimum(p, q)
        divergence += p * (log_p - log_q)
        below += tl.where(q < p, q, 0)
    tl.store(found + row, tl.sum(overlap, 0))
    tl.store(found + count + row, tl.sum(divergence, 0))
    tl.store(found + 2 * count + row, tl.sum(below, 0))
