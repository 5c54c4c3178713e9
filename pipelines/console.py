"""The terminal: lines, and progress bars with rate and time left, and the numbers of the moment below them. Plain lines
where there is no terminal.

Knows no stage.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..store.progress import SILENT, Listener

PLAIN_SECONDS = 10.0
"""Seconds between progress lines where there is no terminal."""

WATCHED = {
    "loss": "loss {:.3f}",
    "accepted_length": "accepted length {:.2f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "slots_per_second": "{:,.0f} slots/s",
    "share_waiting_for_data": "waiting for data {:.0%}",
    "gpu_memory_gib": "GPU {:.1f} GiB",
}
"""How numbers of the moment read, in this order; others follow under their own names."""

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


class _Watched:
    """Numbers of the moment on as many lines as they need; none of them is broken in two."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [""]
        for number in watched(self.values):
            longer = f"{lines[-1]} · {number}" if lines[-1] else number
            if len(longer) <= options.max_width:
                lines[-1] = longer
            else:
                lines.append(number)
        yield Text("\n".join(filter(None, lines)), no_wrap=True, overflow="ellipsis", style="dim")


class _View(Progress):
    """Bars, and below them the numbers of the moment once there are any."""

    numbers = _Watched()  # of the class: the first picture is drawn while the base class is made

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.numbers.values:
            yield self.numbers


def watched(values: Mapping[str, float]) -> list[str]:
    """Numbers of the moment as people read them."""
    known = [text.format(values[name]) for name, text in WATCHED.items() if name in values]
    return known + [f"{name.replace('_', ' ')} {value:,.4g}" for name, value in values.items() if name not in WATCHED]


@contextmanager
def reporting(title: str, unit: str, quiet: bool = False, as_json: bool = False) -> Iterator[Listener]:
    """A listener that shows a job: a bar on a terminal, a line every few seconds elsewhere.

    Args:
        title: the job's name.
        unit: what its progress counts.
        quiet: show nothing.
        as_json: write JSON lines instead (`json_lines`).
    """
    if quiet:
        yield SILENT
    elif as_json:
        from .json_lines import writing

        with writing(sys.stdout) as listener:
            yield listener
    elif console.is_terminal:
        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            _CountColumn(),
            _RateColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        ]
        with _View(*columns, console=console, speed_estimate_period=60) as progress:
            progress.numbers = _Watched()
            yield _bar(progress, title, unit)
    else:
        yield _plain(title, unit)


def _bar(progress: _View, title: str, unit: str) -> Listener:
    task = progress.add_task(title, total=None, note="", unit=unit, start=False)

    def start(total: int, done: int) -> None:
        progress.update(task, total=total, completed=done)
        progress.start_task(task)

    def advance(amount: int, note: str) -> None:
        progress.update(task, advance=amount)
        if note and not progress.numbers.values:  # which say more, and in their own place
            progress.update(task, note=note)

    def say(line: str) -> None:
        progress.console.print(line, markup=False)

    def watch(values: Mapping[str, float]) -> None:
        progress.numbers.values = {**progress.numbers.values, **values}  # replaced whole: another thread draws it
        progress.update(task, note="")

    return Listener(say, start, advance, partial(_bar, progress), watch)


def _plain(title: str, unit: str) -> Listener:
    total = done = before = 0
    note = ""
    numbers: dict[str, float] = {}
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
        told = ", ".join(watched(numbers)) if numbers else note
        line = f"{title}: {done:,} of {total:,} {unit}, {_number(rate)} {unit}/s, {left:.0f} s left; {told}"
        write_line(sys.stdout, line.rstrip("; "))

    return Listener(lambda line: write_line(sys.stdout, line), start, advance, _plain, numbers.update)


def write_line(stream: TextIO, line: str) -> None:
    """Write a line, to nowhere once nobody reads any more: work does not end, unsaved, for want of a listener."""
    try:
        stream.write(f"{line}\n")
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # or what the stream still holds would fail again at the very end
        os.close(nowhere)


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}"


def fail(message: str) -> None:
    """Print why a command failed, on standard error."""
    print(f"dflash: {message}", file=sys.stderr, flush=True)


def reason(error: Exception) -> str:
    """An error that a person can put right, as a sentence."""
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename or 'see the path in your settings'}"
    return str(error)


def leave() -> None:
    """Leave the terminal as it was found, in a process that ends at once, perhaps in the middle of a picture."""
    if console.is_terminal:
        console.file.write("\x1b[?25h\n")  # the cursor, which a bar hides
        console.file.flush()
