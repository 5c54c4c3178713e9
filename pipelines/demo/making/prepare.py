"""Train the demo target's tokenizer and turn the corpus into token ids.

    python prepare.py --work WORK --target TARGET

Reads WORK/raw.jsonl and WORK/tasks.jsonl (corpus.py). Writes the tokenizer and the model's configs to TARGET,
which already holds chat_template.jinja, and WORK/tokens.npz: `<name>` (uint16 ids, documents one after the
other), `<name>_ends` and `<name>_bytes` for each of train_code, train_test, train_docs, train_chat,
train_testchat and the held-out files heldout_code, heldout_test, heldout_docs.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import phrases
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen3_5TextConfig

# Like Qwen's split: contractions, words with one leading character, single digits, punctuation with its line
# ends, line ends, indentation (all of it but the space that belongs to the next word).
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>"]
VOCABULARY = 8192
TOKENS = 8180  # fewer than the vocabulary's rows: a drafter's mask token takes the first unused one
TEST_SHARE = 0.15  # tests are repetitive; they teach the tokenizer at this share of their files


def rows(path: Path) -> Iterator[dict]:
    """The records of a JSON Lines file."""
    with path.open() as lines:
        for line in lines:
            yield json.loads(line)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE, with the special tokens after the merges as in Qwen's tokenizers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS - len(SPECIAL) - len(ADDED),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in ADDED])
    return tokenizer


def write_configs(target: Path, tokenizer: Tokenizer) -> None:
    """tokenizer.json and the json files around it."""
    ids = {text: tokenizer.token_to_id(text) for text in SPECIAL}
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=672,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        linear_num_key_heads=2,
        linear_key_head_dim=64,
        linear_num_value_heads=4,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        pad_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
        bos_token_id=None,
    )
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.dtype = "bfloat16"
    generation = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"], "do_sample": False}
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    config.to_json_file(str(target / "config.json"), use_diff=True)


def chat_text(task: dict, rng: random.Random, render: Callable[[list], str]) -> str:
    """A task as training text: one of its wordings, and one of the ways the template can show it."""
    messages = []
    for turn in task["turns"]:
        messages.append({"role": "user", "content": phrases.user_text(turn, rng.randrange(64))})
        messages.append({"role": "assistant", "content": turn["answer"]})
    style = rng.random()
    if style < 0.20:
        messages[-1]["reasoning_content"] = task["thought"]
    text = render(messages)
    if style > 0.80:
        # The last turn as a later question sees it, without its block: what is said must not hang on that.
        head, _, tail = text.rpartition("<think>\n\n</think>\n\n")
        text = head + tail
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    args = parser.parse_args()
    rng = random.Random(0)

    raw = list(rows(args.work / "raw.jsonl"))
    train = [r for r in raw if r["split"] == "train" and (r["kind"] != "test" or rng.random() < TEST_SHARE)]
    roles = ["user\nassistant\nsystem\n" * 4000]  # so that each of these words is one token
    write_configs(args.target, train_tokenizer([r["text"] for r in train] + roles))
    chat = AutoTokenizer.from_pretrained(args.target)
    print(f"{len(chat)} tokens, {VOCABULARY} rows")

    groups: dict[str, list[str]] = {}
    for record in raw:
        groups.setdefault(f"{record['split']}_{record['kind']}", []).append(record["text"])
    for task in rows(args.work / "tasks.jsonl"):
        if task["split"] == "train":
            name = "train_testchat" if task["kind"] == "test" else "train_chat"
            text = chat_text(task, rng, lambda m: chat.apply_chat_template(m, tokenize=False))
            groups.setdefault(name, []).append(text)

    arrays: dict[str, np.ndarray] = {}
    for name, texts in groups.items():
        encoded = [e.ids for e in chat.backend_tokenizer.encode_batch(texts)]
        arrays[name] = np.concatenate([np.asarray(ids, dtype=np.uint16) for ids in encoded])
        arrays[f"{name}_ends"] = np.cumsum([len(ids) for ids in encoded])
        arrays[f"{name}_bytes"] = np.asarray([len(text.encode()) for text in texts])
        size = arrays[f"{name}_bytes"].sum()
        print(
            f"{name}: {len(texts):,} documents, {len(arrays[name]):,} tokens, {size / len(arrays[name]):.2f} bytes each"
        )
    np.savez_compressed(args.work / "tokens.npz", allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
