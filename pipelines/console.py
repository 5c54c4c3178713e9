"""The terminal: lines, and progress bars with rate and time left, or plain lines where there is none.

Knows no stage.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..store.progress import Listener

PLAIN_SECONDS = 10.0
"""Seconds between progress lines where there is no terminal."""

# Into a file or a pipe nothing need be cut to fit a screen.
_WIDE = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200

console = Console(highlight=False, soft_wrap=True, width=_WIDE)


class _CountColumn(TextColumn):
    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        total = "?" if task.total is None else f"{task.total:,.0f}"
        return Text(f"{task.completed:,.0f} of {total}", style="progress.download")


class _RateColumn(TextColumn):
    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{_number(speed)} {task.fields['unit']}/s" if speed else "", style="progress.data.speed")


@contextmanager
def reporting(title: str, unit: str, quiet: bool = False) -> Iterator[Listener]:
    """A listener that shows a job: a bar on a terminal, a line every few seconds elsewhere, nothing when quiet."""
    if quiet:
        yield Listener(lambda line: None, lambda total, done: None, lambda amount, note: None)
    elif console.is_terminal:
        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            _CountColumn(),
            _RateColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        ]
        with Progress(*columns, console=console, speed_estimate_period=60) as progress:
            yield _bar(progress, title, unit)
    else:
        yield _plain(title, unit)


def _bar(progress: Progress, title: str, unit: str) -> Listener:
    task = progress.add_task(title, total=None, note="", unit=unit, start=False)

    def start(total: int, done: int) -> None:
        progress.update(task, total=total, completed=done)
        progress.start_task(task)

    def advance(amount: int, note: str) -> None:
        progress.update(task, advance=amount)
        if note:
            progress.update(task, note=note)

    def say(line: str) -> None:
        progress.console.print(line, markup=False)

    return Listener(say, start, advance, partial(_bar, progress))


def _plain(title: str, unit: str) -> Listener:
    total = done = before = 0
    note = ""
    began = last = time.monotonic()
    starting = True

    def start(amount: int, already: int) -> None:
        nonlocal total, done, before, began, last, starting
        total, done, before = amount, already, already
        began = last = time.monotonic()
        starting = True

    def advance(amount: int, said: str) -> None:
        nonlocal done, last, note, before, began, starting
        done, note = done + amount, said or note
        now = time.monotonic()
        if starting and done < total:  # the rate is that of the work, not of what came before its first piece
            began, before, starting = now, done, False
            return
        if now - last < PLAIN_SECONDS and done < total:
            return
        last = now
        rate = (done - before) / max(now - began, 1e-9)
        left = (total - done) / rate if rate else 0.0
        print(
            f"{title}: {done:,} of {total:,} {unit}, {_number(rate)} {unit}/s, {left:.0f} s left {note}".rstrip(),
            flush=True,
        )

    return Listener(lambda line: print(line, flush=True), start, advance, _plain)


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}"


def fail(message: str) -> None:
    """Print why a command failed, on standard error."""
    print(f"dflash: {message}", file=sys.stderr, flush=True)
