"""A queue of `dflash train` over some devices, one process each.

A run that fails is reported, and the others go on. One that is killed is put at the end of the queue, once: it resumes
from its checkpoint. What a run says goes to `log.txt` in its folder, what it counts to its row on the board. Knows
processes and signals, nothing of sweeps and of training.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...store.format import DflashError
from ...store.progress import Listener
from ..console import reason
from ..json_lines import relay
from ..launch import DFLASH, device_name, killed_by
from ..stopping import CHILD, STOPPED
from .board import DONE, WAITING, Board, Row

LOG = "log.txt"
TICK = 0.1
READER_SECONDS = 2.0
"""How long to wait for the rest of what a process that has ended wrote."""


@dataclass(frozen=True)
class Job:
    """A run to make.

    Attributes:
        row: shows how it stands; its name is the run's.
        folder: of the run.
        arguments: of `dflash train`, besides those that say where it runs and how it reports.
        check: called before each start; raises DflashError where it should not be made any more.
    """

    row: Row
    folder: Path
    arguments: Sequence[str]
    check: Callable[[], None]


class Queue:
    """Works jobs off.

    Args:
        jobs: in this order.
        devices: one process at a time on each; the CPU as often as it is named.
        folder: to run in.
        board: told what happens.
        program: what to run, `dflash` by default.

    Attributes:
        states: by name, how those that are not done ended, "failed: why" and the like. Those that never began, or wait
            for their turn again, are not in it.
    """

    def __init__(
        self, jobs: Iterable[Job], devices: Sequence[str], folder: Path, board: Board, program: Sequence[str] = DFLASH
    ) -> None:
        self.states: dict[str, str] = {}
        self._waiting, self._free = deque(jobs), deque(devices)
        self._folder, self._board, self._program = folder, board, program
        self._environment = _environment(len(devices))
        self._running: list[_Process] = []
        self._killed_once: set[str] = set()
        self._asked = threading.Event()

    @property
    def asked(self) -> bool:
        """Whether a stop was asked for."""
        return self._asked.is_set()

    def stop(self) -> None:
        """Ask for a stop, from any thread: runs save and end, and no other is started."""
        self._asked.set()

    def kill(self) -> None:
        """End all processes at once."""
        for process in self._running:
            process.kill()

    def work(self) -> None:
        """Work until all jobs have ended, or those at hand once a stop is asked for."""
        told = False
        try:
            while self._running or (self._waiting and not self.asked):
                while self._waiting and self._free and not self.asked:
                    self._start(self._waiting.popleft(), self._free.popleft())
                for process in [process for process in self._running if process.ended]:
                    self._running.remove(process)
                    self._free.append(process.device)
                    self._end(process)
                if self.asked and not told:
                    told = True
                    self._board.say("stopping, once the runs have saved; asked again they end at once")
                    for process in self._running:
                        process.terminate()
                self._board.tick()
                time.sleep(TICK)
        finally:
            for process in self._running:  # only after an error of ours: they save and end, each in its own time
                process.terminate()

    def _start(self, job: Job, device: str) -> None:
        self.states.pop(job.row.name, None)
        try:
            job.check()
            command = [*self._program, "train", "--json", "--gpus", device, *job.arguments]
            self._running.append(_Process(job, device, command, self._folder, self._environment))
        except (DflashError, OSError) as error:
            self._free.appendleft(device)
            self._fail(job, reason(error))
            return
        job.row.begin(device_name(device))
        self._board.say(f"{job.row.name}: begins on {device_name(device)}")

    def _end(self, process: _Process) -> None:
        """Judge a process that has ended."""
        job, row = process.job, process.job.row
        code = process.close()
        if code == 0:
            row.state = DONE
            length = row.number("accepted_length", ".2f")
            self._board.say(f"{row.name}: done" + (f", accepted length {length}" if length else ""))
        elif code in (STOPPED, -signal.SIGTERM):
            row.state = self.states[row.name] = "stopped"
            self._board.say(f"{row.name}: stopped at {row.updates or 'no'} updates")
        elif code < 0:
            self._killed(job, killed_by(-code))
        else:
            self._fail(job, process.last_words() or f"exit code {code}")

    def _killed(self, job: Job, by: str) -> None:
        name = job.row.name
        again = name in self._killed_once
        self._killed_once.add(name)
        self.states[name] = f"killed: twice, {by}" if again else f"killed: {by}"
        job.row.state = "killed"
        if again or self.asked:
            self._board.say(f"{name}: {self.states[name]}; see {job.folder / LOG}")
        else:
            job.row.state = WAITING
            self._waiting.append(job)
            self._board.say(f"{name}: {by}; it goes on from its last checkpoint, after the others")

    def _fail(self, job: Job, why: str) -> None:
        job.row.state = "failed"
        self.states[job.row.name] = f"failed: {why}"
        self._board.say(f"{job.row.name}: failed: {why}")


class _Process:
    """One `dflash train`."""

    def __init__(self, job: Job, device: str, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.job, self.device = job, device
        job.folder.mkdir(parents=True, exist_ok=True)
        self._log = (job.folder / LOG).open("ab", buffering=0)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self._note(f"--- {now} on {device_name(device)}: dflash train {shlex.join(job.arguments)}")
        self._began = self._log.tell()
        try:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,  # ends when this process does, which asks the run to stop
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # Ctrl-C is for this process alone
            )
        except BaseException:
            self._log.close()
            raise
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def ended(self) -> bool:
        """Whether the process has."""
        return self._process.poll() is not None

    def terminate(self) -> None:
        """Ask it to save and end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def close(self) -> int:
        """Read what is left, and give its exit code back."""
        self._reader.join(READER_SECONDS)  # a process that it left behind may hold the pipe
        self._log.close()
        if self._process.stdin:
            self._process.stdin.close()
        return self._process.wait()

    def last_words(self) -> str:
        """The error it ended with, in a line."""
        with (self.job.folder / LOG).open("rb") as log:
            log.seek(self._began)
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        said = [line.removeprefix("dflash: ") for line in lines if line.startswith("dflash: ")]
        return (said or lines or [""])[-1]

    def _read(self) -> None:
        row = self.job.row
        listener = Listener(self._note, row.start, lambda amount, note: row.advance(amount), watch=row.watch)
        assert self._process.stdout
        with self._process.stdout as lines:
            for line in lines:
                relay(line, listener)

    def _note(self, line: str) -> None:
        with suppress(OSError, ValueError):  # a full disk ends the run, in its own words; the log may be closed
            self._log.write(f"{line}\n".encode())


def _environment(processes: int) -> dict[str, str]:
    """What every process has in its environment."""
    # It is no rank, even where this one was started as if it were.
    found = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    found[CHILD] = "1"
    found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    return found
