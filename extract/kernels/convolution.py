"""The short causal convolution before linear attention, a channel at a time, with what follows it.

    c[t] = sum over j of w[j] * x[t - 3 + j]     y = silu(c)     queries and keys also: y / sqrt(sum(y^2) + 1e-6)

The sum of squares is over a head. Positions before a document's first token count as zeros; each row of the batch is a
document of its own. The inputs are read where their product left them; queries, keys and values leave apart, as the
linear attention takes them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

EPS = 1e-6
TAPS = 4
"""Taps of the kernel; a shorter convolution has zeros before its own."""
ROWS, HEADS = 32, 4
"""Tokens (at least three) and heads of one program."""


def convolve(x: Tensor, weight: Tensor, first: int, heads: int, dim: int, normalise: bool) -> Tensor:
    """The convolution of some channels, seen as heads.

    Args:
        x: `[b, n, channels]`, last stride 1, rows of the batch one after another.
        weight: `[channels, TAPS]`, contiguous.
        first: the first channel taken.
        heads, dim: `heads * dim` channels are taken.
        normalise: scale each head to length one.

    Returns:
        `[b, n, heads, dim]`.
    """
    batch, tokens, _ = x.shape
    out = torch.empty(batch, tokens, heads, dim, dtype=x.dtype, device=x.device)
    head_block = min(HEADS, triton.next_power_of_2(heads))
    grid = triton.cdiv(tokens, ROWS), triton.cdiv(heads, head_block), batch
    launch(
        _convolve, grid, x, weight, out, tokens, x.stride(0), x.stride(1), first, heads, dim, normalise,
        ROWS, head_block, triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
    return out


def convolve_reference(x: Tensor, weight: Tensor, first: int, heads: int, dim: int, normalise: bool) -> Tensor:
    """The same in plain torch."""
    channels, taps = slice(first, first + heads * dim), weight.shape[1]
    taken = x[..., channels].transpose(1, 2)
    summed = F.conv1d(taken, weight[channels, None], padding=taps - 1, groups=heads * dim)[..., : x.shape[1]]
    out = F.silu(summed).transpose(1, 2).unflatten(-1, (heads, dim))
    if normalise:
        exact = out.float()
        out = (exact * torch.rsqrt(exact.pow(2).sum(-1, keepdim=True) + EPS)).to(x.dtype)
    return out


@triton.jit
def _convolve(
    x, weight, out, tokens, batch_stride, stride, first, heads, dim, normalise: tl.constexpr,
    rows: tl.constexpr, head_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * rows
    document = tl.program_id(2).to(tl.int64)
    head = (tl.program_id(1) * head_block + tl.arange(0, head_block))[:, None]
    column = tl.arange(0, block)[None, :]
    inside = (head < heads) & (column < dim)
    channel = first + head * dim + column
    source = x + document * batch_stride + channel
    target = out + (document * tokens * heads + head) * dim + column
    factors = weight + channel * 4
    w0 = tl.load(factors, mask=inside, other=0).to(tl.float32)
    w1 = tl.load(factors + 1, mask=inside, other=0).to(tl.float32)
    w2 = tl.load(factors + 2, mask=inside, other=0).to(tl.float32)
    w3 = tl.load(factors + 3, mask=inside, other=0).to(tl.float32)
    # The last three tokens stay in registers, so each is read once.
    x0 = tl.zeros([head_block, block], tl.float32)
    x1, x2 = x0, x0
    if start > 0:
        x0 = tl.load(source + (start - 3) * stride, mask=inside, other=0).to(tl.float32)
        x1 = tl.load(source + (start - 2) * stride, mask=inside, other=0).to(tl.float32)
        x2 = tl.load(source + (start - 1) * stride, mask=inside, other=0).to(tl.float32)
    kind = x.dtype.element_ty
    for token in range(start, tl.minimum(start + rows, tokens)):
        x3 = tl.load(source + token * stride, mask=inside, other=0).to(tl.float32)
        total = (x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3).to(kind).to(tl.float32)
        result = (total * tl.sigmoid(total)).to(kind)
        if normalise:
            exact = result.to(tl.float32)
            result = (exact * tl.rsqrt(tl.sum(exact * exact, 1) + 1e-6)[:, None]).to(kind)
        tl.store(target + token * heads * dim, result, mask=inside)
        x0, x1, x2 = x1, x2, x3
