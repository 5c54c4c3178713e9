"""Parts written and committed by this store against the same bytes written in order to a plain file.

    python -m bench.store_write --folder /tmp/bench

Both end with an fsync and go to the same disk, in turn, round after round; the states are random and in memory before
the clock starts. Printed: the rates, their ratio, and the share of the time in which whoever hands states over waited.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from dflash_offline.store import TRAIN, PartWriter, States, create_store
from dflash_offline.store.format import Encoding
from dflash_offline.store.fp8 import encode_bits

from .stores import identity, random_bits

BLOCK = 8 << 20


def raw(path: Path, documents: list[States], total: int) -> float:
    """Seconds to write so many bytes of the documents to a file in order, fsynced."""
    views = [array.reshape(-1).view(np.uint8).data for states in documents for array in _arrays(states)]
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        left, number = total, 0
        while left:
            view = views[number % len(views)][:left]
            for at in range(0, len(view), BLOCK):
                file.write(view[at : at + BLOCK])
            left, number = left - len(view), number + 1
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def _arrays(states: States) -> list[np.ndarray]:
    return [states.values] if states.scales is None else [states.values, states.scales]


def ours(folder: Path, documents: list[States], tokens: int, layers: int, encoding: Encoding) -> tuple[float, float]:
    """Seconds to write documents as one committed part of so many tokens, and seconds of it spent in `append`."""
    width = documents[0].values.shape[-1]
    store = create_store(folder, identity(layers, width, encoding), lambda head: head.mkdir(parents=True))
    lengths, used = [], 0
    while used < tokens:
        lengths.append(min(len(documents[len(lengths) % len(documents)]), tokens - used))
        used += lengths[-1]
    began, waited = time.perf_counter(), 0.0
    with PartWriter(store, "t-000000-000000000000", lengths) as writer:
        for number, length in enumerate(lengths):
            asked = time.perf_counter()
            writer.append(documents[number % len(documents)].rows(0, length), None)
            waited += time.perf_counter() - asked
        writer.commit(
            split=TRAIN,
            tokens=np.zeros(tokens, np.int32),
            loss_mask=np.ones(tokens, bool),
            doc_ids=np.arange(len(lengths), dtype=np.uint64),
            doc_tags=[""] * len(lengths),
            plan="bench",
            provenance={},
        )
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return seconds, waited


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to write; what is written is removed")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of states a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--encoding", choices=["bf16", "fp8"], default="bf16")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(200), np.log(4096), 12)).astype(int)
    plain = [random_bits(arguments.layers, int(length), arguments.width, rng) for length in lengths]
    documents = [encode_bits(bits) if arguments.encoding == "fp8" else States(bits) for bits in plain]
    per_token = arguments.layers * (arguments.width * 2 if arguments.encoding == "bf16" else arguments.width + 4)
    tokens = int(arguments.gigabytes * 1e9 / per_token)
    raw_rates, our_rates, waits = [], [], []
    for number in range(arguments.rounds + 1):
        raw_seconds = raw(arguments.folder / "raw", documents, tokens * per_token)
        seconds, waited = ours(arguments.folder / "store", documents, tokens, arguments.layers, arguments.encoding)
        if number:  # the first round warms up
            raw_rates.append(tokens * per_token / raw_seconds / 1e9)
            our_rates.append(tokens * per_token / seconds / 1e9)
            waits.append(waited / seconds)
    table = Table("", "GB/s", "of raw")
    raw_rate, rate = statistics.median(raw_rates), statistics.median(our_rates)
    table.add_row("raw sequential write, fsync", f"{raw_rate:.2f}", "1.00")
    table.add_row(f"this store ({arguments.encoding}), committed", f"{rate:.2f}", f"{rate / raw_rate:.2f}")
    Console(highlight=False).print(table)
    print(f"share of the time in which append waited: {statistics.median(waits):.2f}")


if __name__ == "__main__":
    main()
