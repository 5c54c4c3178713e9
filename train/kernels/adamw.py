"""AdamW (Loshchilov and Hutter 2019) over flat buffers, in one pass, and the norm of a flat gradient.

    g  = gradient * scale                        scale: the clip, and the loss's denominator
    m  = beta1 m + (1 - beta1) g                 v = beta2 v + (1 - beta2) g^2
    w  = w * keep - pace * m / (sqrt(v / correction) + eps)

with keep = 1 - rate * decay for matrices and 1 for the rest, pace = rate / (1 - beta1^t), correction = 1 - beta2^t. A
pass reads and writes w, m and v in fp32, reads the gradient, leaves zeros there if more is to be added to them, and
writes w once more in the dtype that the model computes in: 28 bytes a weight in bfloat16, at the memory's rate. Nothing
waits for the host: what changes from update to update is read from the device, and so is whether an update is good.

The norm has two stages whose shapes depend on the length alone, and no atomics, so it is the same bits each time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import fused, launch

BLOCK = 2048
"""Elements of a program of the update."""
NORM_BLOCK = 8192
"""Elements that a program of the norm takes at a time: several loads a thread on their way at once."""
NORM_PROGRAMS = 512
"""Programs that share a long norm: about as many as a GPU holds at once."""


def adamw(
    masters: Tensor,
    first: Tensor,
    second: Tensor,
    gradients: Tensor,
    weights: Tensor,
    scalars: Tensor,
    matrices: int,
    betas: tuple[float, float],
    eps: float,
    zero: bool = True,
) -> None:
    """One update, in place.

    Args:
        masters, first, second: `[N]` fp32, the weights and their moments.
        gradients: `[N]` bf16 or fp32.
        weights: `[N]`, the masters in the dtype to compute in; written only.
        scalars: `[5]` fp32: good, scale, pace, correction, keep. If good is zero only the gradient is written, if that.
        matrices: elements that weights decay in, from the first.
        zero: leave zeros in the gradient.
    """
    if not fused(masters):
        return adamw_reference(masters, first, second, gradients, weights, scalars, matrices, betas, eps, zero)
    size = masters.numel()
    launch(
        _adamw, (triton.cdiv(size, BLOCK),),
        masters, first, second, gradients, weights, scalars, size, matrices, *betas, eps, zero, BLOCK,
        num_warps=8,
    )  # fmt: skip


def adamw_reference(
    masters: Tensor,
    first: Tensor,
    second: Tensor,
    gradients: Tensor,
    weights: Tensor,
    scalars: Tensor,
    matrices: int,
    betas: tuple[float, float],
    eps: float,
    zero: bool = True,
) -> None:
    """The same in plain torch, on any device; waits for the host."""
    good, scale, pace, correction, keep = scalars.tolist()
    if good:
        scaled = gradients.float() * scale
        first.lerp_(scaled, 1 - betas[0])
        second.mul_(betas[1]).addcmul_(scaled, scaled, value=1 - betas[1])
        masters[:matrices].mul_(keep)
        masters.addcdiv_(first, torch.div(second, correction, out=scaled).sqrt_().add_(eps), value=-pace)
        weights.copy_(masters)
    if zero:
        gradients.zero_()


def squared_norm(x: Tensor) -> Tensor:
    """The sum of the squares of `[N]` bf16 or fp32, an fp64 scalar; not finite if any of it is not."""
    if not fused(x):
        return squared_norm_reference(x)
    programs = min(NORM_PROGRAMS, triton.cdiv(x.numel(), NORM_BLOCK))
    partial = torch.empty(programs, dtype=torch.float32, device=x.device)
    launch(_squares, (programs,), x, partial, x.numel(), programs, NORM_BLOCK, num_warps=8)
    return partial.sum(dtype=torch.float64)


def squared_norm_reference(x: Tensor) -> Tensor:
    """The same in plain torch."""
    return x.float().square().sum(dtype=torch.float64)


@triton.jit
def _adamw(
    masters, first, second, gradients, weights, scalars, size, matrices, beta1: tl.constexpr, beta2: tl.constexpr,
    eps: tl.constexpr, zero: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    good, scale, pace = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    correction, keep = tl.load(scalars + 3), tl.load(scalars + 4)
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    # Four elements a thread, 16 bytes of fp32, whatever the dtype: the widest for bf16 would be eight, and each tensor
    # would change its layout through shared memory between the two.
    at = tl.max_contiguous(tl.multiple_of(at, 4), 4)
    inside = at < size
    gradient = tl.load(gradients + at, mask=inside, other=0).to(tl.float32) * scale
    master = tl.load(masters + at, mask=inside, other=0)
    m = tl.load(first + at, mask=inside, other=0)
    v = tl.load(second + at, mask=inside, other=0)
    m += (1 - beta1) * (gradient - m)
    v = beta2 * v + (1 - beta2) * gradient * gradient
    master = master * tl.where(at < matrices, keep, 1.0) - pace * m / (tl.sqrt(v / correction) + eps)
    if good != 0:
        tl.store(first + at, m, mask=inside)
        tl.store(second + at, v, mask=inside)
        tl.store(masters + at, master, mask=inside)
        tl.store(weights + at, master.to(weights.dtype.element_ty), mask=inside)
    if zero:
        tl.store(gradients + at, tl.zeros([block], gradients.dtype.element_ty), mask=inside)


@triton.jit
def _squares(x, partial, size, programs: tl.constexpr, block: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([block], tl.float32)
    for start in range(program * block, size, programs * block):
        at = start + tl.arange(0, block)
        value = tl.load(x + at, mask=at < size, other=0).to(tl.float32)
        total += value * value
    tl.store(partial + program, tl.sum(total, 0))
