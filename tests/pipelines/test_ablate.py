"""`dflash ablate`: what its queue does with processes that end in every way, and a real sweep killed half way."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import run
from tiny import write_data

from dflash_offline.pipelines.ablate.board import Board, Row
from dflash_offline.pipelines.ablate.queue import LOG, Job, Queue
from dflash_offline.pipelines.config import ConfigError
from dflash_offline.store import Store

PROGRAM = """
import json, os, pathlib, signal, sys, time
name = sys.argv[-1]
told = pathlib.Path(name)
told.mkdir(exist_ok=True)
times = len(list(told.glob("began*")))
(told / f"began{times}").touch()
print(json.dumps({"start": {"total": 10, "done": 0}}), flush=True)
print(json.dumps({"advance": 4}), flush=True)
print(json.dumps({"watch": {"accepted_length": 1.5}}), flush=True)
if "waits" in name:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    time.sleep(60)
if "killed-always" in name or ("killed-once" in name and not times):
    os.kill(os.getpid(), signal.SIGKILL)
if "fails" in name:
    sys.stderr.write("warning: something else\\ndflash: the reason, in a sentence\\n")
    sys.exit(1)
"""


def queue_of(folder: Path, devices: list[str], *names: str) -> tuple[Queue, list[Row]]:
    """A queue of stand-ins for `dflash train`, each of which does what its name says."""
    rows = [Row(name) for name in names]
    jobs = [Job(row, folder / "runs" / row.name, [row.name], lambda: None) for row in rows]
    return Queue(jobs, devices, folder, Board("sweep", rows), [sys.executable, "-S", "-c", PROGRAM]), rows


def test_runs_that_end_badly_are_reported_and_the_others_go_on(tmp_path: Path) -> None:
    queue, rows = queue_of(tmp_path, ["cpu", "cpu"], "fails", "killed-always", "killed-once", "good")
    queue.work()
    assert [row.state for row in rows] == ["failed", "killed", "done", "done"]
    assert queue.states["fails"] == "failed: the reason, in a sentence"
    assert queue.states["killed-always"].startswith("killed: twice, killed by SIGKILL")
    assert set(queue.states) == {"fails", "killed-always"}
    began = {row.name: len(list((tmp_path / row.name).glob("began*"))) for row in rows}
    assert began == {"fails": 1, "killed-always": 2, "killed-once": 2, "good": 1}
    assert rows[3].values == {"accepted_length": 1.5}
    assert "the reason, in a sentence" in (tmp_path / "runs/fails" / LOG).read_text()


def test_a_stop_ends_what_runs_and_starts_nothing_more(tmp_path: Path) -> None:
    queue, rows = queue_of(tmp_path, ["cpu"], "waits", "good")
    board = queue._board
    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)

    def when_it_runs() -> None:
        if rows[0].step == 4:
            queue.stop()

    board.say, board.tick = hear, when_it_runs
    queue.work()
    assert queue.states == {"waits": "stopped"}
    assert [row.state for row in rows] == ["stopped", "waiting"]
    assert not (tmp_path / "good").exists()
    assert any("once the runs have saved" in line for line in said)


def test_what_may_not_start_any_more_is_a_failure(tmp_path: Path) -> None:
    row = Row("late")

    def refuse() -> None:
        raise ConfigError("dflash.toml was changed")

    queue = Queue([Job(row, tmp_path / "late", [], refuse)], ["cpu"], tmp_path, Board("sweep", [row]), ["no-program"])
    queue.work()
    assert queue.states == {"late": "failed: dflash.toml was changed"}


@pytest.fixture
def work(hybrid: Path, filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a `dflash.toml` whose store is there; the current one."""
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "data.jsonl", 6)
    small = {"store.path": filled.place, "drafter.layer_ids": [1, 5], "drafter.block_size": 4, "train.tokens": 512}
    few = {"train.anchors": 8, "train.epochs": 12, "train.log_every": 1}
    changes = [word for key, value in (small | few).items() for word in ("--set", f"{key}={value}")]
    assert run(monkeypatch, "init", "--target", str(hybrid), "--data", "data.jsonl", *changes) == 0
    return tmp_path


def until(there: Path, process: subprocess.Popen[str]) -> None:
    """Wait for a file."""
    while not there.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def test_a_sweep_killed_half_way_is_finished_by_a_second_call(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "s.toml").write_text("[grid]\ndrafter.depth = [1, 2]\n")
    command = [sys.executable, "-m", "dflash_offline.pipelines.cli", "ablate", "s.toml", "--gpus", "cpu"]
    process = subprocess.Popen(
        command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    first, second = work / "runs/s/depth=1", work / "runs/s/depth=2"
    until(second / "metrics.jsonl", process)
    process.kill()  # its run sees that, saves and ends
    process.communicate()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not json.loads((second / "run.json").read_text())["step"]:
        time.sleep(0.05)
    made = {path: path.stat().st_mtime_ns for path in first.rglob("*") if path.is_file()}

    assert run(monkeypatch, "ablate", "s.toml", "--gpus", "cpu") == 0
    said = capsys.readouterr().out
    assert "2 runs, 1 of them done" in said
    assert "depth=1: begins" not in said
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*") if path.is_file()} == made
    assert "resuming from" in (second / LOG).read_text()
    found = json.loads((work / "runs/s/results.json").read_text())
    assert [row["state"] for row in found["runs"]] == ["done"] * 2
    lengths = [row["accepted_length"] for row in found["runs"]]
    assert lengths == sorted(lengths, reverse=True)
    assert all(row["interval"] and row["heldout"] for row in found["runs"])
    page = (work / "runs/s/report.html").read_text()
    assert all(row["run"] in page.replace("<wbr>", "") for row in found["runs"])

    # Nothing is left to do; a variant more is the only one made.
    (work / "s.toml").write_text("[grid]\ndrafter.depth = [1, 2, 3]\n[base]\ntrain.epochs = 12\n")
    assert run(monkeypatch, "ablate", "s.toml", "--gpus", "cpu,cpu") == 0
    said = capsys.readouterr().out
    assert "3 runs, 2 of them done" in said
    assert sum(": begins" in line for line in said.splitlines()) == 1


def test_a_variant_that_cannot_train_is_refused_before_any_run(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "s.toml").write_text("[grid]\ndrafter.layer_ids = [[1, 5], [1, 6]]\n")
    assert run(monkeypatch, "ablate", "s.toml", "--gpus", "cpu") == 1
    assert "variant layer_ids=1+6" in capsys.readouterr().err
    assert not (work / "runs").exists()


def test_one_at_a_time(work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from dflash_offline.pipelines.ablate.run import _hold

    (work / "s.toml").write_text("[grid]\ntrain.seed = [0, 1]\n")
    with _hold(work / "runs/s"):
        assert run(monkeypatch, "ablate", "s.toml", "--gpus", "cpu") == 1
    assert "another `dflash ablate` works on the sweep" in capsys.readouterr().err
