"""The two commands as a user types them: `dflash extract` on some GPUs, `dflash train` on others, alone and together.

    python -m bench.side_by_side --extract 0-4 --train 5-7 --memory /dev/shm/dflash --disk DIR --out FILE.json
    python -m bench.side_by_side --extract 0 --train 0 ...                  # one GPU: `both` shares it
    python -m bench.side_by_side --tiny --memory DIR --disk DIR             # the bundled target on a CPU

A target of Qwen3.6-27B's shape is drawn on a GPU and written as safetensors, documents of a realistic length mix as
token ids with a loss mask; from there on everything is the product's own: `dflash init`, `extract`, `train`. Steps:

    extract-1, extract-all     extraction alone on the first and on all of its GPUs, into memory
    train-1, train-all         training alone, from the store of extract-all
    both                       the two commands started together, the store in memory
    both-disk                  the same, the store on the disk
    train-disk                 training alone on all of its GPUs, from the store of both-disk, nothing cached

Rates of extraction count whole units, between the first that every GPU has and the last; rates of training are the
median of what the run itself reports every ten updates. Steps may be run one by one, in this order.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from dflash_offline.pipelines.devices import parse_gpus

from .commands import Command, CommandFailed, GpuMemory, ending, extraction, first_update, training
from .targets import random_corpus, random_target

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)

STEPS = ("extract-1", "extract-all", "train-1", "train-all", "both", "both-disk", "train-disk")
BUNDLED = Path(__file__).parents[1] / "pipelines" / "demo" / "target"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
TINY = (
    *("extract.unit_tokens=2048", "data.max_length=1024"),
    *("train.tokens=2048", "train.anchors=32", "train.validate_documents=2"),
)
GPUS = 64
"""More than a machine has: numbers are checked by the commands."""


def write_target(folder: Path, layers: int) -> None:
    """A target with random weights, a file a layer, and the bundled target's tokenizer."""
    staged = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    model = random_target(layers)
    files: dict[str, dict[str, Any]] = {}
    for name, tensor in model.state_dict().items():
        layer = name.partition("layers.")[2].partition(".")[0] or "ends"
        files.setdefault(f"model-{layer}.safetensors", {})[name] = tensor

    def save(file: str) -> None:
        save_file({name: tensor.cpu() for name, tensor in files[file].items()}, staged / file)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, files))
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (staged / "model.safetensors.index.json").write_text(json.dumps(index))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(staged)
    for name in TOKENIZER:
        shutil.copy(BUNDLED / name, staged)
    staged.rename(folder)


