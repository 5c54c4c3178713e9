"""All checks in turn. None ends the others: one that fails is a row that says so. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ..location import FILE
from .check import Check, Findings
from .gpus import check_compiler, check_gpus, check_kernels, check_linear_attention
from .machine import check_machine
from .software import check_packages, check_python, check_settings
from .store import check_store


def examine(folder: Path, store: str | None, disk: bool) -> list[Check]:
    """All checks, in the order of a table.

    Args:
        folder: where `dflash.toml` may be.
        store: the store's path or address; by default the one that `dflash.toml` names.
        disk: measure the speed of the store's disk (ten seconds at most).
    """
    found = Findings()
    steps: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        (FILE, lambda: check_settings(folder, found)),
        ("Python", check_python),
        ("packages", check_packages),
        ("GPUs", lambda: check_gpus(found)),
        ("C compiler", lambda: check_compiler(found)),
        ("kernels", lambda: check_kernels(found)),
        ("linear attention", lambda: check_linear_attention(found)),
        ("machine", check_machine),
        ("store", lambda: check_store(folder, store, found, disk)),
    ]
    checks: list[Check] = []
    for name, step in steps:
        try:
            checks += step()
        except Exception as error:  # whatever it is, the other rows still help
            reason = str(error).strip().splitlines() or [""]
            checks.append(Check(name, "warning", f"this check itself failed: {type(error).__name__}: {reason[0]}"))
    return checks


def failed(checks: list[Check]) -> bool:
    """Whether something needed is missing or broken."""
    return any(check.state in ("missing", "broken") for check in checks)
