"""Random whole documents read into given buffers: this store against memcpy, zarr-python, tensorstore and safetensors.

    python -m bench.store_read --folder /tmp/bench

All read the same documents in turn, round after round, from a warm page cache; the table gives the median of the rounds
and, in its last columns, the rate of this store (chunks verified before, and at first touch) over that of the row.
Ratios are the result: rates belong to a machine. `--cold` adds reads with the page cache emptied of these files, beside
a plain sequential read of the same shards. Libraries that are not installed are left out and said so. The libraries
return fresh arrays, and with glibc's default settings pay for that in page faults; to spare them, set
MALLOC_TRIM_THRESHOLD_=-1 MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TOP_PAD_=268435456 MALLOC_ARENA_MAX=1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from rich.console import Console
from rich.table import Table

from dflash_offline.store import TRAIN, Fetcher, Store, open_store
from dflash_offline.store.format import CHUNK_TOKENS
from dflash_offline.store.place import Directory
from dflash_offline.store.prefetch import Batch
from dflash_offline.store.states import page_aligned
from dflash_offline.store.verify import verify

from .stores import random_store

Reader = Callable[[Sequence[int]], object]
"""Reads the documents of these indices, end to end, into buffers of its own."""


class Bench:
    """A store, what to read of it, and the ways to read that are compared."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder, self.threads = folder, arguments.threads
        shape = arguments.layers, arguments.width
        tokens = int(arguments.gigabytes * 1e9 / (shape[0] * shape[1] * 2))
        self.store = random_store(folder, *shape, tokens, arguments.parts)
        self.documents = self.store.documents(TRAIN)
        self.budget = arguments.budget
        self.layers = tuple(range(arguments.layers))
        self.row = shape[1] * 2
        self.pool = ThreadPoolExecutor(self.threads)
        self.batch = Batch.empty(self.store, self.budget, len(self.layers), final=False)
        self.batch.hidden.values[:] = 1
        self.source = page_aligned((len(self.layers), max(4 * self.budget, 1 << 15), shape[1]), np.dtype(np.uint16))
        self.source[:] = 2

    def draw(self, rng: np.random.Generator) -> list[int]:
        """Random documents that fill the budget."""
        chosen, used = [], 0
        for index in rng.permutation(len(self.documents)):
            if used + self.documents.length[index] <= self.budget:
                chosen.append(int(index))
                used += int(self.documents.length[index])
        return chosen

    def bytes_of(self, chosen: Sequence[int], layers: int) -> int:
        """Bytes of states of these documents."""
        return int(self.documents.length[list(chosen)].sum()) * self.row * layers

    def spread(self, work: Callable[[int, int], object], chosen: Sequence[int]) -> None:
        """Call `work(document, place in the budget)` for all, on the threads."""
        places = np.concatenate([[0], np.cumsum(self.documents.length[list(chosen)])])
        list(self.pool.map(work, chosen, places[:-1].tolist()))

    def memcpy(self, chosen: Sequence[int]) -> None:
        """The limit: the same bytes from memory, in pieces as small as a chunk, so that no thread is left with more."""
        values = self.batch.hidden.values

        def copy(piece: tuple[int, int, int, int]) -> None:
            layer, start, at, count = piece
            np.copyto(values[layer, at : at + count], self.source[layer, start : start + count])

        work, place = [], 0
        for index in chosen:
            length = int(self.documents.length[index])
            start = (index * 4096) % (self.source.shape[1] - length)
            for low in range(0, length, CHUNK_TOKENS):
                count = min(CHUNK_TOKENS, length - low)
                work += [(layer, start + low, place + low, count) for layer in self.layers]
            place += length
        left = deque(work)

        def drain(_: int) -> None:
            while left:
                try:
                    copy(left.popleft())
                except IndexError:
                    return

        list(self.pool.map(drain, range(self.threads)))

    def ours(self, store: Store, layers: tuple[int, ...]) -> Reader:
        """This store's own reader; a store that was just opened has checked nothing yet."""
        fetcher = Fetcher(store, self.documents, layers, self.threads)
        batch = Batch(
            self.batch.hidden if len(layers) == len(self.layers) else _some(self.batch, len(layers)),
            None,
            self.batch.tokens,
            self.batch.loss_mask,
            self.batch.doc_start,
            [],
            0,
        )
        return lambda chosen: fetcher.fill(batch, chosen)

    def zarr_python(self, layers: tuple[int, ...], threads: bool) -> Reader:
        """zarr-python into fresh arrays (it is not asked to copy them into ours)."""
        arrays = {record.id: self._array(record.id) for record in self.store.parts}
        select = slice(None) if len(layers) == len(self.layers) else layers[0]

        def read(index: int, at: int = 0) -> None:
            start, length = int(self.documents.start[index]), int(self.documents.length[index])
            arrays[self.store.parts[self.documents.part[index]].id][start : start + length, select]

        if threads:
            return lambda chosen: self.spread(read, chosen)
        return lambda chosen: [read(index) for index in chosen]

    def tensorstore(self, layers: tuple[int, ...]) -> Reader:
        """tensorstore with its defaults, all documents asked for at once, into fresh arrays."""
        import tensorstore  # pyright: ignore[reportMissingImports]

        arrays = {
            record.id: tensorstore.open(
                {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(self._path(record.id) / "hidden")}}
            ).result()
            for record in self.store.parts
        }

        def read(chosen: Sequence[int]) -> list[Any]:
            futures = []
            for index in chosen:
                start, length = int(self.documents.start[index]), int(self.documents.length[index])
                array = arrays[self.store.parts[self.documents.part[index]].id][start : start + length]
                futures.append((array if len(layers) == len(self.layers) else array[:, layers[0]]).read())
            return [future.result() for future in futures]

        return read

    def safetensors(self, by_layer: bool) -> Reader:
        """A file a document, mapped and copied into the buffer, a thread a document or a thread a layer of one."""
        import torch
        from safetensors import safe_open

        folder = self.folder / f"{self.store.place}.safetensors".rpartition("/")[2]
        self._write_safetensors(folder)
        target = torch.from_numpy(self.batch.hidden.values.view(np.int16))

        layers = [slice(layer, layer + 1) for layer in self.layers] if by_layer else [slice(None)]

        def read(piece: tuple[int, int, slice]) -> None:
            index, at, some = piece
            length = int(self.documents.length[index])
            with safe_open(folder / f"{index}.safetensors", "pt") as file:
                target[some, at : at + length].copy_(file.get_tensor("hidden")[some])  # mapped: copied only here

        def read_all(chosen: Sequence[int]) -> None:
            places = np.concatenate([[0], np.cumsum(self.documents.length[list(chosen)])]).tolist()
            pairs = zip(chosen, places[:-1], strict=True)
            list(self.pool.map(read, [(index, at, some) for index, at in pairs for some in layers]))

        torch.set_num_threads(1)  # the pieces are spread over the threads already
        return read_all

    def sequential(self) -> float:
        """GB/s of reading whole shards in order, some at a time; the page cache is emptied of them before."""
        shards = self.shards()
        forget(shards)

        def read(path: Path) -> int:
            buffer = page_aligned((8 << 20,), np.dtype(np.uint8)).data
            total = 0
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    total += count
            return total

        began = time.perf_counter()
        total = sum(self.pool.map(read, shards))
        return total / (time.perf_counter() - began) / 1e9

    def shards(self) -> list[Path]:
        """The shard files."""
        return [path for record in self.store.parts for path in (self._path(record.id) / "hidden/c").rglob("*/0/0")]

    def _path(self, name: str) -> Path:
        assert isinstance(self.store.place, Directory)
        return self.store.place.path / self.store.parts_folder / name

    def _array(self, name: str) -> Any:
        return zarr.open_array(str(self._path(name) / "hidden"), mode="r")

    def _write_safetensors(self, folder: Path) -> None:
        from safetensors.numpy import save_file

        folder.mkdir(exist_ok=True)
        for index in range(len(self.documents)):
            if not (path := folder / f"{index}.safetensors").exists():
                length, start = int(self.documents.length[index]), int(self.documents.start[index])
                out = self.store.empty_states(len(self.layers), length)
                self.store.part(int(self.documents.part[index])).read("hidden", start, start + length, self.layers, out)
                save_file({"hidden": out.values.view(np.int16)}, path)


