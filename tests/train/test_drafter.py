"""The drafter's forward pass against one written block by block, and its checkpoint against the public layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from dflash_offline.store import Store, load_head
from dflash_offline.train.attention import Blocks
from dflash_offline.train.checkpoint import (
    CheckpointError,
    checkpoints,
    drafter_config,
    load_drafter,
    load_resume,
    save_checkpoint,
    settings_from_config,
)
from dflash_offline.train.drafter import Drafter, DrafterSettings
from dflash_offline.train.inputs import side_by_side


def drafter_settings(**changes: Any) -> DrafterSettings:
    values: dict[str, Any] = {
        "layer_ids": [1, 5],
        "block_size": 4,
        "mask_token_id": 8190,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "rope_theta": 1e4,
    }
    return DrafterSettings(**{**values, **changes})


def one_block(
    weights: dict[str, torch.Tensor], s: DrafterSettings, hidden: torch.Tensor, embedded: torch.Tensor, anchor: int
) -> torch.Tensor:
    """A block `[B, H]` of a document alone, by the design's formulas and transformers' own norm and rope."""

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        module = Qwen3RMSNorm(x.shape[-1], s.rms_norm_eps)
        module.weight.data = weights[f"{name}.weight"]
        return module(x)

    config = Qwen3Config(
        hidden_size=32, head_dim=s.head_dim, rope_parameters={"rope_type": "default", "rope_theta": s.rope_theta}
    )
    positions = torch.arange(anchor + s.block_size)[None]
    cos, sin = Qwen3RotaryEmbedding(config)(embedded, positions)
    concatenated = torch.cat(list(hidden[:, :anchor]), -1)
    context = norm("hidden_norm", F.linear(concatenated, weights["fc.weight"]))
    h = embedded
    for i, kind in enumerate(s.layer_types):
        at = f"layers.{i}.self_attn."
        x = norm(f"layers.{i}.input_layernorm", h)
        both = torch.cat([context, x])  # the context passes no input norm
        key = norm(at + "k_norm", F.linear(both, weights[at + "k_proj.weight"]).unflatten(-1, (-1, s.head_dim)))
        value = F.linear(both, weights[at + "v_proj.weight"]).unflatten(-1, (-1, s.head_dim))
        query = norm(at + "q_norm", F.linear(x, weights[at + "q_proj.weight"]).unflatten(-1, (-1, s.head_dim)))
        padded = torch.cat([torch.zeros(anchor, *query.shape[1:]), query])
        q, k = apply_rotary_pos_emb(padded.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
        mask = torch.ones(s.block_size, anchor + s.block_size, dtype=torch.bool)
        if kind == "sliding_attention":
            for slot in range(s.block_size):
                for place in range(anchor + s.block_size):
                    gap = anchor + slot - place
                    near = gap < s.sliding_window if place < anchor else abs(gap) < s.sliding_window
                    mask[slot, place] = near and (place < anchor or gap >= 0 or not s.is_causal)
        repeat = s.num_attention_heads // s.num_key_value_heads
        out = F.scaled_dot_product_attention(
            q[:, :, anchor:],
            k.repeat_interleave(repeat, 1),
            value.transpose(0, 1)[None].repeat_interleave(repeat, 1),
            attn_mask=mask,
        )
        h = h + F.linear(out[0].transpose(0, 1).flatten(1), weights[at + "o_proj.weight"])
        x = norm(f"layers.{i}.post_attention_layernorm", h)
        gate, up = (F.linear(x, weights[f"layers.{i}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        h = h + F.linear(F.silu(gate) * up, weights[f"layers.{i}.mlp.down_proj.weight"])
    return norm("norm", h)


@pytest.mark.parametrize("causal", [True, False])
def test_forward_equals_the_formulas_block_by_block(causal: bool) -> None:
    s = drafter_settings(is_causal=causal)
    drafter = Drafter(s, 32)
    drafter.reset(0)
    generator = torch.Generator().manual_seed(1)
    for parameter in drafter.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.1
    lengths = [11, 7]
    hidden = torch.randn(2, 18, 32, generator=generator)
    embedding = torch.randn(8192, 32, generator=generator)
    doc_start = torch.tensor([0] * 11 + [11] * 7)
    anchors = torch.tensor([0, 2, 9, 11, 15])
    tokens = torch.randint(0, 8000, (18,), generator=generator)
    context = drafter.context(side_by_side(hidden), torch.arange(18) - doc_start)
    embedded = drafter.block_inputs(embedding, tokens[anchors])
    assert torch.equal(embedded[:, 0], embedding[tokens[anchors]])
    assert (embedded[:, 1:] == embedding[s.mask_token_id]).all()
    out = drafter.blocks(embedded, context, Blocks.of(anchors, doc_start))
    weights = {name: tensor.detach() for name, tensor in drafter.named_parameters()}
    for row, anchor in enumerate(anchors.tolist()):
        document = 0 if anchor < lengths[0] else 1
        first = document * lengths[0]
        alone = hidden[:, first : first + lengths[document]]
        expected = one_block(weights, s, alone, embedded[row], anchor - first)
        torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-4)


PUBLISHED_KEYS = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
    f"layers.{i}.{name}.weight"
    for i in range(2)
    for name in (
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "self_attn.q_norm",
        "self_attn.k_norm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
}


def save(folder: Path, store: Store, s: DrafterSettings, seed: int = 0) -> Drafter:
    drafter = Drafter(s, store.identity.hidden_size)
    drafter.reset(seed)
    config = drafter_config(s, store.identity, load_head(store).config, "float32")
    save_checkpoint(folder, drafter.state_dict(), config, {"position": {}}, {"count": torch.zeros(())})
    return drafter


def test_the_checkpoint_has_the_published_layout(filled: Store, tmp_path: Path) -> None:
    s = drafter_settings()
    drafter = save(tmp_path / "step-1", filled, s)
    with safe_open(tmp_path / "step-1" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == PUBLISHED_KEYS
        assert file.get_slice("fc.weight").get_shape() == [32, 64]
    config = json.loads((tmp_path / "step-1" / "config.json").read_text())
    for where in (config, config["dflash_config"]):
        assert (where["block_size"], where["mask_token_id"], where["target_layer_ids"]) == (4, 8190, [1, 5])
    assert config["num_target_layers"] == 8
    assert config["dflash_config"]["rendering"] == "enable_thinking=false"
    assert "is_causal" not in config

    read = Qwen3Config.from_pretrained(tmp_path / "step-1")
    assert read.sliding_window == 6
    assert read.layer_types == ["sliding_attention", "full_attention"]
    assert read.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}
    assert (read.num_attention_heads, read.num_key_value_heads, read.head_dim) == (4, 2, 8)
    assert (read.hidden_size, read.intermediate_size, read.num_hidden_layers, read.vocab_size) == (32, 24, 2, 8192)

    loaded, _ = load_drafter(tmp_path / "step-1", torch.float32, torch.device("cpu"))
    assert loaded.settings == s
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_causal": False},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["sliding_attention"] * 3, "sliding_window": 2048},
        {"rope_theta": 1e7, "head_dim": 16},
        {"block_size": 32},
    ],
)
def test_every_shape_reads_back(changes: dict[str, Any], filled: Store, tmp_path: Path) -> None:
    s = drafter_settings(**changes)
    save(tmp_path / "step-1", filled, s)
    config = json.loads((tmp_path / "step-1" / "config.json").read_text())
    back = settings_from_config(config)
    if "sliding_attention" not in s.layer_types:  # a window that no layer has is not written
        back = back.model_copy(update={"sliding_window": s.sliding_window})
    assert back == s
    assert (config.get("is_causal") is False) == (not s.is_causal)
    only_nested = {k: v for k, v in config.items() if k not in ("block_size", "mask_token_id", "target_layer_ids")}
    only_flat = {k: v for k, v in config.items() if k != "dflash_config"}
    old_rope = {k: v for k, v in config.items() if k != "rope_parameters"}
    for variant in (only_nested, only_flat, old_rope):
        assert settings_from_config(variant) == settings_from_config(config)


def test_a_config_that_says_too_little_is_refused_by_key(filled: Store, tmp_path: Path) -> None:
    save(tmp_path / "step-1", filled, drafter_settings())
    config = json.loads((tmp_path / "step-1" / "config.json").read_text())
    del config["dflash_config"], config["mask_token_id"]
    with pytest.raises(CheckpointError, match="does not say mask_token_id"):
        settings_from_config(config)


def test_only_whole_checkpoints_count(filled: Store, tmp_path: Path) -> None:
    save(tmp_path / "step-00000002", filled, drafter_settings())
    save(tmp_path / "step-00000010", filled, drafter_settings())
    (tmp_path / "step-00000030").mkdir()  # empty
    (tmp_path / "step-00000020").mkdir()
    (tmp_path / "step-00000020" / "config.json").write_text("{}")
    (tmp_path / ".saving.abc").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000010"]
    assert checkpoints(tmp_path / "nowhere") == []
    with pytest.raises(CheckpointError, match="not a whole drafter checkpoint"):
        load_drafter(tmp_path / "step-00000030", torch.float32, torch.device("cpu"))
    (tmp_path / "step-00000010/training/state.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be resumed"):
        load_resume(tmp_path / "step-00000010")


def test_weights_of_another_shape_are_refused(filled: Store, tmp_path: Path) -> None:
    save(tmp_path / "step-1", filled, drafter_settings())
    config = json.loads((tmp_path / "step-1" / "config.json").read_text())
    (tmp_path / "step-1" / "config.json").write_text(json.dumps({**config, "head_dim": 16}))
    with pytest.raises(CheckpointError, match="do not fit"):
        load_drafter(tmp_path / "step-1", torch.float32, torch.device("cpu"))


def test_fresh_weights_follow_from_the_seed() -> None:
    one, same, other = (Drafter(drafter_settings(), 32) for _ in range(3))
    one.reset(1)
    same.reset(1)
    other.reset(2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, other.fc.weight)
