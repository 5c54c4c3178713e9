"""What the fp8 encoding does to the states of a bf16 store, layer by layer.

    python -m bench.fp8_error states

For each stored layer, over the first tokens of a store: the relative error |x' - x| / |x| of all of it (Frobenius), of
the median token, and of the worst one. x is what a bf16 store holds, x' what comes back from fp8.
"""

from __future__ import annotations

import argparse

import numpy as np
from rich.console import Console
from rich.table import Table

from dflash_offline.store import Store, open_store
from dflash_offline.store.fp8 import decode_bits, encode_bits


def floats(bits: np.ndarray) -> np.ndarray:
    """Bit patterns of bfloat16 as float64."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def errors(store: Store, name: str, layer: int, tokens: int) -> tuple[float, float, float]:
    """Relative error of one layer: of all tokens, of the median token, of the worst."""
    squares, sizes = [], []
    left = tokens
    for index, record in enumerate(store.parts):
        count = min(left, record.tokens)
        if not count:
            break
        rows = store.empty_states(1, count)
        store.part(index).read(name, 0, count, (layer,), rows)
        exact, found = floats(rows.values[0]), floats(decode_bits(encode_bits(rows.values))[0])
        squares.append(((found - exact) ** 2).sum(-1))
        sizes.append((exact**2).sum(-1))
        left -= count
    wrong, size = np.concatenate(squares), np.concatenate(sizes)
    each = np.sqrt(wrong / size)
    return float(np.sqrt(wrong.sum() / size.sum())), float(np.median(each)), float(each.max())


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="a bf16 store's path or address")
    parser.add_argument("--tokens", type=int, default=20_000)
    arguments = parser.parse_args()
    store = open_store(arguments.store)
    if store.identity.encoding != "bf16":
        raise SystemExit(f"{store.place} is in fp8 already: the error is measured on a bf16 store")
    table = Table("layer", "relative error", "median token", "worst token", title=f"fp8 against bf16, {store.place}")
    rows = [("hidden", place, str(layer)) for place, layer in enumerate(store.identity.layer_ids)]
    if store.identity.final:
        rows.append(("final", 0, "final"))
    for name, place, title in rows:
        table.add_row(title, *(f"{100 * error:.2f}%" for error in errors(store, name, place, arguments.tokens)))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
