"""Matrix products with trained weights: bf16 by cuBLAS, or forward and into the input in fp8.

    y = x W^T        dx = dy W        dW += dy^T x

W is several parameters one below the other, one wide product instead of some narrow ones. Parameters that lie one right
after another in memory, as a run's flat buffer has them, are joined without a copy, and so are their gradients. dW is
added into the gradients that are there by the product itself, so it needs no room of its own and no pass to add it; it
is written over a gradient that is marked as an earlier update's (`mark_stale`).

    fp8:  y = (x8 W8^T) * sx * sw        dx = (dy8 W8') * sdy * s        x8, W8 and W8' e4m3, dy8 e5m2

with a scale for each row of x, W and dy. The sum of dx runs along the columns that y has, so W8' is W quantised anew,
transposed, with one scale s, the largest of sw. e5m2 because the gradients of one row span many powers of two. dW stays
in bf16: quantising along the tokens would cost what the faster product gains. What backward needs is kept in bf16, the
quantised forms live only as long as their product. On a CPU the fp8 products are imitated, with the same codes.

Quantising moves 3 bytes a value (see `quantise`), x and W forward, dy and W backward: 22 GB a step of Qwen3.6-27B's
drafter at 8,192 rows, 7 ms of an H200, for products of 56 TFLOP (73 ms in bf16 at 770 TFLOP/s).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...store import DflashError
from .quantise import E5M2, Rows, quantise, quantise_transposed

MULTIPLE = 16
"""fp8 products take only widths that are multiples of this."""


def product(x: Tensor, weights: Sequence[Tensor], fp8: bool = False) -> Tensor:
    """x times each weight transposed, side by side.

    In backward a weight that is a parameter and has a `.grad` (of its dtype, or float32) gets its gradient added there
    and none through autograd: hooks on it do not run, `torch.autograd.grad` cannot ask for it, and asking that for x
    alone adds it too. Without `.grad` it gets it as usual. Gradients of gradients are not supported.

    Args:
        x: `[n, in]`, each row's values together.
        weights: `[out_i, in]` each, of the dtype of x.
        fp8: multiply in fp8 where the module says so; on a GPU x must be bfloat16.

    Returns:
        `[n, sum of out_i]`, the dtype of x.

    Raises:
        DflashError: with fp8, where a width is no multiple of 16.
    """
    if fp8:
        for weight in weights:
            if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
                shape = " x ".join(map(str, weight.shape))
                raise DflashError(f"fp8 products need widths that are multiples of {MULTIPLE}; a weight is {shape}")
    return _Product.apply(x, fp8, *weights)


def mark_stale(weight: Tensor, stale: bool) -> None:
    """Say whether a parameter's gradient is an earlier update's: the next product writes over it, the others add."""
    vars(weight)["stale"] = stale


def is_stale(weight: Tensor) -> bool:
    """Whether `mark_stale` said so last, and no product has made the gradient since."""
    return vars(weight).get("stale", False)


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """One `[sum of out_i, in]` view of matrices `[out_i, in]` that lie right one after another, else None."""
    first = tensors[0]
    rows, address, storage = 0, first.data_ptr(), first.untyped_storage().data_ptr()
    for tensor in tensors:
        if (
            tensor.data_ptr() != address
            or tensor.untyped_storage().data_ptr() != storage
            or tensor.dtype != first.dtype
            or tensor.shape[1] != first.shape[1]
            or not tensor.is_contiguous()
        ):
            return None
        rows += tensor.shape[0]
        address += tensor.numel() * tensor.element_size()
    return first.detach().as_strided((rows, first.shape[1]), (first.shape[1], 1))


def scaled_product(a: Rows, b: Rows, dtype: torch.dtype, *, fast: bool = True, out: Tensor | None = None) -> Tensor:
    """`[n, m]` of `[n, k]` and `[m, k]` in fp8: (a b^T) * scales of a * scales of b. b must be e4m3.

    Args:
        a, b: rows of a may lie apart.
        dtype: of the result.
        fast: add up in the tensor cores alone, which keep some 14 bits; else partial sums of a few are added in fp32.
        out: where to put the result, of that dtype.
    """
    if not a.codes.is_cuda:
        exact = (a.codes.float() @ b.codes.float().T * a.scales[:, None] * b.scales).to(dtype)
        return exact if out is None else out.copy_(exact)
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a.codes,
        b.codes.t(),
        scale_a=a.scales[:, None],
        scale_b=b.scales[None, :],
        out_dtype=dtype,
        use_fast_accum=fast,
        out=out,
    )


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fp8: bool, *weights: Tensor) -> Tensor:
        pieces = _pieces(weights)
        largest = []
        if fp8:
            rows, parts = quantise(x), []
            for piece in pieces:
                weight = quantise(piece)
                parts.append(scaled_product(rows, weight, x.dtype))
                largest.append(weight.scales.amax())
        else:
            parts = [F.linear(x, piece) for piece in pieces]
        ctx.save_for_backward(x, *weights, *largest)
        ctx.count = len(weights)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *saved = ctx.saved_tensors
        weights, largest = saved[: ctx.count], saved[ctx.count :]
        dy = dy if dy.stride(1) == 1 else dy.contiguous()
        dx = _input_gradient(dy, _pieces(weights), largest) if ctx.needs_input_grad[0] else None
        return dx, None, *_weight_gradients(dy, x, weights, ctx.needs_input_grad[2:])


def _pieces(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """The joined weight alone, or the weights where they cannot be joined (a drafter loaded for evaluation)."""
    together = joined(weights)
    return weights if together is None else [together]


def _input_gradient(dy: Tensor, pieces: Sequence[Tensor], largest: Sequence[Tensor]) -> Tensor:
    """dy W. `largest`: each piece's largest scale, or nothing without fp8."""
    parts = dy.split([piece.shape[0] for piece in pieces], 1)
    if not largest:
        total = parts[0] @ pieces[0]
        for part, piece in zip(parts[1:], pieces[1:], strict=True):
            total.addmm_(part, piece)
        return total
    found = []
    for part, piece, scale in zip(parts, pieces, largest, strict=True):
        weight = Rows(quantise_transposed(piece, scale), scale.repeat(piece.shape[1]))
        found.append(scaled_product(quantise(part, E5M2), weight, dy.dtype))
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


