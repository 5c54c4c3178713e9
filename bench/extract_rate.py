"""Tokens a second of extraction on one GPU: transformers' forward pass, the fused one, the fused one with its store.

    python -m bench.extract_rate --folder DIR [--layers 64] [--tokens 700000] [--fp8] [--profile]

Random weights of Qwen3.6-27B's shape, made on the GPU. A corpus of a realistic length mix is planned as always, and
units spread evenly over it are done. The forward passes all run over the same batches; the rows with the store are
the real thing: units computed, packed, copied, written as parts and fsynced, the clock from before the first pass to
after the last commit. States are compared too: the fused pass with transformers' own, and transformers' own with itself
one document at a time, which shows some of what bfloat16 rounding alone does.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dflash_offline.extract.capture import Capture, Loaded, StateCapture, relative_error, states_of
from dflash_offline.extract.corpus import Corpus
from dflash_offline.extract.fused import FusedTarget
from dflash_offline.extract.kernels.delta_rule import pin_configurations
from dflash_offline.extract.plan import Plan, Unit, batches, make_plan
from dflash_offline.extract.target import default_layer_ids
from dflash_offline.extract.unit import UnitReport, UnitWorker
from dflash_offline.store import create_store

from .stores import identity
from .targets import flops_per_token, random_corpus, random_target

console = Console(highlight=False, soft_wrap=True)


def spread(plan: Plan, count: int) -> list[Unit]:
    """So many units, spread evenly over the plan."""
    return [plan.units[int(i)] for i in np.linspace(0, len(plan.units) - 1, min(count, len(plan.units)))]


def batch_ids(corpus: Corpus, plan: Plan, count: int) -> list[tuple[Tensor, int]]:
    """Padded ids of batches spread over the plan, and their tokens without padding."""
    found = []
    for unit in spread(plan, count):
        lengths = corpus.lengths[unit.documents].tolist()
        group = batches(lengths, plan.batch_tokens)[0]
        documents = [corpus.tokens[corpus.rows(m)] for m in unit.documents[group]]
        ids = torch.zeros(len(documents), max(map(len, documents)), dtype=torch.int64)
        for row, document in enumerate(documents):
            ids[row, : len(document)] = torch.from_numpy(document)
        found.append((ids.cuda(), sum(map(len, documents))))
    return found


def forward_rate(capture: Capture, work: Sequence[tuple[Tensor, int]], rounds: int) -> list[float]:
    """Tokens a second of forward passes alone, each round all batches."""
    for ids, _ in work[:2]:
        capture(ids)
    rates = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for ids, _ in work:
            capture(ids)
        stop.record()
        torch.cuda.synchronize()
        rates.append(sum(n for _, n in work) / start.elapsed_time(stop) * 1000)
    return rates


def whole_rate(
    capture: Capture,
    corpus: Corpus,
    plan: Plan,
    units: Sequence[Unit],
    layer_ids: Sequence[int],
    folder: Path,
    config: Any,
) -> tuple[float, float, UnitReport]:
    """Tokens a second with the store, the share of padding, and the parts of the time; the store is removed."""
    path = folder / "extract-rate"
    shutil.rmtree(path, ignore_errors=True)
    said = {"layer_ids": tuple(layer_ids), "final": True, "num_layers": config.num_hidden_layers}
    shape = identity(1, config.hidden_size).model_copy(update=said)
    store = create_store(path, shape, lambda head: head.mkdir(parents=True))
    worker = UnitWorker(store, plan, corpus, Loaded(capture, torch.device("cuda:0"), "fused", [], []))
    worker.run(units[0])  # warm: pinned buffers, kernels
    torch.cuda.synchronize()
    began = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:  # as a worker process has two units under way
        reports = list(pool.map(worker.run, units[1:]))
    seconds = time.perf_counter() - began
    total = UnitReport(sum(r.tokens for r in reports))
    for name in ("computed", "forward", "copy", "write", "wait"):
        setattr(total, name, sum(getattr(r, name) for r in reports))
    shutil.rmtree(path)
    return total.tokens / seconds, 1 - total.tokens / total.computed, total


def errors(ours: list[Tensor], theirs: list[Tensor]) -> str:
    """Relative errors, a state each."""
    return " ".join(f"{relative_error(o, t):.1e}" for o, t in zip(ours, theirs, strict=True))


def profile(name: str, work: Callable[[], Any]) -> None:
    """Where the GPU's time goes in one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as run:
        work()
        torch.cuda.synchronize()
    events = sorted(run.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events)
    console.print(f"{name}: {total / 1000:.1f} ms of kernels")
    for event in events[:24]:
        share = event.self_device_time_total / total
        each = event.self_device_time_total / event.count
        console.print(f"  {share:6.1%} {event.count:5d} x {each:8.0f} us  {event.key[:100]}")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the store is written, and removed")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--documents", type=int, default=20_000, help="documents of the corpus that is planned")
    parser.add_argument("--tokens", type=int, default=700_000, help="tokens of the units that are done")
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--unit-tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=4, help="batches of one round of forward passes")
    parser.add_argument("--fp8", action="store_true", help="also with products in fp8")
    parser.add_argument("--no-store", action="store_true", help="forward passes only")
    parser.add_argument("--profile", action="store_true", help="print where one pass spends its time")
    arguments = parser.parse_args()
    console.print(pin_configurations(128) or "flash-linear-attention: pinned configurations")
    model = random_target(arguments.layers)
    config = model.config
    corpus = random_corpus(arguments.documents, 3072, config.vocab_size)
    none = np.zeros(len(corpus), bool)
    plan = make_plan("bench", {}, corpus, none, arguments.unit_tokens, arguments.batch_tokens)
    layer_ids = default_layer_ids(arguments.layers)
    work = batch_ids(corpus, plan, arguments.batches)
    units = spread(plan, 1 + arguments.tokens // arguments.unit_tokens)
    console.print(f"{len(units)} of {len(plan.units)} units of a corpus of {len(corpus.tokens):,} tokens; {layer_ids}")

    table = Table("", "Ktok/s", "of stock", "TFLOP/s", "padding", title=torch.cuda.get_device_name())
    base = 0.0

    def row(name: str, rate: float, padding: str = "") -> None:
        nonlocal base
        base = base or rate
        table.add_row(
            name, f"{rate / 1000:.2f}", f"{rate / base:.2f}", f"{rate * flops_per_token(config) / 1e12:.0f}", padding
        )

    stock = StateCapture(model, layer_ids, None)
    sample = work[-1][0]
    exact = [state.clone() for state in states_of(stock, sample)]
    alone = [torch.cat(pair) for pair in zip(*(states_of(stock, ids[None]) for ids in sample), strict=True)]
    console.print(f"transformers alone against in a batch: {errors(alone, exact)}")
    del alone
    row("transformers, forward", statistics.median(forward_rate(stock, work, arguments.rounds)))
    if arguments.profile:
        profile("transformers", lambda: stock(sample))
    for hook in [h for layer in model.get_decoder().layers for h in [layer._forward_hooks]]:
        hook.clear()
    for name in ["bf16", "fp8"][: 1 + arguments.fp8]:
        capture = FusedTarget(model, layer_ids, None, fp8=name == "fp8")
        torch.cuda.empty_cache()
        console.print(f"fused {name} against transformers: {errors(states_of(capture, sample), exact)}")
        row(f"fused {name}, forward", statistics.median(forward_rate(capture, work, arguments.rounds)))
        if arguments.profile:
            profile(f"fused {name}", lambda target=capture: target(sample))
        if not arguments.no_store:
            rate, padding, total = whole_rate(capture, corpus, plan, units, layer_ids, arguments.folder, config)
            row(f"fused {name}, with the store", rate, f"{padding:.1%}")
            console.print(
                f"fused {name}: forward {total.forward:.1f} s; beside it copies {total.copy:.1f} s and writing "
                f"{total.write:.1f} s; waited for the disk {total.wait:.1f} s"
            )
    console.print(f"peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, torch {torch.__version__}")
    console.print(table)


if __name__ == "__main__":
    main()
