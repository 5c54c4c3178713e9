"""Keep the conversations of the demo target that are worth learning from.

    python keep.py --work WORK --target TARGET --out conversations.jsonl [--first FIRST]

Reads WORK/generated.jsonl.gz and WORK/second.jsonl.gz where it exists (converse.py). Drops what did not end
by itself, loops, is short, was said before, holds a special token, or does not come back as the same tokens
from the rendered conversation. Held-out rows are also read once more by the target, in fp32 and without
cache, in the rendering each turn was written in and in the final one: every token the target said must be its
first choice there, by a margin. Prints how many were dropped for each reason. With --first it also writes the
good conversations of one turn, for `converse.py second` to go on with.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections import Counter, defaultdict
from itertools import zip_longest
from pathlib import Path

import torch
from converse import prompt_ids
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

SHORTEST = 16  # tokens of an answer, its end included
LOOP = 0.35  # largest share of an answer's 4-grams that were there before
MARGIN = 0.01  # logits between the first choice and the second
ROWS = {"train": 2250, "heldout": 200}
TWO_TURNS = 0.15


def repeated_share(ids: list[int], n: int = 4) -> float:
    """The share of an answer's n-grams that occurred earlier in it."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def render(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> list[int]:
    """The ids of a whole conversation as the template shows it."""
    return tokenizer(str(tokenizer.apply_chat_template(messages, tokenize=False)))["input_ids"]


def find_turns(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], answers: list[list[int]]
) -> list[int]:
    """Where each answer begins in the ids of the whole conversation; -1 where it is not there."""
    ids = render(tokenizer, messages)
    starts = []
    for number, answer in enumerate(answers):
        last = number == len(answers) - 1
        if last:
            head = prompt_ids(tokenizer, messages[: 2 * number + 1])
        else:
            head = tokenizer(
                str(tokenizer.apply_chat_template(messages[: 2 * number + 1], tokenize=False))
                + "<|im_start|>assistant\n"
            )["input_ids"]
        same = ids[: len(head)] == head and ids[len(head) : len(head) + len(answer)] == answer
        starts.append(len(head) if same else -1)
    return starts


def why_not(tokenizer: PreTrainedTokenizerFast, row: dict) -> str | None:
    """The reason to drop a row without asking the model, or None."""
    for turn in row["turns"]:
        answer = turn["answer"]
        if not turn["ended"]:
            return "cut off" if answer else "not answered (out of time)"
        if len(answer) < SHORTEST:
            return "short"
        if any(i in tokenizer.added_tokens_decoder for i in answer[:-1]):
            return "special token inside"
        if repeated_share(answer[:-1]) > LOOP:
            return "loop"
    newline = tokenizer("\n")["input_ids"]
    for number, turn in enumerate(row["turns"]):
        shown = render(tokenizer, row["messages"][: 2 * number + 2])
        if shown != turn["prompt"] + turn["answer"] + newline:
            return "other tokens when rendered again"
    if -1 in find_turns(tokenizer, row["messages"], [turn["answer"] for turn in row["turns"]]):
        return "other tokens when rendered again"
    return None


@torch.no_grad()
def least_margin(model: PreTrainedModel, ids: list[int], start: int, length: int) -> float:
    """By how much the model prefers each said token to any other, at the least; negative when it does not."""
    logits = model(input_ids=torch.tensor([ids[: start + length]]), use_cache=False).logits[0]
    logits = logits[start - 1 : start + length - 1].float()
    said = torch.tensor(ids[start : start + length])[:, None]
    chosen = logits.gather(1, said)[:, 0]
    others = logits.scatter(1, said, float("-inf")).max(-1).values
    return (chosen - others).min().item()


def unsure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, row: dict) -> str | None:
    """The reason to drop a held-out row after reading it, or None."""
    for turn in row["turns"]:
        margin = least_margin(model, turn["prompt"] + turn["answer"], len(turn["prompt"]), len(turn["answer"]))
        if margin <= MARGIN:
            return "near tie" if margin > -MARGIN else "not the first choice"
    ids = render(tokenizer, row["messages"])
    answers = [turn["answer"] for turn in row["turns"]]
    starts = find_turns(tokenizer, row["messages"], answers)
    for start, answer in list(zip(starts, answers, strict=True))[:-1]:
        if least_margin(model, ids, start, len(answer)) <= MARGIN:
            return "earlier turn not the first choice in the final rendering"
    return None


