"""The launcher, with small programs as ranks that really die, hang and are killed; and stopping in good order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dflash_offline.pipelines import launch as launching
from dflash_offline.pipelines.launch import LaunchError, launch
from dflash_offline.pipelines.stopping import SAME_SECONDS, STOPPED, Stop
from dflash_offline.store.progress import SILENT

BEGIN = """
import json, os, signal, sys, time
rank = int(os.environ["RANK"])
def say(**what):
    print(json.dumps(what), flush=True)
def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a rank that waits for a peer inside a collective
    time.sleep(300)
def leave_mark():
    open(f"rank{rank}.pid", "w").write(str(os.getpid()))
"""
STAND_IN = [sys.executable, "-S", "-c"]


def nothing() -> None:
    """What a `Stop` that ends no process does last."""


@dataclass
class Outcome:
    """What came of a launch.

    Attributes:
        made: what `launch` returned.
        error: what it raised.
        said: the lines its listener was told.
        advanced: what was counted.
    """

    made: str | None = None
    error: str | None = None
    said: str = ""
    advanced: int = 0


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., Outcome]:
    """Launch a program as ranks in `tmp_path`."""

    def go(program: str, devices: tuple[str, ...] = ("cpu", "cpu"), stop: Stop | None = None) -> Outcome:
        found, said = Outcome(), []

        def advance(amount: int, note: str) -> None:
            found.advanced += amount

        listener = replace(SILENT, say=said.append, advance=advance)
        command = [*STAND_IN, BEGIN + textwrap.dedent(program)]
        try:
            found.made = launch(devices, ["word"], tmp_path, listener, stop or Stop("", nothing), command)
        except LaunchError as error:
            found.error = str(error)
        found.said = "\n".join(said)
        return found

    return go


def alive(pid: int) -> bool:
    """Whether a process is there and not merely unburied."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int) -> bool:
    """Whether a process has ended, or does within seconds."""
    for _ in range(200):
        if not alive(pid):
            return True
        time.sleep(0.05)
    return False


def written(folder: Path, count: int, pattern: str = "rank*.pid") -> list[int]:
    """The process ids that ranks have left in a folder, once all have."""
    for _ in range(400):
        found = [path.read_text() for path in folder.glob(pattern)]
        if len(found) == count and all(found):
            return [int(text) for text in found]
        time.sleep(0.05)
    raise AssertionError(f"{count} ranks should have begun in {folder}")


def test_ranks_know_their_places_and_rank_0_reports(ranks: Callable[..., Outcome], tmp_path: Path) -> None:
    found = ranks(
        """
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DFLASH_CHILD"]
        open(f"rank{rank}", "w").write(json.dumps([os.environ[name] for name in names] + sys.argv[1:]))
        say(say="resuming") if rank == 0 else None
        say(advance=3)
        print("no JSON", flush=True)
        print("a warning", file=sys.stderr)
        say(done="a folder")
        """,
        ("5", "6", "7"),
    )
    assert (found.made, found.error, found.advanced) == ("a folder", None, 3)
    places = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(3)]
    port = places[0][5]
    assert places == [[str(n), str(n), "3", "3", "127.0.0.1", port, "1", "word"] for n in range(3)]
    for line in ("resuming", "no JSON", "a warning", "rank 1: a warning", "rank 2: a warning"):
        assert found.said.splitlines().count(line) == 1, found.said


