"""What `--gpus` says: `0-4`, `0,2,5-7`, `all` or `cpu`. Knows no stage."""

from __future__ import annotations

import os
import re

from .location import ConfigError


def parse_gpus(text: str, available: int) -> list[str]:
    """Devices named by `--gpus`: GPU numbers as strings, or ["cpu"].

    Args:
        available: GPUs on this machine.

    Raises:
        ConfigError: not understood, named twice, or not on this machine.
    """
    text = text.strip().lower()
    if text == "cpu":
        return ["cpu"]
    here = f"this machine has {available} GPU{'s' * (available != 1)}" if available else "this machine has no GPU"
    if text == "all":
        if not available:
            raise ConfigError(f"{here}: pass --gpus cpu")
        return [str(number) for number in range(available)]
    found: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", piece)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise ConfigError(f"--gpus {text} is not understood: write 0-4, 0,2,5-7, all or cpu")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    for number in found:
        if number >= available:
            raise ConfigError(f"--gpus {text}: there is no GPU {number}, {here}" + ("" if available else "; use cpu"))
        if found.count(number) > 1:
            raise ConfigError(f"--gpus {text} names GPU {number} twice")
    return [str(number) for number in found]


def choose_devices(text: str) -> list[str]:
    """`parse_gpus` on this machine. `cpu` hides all GPUs from this process, and from libraries that would use one."""
    if text.strip().lower() == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return ["cpu"]
    import torch

    return parse_gpus(text, torch.cuda.device_count())
