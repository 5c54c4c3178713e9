"""Starting a Triton kernel, and whether tensors go through kernels at all.

On a GPU always; on a CPU only under Triton's interpreter (TRITON_INTERPRET=1), which is how tests run kernels there.
Elsewhere each operation's plain reference computes.
"""

from __future__ import annotations

from typing import Any

import torch
from triton import knobs


def fused(x: torch.Tensor) -> bool:
    """Whether an operation on this tensor runs its kernel."""
    return x.is_cuda or bool(knobs.runtime.interpret)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Start a kernel over a grid. `options` are Triton's: num_warps and the like."""
    kernel[grid](*arguments, **options)
