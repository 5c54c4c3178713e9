"""What `--gpus` says: `0-4`, `0,2,5-7`, `all`, `cpu`, or `cpu,cpu` for two processes there. Knows no stage."""

from __future__ import annotations

import os
import re

from .location import ConfigError


def parse_gpus(text: str, available: int) -> list[str]:
    """Devices named by `--gpus`: GPU numbers as strings, or "cpu" as often as it was said.

    Args:
        available: GPUs on this machine.

    Raises:
        ConfigError: not understood, a GPU named twice or not on this machine, or the CPU named beside GPUs.
    """
    text = text.strip().lower()
    if cpus := _cpus(text):
        return cpus
    here = f"this machine has {available} GPU{'s' * (available != 1)}" if available else "this machine has no GPU"
    if text == "all":
        if not available:
            raise ConfigError(f"{here}: pass --gpus cpu")
        return [str(number) for number in range(available)]
    found: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", piece)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise ConfigError(f"--gpus {text} is not understood: write 0-4, 0,2,5-7, all, cpu or cpu,cpu")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    for number in found:
        if number >= available:
            raise ConfigError(f"--gpus {text}: there is no GPU {number}, {here}" + ("" if available else "; use cpu"))
        if found.count(number) > 1:
            raise ConfigError(f"--gpus {text} names GPU {number} twice")
    return [str(number) for number in found]


def choose_devices(text: str) -> list[str]:
    """`parse_gpus` on this machine. `cpu` hides all GPUs from this process, and from libraries that would use one."""
    if cpus := _cpus(text.strip().lower()):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return cpus
    import torch

    return parse_gpus(text, torch.cuda.device_count())


def own_rank() -> int | None:
    """This process's number among the ranks of a run (RANK, by torchrun or `launch`), or None where it is no rank.

    Raises:
        ConfigError: it is no number.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return _number_said("RANK")


def own_device(devices: list[str]) -> str:
    """A rank's device: the one at its place among this machine's ranks. Any number of ranks fit on the CPU.

    Raises:
        ConfigError: there are fewer devices than ranks, or LOCAL_RANK is not set.
    """
    if devices[0] == "cpu":
        return "cpu"
    local = _number_said("LOCAL_RANK")
    if local >= len(devices):
        raise ConfigError(
            f"--gpus names {len(devices)} GPU{'s' * (len(devices) != 1)}, too few for local rank {local}: "
            "name one for each process of this machine"
        )
    return devices[local]


def _number_said(name: str) -> int:
    said = os.environ.get(name, "")
    if not said.isdecimal():
        raise ConfigError(
            f"the environment says {name}={said}, which is no number: start ranks with torchrun or --gpus"
        )
    return int(said)


def _cpus(text: str) -> list[str]:
    """The word cpu as often as it is said, if at all. Raises ConfigError when something else is said too."""
    pieces = [piece.strip() for piece in text.split(",")]
    if "cpu" in pieces and set(pieces) != {"cpu"}:
        raise ConfigError(f"--gpus {text} names the CPU beside something else: a run uses one kind of device")
    return pieces if "cpu" in pieces else []
