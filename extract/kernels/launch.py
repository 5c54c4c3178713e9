"""Starting a Triton kernel, in a form that type checkers understand."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Start a kernel over a grid. `options` are Triton's: num_warps and the like."""
    kernel[grid](*arguments, **options)
