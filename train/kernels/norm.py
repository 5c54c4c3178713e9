"""RMSNorm with the residual sum before it, forward and backward (Zhang and Sennrich 2019).

    s = x + d        u = s / sqrt(mean(s^2) + eps)        y = w * u

    ds = ds' + (g - u * mean(g * u)) / sqrt(mean(s^2) + eps)        g = w * dy        dw = sum over rows of dy * u

ds' is what reaches the sum by the residual, ds serves x and d alike. Both ways each value is read once and written
once: forward a row a program; backward some programs walk the rows, keeping their share of dw in registers. Knows
nothing of layers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import fused, launch

ROW = 8192
"""Columns whose backward pass fills a multiprocessor's registers; programs of narrower rows share one. Two rows ahead
of three tensors so wide, in bf16, take 96 KiB of its shared memory; wider rows and fp32 are not read ahead."""
CPU_PROGRAMS = 5


def programs(x: Tensor, each: int) -> int:
    """How many programs share the rows of x by walking them with a stride: `each` a multiprocessor, some on a CPU.

    The count depends on the device alone, so what is summed a program at a time is the same in every run on it.
    """
    return each * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else CPU_PROGRAMS


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum and its norm, differentiable.

    Args:
        x: `[n, H]`.
        delta: `[n, H]` in the dtype of x, or None for no sum (then the first result is x itself).
        weight: `[H]`, in any floating dtype.

    Returns:
        Two `[n, H]` in the dtype of x.
    """
    if not fused(x):
        return add_norm_reference(x, delta, weight, eps)
    return _AddNorm.apply(x, delta, weight, eps)


def add_norm_reference(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same in plain torch, over the last of any axes."""
    total = x if delta is None else x + delta
    wide = total.float()
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return total, (weight * unit.to(x.dtype)).to(x.dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, weight = x.contiguous(), weight.contiguous()
        rows, width = x.shape
        total = x if delta is None else torch.empty_like(x)
        normed = torch.empty_like(x)
        block = triton.next_power_of_2(width)
        launch(
            _norm_forward, (rows,),
            x, x if delta is None else delta.contiguous(), weight, total, normed, width, eps, delta is not None, block,
            num_warps=_warps(block, 1024),
        )  # fmt: skip
        ctx.save_for_backward(total, weight)
        ctx.set_materialize_grads(False)
        ctx.eps = eps
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_total, d_normed = gradients
        if d_normed is None:
            return d_total, d_total if ctx.needs_input_grad[1] else None, None, None
        total, weight = ctx.saved_tensors
        rows, width = total.shape
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        d_x = torch.empty_like(total) if wanted else None
        block = triton.next_power_of_2(width)
        count = max(1, min(rows, programs(total, min(8, max(1, ROW // block)))))
        sums = torch.empty(count, width, dtype=torch.float32, device=total.device)
        launch(
            _norm_backward, (count,),
            total, weight, total if d_total is None else d_total.contiguous(), d_normed.contiguous(),
            total if d_x is None else d_x, sums, rows, width, ctx.eps, d_total is not None, wanted, block,
            3 if block * total.element_size() <= 2 * ROW else 1, num_warps=_warps(block, 512),
        )  # fmt: skip
        return d_x, d_x if ctx.needs_input_grad[1] else None, sums.sum(0).to(weight.dtype), None


def _warps(block: int, each: int) -> int:
    return min(16, max(4, block // each))


@triton.jit
def _norm_forward(x, delta, weight, total, normed, width, eps, has_delta: tl.constexpr, block: tl.constexpr):
    column = tl.arange(0, block)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    if has_delta:
        value += tl.load(delta + at, mask=inside, other=0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    unit = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    result = unit.to(x.dtype.element_ty).to(tl.float32) * factor
    tl.store(normed + at, result.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    total, weight, d_total, d_normed, d_x, sums, rows, width, eps, has_d_total: tl.constexpr, wanted: tl.constexpr,
    block: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    share = tl.zeros([block], tl.float32)
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=stages):  # pyright: ignore[reportGeneralTypeIssues]
        at = row * width + column
        value = tl.load(total + at, mask=inside, other=0).to(tl.float32)
        slope = tl.load(d_normed + at, mask=inside, other=0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        unit = value * scale
        share += slope * unit
        if wanted:
            slope *= factor
            result = (slope - unit * (tl.sum(slope * unit, 0) / width)) * scale
            if has_d_total:
                result += tl.load(d_total + at, mask=inside, other=0).to(tl.float32)
            tl.store(d_x + at, result.to(d_x.dtype.element_ty), mask=inside)
    tl.store(sums + program * width + column, share, mask=inside)
