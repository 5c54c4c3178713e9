"""Stopping in good order: SIGINT, SIGTERM, and the end of the process that started this one.

A handler in Python waits for the main thread to come back to Python, and from a rendezvous, a collective or a long read
that takes a while or forever; so a thread answers. Knows nothing of what is stopped.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPPED = 130
"""Exit code of a command that was stopped."""

AGAIN = "stopped; run the same command again to go on"
"""What a command that was stopped says."""

CHILD = "DFLASH_CHILD"
"""Set to 1 in the environment of processes that dflash starts; their stdin is a pipe that ends when the parent does."""

ORPHAN_SECONDS = 600.0
"""How long a process goes on once its parent is gone: enough to save, and not forever where others do not answer."""

SAME_SECONDS = 1.0
"""Signals so close together are one request: what stops a process may signal it, and then its whole group."""

_OVER = b"\0"  # no signal's number


def is_child() -> bool:
    """Whether dflash started this process."""
    return os.environ.get(CHILD) == "1"


class Stop:
    """What a request to stop does: it ends the process at once, until `instead` names something gentler."""

    def __init__(self, notice: str, last: Callable[[], None]) -> None:
        self._notice, self._last = notice, last
        self._ask: Callable[[], None] | None = None
        self._kill: Callable[[], None] = lambda: None
        self._asked: float | None = None
        """When it was asked first."""
        self._lock = threading.Lock()

    def instead(self, ask: Callable[[], None], kill: Callable[[], None] = lambda: None) -> None:
        """From now on, ask first.

        Args:
            ask: called by another thread, once, on the first request; what it asks ends this process soon.
            kill: called before the process ends at once after all.
        """
        with self._lock:
            self._ask, self._kill = ask, kill

    def request(self, again: bool) -> None:
        """Someone wants this process to stop; `again`: ends it at once where it was asked before."""
        with self._lock:
            if self._ask is not None and self._asked is None:
                self._asked = time.monotonic()
                if self._notice:
                    print(self._notice, file=sys.stderr, flush=True)
                self._ask()
            elif self._asked is None or (again and time.monotonic() - self._asked > SAME_SECONDS):
                self.end()

    def end(self) -> None:
        """End the process at once."""
        self._kill()
        self._last()
        os._exit(STOPPED)


@contextmanager
def stoppable(notice: str, last: Callable[[], None]) -> Iterator[Stop]:
    """While this lasts, SIGINT and SIGTERM go to a `Stop`; in a process dflash started, so does the end of its stdin.

    A second signal ends the process at once, but not one that dflash or torchrun looks after: it may be sent a signal
    twice, by them and by what stops a whole group, and they have SIGKILL. To be used in the main thread.

    Args:
        notice: printed on standard error when asked to stop; may be empty.
        last: called before the process ends at once, to leave the terminal in order.
    """
    stop = Stop(notice, last)
    ours, woken = os.pipe()
    os.set_blocking(woken, False)
    before = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    # A handler must be there for the wake-up to be written.
    handlers = {number: signal.signal(number, _do_nothing) for number in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=_answer, args=(stop, ours), name="stop", daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.write(woken, _OVER)
        thread.join()
        os.close(woken)
        os.close(ours)


def _do_nothing(number: int, frame: object) -> None:
    pass


def _answer(stop: Stop, signals: int) -> None:
    parent = sys.__stdin__.fileno() if is_child() and sys.__stdin__ else None
    looked_after = is_child() or "RANK" in os.environ
    limit: float | None = None
    while True:
        ready, _, _ = select.select([signals, *([] if parent is None else [parent])], [], [], limit)
        if signals in ready:
            for number in os.read(signals, 64):
                if number in (signal.SIGINT, signal.SIGTERM):
                    stop.request(again=not looked_after)
                elif number == _OVER[0]:
                    return
        if parent in ready and not os.read(parent, 4096):
            parent, limit = None, ORPHAN_SECONDS
            stop.request(again=False)
        if not ready:
            stop.end()
