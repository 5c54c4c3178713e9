"""How fast a run goes: tokens a second, the share of time spent waiting for data, and memory, since it was last asked.

Told of updates once they are made, not when they are asked for: the host is ahead by a few. A run whose GPUs wait for
data is told so once, with what would help. Knows counts and clocks only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..store import BatchStream
from ..store.progress import Listener
from .idle import Idle

SLOW = 0.2
"""Share of the time spent waiting from which on data is the limit."""
PATIENCE = 5
"""Lines in a row that must say so: the first few batches are always waited for."""


class Meter:
    """Args:
    device: where the run trains.
    before: seconds that the run has taken in earlier processes.
    listener: told when data is the limit.
    idle: of a GPU; elsewhere what waits is this process.
    """

    def __init__(self, device: torch.device, before: float, listener: Listener, idle: Idle | None = None) -> None:
        self._device, self._listener, self._idle = device, listener, idle
        self._began = time.perf_counter() - before
        self._last = time.perf_counter()
        self._tokens = 0
        self._stream: BatchStream | None = None
        self._waited = 0.0
        self._slow, self._told = 0, False

    def add(self, tokens: int) -> None:
        """Count tokens of an update that is made, by all ranks."""
        self._tokens += tokens

    def follow(self, stream: BatchStream) -> None:
        """Count from now on, with what is waited for this stream."""
        self._stream = stream
        self._wait_from_here()
        self._last, self._tokens, self._waited = time.perf_counter(), 0, self._seconds_waited()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of something that is not training: a validation."""
        began = time.perf_counter()
        yield
        # As long ago as it was when the pause began; at the earliest now, if it was read in between.
        self._last = time.perf_counter() - max(0.0, began - self._last)
        self._wait_from_here()

    def read(self) -> tuple[dict[str, float], float]:
        """Numbers since this was asked last, and over how many seconds."""
        waited = self._seconds_waited()
        now = time.perf_counter()
        seconds = max(now - self._last, 1e-9)
        share = min(1.0, (waited - self._waited) / seconds)
        found = {
            "tokens_per_second": self._tokens / seconds,
            "share_waiting_for_data": share,
            "seconds": now - self._began,
        }
        if self._device.type == "cuda":
            found["gpu_memory_gib"] = torch.cuda.memory_reserved(self._device) / 2**30
        self._slow = self._slow + 1 if share > SLOW else 0
        if self._slow == PATIENCE and not self._told:
            self._told = True
            self._listener.say(
                f"the run waits for data {share:.0%} of the time: the store's disk is the limit; "
                "extract.encoding = fp8 halves the bytes, and a store in memory is faster"
            )
        self._last, self._tokens, self._waited = now, 0, waited
        return found, seconds

    def _wait_from_here(self) -> None:
        if self._idle is not None:
            self._idle.begin()

    def _seconds_waited(self) -> float:
        """For the stream, so far."""
        if self._idle is not None:
            return self._idle.seconds()
        return self._stream.waited if self._stream else 0.0
