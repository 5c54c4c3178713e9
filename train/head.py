"""The target's frozen LM head: the two products with it, in bf16 or in fp8. Knows nothing of losses."""

from __future__ import annotations

import torch
from torch import Tensor

from ..store import DflashError
from .kernels.loss_gradient import CodedSlopes
from .kernels.products import MULTIPLE, scaled_product
from .kernels.quantise import Rows, quantise, quantise_transposed

FAST_BACK = False
"""Whether the fp8 product over the vocabulary adds up in the tensor cores alone. They keep some 14 bits and cut off the
rest; of a vocabulary of 248,320 they add 7,760 times. Otherwise partial sums of a few are added in fp32."""


class LmHead:
    """The two products with the frozen LM head.

        z = h W^T        dh = dz W
        fp8:  z = (h8 W8^T) * sh * sw        dh = (dz8 W8') * sdz * s + dz_label W_label        dz8 e5m2, the rest e4m3

    sh, sw and sdz are scales of rows. The sum of dh runs along the vocabulary, so W8' is W quantised transposed, with
    one scale s, the largest of sw. What dz8 is, and why the label is apart: `kernels/loss_gradient.py`. The codes are
    made once and stay beside W, 2 bytes a weight. On a CPU the fp8 products are imitated with the same codes.

    Args:
        weight: `[vocabulary, H]`, in the dtype of the hidden states.
        fp8: multiply in fp8; on a GPU the hidden states must be bfloat16.

    Raises:
        DflashError: with fp8, where vocabulary or H is no multiple of 16.
    """

    def __init__(self, weight: Tensor, fp8: bool = False) -> None:
        self.weight = weight
        self.fp8 = fp8
        if not fp8:
            return
        if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
            raise DflashError(
                f"an LM head in fp8 needs a vocabulary and a hidden size that are multiples of {MULTIPLE}; "
                f"this one has {weight.shape[0]} and {weight.shape[1]}"
            )
        self._codes = quantise(weight.detach())
        scale = self._codes.scales.amax()
        self._transposed = Rows(quantise_transposed(weight.detach(), scale), scale.repeat(weight.shape[1]))

    def logits(self, rows: Tensor, out: Tensor) -> Tensor:
        """Logits of rows `[n, H]` into `out`, `[n, vocabulary]` fp32, which is returned."""
        if self.fp8:
            return scaled_product(quantise(rows), self._codes, out.dtype, out=out)
        if rows.dtype == torch.float32:
            return torch.mm(rows, self.weight.T, out=out)
        if rows.is_cuda:
            return torch.mm(rows, self.weight.T, out_dtype=torch.float32, out=out)
        return out.copy_(rows @ self.weight.T)  # a CPU's product has no other dtype than its factors'

    def back(self, slopes: Tensor | CodedSlopes) -> Tensor:
        """The gradient `[n, H]` in the rows, from the one in their logits: `[n, vocabulary]`, last stride 1, or codes.

        In the dtype of the hidden states; from codes in fp32.
        """
        if isinstance(slopes, Tensor):
            return slopes @ self.weight
        found = scaled_product(slopes.rows, self._transposed, torch.float32, fast=FAST_BACK)
        return found.add_(slopes.own[:, None] * self.weight[slopes.labels.clamp(min=0)])
