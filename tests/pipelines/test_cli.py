"""The command line as a user meets it: the whole flow in an empty directory, and wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import dflash, run
from stores import small_disk
from tiny import write_data

from dflash_offline.train.checkpoint import checkpoints


def test_a_full_disk_ends_an_extraction_that_can_go_on(hybrid: Path, tmp_path: Path) -> None:
    if not small_disk(tmp_path):
        pytest.skip("mounting needs user namespaces")
    (tmp_path / "disk").mkdir()
    data = write_data(tmp_path / "data.jsonl", 400)
    settings = ("--set", "store.path=disk/states", "--set", "extract.unit_tokens=500")
    assert dflash(tmp_path, "init", "--target", str(hybrid), "--data", str(data), *settings).returncode == 0
    run = f'"{sys.executable}" -m dflash_offline.pipelines.cli'
    script = f"""
mount -t tmpfs -o size=7m none {tmp_path}/disk
{run} extract --gpus cpu; echo "left $?"
{run} store verify; echo "left $?"
mount -o remount,size=70m {tmp_path}/disk
{run} extract --gpus cpu; echo "left $?"
{run} store verify; echo "left $?"
"""
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("left")] == ["left 1", *["left 0"] * 3]
    assert done.stderr.startswith("dflash: no room is left for the store")
    assert len(done.stderr.splitlines()) == 1
    assert "400 documents" in done.stdout


def test_the_flow_with_the_store_in_an_object_store(hybrid: Path, tmp_path: Path, prefix: str) -> None:
    data = write_data(tmp_path / "data.jsonl", 8)
    for command in (
        ("init", "--target", str(hybrid), "--data", str(data), "--set", f"store.path={prefix}"),
        ("extract", "--gpus", "cpu"),
        ("store", "verify"),
        ("train", "--gpus", "cpu", "--set", "train.epochs=1"),
        ("evaluate", "--gpus", "cpu"),
        ("extract", "--gpus", "cpu"),
    ):
        done = dflash(tmp_path, *command)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
    assert f"{prefix}: 8 documents" in done.stdout
    assert "0 to do" in done.stdout
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data.jsonl", "dflash.toml", "runs"]


def test_the_flow_in_an_empty_directory(hybrid: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "elsewhere.jsonl", 20)
    work = tmp_path / "work"
    work.mkdir()
    for command in (
        ("init", "--target", str(hybrid), "--data", str(data)),
        ("extract", "--gpus", "cpu"),
        ("store", "info"),
        ("train", "--gpus", "cpu"),
        ("evaluate", "--gpus", "cpu"),
    ):
        done = dflash(work, *command)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
    assert "accepted length" in done.stdout
    assert len(checkpoints(work / "runs/drafter/checkpoints")) == 2

    done = dflash(work, "evaluate", "--gpus", "cpu", "--target", "--json", "--documents", "2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rendering"] == "enable_thinking=false"
    assert found["decoding"]["turns_equal_to_greedy"] == found["decoding"]["turns"] > 0
    assert found["states"]["accepted_length"] >= 1
    info = json.loads(dflash(work, "store", "info", "--json").stdout)
    assert info["splits"]["train"]["documents"] == 18
    assert info["tags"] == {"chat": 10, "code": 10}


@pytest.fixture
def ready(hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a `dflash.toml`, which is the current one."""
    write_data(tmp_path / "data.jsonl", 6)
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "init", "--target", str(hybrid), "--data", "data.jsonl") == 0
    return tmp_path


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The error, which is one line."""
    error = capsys.readouterr().err
    assert error.startswith("dflash: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("extract", "--gpus", "9"), "there is no GPU 9"),
        (("extract", "--gpus", "cpu", "--set", "extract.layer_ids=[1, 99]"), "layer id 99 is out of range"),
        (("extract", "--gpus", "cpu", "--set", "extract.layer_ids=[7]"), "set extract.last_layer"),
        (("extract", "--gpus", "cpu", "--set", 'data.files=["gone.jsonl"]'), "gone.jsonl: No such file"),
        (("extract", "--gpus", "cpu", "--set", "target.path=./gone"), "no target folder"),
        (("extract", "--gpus", "cpu", "--set", "store.path=data.jsonl"), "is a file"),
        (("extract", "--gpus", "cpu", "--set", "store.path=."), "not a dflash store"),
        (("extract", "--gpus", "cpu", "--set", "extract.layers=[1]"), "did you mean extract.layer_ids?"),
        (("train", "--gpus", "cpu"), "run `dflash extract` first"),
        (("evaluate", "--gpus", "cpu"), "run `dflash extract` first"),
        (("store", "info"), "run `dflash extract` first"),
        (("store", "info", "data.jsonl"), "not a dflash store"),
        (("init", "--target", "x/y/z", "--data", "data.jsonl", "--force"), "no target folder x/y/z"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_one(
    arguments: tuple[str, ...],
    says: str,
    ready: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(ready.iterdir())
    assert run(monkeypatch, *arguments) == 1
    assert says in said(capsys)
    assert sorted(ready.iterdir()) == before  # nothing half-written


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"messages": [{"role": "user"', "line 4: not valid JSON"),
        ('{"messages": []}', "line 4: the conversation is empty"),
        ('{"messages": [{"role": "oracle", "content": "x"}]}', "line 4: unknown role 'oracle'"),
    ],
)
def test_a_bad_line_of_data(
    line: str, says: str, ready: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (ready / "data.jsonl").read_text().splitlines()
    (ready / "data.jsonl").write_text("\n".join([*lines[:3], line, *lines[3:]]) + "\n")
    assert run(monkeypatch, "extract", "--gpus", "cpu") == 1
    assert says in said(capsys)
    assert not (ready / "states").exists()


def test_a_target_that_is_no_causal_lm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "data.jsonl", 2)
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder/config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    assert run(monkeypatch, "init", "--target", "encoder", "--data", "data.jsonl") == 1
    assert "not a causal language model" in said(capsys)
    assert run(monkeypatch, "init", "--target", "data.jsonl", "--data", "data.jsonl") == 1
    assert "no target folder" in said(capsys)


def test_a_store_made_with_another_target(
    ready: Path, dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "extract", "--gpus", "cpu") == 0
    capsys.readouterr()
    assert run(monkeypatch, "extract", "--gpus", "cpu", "--set", f"target.path={dense}") == 1
    error = said(capsys)
    assert "target_weights" in error
    assert "another [store] path" in error
    assert run(monkeypatch, "evaluate", "--gpus", "cpu") == 1
    assert "run `dflash train` first" in said(capsys)


def test_help_names_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    help_ = capsys.readouterr().out
    for command in ("init", "extract", "train", "evaluate", "demo", "store"):
        assert command in help_
