"""Let the demo target answer prompts: choose the prompts, then generate.

    python converse.py pick     --work WORK --target TARGET            (CPU) writes WORK/prompts.jsonl
    python converse.py generate --work WORK --target TARGET --out OUT  (GPU) writes OUT/generated.jsonl.gz
    python converse.py second   --work WORK --target TARGET --out OUT  (either) writes OUT/second.jsonl.gz

Prompts of one token length share a batch, so there is no padding and no attention mask; a prompt is worded
(tasks.py has several wordings) so that its length is a multiple of 8. Weights are the file's (bf16),
arithmetic is fp32 with TF32 off and thinking is off, so that a CPU finds the same text. Run `generate` where
flash-linear-attention is not importable. Held-out prompts are answered greedily, training prompts half
greedily and half at temperature 0.7. `second` asks a second question in the conversations of one turn that
keep.py found good (WORK/first.jsonl): most fail one of its tests, so it takes many.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections import Counter, defaultdict
from pathlib import Path

import phrases
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

STEP, LONGEST = 8, 256  # prompt lengths are multiples of one and at most the other
SECOND_STEP, SECOND_LONGEST = 16, 400  # the same for the prompt of a second turn
SECOND_TRAIN = 350  # training conversations that `second` goes on with
NEW_TOKENS = 224
TEMPERATURE = 0.7
WANTED = {"train": 2600, "heldout": 1200}  # prompts of each tag; there are fewer where the files give fewer
TEST_SHARE = 0.2  # of those, at most this share from the library's tests


def prompt_ids(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> list[int]:
    """The ids of a conversation up to the assistant's words, thinking off."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    return tokenizer(str(text))["input_ids"]


