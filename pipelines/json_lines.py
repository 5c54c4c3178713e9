"""Progress as JSON lines, one object a line: what `dflash train --json` writes, and how another process reads it.

    {"say": "resuming from ..."}
    {"start": {"total": 1200, "done": 200}}
    {"advance": 3}                                    amounts added up, a few times a second
    {"watch": {"loss": 2.31, "tokens_per_second": 38100.0}}
    {"done": "runs/drafter/checkpoints/step-00001200"}

Knows listeners and lines, no stage and no process.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from ..store.progress import Listener
from .console import write_line

BETWEEN = 0.2
"""Seconds between lines that only count."""


@contextmanager
def writing(stream: TextIO) -> Iterator[Listener]:
    """A listener that writes JSON lines; any thread may use it. What was counted is all written at the end.

    Once nobody reads them any more, lines are dropped: a run does not end, unsaved, for want of a listener.
    """
    lock = threading.RLock()
    counted, last = 0, -math.inf

    def write(content: dict[str, Any] | None) -> None:
        nonlocal counted, last
        with lock:
            # First what was counted, so that lines stay in the order of what happened.
            lines = [{"advance": counted}] * bool(counted) + [content] * (content is not None)
            counted, last = 0, time.monotonic()
            write_line(stream, "\n".join(map(json.dumps, lines)))

    def advance(amount: int, note: str) -> None:
        nonlocal counted
        with lock:
            counted += amount
            if time.monotonic() - last >= BETWEEN:
                write(None)

    def watch(values: Mapping[str, float]) -> None:
        # JSON has no word for what is not finite.
        write({"watch": {name: value for name, value in values.items() if math.isfinite(value)}})

    def start(total: int, done: int) -> None:
        write({"start": {"total": total, "done": done}})

    def phase(title: str, unit: str) -> Listener:
        return Listener(say, lambda total, done: None, lambda amount, note: None)  # counts something else

    def say(line: str) -> None:
        write({"say": line})

    try:
        yield Listener(say, start, advance, phase, watch)
    finally:
        if counted:
            write(None)


def write_done(made: Path | str, stream: TextIO) -> None:
    """The last line: where what was made lies."""
    write_line(stream, json.dumps({"done": str(made)}))


def relay(line: str, listener: Listener) -> str | None:
    """Pass a line on to a listener. Returns what was made when it is the last; what is no line of ours is only said."""
    try:
        content = json.loads(line)
    except ValueError:
        content = None
    match content:
        case {"say": str(text)}:
            listener.say(text)
        case {"start": {"total": int(total), "done": int(done)}}:
            listener.start(total, done)
        case {"advance": int(amount)}:
            listener.advance(amount, "")
        case {"watch": dict(values)}:
            listener.watch(values)
        case {"done": str(made)}:
            return made
        case _ if line.strip():
            listener.say(line.rstrip())
        case _:
            pass
    return None
