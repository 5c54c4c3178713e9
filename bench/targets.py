"""Targets of a real shape with random weights, made on the GPU, and documents of a realistic length mix.

Imported by the benchmarks beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from dflash_offline.extract.corpus import Corpus

QWEN_27B: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    },
}
"""Qwen3.6-27B but for its 64 layers."""


def random_target(layers: int, device: str = "cuda", **changes: Any) -> Any:
    """A causal LM of `QWEN_27B`'s shape and so many layers, every fourth with full attention, in bfloat16."""
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    config = Qwen3_5TextConfig(**{**QWEN_27B, **changes}, num_hidden_layers=layers, layer_types=kinds)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.requires_grad_(False).eval()


def flops_per_token(config: Any) -> float:
    """Operations of the decoder's matrix products for one token, 2 a multiply-add; attention to other tokens not in."""
    width, heads = config.hidden_size, config.num_attention_heads
    full = width * config.head_dim * (3 * heads + 2 * config.num_key_value_heads)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    linear = width * (2 * keys + 3 * values + 2 * config.linear_num_value_heads)
    mixers = sum(linear if kind == "linear_attention" else full for kind in config.layer_types)
    return 2.0 * (mixers + config.num_hidden_layers * 3 * width * config.intermediate_size)


def random_corpus(documents: int, longest: int, vocabulary: int, seed: int = 0) -> Corpus:
    """Documents of log-normal length (median 900, a tenth above 2,700 before the cut at `longest`), random tokens."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(np.log(900), 0.85, documents)), 40, longest).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Corpus(
        tokens=rng.integers(0, vocabulary, offsets[-1]).astype(np.int32),
        loss_mask=np.ones(offsets[-1], bool),
        offsets=offsets,
        ids=np.arange(documents, dtype=np.uint64),
        heldout=np.zeros(documents, bool),
        tags=["text"] * documents,
        places=[f"document {i}" for i in range(documents)],
    )
