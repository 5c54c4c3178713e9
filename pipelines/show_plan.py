"""An estimate of an extraction on a terminal. Computes nothing."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ..store.room import size
from .console import console


def show_plan(found: dict[str, Any]) -> None:
    """The result of `dflash plan`."""
    table = Table(show_header=False)
    table.add_row("store", found["store"] + ("" if found["bytes_stored"] else " (new)"))
    for split, counts in found["splits"].items():
        table.add_row(
            split,
            f"{counts['documents']:,} documents, {counts['tokens']:,} tokens, "
            f"{counts['supervised_tokens']:,} of them supervised",
        )
    lengths = found["lengths"]
    table.add_row(
        "length",
        f"median {lengths['median']:,}, 90th percentile {lengths['p90']:,}, longest {lengths['longest']:,} tokens",
    )
    table.add_row(
        "to do",
        f"{found['units_left']:,} of {found['units']:,} units: {found['documents_left']:,} documents, "
        f"{found['tokens_left']:,} tokens",
    )
    table.add_row("forward passes", f"{found['passes_left']:,}, {100 * found['padding']:.1f}% of their tokens padding")
    table.add_row("time", _time(found))
    console.print(table, soft_wrap=False)

    table = Table("states of all the data", "with final", "without final")
    for encoding in dict.fromkeys(kind["encoding"] for kind in found["kinds"]):
        kinds = {kind["final"]: kind for kind in found["kinds"] if kind["encoding"] == encoding}
        table.add_row(encoding, *(_bytes(kinds[final]) for final in (True, False)))
    console.print(table, soft_wrap=False)

    stored = f"{size(found['bytes_stored'])} in the store" if found["bytes_stored"] else "nothing in the store yet"
    free = "an object store does not say how much is free" if found["free"] is None else f"{size(found['free'])} free"
    fits = ": it fits" if found["fits"] else ""
    console.print(f"{stored}, {size(found['bytes_left'])} left to write, {free}{fits}", markup=False)
    if found["warning"]:
        console.print(found["warning"], style="bold", markup=False)


def _bytes(kind: dict[str, Any]) -> str:
    return size(kind["bytes"]) + (" (chosen)" if kind["chosen"] else "")


def _time(found: dict[str, Any]) -> str:
    if not found["tokens_left"]:
        return "nothing is left to do"
    if found["hours"] is None:
        return "not known before a first extraction here: pass --rate with the tokens a second of one GPU"
    hours = found["hours"]
    length = (
        f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes" if hours >= 1 / 60 else "under a minute"
    )
    source = "as given" if found["rate_from"] == "given" else "measured here at the last extraction from this target"
    devices = "1 device" if found["gpus"] == 1 else f"{found['gpus']} devices"
    return f"{length} on {devices} at {found['rate']:,.0f} tokens a second each ({source})"