def write_documents(path: Path, tokens: int, vocabulary: int, longest: int) -> None:
    """About so many tokens of documents, an eighth of each an unsupervised prompt; other lengths, other documents."""
    corpus = random_corpus(max(8, tokens // 1100), longest, vocabulary, seed=tokens)
    with path.open("w") as file:
        for start, length in zip(corpus.offsets, corpus.lengths.tolist(), strict=False):
            ids = corpus.tokens[start : start + length].tolist()
            mask = [0] * (length // 8) + [1] * (length - length // 8)
            file.write(json.dumps({"input_ids": ids, "loss_mask": mask}, separators=(",", ":")) + "\n")


class Bench:
    """The steps, and what they found.

    Args:
        said: the command line.
    """

    def __init__(self, said: argparse.Namespace) -> None:
        self.said = said
        self.memory, self.disk = said.memory.absolute(), said.disk.absolute()
        self.extractors = ["cpu"] * 2 if said.tiny else parse_gpus(said.extract, GPUS)
        self.trainers = ["cpu"] * 2 if said.tiny else parse_gpus(said.train, GPUS)
        self.found: dict[str, Any] = {}
        self.steps: dict[str, Callable[[], None]] = {
            "extract-1": lambda: self.extract(self.extractors[:1], "one"),
            "extract-all": lambda: self.extract(self.extractors, "full"),
            "train-1": lambda: self.train("train-1", self.trainers[:1], self.memory / "full"),
            "train-all": lambda: self.train("train-all", self.trainers, self.memory / "full"),
            "both": lambda: self.both("both", self.memory / "both"),
            "both-disk": lambda: self.both("both-disk", self.disk / "both"),
            "train-disk": self.train_from_disk,
        }
        self.failed: list[str] = []

    def prepare(self) -> None:
        """Target and documents; `dflash.toml` in a folder for each number of GPUs that extract."""
        self.memory.mkdir(parents=True, exist_ok=True)
        self.disk.mkdir(parents=True, exist_ok=True)
        began = time.time()
        target = BUNDLED if self.said.tiny else self.memory / "target"
        if not target.is_dir():
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # whose end gives its GPU memory back
                pool.submit(write_target, target, self.said.layers).result()
        console.print(f"target written in {time.time() - began:.1f} s")
        vocabulary = json.loads((target / "config.json").read_text())["vocab_size"]
        shape = TINY if self.said.tiny else ("train.tokens=8192",)
        given = [*shape, *(self.said.set or [])]
        for count in {1, len(self.extractors)}:
            folder = self.folder(count)
            if (folder / "dflash.toml").exists():
                continue
            folder.mkdir(parents=True, exist_ok=True)
            tokens = self.said.seconds * count * self.said.expect
            write_documents(folder / "data.jsonl", tokens, vocabulary, 1024 if self.said.tiny else 3072)
            overrides = [word for text in given for word in ("--set", text)]
            Command(folder, "init", "--target", str(target), "--data", "data.jsonl", *overrides).wait()

    def folder(self, extractors: int) -> Path:
        """Where the commands run: the same settings, data for so many GPUs."""
        return self.disk / f"work-{extractors}"

    def start(self, stage: str, gpus: list[str], store: Path, *more: str) -> Command:
        """One of the two commands."""
        settings = [word for text in (f"store.path={store}", *more) for word in ("--set", text)]
        flags = ["--json", "--wait"] if stage == "train" else []
        count = len(gpus) if stage == "extract" and store.name == "one" else len(self.extractors)
        return Command(self.folder(count), stage, "--gpus", ",".join(gpus), *flags, *settings)

    def extract(self, gpus: list[str], name: str) -> None:
        """Extraction alone, into a new store in memory."""
        store = self.memory / name
        shutil.rmtree(store, ignore_errors=True)
        command = self.start("extract", gpus, store)
        with ending(command), GpuMemory() as memory:
            found = extraction(command, store, len(gpus))
        step = "extract-1" if name == "one" else "extract-all"
        self.keep(step, extract=found, memory=memory.of(gpus, command.began, time.time()))
        if name == "one":
            shutil.rmtree(store)

    def train(self, step: str, gpus: list[str], store: Path, length: str | None = None) -> None:
        """Training alone, for as many updates as asked for, or `length`."""
        run = self.run_of(step)
        command = self.start("train", gpus, store, f"train.run={run}", length or f"train.steps={self.said.updates}")
        with ending(command), GpuMemory() as memory:
            command.wait()
            found = training(command, store, len(gpus))
        since = command.began + found.first
        self.keep(step, train=found, memory=memory.of(gpus, since, time.time()))

    def both(self, step: str, store: Path) -> None:
        """Both commands from nothing; training is told to stop once extraction has ended."""
        shutil.rmtree(self.memory / "full", ignore_errors=True)
        shutil.rmtree(store, ignore_errors=True)
        run = self.run_of(step)
        writing = self.start("extract", self.extractors, store)
        reading = self.start("train", self.trainers, store, f"train.run={run}", f"train.steps={10**6}")
        with ending(writing, reading), GpuMemory() as memory:
            writing.wait()
            ended = time.time()
            reading.stop()
            reading.wait()
            first = first_update(reading)
            if first is None or first > ended:
                raise CommandFailed("extraction ended before training had begun: give --seconds more")
            found = training(reading, store, len(self.trainers), ended)
            made = extraction(writing, store, len(self.extractors), first)
        console.print(f"{step}: {ended - first:.0f} s at work together")
        self.keep(step, extract=made, train=found, memory=memory.of([*self.extractors, *self.trainers], first, ended))
        if store.parent == self.memory:
            shutil.rmtree(store)

    def train_from_disk(self) -> None:
        """Training from the store that both-disk left, with nothing of it in the page cache."""
        if not self.said.tiny:
            Path("/proc/sys/vm/drop_caches").write_text("3")
        # Once through: what is read again comes from the page cache.
        self.train("train-disk", self.trainers, self.disk / "both", "train.epochs=1")

    def run_of(self, step: str) -> Path:
        """An empty place for a run. Those of steps before, whose checkpoints fill a disk, are removed."""
        shutil.rmtree(self.disk / "runs", ignore_errors=True)
        return self.disk / "runs" / step

    def all(self, wanted: list[str]) -> None:
        """Run steps; one that fails is named, and those after it are run all the same."""
        for step in STEPS:
            if step in wanted:
                try:
                    self.steps[step]()
                except CommandFailed as error:
                    console.print(f"{step} failed: {error}")
                    self.failed.append(step)
        shutil.rmtree(self.disk / "runs", ignore_errors=True)

    def keep(self, step: str, **found: Any) -> None:
        """Write what a step found to the file, and its main numbers to the terminal."""
        plain = {name: value if isinstance(value, dict) else asdict(value) for name, value in found.items()}
        self.found[step] = plain
        if self.said.out:
            self.said.out.write_text(json.dumps(self.found, indent=1))
        for name, values in plain.items():
            short = {key: v for key, v in values.items() if key not in ("said", "reports")}
            short = {key: round(v, 3) if isinstance(v, float) else v for key, v in short.items()}
            if name == "memory":
                short = {gpu: f"{min(seen)}-{max(seen)} GiB" for gpu, seen in values.items() if seen}
            console.print(f"{step} {name}: {short}")

    def table(self) -> Table:
        """All steps beside each other."""
        table = Table("step", "stage", "GPUs", "Ktok/s", "each", "of alone", "waits", "first, s", "busy")
        alone = {"extract": "extract-all", "train": "train-all"}
        for step, found in self.found.items():
            for stage, alone_step in alone.items():
                if stage not in found:
                    continue
                values = found[stage]
                base = self.found.get(alone_step, {}).get(stage)
                rate, gpus = values["rate"] / 1000, values["gpus"]
                table.add_row(
                    *(step, stage, str(gpus), f"{rate:.2f}", f"{rate / gpus:.2f}"),
                    f"{values['rate'] / base['rate']:.2f}" if base else "",
                    *(f"{values['waiting']:.1%}", f"{values['first']:.1f}"),
                    f"{values['busy']:.0%}" if "busy" in values else "",
                )
        return table


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extract", default="0-4", help="GPUs that extract")
    parser.add_argument("--train", default="5-7", help="GPUs that train")
    parser.add_argument("--memory", type=Path, required=True, help="folder in memory: target and stores")
    parser.add_argument("--disk", type=Path, required=True, help="folder on the disk: runs, and the stores of *-disk")
    parser.add_argument("--steps", default=",".join(STEPS), help="which, separated by commas")
    parser.add_argument("--layers", type=int, default=64, help="of the target")
    parser.add_argument("--seconds", type=int, default=60, help="how long each extraction's data lasts, about")
    parser.add_argument("--expect", type=int, help="tokens a second of one GPU, to make so much data")
    parser.add_argument("--updates", type=int, help="updates of training alone")
    parser.add_argument("--set", action="append", help="a setting for dflash init: section.key=value; may be repeated")
    parser.add_argument("--out", type=Path, help="JSON file for all numbers")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, the bundled target")
    said = parser.parse_args()
    said.expect = said.expect or (800 if said.tiny else 12_000)
    said.updates = said.updates or (60 if said.tiny else 200)
    wanted = said.steps.split(",")
    if unknown := [step for step in wanted if step not in STEPS]:
        parser.error(f"--steps: there is no {unknown[0]}, only {', '.join(STEPS)}")
    bench = Bench(said)
    bench.prepare()
    bench.all(wanted)
    console.print(bench.table())
    if bench.failed:
        sys.exit(f"failed: {', '.join(bench.failed)}")


if __name__ == "__main__":
    main()
