"""Milliseconds and TFLOP/s of a drafter step's matrix products, bf16 and fp8: one by one, and all of them for seconds.

    python -m bench.products [--rows 8192] [--chunk 1536] [--seconds 3] [--small]

Qwen3.6-27B's drafter and its target's LM head, random normal data (a chip is faster on zeros). `product` is the
training step's own, in fp8 with the quantising of what it multiplies; `bare` is torch.mm, or torch._scaled_mm of
matrices that are in fp8 already. Each line is the median of some calls timed on the GPU, printed as it is measured; a
case that fails prints its error instead. The sustained rate is that of a step's products, in the order of a step, head
included, over and over: what a step could at most reach on this chip at the clock that it holds. `--small` runs
everything on small matrices, on a CPU too, to see that it runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dflash_offline.train.kernels.products import product, scaled_product
from dflash_offline.train.kernels.quantise import E5M2, Rows, quantise, quantise_transposed

CHUNKS = (768, 1024, 1280, 1536, 1650, 1664, 1920, 2048)


@dataclass(frozen=True)
class Sizes:
    """What the products are made of."""

    rows: int = 8192
    hidden: int = 5120
    chosen: int = 5
    layers: int = 5
    queries: int = 4096
    keys: int = 1024
    mlp: int = 17408
    vocabulary: int = 248320
    head_rows: int = 7680
    chunk: int = 1536

    def cases(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each product."""
        return {
            "fc": (self.chosen * self.hidden, self.hidden),
            "context kv": (self.hidden, 2 * self.keys),
            "qkv": (self.hidden, self.queries + 2 * self.keys),
            "o": (self.queries, self.hidden),
            "gate_up": (self.hidden, 2 * self.mlp),
            "down": (self.mlp, self.hidden),
        }


SMALL = Sizes(32, 64, 2, 2, 64, 32, 96, 512, 24, 8)


def reason(error: Exception) -> str:
    """One line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:140] if lines else ''}"


class Bench:
    """Times calls on a device and prints a line each."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self.repeats = repeats

    def normal(self, rows: int, columns: int, size: float = 1.0) -> Tensor:
        """Random normal bf16."""
        return torch.randn(rows, columns, device=self.device, dtype=torch.bfloat16) * size

    def show(self, name: str, flops: float, prepare: Callable[[], Callable[[], Any]]) -> None:
        """Print the median time of the call that `prepare` makes, and its rate; or why it failed."""
        try:
            work = prepare()
            work()
            times = self._on_gpu(work) if self.device.type == "cuda" else self._on_cpu(work)
        except Exception as error:
            print(f"  {name:42s} failed: {reason(error)}", flush=True)
            return
        ms = statistics.median(times)
        print(f"  {name:42s} {ms:9.3f} ms {flops / ms / 1e9:8.1f} TFLOP/s", flush=True)

    def _on_gpu(self, work: Callable[[], Any]) -> list[float]:
        work()
        torch.cuda.synchronize()
        # While the GPU sleeps the host runs ahead, so that the GPU never waits for it in between.
        torch.cuda._sleep(20_000_000)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(self.repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(marks)]

    def _on_cpu(self, work: Callable[[], Any]) -> list[float]:
        times = []
        for _ in range(self.repeats):
            began = time.perf_counter()
            work()
            times.append((time.perf_counter() - began) * 1000)
        return times


def backward(x: Tensor, weight: nn.Parameter, dy: Tensor, fp8: bool) -> Callable[[], None]:
    """Backward alone of a product, into whichever of x and weight needs a gradient."""
    out = product(x, [weight], fp8)

    def work() -> None:
        x.grad = None
        out.backward(dy, retain_graph=True)

    return work


