"""`dflash.toml`: what init writes is what is read; unknown keys name the nearest valid one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import make_target, write_data
from transformers import Qwen3_5MoeTextConfig

from dflash_offline.extract.target import TargetError, TargetInfo, default_layer_ids, inspect
from dflash_offline.pipelines.config import COMMENTS, ConfigError, Settings, load_settings, write_settings
from dflash_offline.pipelines.init import drafter_shape, init
from dflash_offline.store import DflashError


@pytest.fixture
def folder(hybrid: Path, tmp_path: Path) -> Path:
    write_data(tmp_path / "data.jsonl", 4)
    init(tmp_path, str(hybrid), ["data.jsonl"], [], force=False)
    return tmp_path


def test_init_writes_what_the_target_implies(folder: Path) -> None:
    settings = load_settings(folder, [])
    assert settings.extract.layer_ids == settings.drafter.layer_ids == [1, 2, 3, 4, 5]
    assert settings.drafter.mask_token_id == 8180  # the first id past the tokenizer
    assert settings.drafter.layer_types == ["sliding_attention", "full_attention"]
    text = (folder / "dflash.toml").read_text()
    for section in COMMENTS:
        assert f"\n[{section}]\n" in text
    for section, model in ((s, getattr(settings, s)) for s in COMMENTS):
        for key, field in type(model).model_fields.items():
            assert field.description, f"{section}.{key} has no comment"
            assert f"# {field.description}\n" in text


def test_written_settings_read_back(folder: Path) -> None:
    settings = load_settings(
        folder, ["loss.gamma=2.5", "data.limit=7", 'extract.last_layer="pre"', "drafter.is_causal=false"]
    )
    write_settings(folder / "dflash.toml", settings)
    assert load_settings(folder, []) == settings


def test_overrides(folder: Path) -> None:
    settings = load_settings(
        folder, ["train.lr=3e-4", "store.path=some/where", "drafter.layer_ids=[1, 3]", "data.thinking=true"]
    )
    assert settings.train.lr == 3e-4
    assert settings.store.path == "some/where"
    assert settings.drafter.layer_ids == [1, 3]
    assert settings.data.thinking is True


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.learning_rate=1", "unknown key train.learning_rate"),
        ("train.lrr=1", r"did you mean train\.lr\?"),
        ("train.block_size=4", r"did you mean drafter\.block_size\?"),
        ("train.gamma=5", r"did you mean loss\.gamma\?"),
        ("trian.lr=1", r"unknown section \[trian\]; did you mean train\?"),
        ("lr=1", r"section\.key=value"),
        ("train.lr", r"section\.key=value"),
        ("train.lr=-1", r"train\.lr=-1: .*greater than 0, not -1"),
        ("train.lr=fast", r"train\.lr=fast: .*valid number.*not 'fast'"),
        ("drafter.num_key_value_heads=3", "multiple of num_key_value_heads"),
    ],
)
def test_wrong_overrides_are_one_clear_sentence(override: str, says: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_settings(folder, [override] if "heads" not in override else [override, "drafter.num_attention_heads=4"])
    assert "\n" not in str(caught.value)


def test_a_file_that_is_wrong_is_named(folder: Path, tmp_path: Path) -> None:
    path = folder / "dflash.toml"
    good = path.read_text()
    path.write_text(good.replace("epochs =", "epoch ="))
    with pytest.raises(ConfigError, match=r"dflash\.toml: unknown key train\.epoch; did you mean train\.epochs\?"):
        load_settings(folder, [])
    path.write_text("[train\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(folder, [])
    with pytest.raises(ConfigError, match="run `dflash init`"):
        load_settings(tmp_path / "elsewhere", [])


def test_init_does_not_write_over_a_file(folder: Path, hybrid: Path) -> None:
    with pytest.raises(ConfigError, match="exists"):
        init(folder, str(hybrid), ["data.jsonl"], [], force=False)
    init(folder, str(hybrid), ["data.jsonl"], [], force=True)


@pytest.mark.parametrize("kind", ["dense", "nested"])
def test_init_on_other_targets(kind: str, tmp_path: Path) -> None:
    make_target(tmp_path / "target", kind)
    write_data(tmp_path / "data.jsonl", 4)
    init(tmp_path, "target", ["data.jsonl"], [], force=False)
    assert load_settings(tmp_path, []).drafter.mask_token_id == 8180


def test_a_mixture_of_experts_asks_for_what_it_cannot_infer() -> None:
    target = TargetInfo(Path(), Qwen3_5MoeTextConfig().to_dict())
    said: dict[tuple[str, str], Any] = {("drafter", "mask_token_id"): 1}
    with pytest.raises(ConfigError, match=r"--set drafter\.intermediate_size=N"):
        drafter_shape(target, [1], said)
    assert drafter_shape(target, [1], {**said, ("drafter", "intermediate_size"): 64})["intermediate_size"] == 64


def test_a_vocabulary_without_a_free_id_asks_for_a_mask_token(hybrid: Path, tmp_path: Path) -> None:
    full = TargetInfo(hybrid, {**inspect(hybrid).text, "vocab_size": 8180})
    with pytest.raises(ConfigError, match=r"--set drafter\.mask_token_id=N"):
        drafter_shape(full, [1], {})
    assert drafter_shape(full, [1], {("drafter", "mask_token_id"): 77})["mask_token_id"] == 77


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "rope_theta": 1e6},
            {"layer_ids": [1, 9, 17, 25, 33], "layer_types": ["full_attention"] * 5, "intermediate_size": 12288},
        ),
        (
            # Qwen3.6-27B: 24 heads of 256 and a partial rope in the target; the drafter's are its own.
            {
                "hidden_size": 5120,
                "intermediate_size": 17408,
                "num_hidden_layers": 64,
                "num_attention_heads": 24,
                "head_dim": 256,
                "layer_types": ["linear_attention", "full_attention"],
                "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
            },
            {
                "layer_ids": [1, 16, 31, 46, 61],
                "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
                "intermediate_size": 17408,
                "rope_theta": 1e7,
            },
        ),
    ],
)
def test_the_published_shapes(text: dict[str, Any], expected: dict[str, Any]) -> None:
    layer_ids = list(default_layer_ids(text["num_hidden_layers"]))
    shape = drafter_shape(TargetInfo(Path(), text), layer_ids, {("drafter", "mask_token_id"): 1})
    published = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "block_size": 16}
    assert {key: shape[key] for key in {**published, **expected}} == {**published, **expected}


def test_a_shallow_target_asks_for_layers(tmp_path: Path) -> None:
    make_target(tmp_path / "target", "hybrid", num_hidden_layers=4)
    write_data(tmp_path / "data.jsonl", 4)
    with pytest.raises(TargetError, match=r"4 layers has no 5 default layers: name extract\.layer_ids"):
        init(tmp_path, "target", ["data.jsonl"], [], force=False)
    init(tmp_path, "target", ["data.jsonl"], ["extract.layer_ids=[0, 2]"], force=False)
    assert load_settings(tmp_path, []).drafter.layer_ids == [0, 2]


def test_sections_and_comments_agree() -> None:
    assert set(COMMENTS) == set(Settings.model_fields)
    assert issubclass(ConfigError, DflashError)
    json.dumps(COMMENTS)
