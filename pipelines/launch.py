"""One process a device: starts the ranks of a run, passes on what they say, and sees to it that all of them end.

Rank 0 writes JSON lines, which go to a listener here, so that one process draws on the terminal. A rank that dies ends
the run with its own error: collectives in a captured graph may notice no missing peer, so the others are killed. Knows
processes and signals, nothing of training.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from ..store.format import DflashError
from ..store.progress import Listener
from .json_lines import relay
from .stopping import CHILD, STOPPED, Stop

PEER_LOST = 75
"""Exit code of a rank that fails because another is gone: `train.ranks.PEER_LOST`, whose module would load torch."""

DFLASH = (sys.executable, "-P", "-m", "dflash_offline.pipelines.cli")
"""Starts `dflash`. -P: the working directory is the user's, and no place to import from."""

TICK = 0.05
GRACE_SECONDS = 1.0
"""From a rank's own error to the end of the others."""
PEER_SECONDS = 5.0
"""The same where a rank only missed another, whose own error may be on its way."""
SAVING_SECONDS = 60.0
"""The same when the ranks were asked to stop: another may be saving."""
LEAVING_SECONDS = 600.0
"""From one rank's end as asked to the end of the others."""
OFTEN = "; often the machine ran out of memory"
"""What is said of SIGKILL."""
FINAL_WORDS = ("dflash: ", "Traceback (most recent call last)")
"""How what may be a rank's own error begins."""


class LaunchError(DflashError):
    """A rank that died; the message is its own error."""


def launch(
    devices: Sequence[str],
    arguments: Sequence[str],
    folder: Path,
    listener: Listener,
    stop: Stop,
    program: Sequence[str] = DFLASH,
) -> str | None:
    """Run a program once for each device, with torchrun's variables in its environment, until all of them have ended.

    A request to stop goes to every rank as one SIGTERM; they agree on a step, save and exit with `STOPPED`. When this
    process dies, the ranks' stdin ends, and they do the same.

    Args:
        devices: one a rank; used for messages and threads, since a rank finds its own by LOCAL_RANK.
        arguments: for the program.
        folder: to run in.
        listener: told what rank 0 reports, and what ranks write on standard error.
        stop: where requests to stop come from.
        program: what to run.

    Returns:
        What rank 0 said it has made, or None when the ranks were stopped.

    Raises:
        LaunchError: a rank died. No other is left then.
    """
    run = _Run(listener)
    stop.instead(run.asked.set, run.kill)
    try:
        run.start(devices, [*program, *arguments], folder)
        run.follow()
    finally:
        run.close()
    if failed := [rank for rank in run.ranks if rank.failed]:
        # What it says itself comes before what it says of others, and that before what was done to it.
        culprit = min(failed, key=lambda rank: (rank.killed, rank.code == PEER_LOST))
        raise LaunchError(culprit.error(listener))
    return None if any(rank.stopped for rank in run.ranks) else run.made


class _Rank:
    """A rank's process, and the lines on its standard error that may be its last words."""

    def __init__(self, number: int, device: str, process: subprocess.Popen[str]) -> None:
        self.number, self.process = number, process
        self.name = f"rank {number} ({device_name(device)})"
        self.code: int | None = None
        self.words: list[str] = []
        self._by_us = False

    @property
    def stopped(self) -> bool:
        """Whether it ended as it was asked to, after it saved or before it trained."""
        return self.code in (STOPPED, -signal.SIGTERM)

    @property
    def failed(self) -> bool:
        """Whether it ended in any other way than it should."""
        return self.code not in (None, 0) and not self.stopped

    @property
    def killed(self) -> bool:
        """Whether `kill` was its end."""
        return self._by_us and self.code == -signal.SIGKILL

    def kill(self) -> None:
        """End it at once."""
        if self.process.poll() is None:
            self._by_us = True
            self.process.kill()

    def hear(self, line: str, listener: Listener) -> None:
        """Take a line from its standard error: passed on, unless it may be its own error."""
        if self.words or line.startswith(FINAL_WORDS):
            self.words.append(line)
        elif line.strip():
            listener.say(self._signed(line))

    def spare(self, listener: Listener) -> None:
        """Pass on what was held back and is no sentence of an ending."""
        for line in self.words:
            if not line.startswith("dflash: "):
                listener.say(self._signed(line))

    def error(self, listener: Listener) -> str:
        """Why it died, in one sentence; a traceback is passed on first."""
        self.spare(listener)
        said = [line.removeprefix("dflash: ").rstrip() for line in self.words if line.startswith("dflash: ")]
        if said:
            return said[-1] if self.number == 0 else f"{self.name}: {said[-1]}"
        code = self.code or 0
        if code < 0:
            return f"{self.name} was {killed_by(-code)}"
        last = next((line.strip() for line in reversed(self.words) if line.strip()), f"exit code {code}")
        return f"{self.name} failed: {last}"

    def _signed(self, line: str) -> str:
        return f"rank {self.number}: {line.rstrip()}" if self.number else line.rstrip()