@pytest.mark.parametrize(
    ("program", "error"),
    [
        # The rank that only missed the other ends first; the other's own sentence is what counts.
        (
            """
            if rank == 0:
                print("dflash: another process of this run is gone", file=sys.stderr); sys.exit(75)
            time.sleep(0.5); print("dflash: the disk is full", file=sys.stderr); sys.exit(1)
            """,
            "rank 1 (GPU 6): the disk is full",
        ),
        ("print('dflash: no such store', file=sys.stderr); sys.exit(1)", "no such store"),
        (
            "hang() if rank == 0 else os.kill(os.getpid(), signal.SIGKILL)",
            "rank 1 (GPU 6) was killed by SIGKILL; often",
        ),
        ("hang() if rank == 1 else os.kill(os.getpid(), signal.SIGSEGV)", "rank 0 (GPU 5) was killed by SIGSEGV"),
        ("hang() if rank == 0 else sys.exit(3)", "rank 1 (GPU 6) failed: exit code 3"),
        ("hang() if rank == 0 else 1 / 0", "rank 1 (GPU 6) failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_rank_that_dies_ends_all_with_its_own_error(
    program: str, error: str, ranks: Callable[..., Outcome], tmp_path: Path
) -> None:
    found = ranks("leave_mark()\n" + textwrap.dedent(program), ("5", "6"))
    assert found.error
    assert found.error.startswith(error)
    assert all(gone(pid) for pid in written(tmp_path, 2))
    assert ("Traceback" in found.said) == ("ZeroDivisionError" in error)
    assert "dflash:" not in found.said


def test_ranks_that_only_miss_each_other_say_so(ranks: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "PEER_SECONDS", 0.5)
    found = ranks(
        """
        if rank == 0: hang()
        print("dflash: another process of this run is gone", file=sys.stderr); sys.exit(75)
        """
    )
    assert found.error == "rank 1 (CPU): another process of this run is gone"


def test_what_looks_like_an_ending_and_is_none_is_passed_on(ranks: Callable[..., Outcome]) -> None:
    found = ranks(
        """
        print("Traceback (most recent call last):\\n  of a thread that matters to nobody", file=sys.stderr)
        say(done="x")
        """
    )
    assert (found.made, found.error) == ("x", None)
    assert "rank 1:   of a thread that matters to nobody" in found.said.splitlines()


def test_a_request_to_stop_reaches_every_rank_once(ranks: Callable[..., Outcome], tmp_path: Path) -> None:
    stop = Stop("", nothing)
    asked = """
        def save(number, frame):
            open(f"rank{rank}.signals", "a").write("x")
            time.sleep(0.3)
            print("dflash: stopped; run the same command again to go on", file=sys.stderr)
            sys.exit(130)
        signal.signal(signal.SIGTERM, save)
        leave_mark()
        time.sleep(300)
        """

    def ask() -> None:
        written(tmp_path, 2)
        stop.request(again=False)

    thread = threading.Thread(target=ask)
    thread.start()
    found = ranks(asked, stop=stop)
    thread.join()
    assert (found.made, found.error, found.said) == (None, None, "")
    assert [(tmp_path / f"rank{rank}.signals").read_text() for rank in range(2)] == ["x", "x"]


def test_a_rank_that_is_stopped_alone_stops_the_others(ranks: Callable[..., Outcome]) -> None:
    found = ranks("os.kill(os.getpid(), signal.SIGTERM) if rank else time.sleep(300)")
    assert (found.made, found.error) == (None, None)


def test_a_rank_that_cannot_save_when_stopped_says_so(ranks: Callable[..., Outcome]) -> None:
    found = ranks(
        """
        def save(number, frame):
            print("dflash: the disk is full", file=sys.stderr); sys.exit(1)
        signal.signal(signal.SIGTERM, save)
        leave_mark()
        while rank == 1 or not os.path.exists("rank1.pid"): time.sleep(0.05)
        sys.exit(130)
        """
    )
    assert found.error == "rank 1 (CPU): the disk is full"


PARENT = f"""
import signal, sys, time
from pathlib import Path
from dflash_offline.pipelines.launch import launch
from dflash_offline.pipelines.stopping import stoppable
from dflash_offline.store.progress import SILENT

with stoppable("stopping", lambda: print("ended", file=sys.stderr, flush=True)) as stop:
    command = [*{STAND_IN!r}, sys.argv[1]]
    made = launch(["cpu", "cpu"], [], Path.cwd(), SILENT, stop, command)
sys.exit(130 if made is None else 0)
"""
FOLLOWS = """
import threading
def watch():
    os.read(0, 1)
    os._exit(130)
threading.Thread(target=watch, daemon=True).start()
leave_mark()
time.sleep(300)
"""


def parent(folder: Path, program: str) -> subprocess.Popen[str]:
    """A process that launches two ranks, in a process group of its own as a shell would start it."""
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, BEGIN + program],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def test_a_killed_launcher_takes_its_ranks_along(tmp_path: Path) -> None:
    with parent(tmp_path, FOLLOWS) as process:
        pids = written(tmp_path, 2)
        process.kill()
    assert all(gone(pid) for pid in pids)


def test_ctrl_c_reaches_the_launcher_alone_and_a_second_one_ends_all(tmp_path: Path) -> None:
    with parent(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nleave_mark()\nhang()") as process:
        pids = written(tmp_path, 2)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr
        assert process.stderr.readline() == "stopping\n"
        assert process.poll() is None
        assert all(alive(pid) for pid in pids)
        time.sleep(SAME_SECONDS + 0.1)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == STOPPED
        assert process.stderr.read() == "ended\n"
    assert all(gone(pid) for pid in pids)


SLOW = """
import os, sys, time
from dflash_offline.pipelines.stopping import stoppable

with stoppable("", lambda: open("ended", "w").close()) as stop:
    if sys.argv[1] == "trains":
        stop.instead(lambda: open("asked", "a").write("x"))
    open("rank0.pid", "w").write(str(os.getpid()))
    for _ in range(600):
        time.sleep(0.05)
        if os.path.exists("go"): sys.exit(7)
"""


def alone(folder: Path, word: str, child: bool) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "DFLASH_CHILD": str(int(child))}
    process = subprocess.Popen([sys.executable, "-c", SLOW, word], cwd=folder, stdin=subprocess.PIPE, env=environment)
    written(folder, 1)
    return process


def wait_for(path: Path) -> None:
    for _ in range(200):
        if path.exists() and path.stat().st_size:
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} should be there")


def test_before_training_a_signal_ends_at_once(tmp_path: Path) -> None:
    with alone(tmp_path, "builds", child=False) as process:
        process.terminate()
        assert process.wait(20) == STOPPED
    assert (tmp_path / "ended").exists()


def test_training_is_asked_once_and_a_second_signal_ends_it(tmp_path: Path) -> None:
    with alone(tmp_path, "trains", child=False) as process:
        process.terminate()
        wait_for(tmp_path / "asked")
        process.terminate()  # what stops a process may signal its group next: that is the same request
        time.sleep(SAME_SECONDS + 0.1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == STOPPED
    assert (tmp_path / "asked").read_text() == "x"


def test_a_child_is_asked_by_the_end_of_its_stdin_and_ends_in_its_own_time(tmp_path: Path) -> None:
    with alone(tmp_path, "trains", child=True) as process:
        assert process.stdin
        process.stdin.close()
        wait_for(tmp_path / "asked")
        process.terminate()  # sent to a whole group, say
        process.terminate()
        (tmp_path / "go").touch()
        assert process.wait(20) == 7
    assert (tmp_path / "asked").read_text() == "x"


def test_a_child_whose_parent_dies_before_training_ends(tmp_path: Path) -> None:
    with alone(tmp_path, "builds", child=True) as process:
        assert process.stdin
        process.stdin.close()
        assert process.wait(20) == STOPPED
