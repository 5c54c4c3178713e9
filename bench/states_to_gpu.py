"""States from the store's buffers to a GPU as bfloat16: fp8 with its kernel against plain bf16, and the kernel alone.

    python -m bench.states_to_gpu

Needs a GPU. Times are medians of CUDA events after a warm-up; the copies come from pinned memory, as in training.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from dflash_offline.store import States
from dflash_offline.store.states import empty_states
from dflash_offline.train.fp8 import decode_reference, decode_states
from dflash_offline.train.inputs import buffers_for


def milliseconds(work: Callable[[], object], rounds: int = 20) -> float:
    """Median time of a call on the GPU."""
    times = []
    for number in range(rounds + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(stop))
    return statistics.median(times)


def to_gpu(states: States) -> torch.Tensor:
    """Stored states on the GPU in bfloat16."""
    if states.scales is None:
        return torch.from_numpy(states.values.view(np.int16)).cuda().view(torch.bfloat16)
    return decode_states(torch.from_numpy(states.values).cuda(), torch.from_numpy(states.scales).cuda())


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    shape = arguments.layers, arguments.tokens, arguments.width
    gpu = torch.device("cuda")
    pinned = buffers_for(gpu)
    plain, coarse = (empty_states(encoding, *shape, pinned) for encoding in ("bf16", "fp8"))
    ordinary = empty_states("bf16", *shape)
    codes = torch.randint(0, 127, shape, dtype=torch.uint8, device=gpu)
    scales = torch.rand(shape[:2], device=gpu)
    moved = 3 * codes.numel()
    rows = {
        "bf16, ordinary memory": (milliseconds(lambda: to_gpu(ordinary)), plain.nbytes),
        "bf16, pinned": (milliseconds(lambda: to_gpu(plain)), plain.nbytes),
        "fp8, pinned, decoded": (milliseconds(lambda: to_gpu(coarse)), coarse.nbytes),
        "decoding: kernel": (milliseconds(lambda: decode_states(codes, scales)), moved),
        "decoding: plain torch": (milliseconds(lambda: decode_reference(codes, scales)), moved),
    }
    table = Table(
        "", "ms", "GB/s", title=f"{shape[1]} tokens of {shape[0]} x {shape[2]}, {torch.cuda.get_device_name()}"
    )
    for name, (time, size) in rows.items():
        table.add_row(name, f"{time:.2f}", f"{size / time / 1e6:.0f}")
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
