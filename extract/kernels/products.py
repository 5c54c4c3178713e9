"""Matrix products with weights that stay: bf16 by cuBLAS, or fp8 with a scale a row on both sides.

    y = x W^T        fp8:  y = (x8 W8^T) * sx * sw^T,   x8 = e4m3(x / sx),  sx = max|x row| / 448,  sw the same of W

What comes in is `Rows`: the kernels that make a product's input write it in the form that the product takes, so fp8
costs no pass of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...store.fp8 import encode


@dataclass(frozen=True)
class Rows:
    """A product's input.

    Attributes:
        values: `[n, width]`, the target's dtype, or float8_e4m3fn.
        scales: `[n]` float32 with float8, else None.
    """

    values: Tensor
    scales: Tensor | None = None


def empty_rows(count: int, width: int, like: Tensor, fp8: bool) -> Rows:
    """Rows for a kernel to fill, on the device of `like` and, without fp8, of its dtype."""
    values = torch.empty(count, width, dtype=torch.float8_e4m3fn if fp8 else like.dtype, device=like.device)
    return Rows(values, torch.empty(count, dtype=torch.float32, device=like.device) if fp8 else None)


def quantise(x: Tensor) -> Rows:
    """Rows `[n, width]` in fp8, as a store encodes states; the reference of what the kernels do on their way out."""
    codes, scales = encode(x)
    return Rows(codes.view(torch.float8_e4m3fn), scales)


class Product:
    """The product with one weight, or with several one below the other (one wide product beats some narrow ones).

    In bf16 the layers' own weights become views of the joined one, so the stock forward still works and nothing is held
    twice. In fp8 the originals are given up.

    Args:
        layers: linear layers with equal inputs, all with a bias or none.
        fp8: quantise the weight.
    """

    def __init__(self, layers: Sequence[torch.nn.Linear], fp8: bool) -> None:
        weights = [layer.weight.data for layer in layers]
        biases = [layer.bias.data for layer in layers if layer.bias is not None]
        self.widths = [weight.shape[0] for weight in weights]
        """Columns of the result that each weight makes."""
        joined = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._bias = torch.cat(biases) if biases else None
        pieces = joined.split(self.widths)
        for layer, piece in zip(layers, pieces, strict=True):
            layer.weight.data = torch.empty(0, dtype=joined.dtype, device=joined.device) if fp8 else piece
        self._weight = quantise(joined) if fp8 else Rows(joined)

    def __call__(self, rows: Rows) -> Tensor:
        """`[n, sum of widths]`, bf16 with fp8 rows."""
        if rows.scales is None:
            return F.linear(rows.values, self._weight.values, self._bias)
        assert self._weight.scales is not None
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            rows.values,
            self._weight.values.t(),
            scale_a=rows.scales[:, None],
            scale_b=self._weight.scales[None, :],
            bias=self._bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
