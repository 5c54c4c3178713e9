"""Stores made by hand: a small identity, parts whose bytes follow from a seed, and every file of a store to compare."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from dflash_offline.store import (
    HELDOUT,
    TRAIN,
    Identity,
    PartWriter,
    Place,
    States,
    Store,
    create_store,
    lock_store,
)
from dflash_offline.store.fp8 import encode_bits
from dflash_offline.store.head import save_head

IDENTITY = Identity(
    target_weights="a" * 64,
    target_config="b" * 64,
    tokenizer="c" * 64,
    chat_template="d" * 64,
    rendering="enable_thinking=false",
    max_length=100,
    layer_ids=(1, 3),
    final=True,
    dtype="float32",
    hidden_size=16,
    num_layers=8,
    vocab_size=50,
)
LENGTHS = (300, 20, 7)
"""Tokens of a part's documents: chunks and documents do not line up."""


def fill_head(folder: Path) -> None:
    """A head of ones."""
    (folder.parent / "t").mkdir()
    (folder.parent / "t" / "config.json").write_text("{}")
    save_head(folder, folder.parent / "t", torch.ones(50, 16), None)
    shutil.rmtree(folder.parent / "t")


def new_store(location: str | Path | Place, **changes: Any) -> Store:
    """An empty store; `changes` go to its identity."""
    return create_store(location, IDENTITY.model_copy(update=changes), fill_head)


def bits_of(seed: int, layers: int, count: int = sum(LENGTHS), width: int = 16) -> np.ndarray:
    """Bit patterns of ordinary bfloat16 numbers, `[layers, count, width]` uint16."""
    values = np.random.default_rng(seed).normal(size=(layers, count, width)).astype(np.float32)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def write_part(store: Store, name: str, seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> bool:
    """Commit a part whose bytes follow from `seed`."""
    total = sum(lengths)
    with PartWriter(store, name, lengths) as writer:
        hidden = bits_of(seed, len(store.identity.layer_ids), total)
        final = bits_of(seed + 10_000, 1, total)
        for start in range(0, total, 100):
            rows = slice(start, start + 100)
            pieces = [States(hidden[:, rows]), States(final[:, rows])]
            if store.identity.encoding == "fp8":
                pieces = [encode_bits(piece.values) for piece in pieces]
            writer.append(pieces[0], pieces[1] if store.identity.final else None)
        return commit(writer, name, seed, lengths)


def commit(writer: PartWriter, name: str, seed: int, lengths: tuple[int, ...]) -> bool:
    """Commit what was appended, with tokens and documents that follow from `seed`."""
    total = sum(lengths)
    return writer.commit(
        split=HELDOUT if name.startswith("h") else TRAIN,
        tokens=np.random.default_rng(seed).integers(0, 50, total),
        loss_mask=np.arange(total) % 3 > 0,
        doc_ids=np.arange(len(lengths), dtype=np.uint64) + np.uint64(1000 * seed),
        doc_tags=[("code", "chat")[number % 2] for number in range(len(lengths))],
        plan="plan",
        provenance={"data": "{}"},
    )


def filled_store(location: str | Path | Place, parts: int = 3, **changes: Any) -> Store:
    """A store of a held-out part and training parts, with its index."""
    store = new_store(location, **changes)
    for number in range(parts):
        write_part(store, f"{'t' if number else 'h'}-{number}", seed=number)
    store.refresh()
    store.write_index()
    return store


def read_all(store: Store, index: int, name: str = "hidden") -> States:
    """Every row of a part."""
    layers = len(store.identity.layer_ids) if name == "hidden" else 1
    out = store.empty_states(layers, store.parts[index].tokens)
    store.part(index).read(name, 0, store.parts[index].tokens, tuple(range(layers)), out)
    return out


def files_of(store: Path) -> dict[str, bytes]:
    """Every file of a store."""
    return {str(p.relative_to(store)): p.read_bytes() for p in sorted(store.rglob("*")) if p.is_file()}


def write_parts(path: str) -> None:
    """Write a store of twelve parts and its index, or what is left of it to write."""
    store = new_store(path)
    with lock_store(path):
        for number in range(12):
            if not store.has(name := f"t-{number:02d}"):
                write_part(store, name, seed=number)
        store.refresh()
        store.write_index()


def run_killed(work: Callable[[str], object], path: Path, after: float | None) -> bool:
    """Run `work` on a path in a process of its own, killed after so many seconds; True when it ended by itself.

    The processes come from a server that has this module loaded, so that the time is the work's.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stores", "zarr"])
    process = context.Process(target=work, args=(str(path),))
    with mock.patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parent)):  # where the server finds this module
        process.start()
    process.join(after)
    process.kill()
    process.join()
    return process.exitcode == 0


def some_codes(layers: int, rows: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """All codes but those that are not numbers, and scales over many magnitudes."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (layers, rows, width), dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x7E
    scales = np.exp2(rng.uniform(-40, 20, (layers, rows))).astype(np.float32)
    return torch.from_numpy(codes), torch.from_numpy(scales)


def small_disk(folder: Path) -> bool:
    """Whether this machine lets us mount a disk of 4 MB."""
    script = f"mount -t tmpfs -o size=4m none {folder}"
    return subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, check=False).returncode == 0
