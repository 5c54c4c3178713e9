"""One whole training step beside the plain one, on a GPU: times, parts, memory, losses.

    python -m bench.train_step [--fp8] [--documents 2048] [--block 16]
    python -m bench.train_step --first      # seconds from the process's start to the end of its first step
    python -m bench.train_step --tiny       # on a CPU, to try the script

Both start from the same weights and see the same batches and anchors. Ours is fed from pinned memory, as a run is; the
plain one finds its batch on the GPU. Parts are sums of kernel times, as the profiler saw them.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.plain_step import Batch as PlainBatch
from bench.plain_step import PlainStep, Shape, random_batch
from dflash_offline.store import Batch, States
from dflash_offline.train.drafter import Drafter, DrafterSettings
from dflash_offline.train.flat import Flat
from dflash_offline.train.graphs import MemoryWatch
from dflash_offline.train.head import LmHead
from dflash_offline.train.inputs import Ends, Inputs, buffers_for
from dflash_offline.train.loss import LossSettings
from dflash_offline.train.optimizer import MasterAdamW
from dflash_offline.train.ranks import Ranks
from dflash_offline.train.step import Forward, TrainStep

RATE = 6e-5
PARTS = {
    "attention": ("_attend", "_queries", "_own", "_context", "flex_attention", "flex"),
    "loss rows": ("_hard_rows", "_soft_rows", "_slopes", "cross_entropy", "nll_loss", "softmax"),
    "norms, rotary, SwiGLU": ("_norm_", "_heads_", "_swiglu"),
    "quantising": ("_quantise", "_transpose"),
    "optimizer": ("_adamw", "_squares", "multi_tensor_apply"),
    "copies": ("Memcpy", "Memset", "CatArray", "copy_kernel"),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK", "cublas"),
}


def settings_of(shape: Shape) -> DrafterSettings:
    """The drafter's settings at a shape."""
    values: dict[str, Any] = {
        "layer_ids": list(range(shape.states)),
        "block_size": shape.block,
        "mask_token_id": shape.mask_token,
        "layer_types": ["sliding_attention"] * shape.sliding + ["full_attention"] * shape.full,
        "sliding_window": shape.window,
        "is_causal": shape.causal,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
        "rope_theta": shape.theta,
    }
    return DrafterSettings(**values)


def stored(batch: PlainBatch, device: torch.device) -> Batch:
    """A batch as the store's reader hands it over, in pinned memory for a GPU."""
    allocate = buffers_for(device) or (lambda shape, dtype: np.zeros(shape, dtype))
    bits = batch.states.cpu().view(torch.int16).numpy().view(np.uint16)
    values = allocate(bits.shape, np.dtype(np.uint16))
    values[...] = bits
    length = len(batch.tokens)
    return Batch(
        States(values), None, batch.tokens.cpu().numpy().astype(np.int32), batch.loss_mask.cpu().numpy(),
        batch.doc_start.cpu().numpy().astype(np.int32), [], length,
    )  # fmt: skip


class OurStep:
    """The package's step with the plain one's interface: a call makes one whole step."""

    def __init__(
        self,
        shape: Shape,
        drafter: Drafter,
        ends: Ends,
        batches: Sequence[Batch],
        rate: float,
        ranks: Ranks | None = None,
    ) -> None:
        self._batches, self._rate, self._count = batches, rate, 0
        device, dtype = ends.embedding.device, ends.embedding.dtype
        inputs = Inputs(batches[0], device, dtype)
        loss = LossSettings.model_validate({"gamma": shape.gamma})
        self.optimizer = MasterAdamW(Flat(drafter, accumulates=False), clip=1.0, weight_decay=0.0)
        head = LmHead(ends.lm_head, drafter.fp8)
        forward = Forward(drafter, ends.embedding, head, loss, inputs, shape.anchors, 0)
        self.step = TrainStep(forward, self.optimizer, ranks=ranks)
        self.reports: list[Any] = []

    def __call__(self) -> None:
        step = self.step
        step.load(self._batches[self._count % len(self._batches)], self._count)
        step.micro()
        self.reports.append(step.update(self._rate))
        step.sent()
        self._count += 1

    def losses(self, last: int) -> list[float]:
        """Of the last few steps, waited for."""
        return [report.read().numbers()["loss"] for report in self.reports[-last:]]


def timed(work: Callable[[], object], count: int) -> float:
    """Milliseconds a call, over `count` calls in a row."""
    if not torch.cuda.is_available():
        began = time.perf_counter()
        for _ in range(count):
            work()
        return (time.perf_counter() - began) * 1e3 / count
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    work()
    begin.record()
    for _ in range(count):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def parts(work: Callable[[], object], count: int = 2) -> dict[str, float]:
    """Milliseconds a call of each kind of kernel; what the GPU was idle for is not in."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            work()
        torch.cuda.synchronize()
    found: dict[str, float] = defaultdict(float)
    for event in profile.events() or []:
        if event.device_type != torch.profiler.DeviceType.CUDA or "HtoD" in event.name or "DtoH" in event.name:
            continue
        part = next((name for name, marks in PARTS.items() if any(mark in event.name for mark in marks)), "other")
        found[part] += event.device_time_total / 1e3 / count
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def kernels(work: Callable[[], object], most: int) -> list[tuple[str, float, int]]:
    """The kernels that take longest in one call: name, milliseconds, times run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    found = [(event.key, event.device_time_total / 1e3, event.count) for event in profile.key_averages()]
    return sorted(found, key=lambda item: -item[1])[:most]


