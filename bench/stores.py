"""Stores to measure with: random states of a real shape, in a folder of its own, made once and kept.

Imported by the benchmarks beside it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from dflash_offline.store import TRAIN, Identity, PartWriter, States, Store, create_store, open_store, part_id
from dflash_offline.store.format import Encoding
from dflash_offline.store.fp8 import encode_bits
from dflash_offline.store.states import empty_states


def identity(layers: int, width: int, encoding: Encoding = "bf16") -> Identity:
    """An identity of that shape; nothing else in it matters here."""
    return Identity(
        target_weights="0" * 64,
        target_config="0" * 64,
        tokenizer="0" * 64,
        chat_template="0" * 64,
        rendering="none",
        max_length=4096,
        layer_ids=tuple(range(layers)),
        final=False,
        dtype="bfloat16",
        encoding=encoding,
        hidden_size=width,
        num_layers=64,
        vocab_size=1000,
    )


def document_lengths(tokens: int, rng: np.random.Generator) -> list[int]:
    """Lengths of 200 to 4,096 tokens, log-uniform (mean about 1,290), about so many tokens in all."""
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(int(np.exp(rng.uniform(np.log(200), np.log(4096)))))
    return lengths


def random_bits(layers: int, rows: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Bit patterns of bfloat16 numbers between 1 and 2 with random mantissas and signs, on pages of their own."""
    bits = empty_states("bf16", layers, rows, width).values
    bits[:] = rng.integers(0, 1 << 16, bits.shape, dtype=np.uint16) & 0x807F | 0x3F80
    return bits


def write_random_part(store: Store, number: int, tokens: int, rng: np.random.Generator) -> None:
    """One part of about so many tokens."""
    shape = store.identity
    lengths = document_lengths(tokens, rng)
    ids = rng.integers(0, 1 << 63, len(lengths)).astype(np.uint64)
    with PartWriter(store, part_id(TRAIN, number, ids.tolist()), lengths) as writer:
        for length in lengths:
            bits = random_bits(len(shape.layer_ids), length, shape.hidden_size, rng)
            writer.append(encode_bits(bits) if shape.encoding == "fp8" else States(bits), None)
        total = sum(lengths)
        writer.commit(
            split=TRAIN,
            tokens=np.zeros(total, np.int32),
            loss_mask=np.ones(total, bool),
            doc_ids=ids,
            doc_tags=["text"] * len(lengths),
            plan="bench",
            provenance={},
        )


def random_store(folder: Path, layers: int, width: int, tokens: int, parts: int, encoding: Encoding = "bf16") -> Store:
    """A store of random states, opened; made if the folder has none of that shape."""
    path = folder / f"{encoding}-{layers}x{width}-{parts}x{tokens}"
    if not path.exists():
        staged = path.with_name(f".{path.name}.making")
        shutil.rmtree(staged, ignore_errors=True)
        store = create_store(staged, identity(layers, width, encoding), lambda head: head.mkdir(parents=True))
        rng = np.random.default_rng(0)
        for number in range(parts):
            write_random_part(store, number, tokens // parts, rng)
        store.refresh()
        store.write_index()
        staged.rename(path)
    return open_store(path)
