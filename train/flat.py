"""A module's parameters in one buffer and their gradients in another, so that one kernel or one reduction takes all.

    weights    | q | k | v | o | gate | up | down | ...     0 | norm | norm | ... 0 |
               0                                              ^ matrices            ^ a multiple of BLOCK

Matrices stand first, in the module's order and without gaps where their sizes are multiples of ALIGN: joined products
(q, k, v; gate, up) rely on it. Each parameter's data and `.grad` are views, for good: captured graphs hold their
addresses, so gradients are zeroed, never dropped. The gaps are zero and stay so. Knows nothing of drafters.

Where a run makes one backward pass an update, nothing need be zeroed or added to: the first product that makes a
matrix's gradient writes over the last update's (`begin`). That saves a fifteenth of what the optimizer moves, and the
products a read.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

from .kernels.products import is_stale, mark_stale

ALIGN = 8
"""Elements that each parameter's start is a multiple of: 16 bytes in bfloat16."""
BLOCK = 1024
"""Elements that the length of the matrices, and that of everything, is a multiple of."""


class Flat:
    """Lays out the parameters of a module that is already on its device and in its dtype.

    From here on the module may not be moved or cast: its parameters would leave the buffers.

    Args:
        module: all its parameters have one dtype and device; its values are kept.
        accumulates: whether several backward passes make an update. Their gradients add up, in float32.

    Raises:
        ValueError: the parameters differ in dtype or device, or there are none.
    """

    def __init__(self, module: nn.Module, accumulates: bool = True) -> None:
        named = list(module.named_parameters())
        kinds = {(parameter.dtype, parameter.device) for _, parameter in named}
        if len(kinds) != 1:
            raise ValueError(f"parameters of one dtype and device are needed, not of {kinds or 'none'}")
        dtype, device = kinds.pop()
        self.accumulates = accumulates
        """Whether gradients are to be zero after an update."""
        self._matrices = [parameter for _, parameter in named if parameter.ndim == 2]
        self._places: dict[str, tuple[int, torch.Size]] = {}
        self.matrices = self._place([(name, parameter) for name, parameter in named if parameter.ndim == 2], 0)
        """Elements before the first parameter that is no matrix."""
        size = self._place([(name, parameter) for name, parameter in named if parameter.ndim != 2], self.matrices)
        self.weights = torch.zeros(size, dtype=dtype, device=device)
        """`[N]`, what the module computes with."""
        self.gradients = torch.zeros(size, dtype=torch.float32 if accumulates else dtype, device=device)
        """`[N]`, what backward passes add to."""
        for name, parameter in named:
            place = self.view(self.weights, name)
            place.copy_(parameter.detach())
            parameter.data = place
            parameter.grad_dtype = self.gradients.dtype
            parameter.grad = self.view(self.gradients, name)

    @property
    def names(self) -> list[str]:
        """The parameters' names, matrices first."""
        return list(self._places)

    def view(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        """A parameter's part of a buffer laid out like `weights` (or like its beginning), in the parameter's shape."""
        start, shape = self._places[name]
        return buffer[start : start + math.prod(shape)].view(shape)

    def span(self, first: str, last: str) -> slice:
        """Where the parameters from `first` to `last` lie, in the order of `names`."""
        start, shape = self._places[last]
        return slice(self._places[first][0], start + math.prod(shape))

    def begin(self) -> None:
        """To be called before each backward pass; all matrices must have a part in it (`kernels/products.py`)."""
        if self.accumulates:
            return
        self.gradients[self.matrices :].zero_()
        for parameter in self._matrices:
            mark_stale(parameter, True)

    def end(self) -> None:
        """To be called after each backward pass: no gradient may be an earlier update's now."""
        late = [parameter.shape for parameter in self._matrices if is_stale(parameter)]
        assert not late, f"matrices of shapes {late} had no part in the backward pass"

    def rest(self) -> Flat:
        """What is no matrix, as a layout of its own over the same memory."""
        part = copy.copy(self)
        part.weights, part.gradients = self.weights[self.matrices :], self.gradients[self.matrices :]
        part._places = {
            name: (start - self.matrices, shape)
            for name, (start, shape) in self._places.items()
            if start >= self.matrices
        }
        part.matrices = 0
        return part

    def _place(self, named: list[tuple[str, nn.Parameter]], at: int) -> int:
        """Give each parameter its place from `at` on. Returns the end, padded."""
        for name, parameter in named:
            self._places[name] = at, parameter.shape
            at += -(-parameter.numel() // ALIGN) * ALIGN
        return -(-at // BLOCK) * BLOCK
