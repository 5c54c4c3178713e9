"""What one watches: the terminal's picture, plain lines, and JSON lines."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from dflash_offline.pipelines import console as consoles
from dflash_offline.pipelines import json_lines
from dflash_offline.pipelines.console import reporting
from dflash_offline.pipelines.json_lines import relay, write_done, writing
from dflash_offline.store.progress import SILENT, Listener

NUMBERS = {
    "loss": 2.3104,
    "tokens_per_second": 38_100.0,
    "slots_per_second": 35_000.0,
    "share_waiting_for_data": 0.012,
    "gpu_memory_gib": 40.52,
}
SHOWN = [
    "loss 2.310",
    "accepted length 2.40",
    "38,100 tokens/s",
    "35,000 slots/s",
    "waiting for data 1%",
    "GPU 40.5 GiB",
]


def last_picture(text: str) -> list[str]:
    """The lines that stand on a terminal at the end, for what `rich` writes: each picture is drawn over the last."""
    lines, row = [""], 0
    for piece in re.split(r"(\r|\n|\x1b\[[0-9;?]*[A-Za-z])", text):
        if piece == "\r" or piece.startswith("\x1b[?"):
            continue
        if piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif match := re.fullmatch(r"\x1b\[(\d+)A", piece):
            row -= int(match[1])
        else:
            assert not piece.startswith("\x1b"), piece
            lines[row] += piece
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("width", [80, 60, 40, 12])
def test_numbers_stand_below_the_bar_and_none_is_broken(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    out = StringIO()
    terminal = Console(
        file=out, force_terminal=True, width=width, color_system=None, highlight=False, legacy_windows=False
    )
    monkeypatch.setattr(consoles, "console", terminal)
    with reporting("train", "updates") as listener:
        listener.start(12_000, 1_000)
        listener.advance(200, "loss 2.310")
        listener.watch({**NUMBERS, "loss": 9.0})
        listener.watch({"accepted_length": 2.4, "loss": NUMBERS["loss"]})
        listener.say("a line")
    lines = last_picture(out.getvalue())
    assert all(len(line) <= width for line in lines)
    assert lines[0] == "a line"
    below = [line for line in lines[2:] if line]
    assert "loss" not in lines[1]  # said below
    if width == 80:
        assert re.fullmatch(r"train \S+ +1,200 of 12,000 \S+ updates/s \d+:\d\d:\d\d", lines[1])
    if width >= 40:
        assert [number for line in below for number in line.split(" · ")] == SHOWN
        assert len(below) == {80: 2, 60: 2, 40: 3}[width]
    else:
        assert len(below) == len(SHOWN)  # cut, one a line
    assert out.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_without_numbers_a_bar_has_its_note_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    out = StringIO()
    terminal = Console(file=out, force_terminal=True, width=100, color_system=None, legacy_windows=False)
    monkeypatch.setattr(consoles, "console", terminal)
    with reporting("extract", "tokens") as listener:
        listener.start(50, 0)
        listener.advance(10, "unit 3")
    lines = last_picture(out.getvalue())
    assert lines[0].startswith("extract")
    assert lines[0].endswith("unit 3")
    assert not any(lines[1:])


def test_plain_lines_have_the_numbers_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(consoles, "PLAIN_SECONDS", 0.0)
    with reporting("train", "updates") as listener:
        listener.start(4, 0)
        listener.advance(1, "")
        listener.advance(1, "loss 3.000")
        listener.watch(NUMBERS)
        listener.watch({"accepted_length": 2.4, "some_number": 1.5})
        listener.advance(2, "loss 2.310")
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("train: 2 of 4 updates, ")
    assert first.endswith(" s left; loss 3.000")
    assert last.endswith(f" s left; {', '.join([*SHOWN, 'some number 1.5'])}")


def collected() -> tuple[Listener, list[Any]]:
    """A listener, and all that it is told."""
    told: list[Any] = []
    listener = replace(
        SILENT,
        say=lambda line: told.append(line),
        start=lambda total, done: told.append((total, done)),
        advance=lambda amount, note: told.append(amount),
        watch=lambda values: told.append(dict(values)),
    )
    return listener, told


def test_json_lines_lose_nothing_and_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "BETWEEN", 3600.0)  # after the first, counting waits for something to be said
    out = StringIO()
    with writing(out) as listener:
        listener.say('a "line" · of two\nlines')
        listener.start(100, 10)
        for _ in range(5):
            listener.advance(2, "loss 1.000")
        listener.watch({"loss": 1.0, "accepted_length": float("nan")})
        listener.phase("tokenise", "rows").advance(1000, "")
        listener.advance(1, "")
        listener.advance(1, "")
    write_done("runs/x/checkpoints/step-00000012", out)
    lines = out.getvalue().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"say": 'a "line" · of two\nlines'},
        {"start": {"total": 100, "done": 10}},
        {"advance": 10},
        {"watch": {"loss": 1.0}},
        {"advance": 2},
        {"done": "runs/x/checkpoints/step-00000012"},
    ]
    there, told = collected()
    made = [relay(line, there) for line in lines]
    assert made == [None] * 5 + ["runs/x/checkpoints/step-00000012"]
    assert told == ['a "line" · of two\nlines', (100, 10), 10, {"loss": 1.0}, 2]


def test_json_lines_that_count_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(json_lines.time, "monotonic", lambda: now)
    out = StringIO()
    with writing(out) as listener:
        for _ in range(1000):  # ten seconds of a hundred updates each
            now += 0.01
            listener.advance(1, "")
    counts = [json.loads(line)["advance"] for line in out.getvalue().splitlines()]
    assert sum(counts) == 1000
    assert 45 <= len(counts) <= 52


def test_json_lines_that_nobody_reads_end_nothing() -> None:
    reading, writes = os.pipe()
    os.close(reading)
    with os.fdopen(writes, "w") as stream:
        with writing(stream) as listener:
            for number in range(3):
                listener.say(f"line {number}")
        write_done("made", stream)


@pytest.mark.parametrize("line", ["wandb: syncing", "[1, 2]", '{"say": 3}', '{"other": 1}', "7"])
def test_a_line_of_something_else_is_only_said(line: str) -> None:
    there, told = collected()
    assert relay(line + "\n", there) is None
    assert told == [line]