def one_product(bench: Bench, name: str, rows: int, width: int, out: int) -> None:
    """A product of the drafter forward, into its input and into its weight."""
    flops = 2.0 * rows * width * out
    print(f"{name}: {rows} x {width} -> {out}", flush=True)
    x, dy = bench.normal(rows, width), bench.normal(rows, out)
    asking = x.detach().requires_grad_()
    frozen = nn.Parameter(bench.normal(out, width, width**-0.5), requires_grad=False)
    weight, wide = nn.Parameter(frozen.detach()), nn.Parameter(frozen.detach())
    weight.grad = torch.zeros_like(frozen)
    wide.grad_dtype = torch.float32
    wide.grad = torch.zeros_like(frozen, dtype=torch.float32)
    bench.show("bf16 forward  product", flops, lambda: lambda: product(x, [frozen]))
    bench.show("bf16 forward  bare", flops, lambda: lambda: torch.mm(x, frozen.T))
    bench.show("bf16 dx       product", flops, lambda: backward(asking, frozen, dy, False))
    bench.show("bf16 dx       bare", flops, lambda: lambda: torch.mm(dy, frozen))
    bench.show("bf16 dW       product, added", flops, lambda: backward(x, weight, dy, False))
    bench.show("bf16 dW       product, added to float32", flops, lambda: backward(x, wide, dy, False))
    bench.show("bf16 dW       bare, not added", flops, lambda: lambda: torch.mm(dy.T, x))
    bench.show("fp8  forward  product", flops, lambda: lambda: product(x, [frozen], fp8=True))
    bench.show("fp8  dx       product", flops, lambda: backward(asking, frozen, dy, True))

    def forward() -> Callable[[], Tensor]:
        a, b = quantise(x), quantise(frozen)
        return lambda: scaled_product(a, b, torch.bfloat16)

    def into_input() -> Callable[[], Tensor]:
        a, b = quantise(dy, E5M2), turned(frozen)
        return lambda: scaled_product(a, b, torch.bfloat16)

    bench.show("fp8  forward  bare", flops, forward)
    bench.show("fp8  dx       bare, e5m2 x e4m3", flops, into_input)


def turned(weight: Tensor) -> Rows:
    """A weight's transpose in e4m3 with one scale for all of it."""
    largest = quantise(weight).scales.amax()
    return Rows(quantise_transposed(weight, largest), largest.repeat(weight.shape[1]))


def logits(states: Tensor, head: Tensor) -> Tensor:
    """The head's product in float32."""
    return torch.mm(states, head.T, out_dtype=torch.float32) if states.is_cuda else states.float() @ head.float().T


def slopes_in(scores: Tensor) -> Tensor:
    """bf16 gradients in the first half of each row of float32 logits, where the loss leaves them."""
    return scores.view(torch.bfloat16)[:, : scores.shape[1]]


def head_products(bench: Bench, sizes: Sizes, chunks: Sequence[int]) -> None:
    """The head's two products for chunks of rows."""
    head = bench.normal(sizes.vocabulary, sizes.hidden, sizes.hidden**-0.5)
    straight, across = quantise(head), turned(head)
    for rows in chunks:
        print(f"head: {rows} x {sizes.hidden} -> {sizes.vocabulary}", flush=True)
        one_chunk(bench, rows, head, straight, across)


def one_chunk(bench: Bench, rows: int, head: Tensor, straight: Rows, across: Rows) -> None:
    """Logits in float32 of some rows, and from gradients that lie apart back to the states."""
    vocabulary, hidden = head.shape
    flops = 2.0 * rows * vocabulary * hidden
    states = bench.normal(rows, hidden)
    scores = torch.empty(rows, vocabulary, dtype=torch.float32, device=bench.device)
    slopes = slopes_in(scores)
    slopes.normal_()

    def forward() -> Callable[[], Tensor]:
        a = quantise(states)
        return lambda: scaled_product(a, straight, torch.float32)

    def back() -> Callable[[], Tensor]:
        a = quantise(slopes, E5M2)
        return lambda: scaled_product(a, across, torch.bfloat16)

    bench.show("bf16 logits", flops, lambda: lambda: logits(states, head))
    bench.show("bf16 back, rows apart", flops, lambda: lambda: torch.mm(slopes, head))
    bench.show("fp8  logits, bare", flops, forward)
    bench.show("fp8  back, bare, e5m2 x e4m3", flops, back)
    bench.show(
        "fp8  back, with quantising the gradients",
        flops,
        lambda: lambda: scaled_product(quantise(slopes, E5M2), across, torch.bfloat16),
    )


