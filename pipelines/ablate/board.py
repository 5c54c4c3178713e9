"""What one watches while runs of a sweep train: a live table of all of them on a terminal, plain lines elsewhere.

A `Row` is what is known of a run; whoever looks after the run changes it, and the board draws what it finds. Knows no
process and no file.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..console import console, watched

PLAIN_SECONDS = 30.0
"""Between lines on a run where there is no terminal."""
WAITING, STARTING, RUNNING, DONE = "waiting", "starting", "running", "done"
STYLES = {WAITING: "dim", DONE: "green"}
"""Of states; any other that has ended is bad news."""
BESIDE_NAMES = 64
"""Columns that the table takes beside the runs' names."""


@dataclass
class Row:
    """A run as it is shown.

    Attributes:
        device: where it runs, or ran last.
        state: in a word.
        step: updates done.
        total: updates in all, once known.
        values: numbers of the moment, by name.
    """

    name: str
    device: str = ""
    state: str = WAITING
    step: int = 0
    total: int | None = None
    values: dict[str, float] = field(default_factory=dict)
    _since: tuple[float, int] | None = None

    def begin(self, device: str) -> None:
        """A process has been started for it."""
        self.device, self.state, self._since = device, STARTING, None

    def start(self, total: int, done: int) -> None:
        """It is about to make updates."""
        self.total, self.step, self.state = total, done, RUNNING

    def advance(self, amount: int) -> None:
        """It made some."""
        self.step += amount
        if self._since is None:  # the first ones take longer, and tell nothing of those to come
            self._since = time.monotonic(), self.step

    def watch(self, values: Mapping[str, float]) -> None:
        """Its numbers of the moment; replaced whole, for another thread draws them."""
        self.values = {**self.values, **values}

    @property
    def left(self) -> str:
        """How long it still takes, at the pace since it was started: 1:02:03."""
        if self.state != RUNNING or self._since is None or self.total is None:
            return ""
        began, first = self._since
        if self.step <= first:
            return ""
        seconds = (self.total - self.step) * (time.monotonic() - began) / (self.step - first)
        return str(timedelta(seconds=round(seconds)))

    @property
    def updates(self) -> str:
        """Those done, and in all."""
        if self.total is None:
            return f"{self.step:,}" if self.step else ""
        return f"{self.step:,}/{self.total:,}"

    def number(self, name: str, form: str) -> str:
        """A number of the moment, if there is one."""
        return format(self.values[name], form) if name in self.values else ""


class Board:
    """Shows rows while it is entered.

    Args:
        title: of the sweep.
        rows: its runs, in order.
    """

    def __init__(self, title: str, rows: Sequence[Row]) -> None:
        self._title, self._rows, self._last = title, rows, time.monotonic()
        self._live = Live(console=console, get_renderable=self._drawn, transient=True, refresh_per_second=2)

    def __enter__(self) -> Board:
        if console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        """Print a line; above the table, if there is one."""
        console.print(line, markup=False)

    def tick(self) -> None:
        """To be called often: where there is no terminal, prints how runs stand when it is time to."""
        if console.is_terminal or time.monotonic() - self._last < PLAIN_SECONDS:
            return
        self._last = time.monotonic()
        for row in self._rows:
            if row.state == RUNNING:
                self.say(f"{row.name}: {_sentence(row)}")

    def _drawn(self) -> Group:
        width = max(10, console.width - BESIDE_NAMES)
        lines = max(len(_broken(row.name).wrap(console, width)) for row in self._rows)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
        table.add_column("run", overflow="fold", min_width=10)
        table.add_column("state", no_wrap=True)
        for title in ("updates", "tokens/s", "loss", "accepted", "time left"):
            table.add_column(title, justify="right", no_wrap=True)
        for row in self._chosen(max(3, (console.height - 6) // lines)):
            going = row.state in (STARTING, RUNNING)
            table.add_row(
                _broken(row.name),
                f"on {row.device}" if going else Text(row.state, STYLES.get(row.state, "bold red")),
                row.updates,
                row.number("tokens_per_second", ",.0f") if going else "",
                row.number("loss", ".3f"),
                row.number("accepted_length", ".2f"),
                row.left,
            )
        return Group(table, Text(f"{self._title}: {_counts(self._rows)}", style="dim"))

    def _chosen(self, room: int) -> list[Row]:
        """As many rows as there is room for, in their order: those that run first of all, those that are done last."""
        rows = self._rows
        order = {RUNNING: 0, STARTING: 0, WAITING: 2, DONE: 3}
        chosen = sorted(range(len(rows)), key=lambda i: (order.get(rows[i].state, 1), i))[:room]
        return [rows[i] for i in sorted(chosen)]


def _broken(name: str) -> Text:
    """A name that breaks between settings rather than within one."""
    return Text(name.replace(",", ", "))


def _counts(rows: Sequence[Row]) -> str:
    counted = Counter(row.state for row in rows)
    return f"{len(rows)} runs; " + ", ".join(f"{count} {state}" for state, count in counted.items())


def _sentence(row: Row) -> str:
    left = [f"{row.left} left"] if row.left else []
    return ", ".join([f"{row.updates} updates", *watched(row.values), *left])