def _weight_gradients(
    dy: Tensor, x: Tensor, weights: Sequence[Tensor], needed: Sequence[bool]
) -> Sequence[Tensor | None]:
    """dy^T x, added where a gradient is there already and else returned."""
    grads = [weight.grad if weight.is_leaf else None for weight in weights]
    there = [grad for grad in grads if grad is not None]
    over = [is_stale(weight) for weight in weights]
    alike = all(needed) and len(there) == len(weights) and len(set(over)) == 1
    together = joined(there) if alike else None
    for weight in weights:
        mark_stale(weight, False)
    if together is not None:
        _put_product(together, dy, x, over[0])
        return [None] * len(weights)
    found: list[Tensor | None] = []
    parts = dy.split([weight.shape[0] for weight in weights], 1)
    for part, grad, wanted, stale in zip(parts, grads, needed, over, strict=True):
        found.append(part.T @ x if wanted and grad is None else None)
        if wanted and grad is not None:
            _put_product(grad, part, x, stale)
    return found


def _put_product(grad: Tensor, dy: Tensor, x: Tensor, over: bool) -> None:
    """grad = dy^T x, or else grad += dy^T x; in place and without a temporary on a GPU."""
    if over:
        torch.mm(dy.T, x, out=grad)
    elif grad.dtype == x.dtype:
        grad.addmm_(dy.T, x)
    elif x.is_cuda:
        torch.addmm(grad, dy.T, x, out_dtype=grad.dtype, out=grad)
    else:
        grad.addmm_(dy.T.to(grad.dtype), x.to(grad.dtype))
