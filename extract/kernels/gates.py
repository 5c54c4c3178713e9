"""What closes the two kinds of attention: each head's output times a gate, in the form that the output product takes.

    gated norm (linear attention):  y = w * (o / sqrt(mean(o^2) + eps)) * silu(z)      mean over a head
    output gate (full attention):   y = o * sigmoid(z)

A program takes one token with all its heads, so that fp8 needs no second pass. The gate is read where its product left
it: head h of token t begins at `t * stride + h * head_stride`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .products import Rows, empty_rows


def gated_norm(outputs: Tensor, gate: Tensor, weight: Tensor, eps: float, fp8: bool = False) -> Rows:
    """Rows `[n, heads * d]` of the gated norm.

    Args:
        outputs: `[n, heads, d]`, contiguous.
        gate: `[n, heads, d]`, any strides but 1 in the last axis.
        weight: `[d]`.
    """
    return _gate(outputs, gate, weight, eps, True, fp8)


def gated_norm_reference(outputs: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same in plain torch."""
    exact = outputs.float()
    normed = weight * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)).to(outputs.dtype)
    return (normed * F.silu(gate.float())).to(outputs.dtype).flatten(1)


def output_gate(outputs: Tensor, gate: Tensor, fp8: bool = False) -> Rows:
    """Rows `[n, heads * d]` of the output gate; arguments as for `gated_norm`."""
    return _gate(outputs, gate, outputs, 0.0, False, fp8)


def output_gate_reference(outputs: Tensor, gate: Tensor) -> Tensor:
    """The same in plain torch."""
    return (outputs * torch.sigmoid(gate)).flatten(1)


def _gate(outputs: Tensor, gate: Tensor, weight: Tensor, eps: float, norm: bool, fp8: bool) -> Rows:
    count, heads, dim = outputs.shape
    out = empty_rows(count, heads * dim, outputs, fp8)
    launch(
        _gate_heads, (count,),
        outputs, gate, weight, out.values, out.scales if fp8 else outputs, gate.stride(0), gate.stride(1), heads, dim,
        eps, norm, fp8, triton.next_power_of_2(heads), triton.next_power_of_2(dim), num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _gate_heads(
    outputs, gate, weight, out, scales, stride, head_stride, heads, dim, eps, norm: tl.constexpr, fp8: tl.constexpr,
    head_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, head_block)[:, None]
    column = tl.arange(0, block)[None, :]
    inside = (head < heads) & (column < dim)
    at = row * heads * dim + head * dim + column
    value = tl.load(outputs + at, mask=inside, other=0).to(tl.float32)
    z = tl.load(gate + row * stride + head * head_stride + column, mask=inside, other=0).to(tl.float32)
    kind = outputs.dtype.element_ty
    if norm:
        normed = value * tl.rsqrt(tl.sum(value * value, 1) / dim + eps)[:, None]
        factor = tl.load(weight + column, mask=column < dim, other=0).to(tl.float32)
        result = (normed.to(kind).to(tl.float32) * factor).to(kind).to(tl.float32) * (z * tl.sigmoid(z))
    else:
        result = value * tl.sigmoid(z).to(kind).to(tl.float32)
    if fp8:
        scale = tl.maximum(tl.max(tl.max(tl.abs(result), 1), 0), 448e-12) / 448.0
        tl.store(out + at, (result / scale).to(tl.float8e4nv), mask=inside)
        tl.store(scales + row, scale)
    else:
        tl.store(out + at, result.to(kind), mask=inside)