def pick(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> None:
    """Choose prompts evenly over the tags and word each of them to a length that batches well."""
    rng = random.Random(0)
    groups: dict[tuple[str, str], list[dict]] = defaultdict(list)
    with (args.work / "tasks.jsonl").open() as lines:
        for line in lines:
            task = json.loads(line)
            groups[task["split"], task["tag"]].append(task)
    kept = []
    for (split, tag), group in sorted(groups.items()):
        rng.shuffle(group)
        group.sort(key=lambda t: len(t["turns"]) < 2 and rng.random() < 0.5)  # two-turn tasks come somewhat earlier
        wanted, tests, number = WANTED[split], 0, 0
        seen: set[str] = set()
        for task in group:
            if number == wanted:
                break
            first = task["turns"][0]
            is_test = task["kind"] == "test"
            if first["subject"] in seen or (is_test and tests >= TEST_SHARE * wanted):
                continue
            wordings = len(phrases.PHRASES[first["ask"]])
            for phrase in rng.sample(range(wordings), wordings):
                text = phrases.user_text(first, phrase)
                length = len(prompt_ids(tokenizer, [{"role": "user", "content": text}]))
                if length % STEP == 0 and length <= LONGEST:
                    break
            else:
                continue
            seen.add(first["subject"])
            tests += is_test
            greedy = split == "heldout" or number % 2 == 0
            row = {"source": task["id"], "tag": tag, "split": split, "greedy": greedy, "user": text}
            if len(task["turns"]) > 1:
                second = task["turns"][1]
                row["second"] = [phrases.user_text(second, i) for i in range(len(phrases.PHRASES[second["ask"]]))]
            kept.append(row)
            number += 1
    with (args.work / "prompts.jsonl").open("w") as out:
        for row in kept:
            out.write(json.dumps(row) + "\n")
    counts = Counter((row["split"], row["tag"], "second" in row) for row in kept)
    for key in sorted(counts):
        print(*key, counts[key])


@torch.no_grad()
def answer(
    model: PreTrainedModel, prompts: list[list[int]], greedy: list[bool], end: int, generator: torch.Generator
) -> list[list[int]]:
    """The tokens after each of some prompts of one length; the last is `end` unless the limit came first."""
    device = model.device
    ids = torch.tensor(prompts, device=device)
    sampled = ~torch.tensor(greedy, device=device)
    limit = min(NEW_TOKENS, model.config.max_position_embeddings - ids.shape[1])
    out = torch.full((len(prompts), limit), end, device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    past = None
    step = 0
    for step in range(limit):
        result = model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        past, logits = result.past_key_values, result.logits[:, -1].float()
        token = logits.argmax(-1)
        draw = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)[:, 0]
        token = torch.where(sampled, draw, token).where(~done, end)
        out[:, step] = token
        # A finished row counts its end once; later columns hold `end` too and are cut off below.
        done |= token == end
        ids = token[:, None]
        if step % 16 == 15 and bool(done.all()):
            break
    rows = []
    for row in out[:, : step + 1].tolist():
        rows.append(row[: row.index(end) + 1] if end in row else row)
    return rows


def run_batches(
    args: argparse.Namespace, model: PreTrainedModel, prompts: list[list[int]], greedy: list[bool], end: int
) -> list[list[int]]:
    """Answers to prompts of any lengths, batch by batch."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, ids in enumerate(prompts):
        by_length[len(ids)].append(index)
    generator = torch.Generator(model.device).manual_seed(0)
    answers: list[list[int]] = [[] for _ in prompts]
    began, done = time.perf_counter(), 0
    lengths = sorted(by_length)
    random.Random(0).shuffle(lengths)  # so that running out of time does not favour short prompts
    for length in lengths:
        rows = by_length[length]
        if time.perf_counter() - began > args.seconds:
            print(f"out of time: {len(rows)} prompts of length {length} left out", flush=True)
            continue
        for at in range(0, len(rows), args.batch):
            batch = rows[at : at + args.batch]
            got = answer(model, [prompts[i] for i in batch], [greedy[i] for i in batch], end, generator)
            for index, ids in zip(batch, got, strict=True):
                answers[index] = ids
            done += sum(map(len, got))
            spent = time.perf_counter() - began
            print(f"length {length}: {len(batch)} rows, {done:,} tokens in {spent:.0f} s", flush=True)
    return answers


def load(args: argparse.Namespace) -> PreTrainedModel:
    """The target in fp32, with products that are fp32 too."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    print(f"torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    model = AutoModelForCausalLM.from_pretrained(args.target, use_safetensors=True, dtype=torch.float32)
    return model.to(args.device).eval()


def speak(
    args: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: list[dict]
) -> None:
    """Add an assistant turn to conversations that end with a question."""
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    prompts = [prompt_ids(tokenizer, row["messages"]) for row in rows]
    answers = run_batches(args, model, prompts, [row["greedy"] for row in rows], end)
    for row, ids, got in zip(rows, prompts, answers, strict=True):
        ended = got[-1:] == [end]
        row["turns"].append({"prompt": ids, "answer": got, "ended": ended})
        row["messages"].append({"role": "assistant", "content": tokenizer.decode(got[:-1] if ended else got)})


def ask_again(tokenizer: PreTrainedTokenizerFast, row: dict, questions: list[str], step: int) -> bool:
    """Put a second question in the first wording that fits a batch; False if none does."""
    for text in questions:
        asked = [*row["messages"], {"role": "user", "content": text}]
        length = len(prompt_ids(tokenizer, asked))
        if length % step == 0 and length <= SECOND_LONGEST:
            row["messages"] = asked
            return True
    return False


def write(path: Path, rows: list[dict]) -> None:
    """Conversations with the ids of their turns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as out:
        for row in rows:
            out.write(json.dumps({k: v for k, v in row.items() if k != "second"}, separators=(",", ":")) + "\n")


def generate(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> None:
    """Answer every prompt, then the second questions that fit a batch."""
    model = load(args)
    with (args.work / "prompts.jsonl").open() as lines:
        rows = [json.loads(line) for line in lines][: args.limit]
    for row in rows:
        row["messages"] = [{"role": "user", "content": row.pop("user")}]
        row["turns"] = []
    speak(args, model, tokenizer, rows)
    good = [row for row in rows if row["turns"][0]["ended"] and len(row["turns"][0]["answer"]) >= 16]
    again = [row for row in good if ask_again(tokenizer, row, row.get("second", []), SECOND_STEP)]
    print(f"{len(again)} second questions", flush=True)
    speak(args, model, tokenizer, again)
    write(args.out / "generated.jsonl.gz", rows)


def second(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> None:
    """A second question for good conversations of one turn: all held-out ones, and a sample of the others."""
    model = load(args)
    with (args.work / "prompts.jsonl").open() as lines:
        planned = {row["source"]: row.get("second", []) for row in map(json.loads, lines)}
    with (args.work / "first.jsonl").open() as lines:
        rows = [json.loads(line) for line in lines]
    general = {"continue": phrases.PHRASES["more"], "complete": phrases.PHRASES["now docstring"]}
    again: dict[str, list[dict]] = {"heldout": [], "train": []}
    random.Random(0).shuffle(rows)
    for row in rows:
        questions = planned[row["source"]] or general.get(row["tag"], [])
        room = row["split"] == "heldout" or len(again["train"]) < SECOND_TRAIN
        if room and ask_again(tokenizer, row, questions, STEP):
            again[row["split"]].append(row)
    print(f"{len(again['heldout'])} held-out and {len(again['train'])} training conversations go on", flush=True)
    chosen = again["heldout"] + again["train"]
    speak(args, model, tokenizer, chosen)
    write(args.out / "second.jsonl.gz", chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pick", "generate", "second"])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=768)
    parser.add_argument("--seconds", type=float, default=1e9, help="time for the first turns, and for the second")
    parser.add_argument("--limit", type=int, help="answer only the first so many prompts")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    if args.what == "pick":
        pick(args, tokenizer)
    else:
        (generate if args.what == "generate" else second)(args, tokenizer)


if __name__ == "__main__":
    main()
