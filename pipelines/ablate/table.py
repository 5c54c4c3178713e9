"""The table of results on the terminal; knows what is compared, computes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from ..console import console
from .folders import Run
from .results import Difference, Results
from .words import NOTHING, decimals, shown, signed

TITLES = ("run", "accepted length", "less the best", "held-out loss", "updates", "state")
RIGHT = {"accepted length", "less the best", "held-out loss", "updates"}
"""Numbers, which stand under each other."""


def show(results: Results) -> None:
    """Print the runs, the best first, with intervals and the settings that differ: beside the results where they fit
    the terminal, below them where they do not.
    """
    rows = list(map(_cells, results.runs, [results.to_best.get(run.name) for run in results.runs]))
    settings = [[shown(run.settings.get(key)) for key in results.differing] for run in results.runs]
    whole = _table([*TITLES, *results.differing], [row + values for row, values in zip(rows, settings, strict=True)])
    if console.measure(whole, options=console.options.update(max_width=10_000)).maximum <= console.width:
        console.print(whole)
        return
    console.print(_table(TITLES, rows))
    if results.differing:
        console.print(_table(results.differing, settings))


def _cells(run: Run, apart: Difference | None) -> list[str]:
    last = run.last
    interval = f" {last.interval[0]:.2f}–{last.interval[1]:.2f}" if last and last.interval else ""
    done = run.updates is None or run.step == run.updates
    return [
        run.name,
        decimals(run.accepted_length, 2) + interval,
        f"{signed(apart.value)} {signed(apart.low)}..{signed(apart.high)}" if apart else NOTHING,
        decimals(last and last.loss, 3),
        f"{run.step:,}" if done else f"{run.step:,} of {run.updates:,}",
        run.state,
    ]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Rows numbered from 1, which is how two tables of the same runs belong together."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    for title in ("#", *titles):
        right = title in RIGHT or title == "#"
        table.add_column(title, justify="right" if right else "left", no_wrap=right, overflow="fold")
    for number, cells in enumerate(rows, 1):
        table.add_row(str(number), *map(Text, cells))
    return table
