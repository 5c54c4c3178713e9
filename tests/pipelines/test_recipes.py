"""Recipes of `dflash init`: what they write, that --set goes before them, and that the draft tree's trains."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from commands import run
from tiny import write_data

from dflash_offline.pipelines.config import ConfigError, Settings, load_settings
from dflash_offline.pipelines.init import init
from dflash_offline.pipelines.recipes import RECIPES


def written(target: Path, folder: Path, recipe: str, *overrides: str) -> Settings:
    write_data(folder / "data.jsonl", 4)
    init(folder, str(target), ["data.jsonl"], overrides, force=False, recipe=recipe)
    assert (folder / "dflash.toml").read_text().startswith(f"# Recipe {recipe}: {RECIPES[recipe].why}.\n")
    return load_settings(folder, [])


def test_the_draft_tree_as_designed(hybrid: Path, tmp_path: Path) -> None:
    settings = written(hybrid, tmp_path, "draft-tree")
    assert settings.drafter.block_size == 32
    assert settings.drafter.layer_types == ["sliding_attention"] * 2
    assert (settings.loss.gamma, settings.train.anchors, settings.extract.final) == (10, 1024, True)
    terms = settings.loss.model_dump(include={"cross_entropy", "kl", "total_variation", "lk_log", "lk_mixed"})
    assert {name for name, weight in terms.items() if weight} == {"kl"}
    assert settings.loss.kl == settings.loss.expected_length == 1
    # Inferred as ever.
    assert settings.drafter.layer_ids == [1, 2, 3, 4, 5]
    assert settings.extract.batch_tokens == 2048


def test_what_is_said_goes_before_a_recipe(hybrid: Path, tmp_path: Path) -> None:
    said = ("drafter.block_size=12", 'drafter.layer_types=["full_attention"]', "loss.kl=0.5", "extract.final=false")
    settings = written(hybrid, tmp_path, "draft-tree", *said)
    assert (settings.drafter.block_size, settings.drafter.layer_types) == (12, ["full_attention"])
    assert (settings.loss.kl, settings.loss.gamma, settings.extract.final) == (0.5, 10, False)


def test_published_is_what_init_does_by_itself(hybrid: Path, tmp_path: Path) -> None:
    settings = written(hybrid, tmp_path, "published")
    init(tmp_path, str(hybrid), ["data.jsonl"], [], force=True)
    assert load_settings(tmp_path, []) == settings


def test_an_unknown_recipe_names_the_known(hybrid: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no recipe tree; known are published, draft-tree"):
        written(hybrid, tmp_path, "tree")
    assert not (tmp_path / "dflash.toml").exists()


def test_the_draft_tree_trains(hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32 over answers that are mostly shorter."""
    write_data(tmp_path / "data.jsonl", 12)
    monkeypatch.chdir(tmp_path)
    init_ = ("init", "--target", str(hybrid), "--data", "data.jsonl", "--recipe", "draft-tree")
    # A rate for 32 dimensions, and anchors for one core.
    said = ("train.tokens=256", "train.anchors=24", "train.lr=1e-2", "train.epochs=4", "train.log_every=1")
    assert run(monkeypatch, *init_, *(part for each in said for part in ("--set", each))) == 0
    assert run(monkeypatch, "extract", "--gpus", "cpu") == 0
    assert run(monkeypatch, "train", "--gpus", "cpu") == 0
    rows = [json.loads(line) for line in (tmp_path / "runs/drafter/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) >= 6
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    overlaps = [row["overlap"] for row in rows if "loss" in row]
    assert 0 < overlaps[0] < overlaps[-1] < 1


def test_a_store_without_final_states_is_refused(
    hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(hybrid, tmp_path, "draft-tree", "extract.final=false")
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "extract", "--gpus", "cpu") == 0
    capsys.readouterr()
    assert run(monkeypatch, "train", "--gpus", "cpu") == 1
    error = capsys.readouterr().err
    assert error.startswith("dflash: ")
    assert "keeps no final states, which this loss compares with: extract with extract.final = true" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
