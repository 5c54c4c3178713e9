"""The gradient of a row's loss in its logits, over the logits themselves.

    dz_v = e (softmax(z)_v - [v is the label])                       e: weight of the cross entropy
         + d s (q_v - p_v)                                           d: of the divergence
         + t s q_v (below - [q_v < p_v])                             t: of the total variation, 1 - overlap

q, p, s, below and overlap as in `loss_rows.py`. (d overlap / d q_v = [q_v < p_v]; equal ones count as not below, so the
gradient is zero where the drafter is the target.) Every term of the loss is some e, d and t.

In bfloat16 the gradient of a row takes the first half of the row's own bytes, so that no second buffer of a chunk's
size exists; in fp8 the first quarter. One program walks a row from the left. It stores numbers i..i+n of the gradient,
at bytes 2i..2(i+n) or i..i+n, after all of its threads have loaded logits i..i+n; what is still to be loaded begins at
byte 4(i+n).

In fp8 the label's number is kept apart, in fp32: it is the sum of the others negated, and of a row that is nearly right
they are small beside the softmax. The others are e5m2, with a scale that takes no look at them: none is beyond the
bound e + s (d + t below), which is the largest code. (Where q < p, q is a part of below, elsewhere it is multiplied by
it.) Each is off by an eighth of itself at most, and those under 2^-17 / 57344 = 1.3e-10 of the bound become nothing:
of a vocabulary of 248,320 together at most 3e-5 of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import fused, launch
from .loss_rows import SoftRows, tiles
from .quantise import E5M2, SMALLEST_SCALE, Rows

TILE = 4096
"""Logits that a program takes at a time."""


@dataclass(frozen=True)
class CodedSlopes:
    """The gradient of rows in fp8.

    Attributes:
        rows: `[n, V]`, e5m2 codes and each row's scale; zero at the label.
        labels: `[n]` int64; negative where all of a row is zero.
        own: `[n]` fp32, the number at the label.
    """

    rows: Rows
    labels: Tensor
    own: Tensor


def slopes(
    logits: Tensor, labels: Tensor, log_norm: Tensor, soft: SoftRows | None, weights: Tensor, dtype: torch.dtype
) -> Tensor:
    """The gradient of each row, zeros for rows whose label is negative (they are not read).

    Args:
        logits: `[n, V]` fp32, contiguous; lost.
        labels: `[n]` int64.
        log_norm: `[n]` fp32, at temperature 1.
        soft: of the same rows, or None if the cross entropy is the only term.
        weights: `[3, n]` fp32: e, d and t of each row.
        dtype: fp32 or bfloat16, of the gradient.

    Returns:
        `[n, V]`, which may lie in the memory of `logits`, and then with a row stride of its own.
    """
    if not fused(logits):
        return slopes_reference(logits, labels, log_norm, soft, weights).to(dtype)
    return _over_logits(logits, labels, log_norm, soft, weights, dtype, None)


def slopes_reference(
    logits: Tensor, labels: Tensor, log_norm: Tensor, soft: SoftRows | None, weights: Tensor
) -> Tensor:
    """The same in plain torch, in fp32 and in memory of its own."""
    entropy, divergence, variation = weights[..., None]
    slope = (logits - log_norm[:, None]).exp_().mul_(entropy).scatter_add_(1, labels.clamp(min=0)[:, None], -entropy)
    if soft is not None:
        q = (logits * soft.scale - soft.log_norm[:, None]).exp_()
        p = (soft.target * soft.scale - soft.target_log_norm[:, None]).exp_()
        slope += soft.scale * (divergence * (q - p) + variation * q * (soft.below[:, None] - (q < p).float()))
    return slope.masked_fill_(labels[:, None] < 0, 0)


def coded_slopes(
    logits: Tensor, labels: Tensor, log_norm: Tensor, soft: SoftRows | None, weights: Tensor
) -> CodedSlopes:
    """The same in fp8; e, d and t are not negative. By its kernel on a GPU only: Triton's interpreter knows no fp8."""
    code = coded_slopes_kernel if logits.is_cuda else coded_slopes_reference
    return code(logits, labels, log_norm, soft, weights)


