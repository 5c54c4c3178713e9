"""`dflash doctor`: on this machine as it is, and with things missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import dflash
from stores import filled_store
from tiny import write_data

from dflash_offline.extract.target import inspect
from dflash_offline.pipelines.cli import main
from dflash_offline.pipelines.config import load_settings
from dflash_offline.pipelines.doctor import disk, run
from dflash_offline.pipelines.doctor.check import Check, Findings, Gpu
from dflash_offline.pipelines.doctor.gpus import check_compiler, check_linear_attention
from dflash_offline.pipelines.doctor.run import examine, failed
from dflash_offline.pipelines.doctor.store import check_store
from dflash_offline.pipelines.init import init

SOME_GPU = Gpu("a GPU", (9, 0), 1 << 37, 1 << 37)


def row(checks: list[Check], name: str) -> Check:
    """The check of that name."""
    return next(check for check in checks if check.name == name)


@pytest.fixture
def project(hybrid: Path, tmp_path: Path) -> Path:
    """A directory with a `dflash.toml` that names a hybrid target."""
    write_data(tmp_path / "data.jsonl", 2)
    init(tmp_path, str(hybrid), ["data.jsonl"], [], force=False)
    return tmp_path


def test_this_machine(project: Path) -> None:
    before = sorted(project.iterdir())
    done = dflash(project, "doctor", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 1)
    assert done.stderr == ""
    names = [check["name"] for check in found["checks"]]
    assert {"dflash.toml", "target", "Python", "torch", "zarr", "open files", "store", "disk write"} <= set(names)
    assert "8 layers, 6 of them linear attention" in row([Check(**c) for c in found["checks"]], "target").found
    assert (
        "tokens a second of 5 bf16 layers and final" in row([Check(**c) for c in found["checks"]], "disk write").found
    )
    assert sorted(project.iterdir()) == before


def test_an_empty_directory_and_a_place_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dflash", "doctor", "--no-disk"])
    with pytest.raises(SystemExit) as leaving:
        main()
    said = capsys.readouterr().out
    assert leaving.value.code == 0, said
    assert "none in this directory" in said
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--store", "/proc/dflash"])  # not root's to write either
    with pytest.raises(SystemExit) as leaving:
        main()
    said = capsys.readouterr().out
    assert leaving.value.code == 1
    assert "/proc cannot be written to" in said
    assert "what to do:" in said


@pytest.mark.gpu
def test_a_gpu_and_a_kernel_on_it(tmp_path: Path) -> None:
    checks = examine(tmp_path, None, disk=False)
    assert {row(checks, name).state for name in ("GPU 0", "C compiler", "Triton kernels")} == {"ok"}


def test_linear_attention_without_its_kernels(
    project: Path, hybrid: Path, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    settings = load_settings(project, [])
    here = Findings(settings, inspect(hybrid), [SOME_GPU])
    check = row(list(check_linear_attention(here)), "flash-linear-attention")
    assert check.state == "missing"
    assert f"6 of 8 layers of {hybrid} would run many times slower" in check.found
    assert check.remedy == "pip install flash-linear-attention"
    states = {
        name: row(list(check_linear_attention(found)), "flash-linear-attention").state
        for name, found in {
            "no GPU": Findings(settings, inspect(hybrid)),
            "dense": Findings(settings, inspect(dense), [SOME_GPU]),
            "no target": Findings(gpus=[SOME_GPU]),
        }.items()
    }
    assert states == {"no GPU": "warning", "dense": "unused", "no target": "warning"}


@pytest.mark.parametrize(("gpus", "state"), [([SOME_GPU], "missing"), ([], "unused")])
def test_no_compiler(gpus: list[Gpu], state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    check = row(list(check_compiler(Findings(gpus=gpus))), "C compiler")
    assert check.state == state
    assert failed([check]) == bool(gpus)
    assert check.remedy == ("sudo apt-get install gcc" if gpus else "")


@pytest.mark.parametrize(
    ("toml", "says"),
    [("[target", "cannot be read"), ("[target]\npath = 'x'\n[trian]\n", "did you mean"), ("", "Field required")],
)
def test_a_wrong_dflash_toml_is_a_row(toml: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "dflash.toml").write_text(toml)
    checks = examine(tmp_path, None, disk=False)
    assert row(checks, "dflash.toml").state == "broken"
    assert says in row(checks, "dflash.toml").found
    assert row(checks, "free space").state == "ok"  # the rest was looked at


def test_a_check_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> Any:
        raise RuntimeError("first line\nsecond")

    monkeypatch.setattr(run, "check_machine", failing)
    checks = examine(tmp_path, None, disk=False)
    assert row(checks, "machine") == Check("machine", "warning", "this check itself failed: RuntimeError: first line")
    assert row(checks, "free space").state == "ok"


def test_a_store_says_what_a_token_takes(tmp_path: Path) -> None:
    filled_store(tmp_path / "s")
    checks = list(check_store(tmp_path, "s", Findings(), disk=False))
    assert row(checks, "store").found.endswith("s: 3 parts, 981 tokens")
    assert "tokens of 2 bf16 layers and final" in row(checks, "free space").found
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    assert row(list(check_store(tmp_path, "other", Findings(), disk=False)), "store").state == "broken"


def test_the_measured_file_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[list[Path]] = []
    read = disk._read

    def watching(*arguments: Any) -> float:
        names.append(list(tmp_path.iterdir()))
        return read(*arguments)

    monkeypatch.setattr(disk, "_read", watching)
    speed = disk.measure(tmp_path, size=3_000_000)
    assert speed.size == 3_000_000
    assert speed.write > 0
    assert names == [[]]
    assert list(tmp_path.iterdir()) == []
