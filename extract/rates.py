"""Rates that extractions reached, kept in the user's cache folder for `dflash plan`. Knows nothing of how they came."""

from __future__ import annotations

import json
import platform
from pathlib import Path

from ..store import Identity
from ..store.files import write_atomic
from .user_cache import cache_folder


def machine_name(device: str) -> str | None:
    """What rates are kept by: the name of a GPU of this machine, or for "cpu" the kind of processor. None for a GPU
    that is not here.
    """
    if device == "cpu":
        return platform.machine()
    import torch

    return torch.cuda.get_device_name(int(device)) if int(device) < torch.cuda.device_count() else None


def last_rate(identity: Identity, machine: str) -> float | None:
    """Tokens a second a device that the last extraction of this kind on this kind of device reached, if one did."""
    rate = _rates().get(_rate_key(identity, machine))
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


def remember_rate(identity: Identity, machine: str, rate: float) -> None:
    """Keep a measured rate, in tokens a second a device, in the user's cache folder."""
    path = _rates_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        rates = {**_rates(), _rate_key(identity, machine): round(rate, 3)}
        write_atomic(path, json.dumps(rates, indent=1, sort_keys=True).encode())
    except (OSError, RuntimeError):  # no home at all
        return  # a home that cannot be written to must not fail an extraction that is done


def _rates() -> dict[str, object]:
    try:
        found = json.loads(_rates_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _rates_file() -> Path:
    return cache_folder() / "rates.json"


def _rate_key(identity: Identity, machine: str) -> str:
    return f"{identity.target_config[:16]} {machine} {identity.dtype} {identity.encoding}"