def coded_slopes_reference(
    logits: Tensor,
    labels: Tensor,
    log_norm: Tensor,
    soft: SoftRows | None,
    weights: Tensor,
    dtype: torch.dtype = E5M2,
) -> CodedSlopes:
    """The same in plain torch; `dtype` is that of the codes."""
    slope, label = slopes_reference(logits, labels, log_norm, soft, weights), labels.clamp(min=0)[:, None]
    own, scales = slope.gather(1, label)[:, 0], _scales(soft, weights, dtype)
    codes = (slope.scatter_(1, label, 0) * (1 / scales)[:, None]).to(dtype)
    return CodedSlopes(Rows(codes, scales), labels, own)


def coded_slopes_kernel(
    logits: Tensor,
    labels: Tensor,
    log_norm: Tensor,
    soft: SoftRows | None,
    weights: Tensor,
    dtype: torch.dtype = E5M2,
) -> CodedSlopes:
    """The same in Triton."""
    own, scales = torch.zeros_like(log_norm), _scales(soft, weights, dtype)
    codes = _over_logits(logits, labels, log_norm, soft, weights, dtype, (own, scales))
    return CodedSlopes(Rows(codes, scales), labels, own)


def _scales(soft: SoftRows | None, weights: Tensor, dtype: torch.dtype) -> Tensor:
    entropy, divergence, variation = weights
    bound = entropy if soft is None else entropy + soft.scale * (divergence + variation * soft.below)
    return (bound / torch.finfo(dtype).max).clamp_min(SMALLEST_SCALE)


def _over_logits(
    logits: Tensor,
    labels: Tensor,
    log_norm: Tensor,
    soft: SoftRows | None,
    weights: Tensor,
    dtype: torch.dtype,
    coded: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The kernel's numbers; coded: where the labels' go, and the scales of the others."""
    count, width = logits.shape
    out = logits.view(dtype)[:, :width]
    # What a case does not need is never read.
    own, scales = coded or (log_norm, log_norm)
    if soft is None:
        target, target_log_norm, soft_log_norm, below, scale = logits, log_norm, log_norm, log_norm, 1.0
    else:
        target, target_log_norm, soft_log_norm = soft.target, soft.target_log_norm, soft.log_norm
        below, scale = soft.below, soft.scale
    launch(
        _slopes, (count,),
        logits, out, own, scales, target, labels, log_norm, soft_log_norm, target_log_norm, below, weights, count,
        width, out.stride(0), scale, soft is not None, coded is not None, **tiles(width, TILE),
    )  # fmt: skip
    return out


@triton.jit
def _slopes(
    logits, out, own, scales, target, labels, log_norm, soft_log_norm, target_log_norm, below, weights, count, width,
    out_stride, scale, soft: tl.constexpr, coded: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    kind = out.dtype.element_ty
    label = tl.load(labels + row).to(tl.int32)
    if label < 0:
        for start in range(0, width, block):
            at = start + column
            tl.store(out + row * out_stride + at, tl.zeros([block], tl.float32).to(kind), mask=at < width)
    else:
        # Without soft terms these read whatever is there, and are dropped when compiled.
        norm, drafter_norm = tl.load(log_norm + row), tl.load(soft_log_norm + row)
        target_norm, share = tl.load(target_log_norm + row), tl.load(below + row)
        entropy = tl.load(weights + row)
        divergence = tl.load(weights + count + row) * scale
        variation = tl.load(weights + 2 * count + row) * scale
        inverse = tl.div_rn(1.0, tl.load(scales + row))
        for start in range(0, width, block):
            at = start + column
            inside = at < width
            value = tl.load(logits + row * width + at, mask=inside, other=0)
            slope = tl.exp(value - norm)
            if not coded:
                slope -= (at == label).to(tl.float32)
            slope *= entropy
            if soft:
                q = tl.exp(value * scale - drafter_norm)
                p = tl.exp(tl.load(target + row * width + at, mask=inside, other=0) * scale - target_norm)
                slope += divergence * (q - p) + variation * q * (share - (q < p).to(tl.float32))
            if coded:
                if (label >= start) & (label < start + block):
                    tl.store(own + row, tl.sum(tl.where(at == label, slope, 0), 0) - entropy)
                slope = tl.where(at == label, 0, slope * inverse)
            tl.debug_barrier()  # all threads have loaded what these stores may lie on
            tl.store(out + row * out_stride + at, slope.to(kind), mask=inside)