class _Run:
    """The ranks, and the lines they write."""

    def __init__(self, listener: Listener) -> None:
        self.ranks: list[_Rank] = []
        self.made = ""
        self.asked = threading.Event()
        self._listener = listener
        self._lines: queue.SimpleQueue[tuple[_Rank, bool, str]] = queue.SimpleQueue()
        self._readers: list[threading.Thread] = []

    def start(self, devices: Sequence[str], command: list[str], folder: Path) -> None:
        """Start a rank for each device."""
        common = _environment(devices)
        for number, device in enumerate(devices):
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**common, "RANK": str(number), "LOCAL_RANK": str(number)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # Ctrl-C is for this process alone
            )
            rank = _Rank(number, device, process)
            self.ranks.append(rank)
            assert process.stdout
            assert process.stderr
            for stream, is_error in ((process.stdout, False), (process.stderr, True)):
                reader = threading.Thread(target=self._read, args=(rank, is_error, stream), daemon=True)
                reader.start()
                self._readers.append(reader)

    def follow(self) -> None:
        """Pass lines on until all ranks have ended, and end them where one has died."""
        deadline = leaving = math.inf
        told = False
        while running := [rank for rank in self.ranks if rank.code is None]:
            self._take(TICK)
            for rank in running:
                rank.code = rank.process.poll()
            if any(rank.stopped for rank in self.ranks):
                self.asked.set()  # by someone else, and one of them: the others are to stop too
                leaving = min(leaving, time.monotonic() + LEAVING_SECONDS)
            if self.asked.is_set() and not told:
                told = True
                for rank in running:
                    rank.process.terminate()
            now = time.monotonic()
            if any(rank.failed for rank in self.ranks):
                deadline = min(deadline, now + self._grace())
            if now >= min(deadline, leaving):
                return  # `close` ends the others

    def kill(self) -> None:
        """End all ranks at once."""
        for rank in self.ranks:
            rank.kill()

    def close(self) -> None:
        """Leave no rank, and no line unread."""
        self.kill()
        for rank in self.ranks:
            with suppress(subprocess.TimeoutExpired):  # in a driver's hands not even SIGKILL ends it
                rank.code = rank.process.wait(PEER_SECONDS)
        for reader in self._readers:
            reader.join(GRACE_SECONDS)  # a process that a rank left behind may hold the pipe
        self._take(0)
        for rank in self.ranks:
            if not rank.failed:
                rank.spare(self._listener)
            if rank.process.stdin:
                rank.process.stdin.close()

    def _grace(self) -> float:
        if any(rank.failed and rank.code != PEER_LOST for rank in self.ranks):
            return GRACE_SECONDS
        return SAVING_SECONDS if self.asked.is_set() else PEER_SECONDS

    def _read(self, rank: _Rank, is_error: bool, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._lines.put((rank, is_error, line))

    def _take(self, seconds: float) -> None:
        """Pass on the lines that are there; wait so long for the first."""
        try:
            rank, is_error, line = self._lines.get(timeout=seconds)
            while True:
                if is_error or rank.number:
                    rank.hear(line, self._listener)
                else:
                    self.made = relay(line, self._listener) or self.made
                rank, is_error, line = self._lines.get_nowait()
        except queue.Empty:
            pass


def _environment(devices: Sequence[str]) -> dict[str, str]:
    """What all ranks have in their environment."""
    count = str(len(devices))
    found = {
        **os.environ,
        CHILD: "1",
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(devices))))
    # Gloo looks for the address of this machine's name, which may have none, or one that a firewall guards.
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    if devices[0] == "cpu" and loopback:
        found.setdefault("GLOO_SOCKET_IFNAME", min(loopback))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def device_name(device: str) -> str:
    """A device in a sentence."""
    return "CPU" if device == "cpu" else f"GPU {device}"


def killed_by(number: int) -> str:
    """What a signal's number means for a process that it ended."""
    return f"killed by {signal_name(number)}" + OFTEN * (number == signal.SIGKILL)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
