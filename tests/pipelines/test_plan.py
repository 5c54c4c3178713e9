"""`dflash plan` as a user meets it: counted before anything runs, nothing written, and said when it does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import run
from tiny import write_data

from dflash_offline.extract.rates import machine_name, remember_rate
from dflash_offline.pipelines.config import load_settings
from dflash_offline.pipelines.stages import survey_extraction
from dflash_offline.store.progress import SILENT


@pytest.fixture
def ready(hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a `dflash.toml`, which is the current one, and a cache folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_data(tmp_path / "data.jsonl", 20, heldout=3)
    assert run(monkeypatch, "init", "--target", str(hybrid), "--data", "data.jsonl") == 0
    return tmp_path


def test_hours_come_from_a_rate_that_is_given_or_was_measured(
    ready: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(monkeypatch, "plan", "--gpus", "0-4", "--rate", "100", "--json") == 0  # GPUs of some other machine
    found = json.loads(capsys.readouterr().out)
    assert (found["gpus"], found["rate_from"]) == (5, "given")
    assert found["hours"] == pytest.approx(found["tokens_left"] / 500 / 3600)
    assert found["splits"]["heldout"]["documents"] == 3
    assert found["fits"] is True

    assert run(monkeypatch, "plan", "--gpus", "cpu", "--json") == 0
    assert json.loads(capsys.readouterr().out)["hours"] is None
    assert run(monkeypatch, "plan", "--gpus", "cpu") == 0
    assert "pass --rate" in " ".join(capsys.readouterr().out.split())
    seen = survey_extraction(ready, load_settings(ready, []), "cpu", SILENT)
    remember_rate(seen.identity, machine_name("cpu") or "", 0.5)
    assert run(monkeypatch, "plan", "--gpus", "cpu", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rate"], found["rate_from"]) == (0.5, "measured")
    assert found["hours"] == pytest.approx(found["tokens_left"] / 0.5 / 3600)
    assert sorted(path.name for path in ready.iterdir() if path.name != "cache") == ["data.jsonl", "dflash.toml"]


def test_what_does_not_fit_is_said(
    ready: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(ready)._replace(total=10**12, free=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert run(monkeypatch, "plan", "--gpus", "cpu") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "does not fit" in said
    assert "1.0 MB free" in said
    assert "extract.encoding=fp8" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpus", "cpu", "--set", "store.path=data.jsonl/states"), "is a file"),
        (("--gpus", "all"), "such as --gpus 0-7"),
        (("--gpus", "4-2"), "not understood"),
    ],
)
def test_what_is_refused(
    arguments: tuple[str, ...],
    says: str,
    ready: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if arguments[1] == "all":
        monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert run(monkeypatch, "plan", *arguments) == 1
    assert says in capsys.readouterr().err
