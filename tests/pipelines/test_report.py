"""Results and reports: read from folders in any state, ranked and compared; the page needs nothing else."""

from __future__ import annotations

import itertools
import json
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_offline.pipelines.ablate.report import verdict, write_report
from dflash_offline.pipelines.ablate.results import collect, write_results
from dflash_offline.pipelines.ablate.scales import apart, ticks
from dflash_offline.pipelines.ablate.words import shown, signed
from dflash_offline.train.evaluate.summary import paired_difference


def write_run(folder: Path, length: float, seed: int, **about: Any) -> None:
    """A run's files as `train/` writes them: 40 documents, accepted lengths around `length`."""
    folder.mkdir(parents=True)
    draw = random.Random(seed)
    rows = [[f"{i:016x}", ("code", "chat")[i % 2], round((length + draw.random() / 10) * 50), 50] for i in range(40)]
    made = sum(row[2] for row in rows) / sum(row[3] for row in rows)
    settings = {"drafter": {"block_size": 4}, "loss": {"gamma": length}, "train": {"seed": seed, "run": str(folder)}}
    told = {"done": True, "step": 20, "updates": 20, "settings": settings, "store": "states", "fingerprint": "f"}
    (folder / "run.json").write_text(json.dumps(told | {"devices": ["cpu"], "versions": {"torch": "2"}} | about))
    with (folder / "metrics.jsonl").open("w") as lines:
        for step in range(1, 21):
            lines.write(
                json.dumps({"step": step, "loss": 5 / step, "tokens_per_second": 100.0, "seconds": step}) + "\n"
            )
            if step % 10 == 0:
                lines.write(json.dumps({"step": step, "heldout_loss": 6 / step, "heldout_accuracy": 0.5}) + "\n")
    validation = {
        "accepted_length": made,
        "accepted_length_interval": [made - 0.1, made + 0.1],
        "acceptance_by_position": [0.5, 0.25, 0.1],
        "accepted_length_by_tag": {"code": made, "chat": made},
        "loss": 0.3,
        "heldout": "h",
        "documents": rows,
    }
    lines = [json.dumps({"step": step, **validation}) + "\n" for step in (10, 20)]
    (folder / "validation.jsonl").write_text("".join(lines))


class Page(HTMLParser):
    """What a page would fetch, and its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href") and value]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def runs(tmp_path: Path) -> list[tuple[str, Path]]:
    for number, length in enumerate((1.5, 2.0, 1.2)):
        write_run(tmp_path / f"run{number}", length, number)
    return [(f"run{number}", tmp_path / f"run{number}") for number in range(3)]


def test_runs_are_ranked_and_compared_document_by_document(runs: list[tuple[str, Path]], tmp_path: Path) -> None:
    results = collect(runs, {})
    assert [run.name for run in results.runs] == ["run1", "run0", "run2"]
    assert results.differing == ["loss.gamma", "train.seed"]
    assert results.common == {"drafter.block_size": 4}
    counts = {}
    for name, folder in runs:
        rows = json.loads((folder / "validation.jsonl").read_text().splitlines()[-1])["documents"]
        counts[name] = np.array([row[2:] for row in rows], np.int64)
    for name in ("run0", "run2"):
        apart = results.to_best[name]
        assert (apart.value, apart.low, apart.high) == paired_difference(counts[name], counts["run1"])
        assert apart.clear
        assert apart.value < 0
    assert not results.obstacles
    assert verdict(results).startswith("run1 accepts 2.04 tokens a round")
    write_results(tmp_path / "results.json", results)
    found = json.loads((tmp_path / "results.json").read_text())
    assert [row["run"] for row in found["runs"]] == ["run1", "run0", "run2"]
    assert found["runs"][0]["settings"] == {"loss.gamma": 2.0, "train.seed": 1}


def test_runs_on_other_documents_or_stores_are_not_compared(runs: list[tuple[str, Path]], tmp_path: Path) -> None:
    write_run(tmp_path / "apart", 1.1, 7, fingerprint="another")
    results = collect([*runs, ("apart", tmp_path / "apart")], {})
    assert set(results.to_best) == {"run0", "run2"}
    assert len(results.obstacles) == 1
    assert "apart cannot be compared with run1" in results.obstacles[0]


def test_whatever_a_kill_left_is_read(runs: list[tuple[str, Path]], tmp_path: Path) -> None:
    """Every file cut at every length: no error, and what was whole before the cut counts."""
    folder = runs[0][1]
    for name in ("metrics.jsonl", "validation.jsonl", "run.json"):
        whole = (folder / name).read_bytes()
        for length in range(0, len(whole), 1 + len(whole) // 60):
            (folder / name).write_bytes(whole[:length])
            results = collect(runs, {})
            assert len(results.runs) == 3
            if name == "metrics.jsonl":
                run = next(run for run in results.runs if run.name == "run0")
                lines = whole[:length].splitlines(keepends=True)
                losses = sum(b'"loss"' in line and line.endswith(b"\n") for line in lines)
                assert losses <= len(run.training_loss) <= losses + 1
        (folder / name).write_bytes(whole)
    results = collect([*runs, ("never", tmp_path / "never")], {"never": "failed: no room"})
    assert (results.runs[-1].name, results.runs[-1].state, results.runs[-1].reason) == ("never", "failed", "no room")
    write_report(tmp_path / "report.html", results, "with one that failed")
    assert "no room" in (tmp_path / "report.html").read_text()


def test_the_page_needs_nothing_else_and_says_everything(runs: list[tuple[str, Path]], tmp_path: Path) -> None:
    results = collect(runs, {})
    write_report(tmp_path / "report.html", results, "shapes <&>")
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert not page.fetched
    assert "script" not in page.tags
    assert "url(" not in text.replace("url(#", "")
    assert page.tags.count("svg") >= 5
    for said in ("shapes <&>", "run1", "accepted length", "fingerprint", "loss.", "gamma", "code", "chat"):
        assert said.lower() in page.text.lower()
    first = text
    write_report(tmp_path / "report.html", collect(runs, {}), "shapes <&>")
    assert (tmp_path / "report.html").read_text() == first


def test_nothing_to_compare_is_said(tmp_path: Path) -> None:
    results = collect([("a", tmp_path / "a"), ("b", tmp_path / "b")], {})
    write_report(tmp_path / "report.html", results, "empty")
    assert "nothing to compare" in (tmp_path / "report.html").read_text()


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 9))
def test_ticks_are_round_in_order_and_span(low: float, width: float, most: int) -> None:
    found = ticks(low, low + width, most)
    assert len(found) >= 2
    assert found == sorted(set(found))
    step = found[1] - found[0]
    assert found[0] <= low + 1e-6 * step
    assert found[-1] >= low + width - 1e-6 * step
    assert len(found) <= most + 2


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_labels_are_kept_apart_in_their_order(places: list[float]) -> None:
    ordered = sorted(places)
    found = apart(ordered, 10, 0, 100)
    assert found == sorted(found)
    assert all(b - a >= 10 - 1e-6 for a, b in itertools.pairwise(found))
    if all(b - a >= 10 for a, b in itertools.pairwise(ordered)):
        assert found == pytest.approx(ordered)


def test_settings_and_differences_read_well() -> None:
    assert shown(["full", "full", "sliding"]) == "2 × full, sliding"
    assert [shown(value) for value in (True, None, 3e-4, {})] == ["true", "–", "0.0003", "–"]
    assert [signed(value) for value in (0.0001, -0.25, 0.25)] == ["0.000", "−0.250", "+0.250"]
