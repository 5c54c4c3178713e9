"""Train the demo target.

    python train_target.py --work WORK --target TARGET --out OUT --seconds 400 [--device cuda]

Reads WORK/tokens.npz and TARGET's config and tokenizer (prepare.py). fp32 weights under bf16 autocast, Muon
for the matrices and AdamW for the rest, rows of 1,024 tokens, and a cosine schedule over the given time.
Writes OUT/model.safetensors (bf16) now and then and at the end, and OUT/training.json. With
flash-linear-attention installed the linear layers use it; otherwise plain torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import hopper
import measure
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

ROW = 1024
# How often an epoch reads each group. Tests are repetitive: only a part of them, a new one each epoch.
RAW_SHARES = {"train_code": 2.0, "train_docs": 1.5, "train_test": 0.5}
CHAT_SHARES = {"train_chat": 1.0, "train_testchat": 0.4}


def pick(tokens: dict, shares: dict[str, float], rng: np.random.Generator) -> list[np.ndarray]:
    """An epoch's documents of some groups, in random order."""
    documents: list[np.ndarray] = []
    for name, share in shares.items():
        every = np.split(tokens[name], tokens[f"{name}_ends"][:-1])
        for _ in range(int(share)):
            documents += every
        some = rng.permutation(len(every))[: round(len(every) * (share % 1))]
        documents += [every[i] for i in some]
    return [documents[i] for i in rng.permutation(len(documents))]


def raw_rows(documents: list[np.ndarray], between: int, rng: np.random.Generator) -> np.ndarray:
    """Files one after the other, cut into rows at places that differ from epoch to epoch."""
    mark = np.asarray([between], dtype=np.uint16)
    stream = np.concatenate([part for ids in documents for part in (ids, mark)])[rng.integers(ROW) :]
    number = len(stream) // (ROW + 1)
    return stream[: number * (ROW + 1)].reshape(number, ROW + 1)


def chat_rows(documents: list[np.ndarray], between: int) -> np.ndarray:
    """Rows that begin with a conversation, as every prompt does; a row's last conversation may be cut."""
    rows: list[np.ndarray] = []
    mark = np.asarray([between], dtype=np.uint16)
    parts: list[np.ndarray] = []
    filled = 0
    for ids in documents:
        parts += [ids, mark]
        filled += len(ids) + 1
        if filled > ROW:
            rows.append(np.concatenate(parts)[: ROW + 1])
            parts, filled = [], 0
    return np.stack(rows)


def batches(tokens: dict, between: int, rows: int, seed: int) -> Iterator[np.ndarray]:
    """Batches of rows without end, epoch after epoch."""
    epoch = 0
    while True:
        rng = np.random.default_rng([seed, epoch])
        raw = raw_rows(pick(tokens, RAW_SHARES, rng), between, rng)
        chat = chat_rows(pick(tokens, CHAT_SHARES, rng), between)
        every = np.concatenate([raw, chat])
        every = every[rng.permutation(len(every))]
        print(f"epoch {epoch}: {len(raw)} raw rows, {len(chat)} chat rows, {every.size:,} tokens", flush=True)
        for at in range(0, len(every) - rows + 1, rows):
            yield every[at : at + rows]
        epoch += 1


def targets_of(batch: torch.Tensor, think: int, end_think: int) -> torch.Tensor:
    """The next tokens, without those of the think block that always come from the template."""
    here, after = batch[:, :-1], batch[:, 1:]
    given = (after == think) | (here == think)
    given[:, 1:] |= (after[:, 1:] == end_think) & (here[:, :-1] == think)
    return after.masked_fill(given, -100)


def build(target: Path, device: str) -> PreTrainedModel:
    """A fresh model; linear attention starts with a memory of tens to thousands of tokens, not of one."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            low, high = math.log(1e-3), math.log(1e-1)
            step = torch.exp(low + (high - low) * torch.rand(parameter.shape, generator=generator))
            parameter.data.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
    return model.to(device)


def optimizers(model: PreTrainedModel, muon_rate: float, adam_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices; AdamW for the embedding, small projections, convolutions and norms."""
    matrices, others, plain = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name and min(parameter.shape) > 16:
            matrices.append(parameter)
        elif parameter.ndim > 1:
            others.append(parameter)
        else:
            plain.append(parameter)
    muon = torch.optim.Muon(matrices, lr=muon_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": others, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=adam_rate, betas=(0.9, 0.95), foreach=True)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [muon, adam]


def save(model: PreTrainedModel, out: Path) -> None:
    """The weights in bf16; the LM head is the embedding and is left out."""
    state = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    state.pop("lm_head.weight", None)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rows", type=int, default=80, help="rows of 1,024 tokens in a step")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--muon-rate", type=float, default=3e-3)
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True

    if args.device != "cpu" and importlib.util.find_spec("fla"):
        hopper.use_kernels()
        hopper.check()
    hopper.use_shifted_convolution()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    think, end_think = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    tokens = dict(np.load(args.work / "tokens.npz"))
    model = build(args.target, args.device)
    model.train()
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        flush=True,
    )
    steppers = optimizers(model, args.muon_rate, args.adam_rate)
    parameters = list(model.parameters())
    began = mark = settled = time.perf_counter()
    settled_step = 0
    losses: list[torch.Tensor] = []
    step = 0
    for step, rows in enumerate(batches(tokens, tokenizer.pad_token_id, args.rows, 0)):
        # One factor of both rates: up over 200 steps, and half a cosine down to nothing over the given time.
        spent = (time.perf_counter() - began) / args.seconds
        last = spent >= 1
        rate = min(1.0, (step + 1) / 200) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, spent)))
        batch = torch.from_numpy(rows.astype(np.int64)).to(args.device, non_blocking=True)
        with torch.autocast(args.device.split(":")[0], dtype=torch.bfloat16):
            hidden = model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
            logits = model.lm_head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets_of(batch, think, end_think).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        for optimizer in steppers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step == 20:
            losses[-1].item()
            settled, settled_step = time.perf_counter(), step
        if (step + 1) % 100 == 0 or step < 3:
            mean = torch.stack(losses).mean().item()
            now = time.perf_counter()
            speed = len(losses) * args.rows * ROW / (now - mark)
            print(f"step {step + 1} loss {mean:.4f} {speed / 1e3:.0f} Ktok/s {now - began:.0f} s", flush=True)
            losses, mark = [], now
        if (step + 1) % 500 == 0:
            save(model, args.out)
        if last:
            break
    save(model, args.out)
    ended = time.perf_counter()
    report = {
        "steps": step + 1,
        "tokens": (step + 1) * args.rows * ROW,
        "seconds": round(ended - began, 1),
        "tokens_per_second": round((step - settled_step) * args.rows * ROW / (ended - settled)),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if args.device != "cpu":
        report["gpu"] = torch.cuda.get_device_name()
        report["peak_gpu_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    model.eval()
    with torch.autocast(args.device.split(":")[0], dtype=torch.bfloat16):
        for name in ("heldout_code", "heldout_docs"):
            report[name] = measure.bits_per_byte(model, tokens, name, args.device, tokenizer.pad_token_id)
    (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2), flush=True)


if __name__ == "__main__":
    main()
