"""`dflash` commands in processes of their own, watched from outside: when each line came, when each part was committed,
how much memory each GPU had in use.

Imported by `side_by_side.py`. Knows what the commands print and what a store looks like, nothing of their insides.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from dflash_offline.store import TRAIN, open_store
from dflash_offline.store.format import PARTS

STOPPED = 130
"""Exit code of a command that ended because it was asked to."""


class CommandFailed(Exception):
    """A command that ended with an error; the message is the end of what it printed."""


class Command:
    """`dflash` with some arguments, started.

    Args:
        folder: its working directory.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.began = time.time()
        self.lines: list[tuple[float, str]] = []
        """What it printed, each line with the time at which it came."""
        program = (sys.executable, "-P", "-m", "dflash_offline.pipelines.cli")
        self._process = subprocess.Popen(
            [*program, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append((time.time(), line.rstrip()))

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Ask it to end in good order."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def wait(self) -> float:
        """Seconds from its start to its end. Raises CommandFailed."""
        code = self._process.wait()
        self._reader.join()
        if code not in (0, STOPPED):
            raise CommandFailed("\n".join(text for _, text in self.lines[-12:]))
        return time.time() - self.began


@contextmanager
def ending(*commands: Command) -> Iterator[None]:
    """Whatever happens in the block, the commands do not outlive it."""
    try:
        yield
    finally:
        for command in commands:
            if command.running:
                command.kill()


@dataclass(frozen=True)
class Extraction:
    """Attributes:
    gpus: how many.
    rate: tokens a second of all together.
    first: seconds from the command to the first part, loading the target included.
    whole: seconds of the whole command.
    waiting: share of the passes' time that they waited for the disk.
    said: what it said, with seconds since its start.
    """

    gpus: int
    rate: float
    first: float
    whole: float
    waiting: float
    said: list[tuple[float, str]] = field(repr=False)


def commits(store: Path) -> list[tuple[float, int, str]]:
    """When each part appeared (the renaming changes its folder's status), its tokens and its split, in that order."""
    parts = open_store(store).parts
    return sorted(((store / PARTS / part.id).stat().st_ctime, part.tokens, part.split) for part in parts)


def extraction(command: Command, store: Path, gpus: int, since: float = 0.0) -> Extraction:
    """What an extraction that has ended did; its rate from `since` on."""
    whole = command.wait()
    made = commits(store)
    # The first units of all, and the last, when some GPUs have nothing to do any more, are not in the rate.
    counted = [commit for commit in made[2 * gpus : -gpus] if commit[0] >= since]
    if len(counted) < 3:
        raise CommandFailed(f"{len(made)} units are too few to measure {gpus} GPUs by: give --seconds more")
    seconds = counted[-1][0] - counted[0][0]
    spent = (re.search(r"forward passes ([\d.]+) s.* disk ([\d.]+) s", text) for _, text in command.lines)
    forward, waited = map(float, next(filter(None, spent)).groups())
    rate = sum(tokens for _, tokens, _ in counted[1:]) / seconds
    said = [(round(when - command.began, 1), text) for when, text in command.lines]
    return Extraction(gpus, rate, made[0][0] - command.began, whole, waited / (forward + waited), said)


@dataclass(frozen=True)
class Training:
    """Attributes:
    gpus: how many.
    rate: tokens a second of all together, while it makes updates.
    busy: share of the time, from the first update on, in which it made updates: not validating or saving.
    waiting: share of the updates' time that rank 0 waited for data.
    first: seconds from the command to the first update.
    after_data: seconds to the first update since there was something to train on.
    updates: how many were made.
    memory: smallest and largest GiB that rank 0's allocator held.
    reports: seconds since its start, tokens a second and share of waiting, of every ten updates.
    said: what the run said, with seconds since its start.
    """

    gpus: int
    rate: float
    busy: float
    waiting: float
    first: float
    after_data: float
    updates: int
    memory: tuple[float, float]
    reports: list[tuple[float, float, float]] = field(repr=False)
    said: list[tuple[float, str]] = field(repr=False)


def first_update(command: Command) -> float | None:
    """When the first update was told of, if one was."""
    return next((when for when, event in events(command) if event.get("advance")), None)


def events(command: Command) -> Iterator[tuple[float, dict[str, Any]]]:
    """The JSON lines of `dflash train --json`; anything else as something said."""
    for when, text in list(command.lines):
        try:
            yield when, json.loads(text)
        except ValueError:
            yield when, {"say": text}


def training(command: Command, store: Path, gpus: int, until: float | None = None) -> Training:
    """What a training did, up to a time if one is given."""
    told = [(when, event) for when, event in events(command) if until is None or when <= until]
    first = first_update(command)
    lines = [(when, event["watch"]) for when, event in told if "tokens_per_second" in event.get("watch", {})][1:]
    if first is None or len(lines) < 3:
        raise CommandFailed(f"the training made too few updates to measure: {told[-6:]}")
    updates = sum(event.get("advance", 0) for _, event in told)
    # Between two lines lie ten updates, or a pause too: the median has none.
    each = statistics.median(b - a for (a, _), (b, _) in pairwise(lines)) / 10
    data = next(when for when, _, split in commits(store) if split == TRAIN)
    held = [values["gpu_memory_gib"] for _, values in lines if "gpu_memory_gib" in values] or [0.0]
    return Training(
        gpus,
        statistics.median(values["tokens_per_second"] for _, values in lines),
        min(1.0, updates * each / (lines[-1][0] - first)),
        statistics.fmean(values["share_waiting_for_data"] for _, values in lines),
        first - command.began,
        first - max(data, command.began),
        updates,
        (min(held), max(held)),
        [
            (round(when - command.began, 1), round(values["tokens_per_second"]), values["share_waiting_for_data"])
            for when, values in lines
        ],
        [(round(when - command.began, 1), event["say"]) for when, event in told if "say" in event],
    )


class GpuMemory:
    """What each GPU has in use, looked at every second while the block runs; nothing where there is no nvidia-smi."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int, float]] = []
        """Time, GPU, GiB."""

    def __enter__(self) -> GpuMemory:
        self._smi = None
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits", "-l", "1"]
            self._smi = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self) -> None:
        assert self._smi is not None
        assert self._smi.stdout is not None
        for line in self._smi.stdout:
            index, used = line.split(",")
            self.seen.append((time.time(), int(index), int(used) / 1024))

    def __exit__(self, *_: object) -> None:
        if self._smi is not None:
            self._smi.kill()

    def of(self, gpus: Sequence[str], since: float, until: float) -> dict[str, list[float]]:
        """GiB of each GPU over time."""
        return {
            gpu: [round(used, 2) for when, index, used in self.seen if str(index) == gpu and since <= when <= until]
            for gpu in gpus
        }
