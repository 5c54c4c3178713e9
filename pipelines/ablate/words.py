"""Numbers, settings and names of runs as people read them, on the terminal and in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NOTHING = "–"
"""What stands where there is no number."""


def decimals(value: float | None, places: int) -> str:
    """A number, or a dash."""
    return NOTHING if value is None else f"{value:.{places}f}"


def signed(value: float) -> str:
    """A difference, three decimals, with its sign; a zero has none."""
    text = f"{value:+.3f}"
    return "0.000" if float(text) == 0 else text.replace("-", "−")


def shown(value: Any) -> str:
    """A setting for people: lists with what repeats counted, nothing as a dash."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items()) or NOTHING
    if isinstance(value, (list, tuple)):
        groups: list[list[Any]] = []
        for item in map(shown, value):
            if groups and groups[-1][0] == item:
                groups[-1][1] += 1
            else:
                groups.append([item, 1])
        return ", ".join(f"{count} × {item}" if count > 1 else item for item, count in groups) or NOTHING
    return NOTHING if value is None else str(value)


def named(names: Sequence[str], most: int = 4) -> str:
    """Names in a sentence, the first few of many."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