def matrix_rate(seconds: float) -> tuple[float, float]:
    """TFLOP/s of an 8192^3 product in bf16: in a short burst, and once it has run for some seconds."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    flops = 2 * 8192**3 / 1e9
    time.sleep(2)
    burst = flops / timed(lambda: torch.mm(a, b, out=out), 10)
    timed(lambda: torch.mm(a, b, out=out), int(seconds * 700))
    return burst, flops / timed(lambda: torch.mm(a, b, out=out), 200)


def say(name: str, shape: Shape, ms: float, peak: float, found: dict[str, float]) -> None:
    rate = shape.flops() / ms / 1e9
    print(
        f"{name}: {ms:.1f} ms a step, {rate:.0f} TFLOP/s, {shape.tokens / ms:.1f} Ktok/s, peak {peak:.1f} GiB",
        flush=True,
    )
    if found:
        print("   " + ", ".join(f"{part} {value:.2f}" for part, value in found.items()), flush=True)


def compare(shape: Shape, device: torch.device, fp8: bool, steps: int, plain: bool) -> None:
    """Both steps, one after the other, in one run."""
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    batches = [random_batch(shape, device, seed) for seed in range(2)]
    times: dict[str, float] = {}
    losses: dict[str, list[float]] = {}

    def fresh() -> Drafter:
        drafter = Drafter.empty(settings_of(shape), shape.hidden, device, dtype)
        drafter.reset(0)
        return drafter

    def peak() -> float:
        return torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0

    def clean() -> None:
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def measure_plain(base: PlainStep) -> None:
        base.load(fresh().state_dict())
        clean()
        found: list[torch.Tensor] = []

        def one() -> None:
            found.append(base.micro(batches[len(found) % 2]))
            base.update(RATE)

        for _ in range(3):
            one()
        times["plain"] = timed(one, steps)
        losses["plain"] = [float(loss) for loss in found]
        say("plain", shape, times["plain"], peak(), parts(one) if on_gpu else {})

    both = PlainStep(shape, device, 0, dtype)
    ends = Ends(both.embedding, both.head)
    if plain:
        measure_plain(both)
    del both
    host = [stored(batch, device) for batch in batches]
    batches.clear()
    for name in ["ours, bf16"] + ["ours, fp8"] * fp8:
        clean()
        drafter = fresh()
        drafter.fp8 = name.endswith("fp8")
        clean()
        ours = OurStep(shape, drafter, ends, host, RATE)
        for _ in range(3):
            ours()
        watch = MemoryWatch(device)
        times[name] = timed(ours, steps)
        losses[name] = [report.read().numbers()["loss"] for report in ours.reports[-8:]]
        grown = watch.grown() or "no new segment, no cudaMalloc"
        say(name, shape, times[name], peak(), parts(ours) if on_gpu else {})
        print(f"   after three steps: {grown}", flush=True)
        if on_gpu:
            for kernel, ms, count in kernels(ours, 24):
                print(f"   {ms:8.3f} ms {count:4d} x {kernel[:100]}")
        del ours, drafter
    for name, found_losses in losses.items():
        print(f"last losses, {name}: " + " ".join(f"{loss:.4f}" for loss in found_losses[-8:]))
    if plain:
        print(
            "; ".join(f"{name} is {times['plain'] / ms:.2f} x plain" for name, ms in times.items() if name != "plain")
        )
    if on_gpu:
        burst, steady = matrix_rate(3)
        print(f"bf16 products of 8192^3: {burst:.0f} TFLOP/s in a burst, {steady:.0f} sustained")
        for name, ms in times.items():
            rate = shape.flops() / ms / 1e9
            print(f"{name}: {rate / steady:.3f} of the sustained rate, {rate / burst:.3f} of the burst")


def first(shape: Shape, device: torch.device) -> None:
    """Make and run one step; say how old the process is then. The batch's making is not counted."""
    dtype = torch.bfloat16
    drafter = Drafter.empty(settings_of(shape), shape.hidden, device, dtype)
    drafter.reset(0)
    drawn = age()
    embedding = torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=dtype)
    batch = stored(random_batch(shape, device, 0), device)
    made = age()
    ours = OurStep(shape, drafter, Ends(embedding, embedding), [batch], RATE)
    captured = age()
    ours()
    ours.losses(1)
    whole = age() - (made - drawn)
    print(f"{whole:.1f} s to the first step's end: {drawn:.1f} imports and weights, {captured - made:.1f} capture")


def age() -> float:
    """Seconds since this process began."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    with open("/proc/uptime") as file:
        return float(file.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, help="length of the documents")
    parser.add_argument("--block", type=int, help="slots of a block")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--fp8", action="store_true", help="also with products in fp8")
    parser.add_argument("--no-plain", action="store_true", help="ours alone")
    parser.add_argument(
        "--first", action="store_true", help="time to the first step, twice: kernels compiled, and cached"
    )
    parser.add_argument("--only-first", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, in sizes for it")
    arguments = parser.parse_args()
    shape = Shape.tiny() if arguments.tiny else Shape()
    if arguments.documents:
        shape = replace(shape, documents=arguments.documents)
    if arguments.block:
        shape = replace(shape, block=arguments.block)
    device = torch.device("cpu" if arguments.tiny else "cuda")
    if arguments.only_first:
        first(shape, device)
    elif arguments.first:
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("kernels compiled", "kernels cached"):
                print(kind + ": ", end="", flush=True)
                command = [sys.executable, "-m", "bench.train_step", "--only-first", *["--tiny"] * arguments.tiny]
                subprocess.run(command, check=True, env={**os.environ, "TRITON_CACHE_DIR": cache})
    else:
        compare(shape, device, arguments.fp8, arguments.steps, not arguments.no_plain)


if __name__ == "__main__":
    main()
