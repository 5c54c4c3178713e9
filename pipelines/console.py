"""The terminal: lines, and progress bars with rate and time left, or plain lines where there is none.

Knows no stage.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..store.progress import Listener

PLAIN_SECONDS = 10.0
"""Seconds between progress lines where there is no terminal."""

console = Console(highlight=False, soft_wrap=True)


class _RateColumn(TextColumn):
    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.1f} {task.fields['unit']}/s" if speed else "", style="progress.data.speed")


@contextmanager
def reporting(title: str, unit: str, quiet: bool = False) -> Iterator[Listener]:
    """A listener that shows a job: a bar on a terminal, a line every few seconds elsewhere, nothing when quiet."""
    if quiet:
        yield Listener(lambda line: None, lambda total, done: None, lambda amount, note: None)
    elif console.is_terminal:
        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
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

    def start(amount: int, already: int) -> None:
        nonlocal total, done, before, began, last
        total, done, before = amount, already, already
        began = last = time.monotonic()

    def advance(amount: int, said: str) -> None:
        nonlocal done, last, note
        done, note = done + amount, said or note
        now = time.monotonic()
        if now - last < PLAIN_SECONDS and done < total:
            return
        last = now
        rate = (done - before) / max(now - began, 1e-9)
        left = (total - done) / rate if rate else 0.0
        print(
            f"{title}: {done:,} of {total:,} {unit}, {rate:,.1f} {unit}/s, {left:.0f} s left {note}".rstrip(),
            flush=True,
        )

    return Listener(lambda line: print(line, flush=True), start, advance, _plain)


def fail(message: str) -> None:
    """Print why a command failed, on standard error."""
    print(f"dflash: {message}", file=sys.stderr, flush=True)
