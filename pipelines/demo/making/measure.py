"""Bits per byte of the demo target on held-out files, and what it writes.

    python measure.py --work WORK --target TARGET [--device cuda]

Each file is read after one <|endoftext|> in windows of 1,024 tokens that advance by 512: every token is
predicted once, with at least 512 tokens of the file before it where the file has them. Weights are those of
the file (bf16), arithmetic is fp32.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

WINDOW, STRIDE = 1024, 512
ASKED = [
    "Complete this function.\n\n```python\ndef read_lines(path, encoding=None):\n"
    '    """Return the lines of the file as a list, without their line ends."""\n```',
    "Document `os.path.join`.",
    "Continue this code:\n\nclass Stack:\n    def __init__(self):\n        self._items = []\n\n"
    "    def push(self, item):",
    "Write the docstring.\n\ndef is_empty(self):\n    return len(self._items) == 0",
]


def windows(ids: np.ndarray, ends: np.ndarray, start_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of the windows of some files; targets that are not scored are -100."""
    inputs, targets = [], []
    for first, last in zip([0, *ends[:-1]], ends, strict=True):
        text = np.concatenate([[start_token], ids[first:last].astype(np.int64)])
        done = 0
        for at in range(0, len(text) - 1, STRIDE):
            piece = text[at : at + WINDOW + 1]
            if at + len(piece) - 1 <= done:
                break
            x = np.full(WINDOW, start_token, dtype=np.int64)  # padding on the right is behind every scored token
            y = np.full(WINDOW, -100, dtype=np.int64)
            x[: len(piece) - 1] = piece[:-1]
            y[done - at : len(piece) - 1] = piece[1 + done - at :]
            done = at + len(piece) - 1
            inputs.append(x)
            targets.append(y)
    return torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets))


@torch.no_grad()
def bits_per_byte(
    model: PreTrainedModel, tokens: dict, name: str, device: str, start_token: int, batch: int = 32
) -> dict:
    """Bits per byte over the files of one group of tokens.npz."""
    x, y = windows(tokens[name], tokens[f"{name}_ends"], start_token)
    total, count = 0.0, 0
    for at in range(0, len(x), batch):
        logits = model(input_ids=x[at : at + batch].to(device), use_cache=False).logits.float()
        target = y[at : at + batch].to(device)
        total += F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum").item()
        count += int((target >= 0).sum())
    size = int(tokens[f"{name}_bytes"].sum())
    assert count == len(tokens[name]), f"{count} of {len(tokens[name])} tokens scored"
    return {
        "files": len(tokens[f"{name}_bytes"]),
        "bytes": size,
        "tokens": count,
        "bits_per_byte": round(total / math.log(2) / size, 4),
        "loss_per_token": round(total / count, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples-only", action="store_true")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    model: Any = AutoModelForCausalLM.from_pretrained(args.target, use_safetensors=True, dtype=torch.float32)
    model = model.to(args.device).eval()
    print(type(model).__name__, f"{sum(p.numel() for p in model.parameters()):,} parameters")
    if not args.samples_only:
        tokens = dict(np.load(args.work / "tokens.npz"))
        for name in ("heldout_code", "heldout_test", "heldout_docs"):
            result = bits_per_byte(model, tokens, name, args.device, tokenizer.pad_token_id)
            print(json.dumps({"name": name, **result}))
    for text in ASKED:
        for thinking in (False, True):
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=thinking,
            )
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(args.device)
            out = model.generate(input_ids=ids, max_new_tokens=200, do_sample=False)
            print(f"--- {text}\n--- thinking {thinking}:\n{tokenizer.decode(out[0, ids.shape[1] :])}\n")


if __name__ == "__main__":
    main()
