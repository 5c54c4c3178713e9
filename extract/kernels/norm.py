"""RMSNorm with the residual sum before it.

    s = x + d        y = s / sqrt(mean(s^2) + eps) * w          (Qwen3; rounded before the product with w)
                     y = s / sqrt(mean(s^2) + eps) * (1 + w)    (Qwen3.5)

One pass: x and d are read, s and y written; s is the next residual, and the state of a layer. y leaves in fp8 where the
next product takes that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .products import Rows, empty_rows


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, centred: bool, fp8: bool = False
) -> tuple[Tensor, Rows]:
    """The sum and its norm.

    Args:
        x: `[n, H]`.
        delta: `[n, H]`, or None for no sum (then the first result is x itself).
        weight: `[H]`.
        centred: the weight is stored as its distance from one (Qwen3.5).
        fp8: return the norm in fp8.

    Returns:
        `[n, H]` in the dtype of x, and rows `[n, H]`.
    """
    count, width = x.shape
    total = x if delta is None else torch.empty_like(x)
    out = empty_rows(count, width, x, fp8)
    block = triton.next_power_of_2(width)
    launch(
        _add_norm, (count,),
        x, x if delta is None else delta, weight, total, out.values, out.scales if fp8 else x, width, eps,
        delta is not None, centred, fp8, block, num_warps=8 if block >= 4096 else 4,
    )  # fmt: skip
    return total, out


def add_norm_reference(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    total = x if delta is None else x + delta
    exact = total.float()
    normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return total, (normed * (1 + weight.float())).to(x.dtype) if centred else weight * normed.to(x.dtype)


@triton.jit
def _add_norm(
    x, delta, weight, total, out, scales, width, eps, has_delta: tl.constexpr, centred: tl.constexpr, fp8: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    at = row * width + column
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    if has_delta:
        value += tl.load(delta + at, mask=inside, other=0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    factor = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    if centred:
        result = normed * (1 + factor)
    else:
        result = normed.to(x.dtype.element_ty).to(tl.float32) * factor
    if fp8:
        scale = tl.maximum(tl.max(tl.abs(result), 0), 448e-12) / 448.0
        tl.store(out + at, (result / scale).to(tl.float8e4nv), mask=inside)
        tl.store(scales + row, scale)
    else:
        tl.store(out + at, result.to(x.dtype.element_ty), mask=inside)
