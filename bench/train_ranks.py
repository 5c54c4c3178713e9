"""Several GPUs beside one: tokens a second of the same training step, gradients summed over ranks or made alone.

    python -m bench.train_ranks --gpus 2 [--fp8] [--steps 20]
    python -m bench.train_ranks --gpus 1            # what a process group of one costs
    python -m bench.train_ranks --gpus 2 --tiny     # on a CPU, to try the script

First every GPU makes its steps for itself, all at once; then they make the same steps as ranks of one run, with
gradients summed inside the captured step; then with weights averaged every 50 steps, whose cost is timed apart.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from functools import partial

import torch
from torch import distributed as dist

from bench.plain_step import Shape, random_batch
from bench.train_step import RATE, OurStep, settings_of, stored, timed
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.inputs import Ends
from dflash_offline.train.optimizer import average
from dflash_offline.train.ranks import Ranks, alone, join


def one_rank(arguments: argparse.Namespace) -> None:
    """What each process does; rank 0 prints."""
    shape = Shape.tiny() if arguments.tiny else Shape()
    rank = int(os.environ["RANK"])
    device = torch.device("cpu") if arguments.tiny else torch.device("cuda", rank)
    dtype = torch.float32 if arguments.tiny else torch.bfloat16
    with join(device) as ranks:
        embedding = torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=dtype) / shape.hidden**0.5
        batch = stored(random_batch(shape, device, rank), device)
        found: dict[str, float] = {}
        for name, used in (("alone", alone(device)), ("ranks", ranks)):
            drafter = Drafter.empty(settings_of(shape), shape.hidden, device, dtype)
            drafter.reset(0)
            drafter.fp8 = arguments.fp8
            step = OurStep(shape, drafter, Ends(embedding, embedding), [batch], RATE, used)
            for _ in range(3):
                step()
            step.losses(1)
            dist.barrier()
            found[name] = slowest(ranks, timed(step, arguments.steps))
            if name == "ranks":
                found["average"] = slowest(ranks, timed(partial(average, step.optimizer, ranks), 3))
            del step, drafter
        if ranks.leads:
            tokens = shape.tokens * ranks.count
            for name, ms in (("alone", found["alone"]), ("summed", found["ranks"])):
                print(f"{name}: {ms:.1f} ms a step on each of {ranks.count}, {tokens / ms:.1f} Ktok/s together")
            each = found["alone"] + found["average"] / 50
            print(f"averaged every 50: {each:.1f} ms a step, of it {found['average'] / 50:.2f} for the averages")
            print(
                f"{ranks.count} ranks are {ranks.count * found['alone'] / found['ranks']:.3f} x one with gradients "
                f"summed, {ranks.count * found['alone'] / each:.3f} x with weights averaged"
            )


def slowest(ranks: Ranks, ms: float) -> float:
    """The largest of all ranks' times."""
    time = torch.tensor(ms, device=ranks.device)
    ranks.largest(time)
    return float(time)


def main() -> None:
    """Parse; start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--fp8", action="store_true", help="products in fp8")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, in sizes for it")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        return one_rank(arguments)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    shared = {"WORLD_SIZE": str(arguments.gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "bench.train_ranks", *sys.argv[1:]]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank)}) for rank in range(arguments.gpus)
    ]
    sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
