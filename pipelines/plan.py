"""`dflash plan`: what an extraction will take, from the settings and the data, before anything runs.

The GPUs need not be on this machine. Counts through `extract.estimate`; prints nothing.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..extract.estimate import estimate, shortage
from ..extract.rates import last_rate, machine_name
from ..store.progress import Listener
from .config import Settings
from .devices import parse_gpus
from .location import ConfigError
from .stages import survey_extraction

ANY_MACHINE = 4096
"""More GPUs than any machine has: a plan may be for another one."""


def plan(folder: Path, settings: Settings, gpus: str, rate: float | None, listener: Listener) -> dict[str, Any]:
    """Estimate stage one. Returns the fields of `Estimate`, and "padding" (a share), "fits", "warning" (a sentence or
    None), "gpus", "rate" and "rate_from" ("given", "measured" or None), and "hours" (None without a rate).

    Args:
        gpus: what `--gpus` says; numbers may be those of another machine.
        rate: tokens a second a GPU; by default what the last extraction measured on the GPU named first.

    Raises:
        ConfigError, DataError, TargetError, StoreError: something cannot be used, or the store cannot be made.
    """
    devices = planned_devices(gpus)
    seen = survey_extraction(folder, settings, devices[0], listener)
    found = estimate(seen)
    machine = machine_name(devices[0])
    measured = last_rate(seen.identity, machine) if machine else None
    used = rate or measured
    return {
        **asdict(found),
        "padding": found.padding,
        "fits": found.fits,
        "warning": shortage(found),
        "gpus": len(devices),
        "rate": used,
        "rate_from": "given" if rate else "measured" if measured else None,
        "hours": found.hours(used, len(devices)) if used else None,
    }


def planned_devices(text: str) -> list[str]:
    """Devices named by `--gpus`, on this machine or another.

    Raises:
        ConfigError: not understood, or all the GPUs of a machine that has none.
    """
    if text.strip().lower() != "all":
        return parse_gpus(text, ANY_MACHINE)
    import torch

    if not torch.cuda.device_count():
        raise ConfigError("this machine has no GPU: name those that will extract, such as --gpus 0-7, or --gpus cpu")
    return parse_gpus(text, torch.cuda.device_count())
