"""The bundled target and its conversations, and the demo that runs on them, made smaller."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import BUNDLED
from transformers import AutoModelForCausalLM

from dflash_offline.extract.data import Row, read_rows
from dflash_offline.extract.render import Renderer
from dflash_offline.extract.target import inspect, load_tokenizer
from dflash_offline.pipelines.demo import run as demo_run


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(read_rows([BUNDLED / "conversations.jsonl"]))


def test_the_target_is_a_small_hybrid_of_the_real_kind() -> None:
    info = inspect(BUNDLED / "target")
    assert info.text["model_type"] == "qwen3_5_text"
    kinds = Counter(info.text["layer_types"])
    assert kinds["linear_attention"] == 3 * kinds["full_attention"]
    weights = BUNDLED / "target" / "model.safetensors"
    assert weights.stat().st_size <= 20e6
    assert len(load_tokenizer(info.path)) < info.vocab_size  # an id is left for the mask token
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (BUNDLED / "target" / "LICENSE.txt").read_text()


def test_the_conversations_are_as_described(rows: list[Row]) -> None:
    splits = Counter(row.split for row in rows)
    assert splits["heldout"] == 200
    assert splits["train"] >= 2000
    assert set(Counter(row.tag for row in rows)) == {"complete", "continue", "docs", "docstring"}
    assert len({json.dumps(row.messages) for row in rows}) == len(rows)


@torch.no_grad()
def test_held_out_turns_are_the_targets_own_greedy_text(rows: list[Row]) -> None:
    renderer = Renderer(load_tokenizer(BUNDLED / "target"), thinking=False)
    model: Any = AutoModelForCausalLM.from_pretrained(BUNDLED / "target", dtype=torch.float32)
    heldout = [row for row in rows if row.split == "heldout"]
    for row in heldout[::25]:
        ids, mask = renderer.ids_and_mask(row)
        best = model(input_ids=torch.from_numpy(ids)[None].long()).logits[0, :-1].argmax(-1)
        said = torch.from_numpy(mask)[1:]
        assert torch.equal(best[said], torch.from_numpy(ids).long()[1:][said]), row.place


def test_the_demo_runs_and_does_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"data.limit": 8, "data.limit_heldout": 2, "train.epochs": 1, "train.tokens": 1024, "train.anchors": 32}
    monkeypatch.setattr(demo_run, "OVERRIDES", {**demo_run.OVERRIDES, **small})
    monkeypatch.setattr(demo_run, "DECODED", 1)
    first = demo_run.demo(tmp_path / "demo", ["cpu"])
    assert first["decoding"]["turns_equal_to_greedy"] == first["decoding"]["turns"] > 0
    assert first["decoding"]["turns_that_agree"] == first["decoding"]["turns"]
    said = capsys.readouterr().out
    for part in (
        "$ dflash init",
        "$ dflash extract",
        "$ dflash train",
        "$ dflash evaluate",
        "untrained",
        "equals plain greedy",
    ):
        assert part in said
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "demo" / "states" / "parts").rglob("c/*")}
    again = demo_run.demo(tmp_path / "demo", ["cpu"])
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert again["checkpoint"] == first["checkpoint"]
    assert again["states"] == first["states"]