def forget(paths: Sequence[Path]) -> None:
    """Empty the page cache of files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _some(batch: Batch, layers: int) -> Any:
    return type(batch.hidden)(batch.hidden.values[:layers])


def compare(bench: Bench, rounds: int, layers: tuple[int, ...], console: Console) -> None:
    """One table: all ways to read, in turn."""
    checked = open_store(bench.store.place)
    everything = bench.ours(checked, layers)
    for first in range(0, len(bench.documents)):
        everything([first])  # from here on every chunk is verified, and in the page cache
    ways: dict[str, Callable[[], Reader]] = {
        "this store, verified before": lambda: everything,
        "this store, first touch": lambda: bench.ours(open_store(bench.store.place), layers),
    }
    if len(layers) == len(bench.layers):
        ways = {"memcpy of the same bytes": lambda: bench.memcpy, **ways}
    made = {
        "zarr-python": lambda: bench.zarr_python(layers, threads=False),
        "zarr-python, a thread a core": lambda: bench.zarr_python(layers, threads=True),
        "tensorstore": lambda: bench.tensorstore(layers),
    }
    if len(layers) == len(bench.layers):
        made["safetensors, a thread a document"] = lambda: bench.safetensors(by_layer=False)
        made["safetensors, a thread a layer"] = lambda: bench.safetensors(by_layer=True)
    for name, make in made.items():
        try:
            reader = make()
        except ImportError as error:
            console.print(f"left out: {name} ({error})")
            continue
        ways[name] = lambda reader=reader: reader
    rates: dict[str, list[float]] = {name: [] for name in ways}
    rng = np.random.default_rng(1)
    for number in range(rounds + 1):
        chosen = bench.draw(rng)
        size = bench.bytes_of(chosen, len(layers))
        for name, make in ways.items():
            reader = make()
            began = time.perf_counter()
            reader(chosen)
            if number:  # the first round warms up
                rates[name].append(size / (time.perf_counter() - began) / 1e9)
    title = f"{len(layers)} of {len(bench.layers)} layers"
    table = Table("", "GB/s", "verified /", "first touch /", title=title)
    verified, fresh = (statistics.median(rates[name]) for name in list(ways)[:3] if name.startswith("this store"))
    for name, found in rates.items():
        rate = statistics.median(found)
        table.add_row(name, f"{rate:.2f}", f"{verified / rate:.2f}", f"{fresh / rate:.2f}")
    console.print(table)


def cold(bench: Bench, rounds: int, console: Console) -> None:
    """Reads that come from the disk, beside a sequential one."""
    table = Table("page cache emptied", "GB/s")
    raw = statistics.median(bench.sequential() for _ in range(rounds))
    rng = np.random.default_rng(2)
    found = []
    for _ in range(rounds):
        chosen = bench.draw(rng)
        reader = bench.ours(open_store(bench.store.place), bench.layers)
        forget(bench.shards())
        began = time.perf_counter()
        reader(chosen)
        found.append(bench.bytes_of(chosen, len(bench.layers)) / (time.perf_counter() - began) / 1e9)
    table.add_row("whole shards in order", f"{raw:.2f}")
    table.add_row("this store, random documents, first touch", f"{statistics.median(found):.2f}")
    console.print(table)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the stores to read are made and kept")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--gigabytes", type=float, default=3.0, help="of states in all")
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--budget", type=int, default=8192, help="tokens read at a time")
    parser.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1), help="for everything that has them")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cold", action="store_true", help="reads from the disk as well")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    names = ("zarr", "tensorstore", "safetensors", "numpy")
    console.print(f"{arguments.threads} threads; " + ", ".join(f"{name} {_version(name)}" for name in names))
    bench = Bench(arguments.folder, arguments)
    compare(bench, arguments.rounds, bench.layers, console)
    compare(bench, arguments.rounds, (0,), console)
    report = verify(bench.store.place)
    console.print(f"verify: {report.bytes / report.seconds / 1e9:.2f} GB/s, {len(report.problems)} problems")
    if arguments.cold:
        cold(bench, max(1, arguments.rounds // 2), console)


def _version(name: str) -> str:
    try:
        return version(name)
    except ImportError:
        return "not installed"


if __name__ == "__main__":
    main()