class Step:
    """A step's products in their order, each layer with weights and gradients of its own."""

    def __init__(self, bench: Bench, sizes: Sizes, fp8: bool) -> None:
        self.fp8 = fp8
        self.sizes = sizes
        cases = sizes.cases()
        names = ["fc"] + [name for name in cases if name != "fc"] * sizes.layers
        self.weights = [nn.Parameter(bench.normal(cases[n][1], cases[n][0], cases[n][0] ** -0.5)) for n in names]
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)
        self.inputs = {w: bench.normal(sizes.rows, w) for w in {width for width, _ in cases.values()}}
        self.slopes = {o: bench.normal(sizes.rows, o) for o in {out for _, out in cases.values()}}
        self.head = bench.normal(sizes.vocabulary, sizes.hidden, sizes.hidden**-0.5)
        self.straight, self.across = (quantise(self.head), turned(self.head)) if fp8 else (None, None)
        body = sum(6.0 * sizes.rows * weight.numel() for weight in self.weights)
        body -= 2.0 * sizes.rows * self.weights[0].numel()  # no gradient into the stored states
        self.flops = body + 4.0 * sizes.head_rows * self.head.numel()

    def __call__(self) -> None:
        """Once."""
        found = []
        for i, weight in enumerate(self.weights):
            x = self.inputs[weight.shape[1]].detach().requires_grad_(i > 0)
            found.append(product(x, [weight], self.fp8))
        for start in range(0, self.sizes.head_rows, self.sizes.chunk):
            self._head(self.inputs[self.sizes.hidden][start : min(start + self.sizes.chunk, self.sizes.head_rows)])
        while found:
            out = found.pop()
            out.backward(self.slopes[out.shape[1]])

    def _head(self, states: Tensor) -> None:
        if self.straight is None or self.across is None:
            torch.mm(slopes_in(logits(states, self.head)), self.head)
            return
        scores = scaled_product(quantise(states), self.straight, torch.float32)
        scaled_product(quantise(slopes_in(scores), E5M2), self.across, torch.bfloat16)


def sustained(bench: Bench, sizes: Sizes, fp8: bool, seconds: float) -> None:
    """The rate of whole steps over some seconds."""
    name = f"{'fp8 ' if fp8 else 'bf16'} products of a step"
    try:
        step = Step(bench, sizes, fp8)
        step()
        step()
        _wait(bench.device)
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            step()
            steps += 1
            if steps % 2 == 0:  # the host stays less than two steps ahead, so the clock is right and the GPU has work
                _wait(bench.device)
        _wait(bench.device)
        ms = (time.perf_counter() - began) / steps * 1000
    except Exception as error:
        print(f"{name}: failed: {reason(error)}", flush=True)
        return
    rate = step.flops / ms / 1e9
    print(f"{name}: {step.flops / 1e12:.1f} TFLOP, {ms:.1f} ms, {rate:.1f} TFLOP/s over {seconds:g} s", flush=True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192, help="rows of the drafter's products")
    parser.add_argument("--chunk", type=int, default=1536, help="rows of a chunk of the head in a step")
    parser.add_argument("--seconds", type=float, default=3.0, help="of the sustained rate, bf16 and fp8 each")
    parser.add_argument("--repeats", type=int, default=9, help="timed calls of a product")
    parser.add_argument("--small", action="store_true", help="small matrices, on a CPU too")
    arguments = parser.parse_args()
    if not arguments.small and not torch.cuda.is_available():
        parser.error("no GPU; --small runs on a CPU")
    bench = Bench(torch.device("cuda" if torch.cuda.is_available() else "cpu"), arguments.repeats)
    sizes = SMALL if arguments.small else Sizes(rows=arguments.rows, chunk=arguments.chunk)
    torch.manual_seed(0)
    for name, (width, out) in sizes.cases().items():
        one_product(bench, name, sizes.rows, width, out)
    for fp8 in (False, True):
        sustained(bench, sizes, fp8, arguments.seconds)
    head_products(bench, sizes, (8, 12) if arguments.small else CHUNKS)


if __name__ == "__main__":
    main()