def verdict(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, row: dict) -> str | None:
    """The reason to drop a row, or None; held-out rows are read by the model as well."""
    reason = why_not(tokenizer, row)
    return unsure(model, tokenizer, row) if reason is None and row["split"] == "heldout" else reason


def take(rows: list[dict], wanted: int, rng: random.Random) -> list[dict]:
    """`wanted` rows, the tags as even as they come, with the right share of two turns."""
    chosen: list[dict] = []
    twice = [row for row in rows if len(row["turns"]) > 1]
    once = [row for row in rows if len(row["turns"]) == 1]
    number = min(round(TWO_TURNS * wanted), len(twice))
    for part, count in ((twice, number), (once, wanted - number)):
        by_tag: dict[str, list[dict]] = defaultdict(list)
        for row in part:
            by_tag[row["tag"]].append(row)
        picked: list[dict] = []
        for group in by_tag.values():
            rng.shuffle(group)
            # Greedy and sampled rows take turns; what is left of the longer kind comes last.
            kinds = [[row for row in group if row["greedy"] == greedy] for greedy in (True, False)]
            group[:] = [row for pair in zip_longest(*kinds) for row in pair if row is not None]
        while len(picked) < count and any(by_tag.values()):
            for tag in sorted(by_tag):
                if by_tag[tag] and len(picked) < count:
                    picked.append(by_tag[tag].pop(0))
        chosen += picked
    rng.shuffle(chosen)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    model = AutoModelForCausalLM.from_pretrained(args.target, use_safetensors=True, dtype=torch.float32).eval()
    rows: dict[str, dict] = {}
    for name in ("generated.jsonl.gz", "second.jsonl.gz"):
        if (args.work / name).exists():
            with gzip.open(args.work / name, "rt") as lines:
                rows |= {row["source"]: row for row in map(json.loads, lines)}

    reasons: Counter[tuple[str, str]] = Counter()
    kept: dict[str, list[dict]] = defaultdict(list)
    said: set[str] = set()
    for row in sorted(rows.values(), key=lambda r: r["split"]):  # held-out rows first: a text is theirs if both said it
        if row["messages"][-1]["role"] == "user":
            row["messages"].pop()
        reason = verdict(model, tokenizer, row)
        if reason is not None and len(row["turns"]) == 2:
            # A conversation whose second turn fails is still a conversation of one turn.
            row["messages"], row["turns"] = row["messages"][:2], row["turns"][:1]
            reasons[row["split"], "second turn dropped: " + reason] += 1
            reason = verdict(model, tokenizer, row)
        texts = {m["content"] for m in row["messages"] if m["role"] == "assistant"}
        if reason is None and texts & said:
            reason = "said before"
        reasons[row["split"], reason or "kept"] += 1
        if reason is None:
            said |= texts
            kept[row["split"]].append(row)
    for (split, reason), count in sorted(reasons.items()):
        print(f"{split}: {reason}: {count}")

    if args.first:
        with args.first.open("w") as out:
            for row in kept["heldout"] + kept["train"]:
                if len(row["turns"]) == 1:
                    out.write(json.dumps(row) + "\n")
    rng = random.Random(0)
    with args.out.open("w") as out:
        for split in ("train", "heldout"):
            for number, row in enumerate(take(kept[split], ROWS[split], rng)):
                name = f"{split}-{'greedy' if row['greedy'] else 'sampled'}-{number:04d}"
                record = {"id": name, "tag": row["tag"], "split": split, "messages": row["messages"]}
                out.write(json.dumps(record, ensure_ascii=False) + "\n")
    describe(tokenizer, args.out)


def describe(tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Print what is in a conversations file."""
    groups: dict[str, list[int]] = defaultdict(list)
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            size = len(render(tokenizer, row["messages"]))
            turns = len(row["messages"]) // 2
            for group in (
                row["split"],
                f"{row['split']} {row['tag']}",
                f"{row['split']} {turns} turns",
                "-".join(row["id"].split("-")[:2]),
            ):
                groups[group].append(size)
    for group in sorted(groups):
        sizes = sorted(groups[group])
        print(
            f"{group}: {len(sizes)} rows, {sum(sizes):,} tokens, mean {sum(sizes) / len(sizes):.1f}, "
            f"from {sizes[0]} to {sizes[-1]}, nine tenths up to {sizes[len(sizes) * 9 // 10]}"
        )
    print(f"{path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
