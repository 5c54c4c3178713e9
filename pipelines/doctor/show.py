"""Checks on a terminal: a table, and below it what to do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from ..console import console
from .check import Check
from .run import failed

STYLES = {"ok": "green", "unused": "dim", "warning": "yellow", "missing": "bold red", "broken": "bold red"}


def show_checks(checks: list[Check]) -> None:
    """A table with a verdict a row (elsewhere than on a terminal, a line), then what puts right what is not."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column()
    table.add_column(overflow="fold")
    for check in checks:
        # Text, not markup: what was found may hold brackets.
        table.add_row(Text(check.state, STYLES[check.state]), Text(check.name), Text(check.found))
        if not console.is_terminal:
            console.print(f"{check.state:8} {check.name:24} {check.found}", markup=False)
    if console.is_terminal:
        console.print(table, soft_wrap=False)
    remedies = [check for check in checks if check.remedy]
    if remedies:
        console.print("\nwhat to do:", style="bold")
    for check in remedies:
        console.print(f"  {check.name}: {check.remedy}", markup=False)
    console.print(
        "\nsomething needed is missing or broken" if failed(checks) else "\nnothing that is needed is missing",
        style="bold",
    )


def as_json(checks: list[Check]) -> dict[str, Any]:
    """The checks for programs: "ok" is whether nothing needed is missing."""
    return {"ok": not failed(checks), "checks": [asdict(check) for check in checks]}
