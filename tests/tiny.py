"""Targets and data small enough to make in every test: random weights, the bundled tokenizer and template."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

BUNDLED = Path(str(files("dflash_offline.pipelines") / "demo"))
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

COMMON: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.1,  # wide, so that random states differ from token to token
}
HYBRID: dict[str, Any] = {
    **COMMON,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}


def make_target(folder: Path, kind: str = "hybrid", seed: int = 0, **changes: Any) -> Path:
    """Write a random target: hybrid, dense, moe, or nested (a hybrid under a multimodal config).

    `changes` go to the config of a hybrid.
    """
    torch.manual_seed(seed)
    if kind == "hybrid":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**HYBRID, **changes}, tie_word_embeddings=True))
    elif kind == "dense":
        model = Qwen3ForCausalLM(Qwen3Config(**COMMON, tie_word_embeddings=False))
    elif kind == "moe":
        config = Qwen3MoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
        model = Qwen3MoeForCausalLM(config)
    else:
        vision = {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
        }
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=HYBRID, vision_config=vision))
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(BUNDLED / "target" / name, folder / name)
    return folder


def conversation(number: int, turns: int = 1, words: int = 12) -> list[dict[str, str]]:
    """A conversation whose text depends on `number` alone."""
    messages = []
    for turn in range(turns):
        text = " ".join(f"w{(number * 31 + turn * 7 + i * i) % 97}" for i in range(3 + (number + turn) % words))
        messages.append({"role": "user", "content": f"question {number} {turn}"})
        messages.append({"role": "assistant", "content": text})
    return messages


def write_data(path: Path, count: int, first: int = 0, heldout: int = 2) -> Path:
    """JSONL of `count` conversations, the first `heldout` of them held out, tags in turn."""
    rows = [
        {
            "messages": conversation(n, turns=1 + n % 2),
            "tag": ("code", "chat")[n % 2],
            "split": "heldout" if n < heldout else "train",
        }
        for n in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
