"""The MLP's activation, forward and backward (SwiGLU, Shazeer 2020).

    y = silu(g) * u        silu(g) = g * sigmoid(g), rounded before the product
    du = dy * silu(g)      dg = dy * u * sigmoid(g) * (1 + g * (1 - sigmoid(g)))

g and u are the halves of the rows that one joined product made. Backward starts from them alone: nothing else is kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import fused, launch

COLUMNS = 1024
"""Columns of one program: 16 bytes of bf16 a thread and load, and no rest at the widths in use."""


def swiglu(gate_up: Tensor) -> Tensor:
    """Rows `[n, I]` from `[n, 2 I]`, the gate's half first; same dtype, differentiable."""
    if not fused(gate_up):
        return swiglu_reference(gate_up)
    return _SwiGLU.apply(gate_up)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """The same in plain torch."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        _launch(_swiglu_forward, gate_up, out)
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gate_up,) = ctx.saved_tensors
        d_gate_up = torch.empty_like(gate_up)
        _launch(_swiglu_backward, gate_up, gradients[0].contiguous(), d_gate_up)
        return d_gate_up


def _launch(kernel: Any, gate_up: Tensor, *others: Tensor) -> None:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    block = min(COLUMNS, triton.next_power_of_2(width))
    launch(kernel, (rows * triton.cdiv(width, block),), gate_up, *others, width, block, num_warps=4)


@triton.jit
def _place(width, block: tl.constexpr):
    # One axis, columns first: neighbours in time are neighbours in memory, and no limit of 65,535 on an axis.
    blocks = tl.cdiv(width, block)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * block + tl.arange(0, block)
    return row * width + column, row * width * 2 + column, column < width


@triton.jit
def _swiglu_forward(gate_up, out, width, block: tl.constexpr):
    at, pair, inside = _place(width, block)
    gate = tl.load(gate_up + pair, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + pair + width, mask=inside, other=0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (activated * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(gate_up, d_out, d_gate_up, width, block: tl.constexpr):
    at, pair, inside = _place(width, block)
    gate = tl.load(gate_up + pair, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + pair + width, mask=inside, other=0).to(tl.float32)
    slope = tl.load(d_out + at, mask=inside, other=0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = slope * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(d_gate_up + pair, d_gate.to(d_gate_up.dtype.element_ty), mask=inside)
    tl.store(d_gate_up + pair + width, (slope * gate * sigmoid).to(d_gate_up.dtype.element_ty), mask=inside)
