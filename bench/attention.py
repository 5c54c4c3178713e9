"""Anchor-block attention against flex_attention, a layer at the 27B drafter's shape: forward, backward, both.

    python -m bench.attention [--documents 2048 8192] [--no-flex] [--compile-seconds 100]
    python -m bench.attention --tiny  # on a CPU

The opponent is the best of several arrangements of compiled flex_attention, each with its mask made beforehand and its
inputs laid out as it likes them, neither of which is timed. Times are of the GPU alone (it is kept busy while the host
gets ahead), medians over rounds that take turns between two sets of inputs. The error is the largest relative error, in
norm, of the output and of the gradients of queries, keys and values, against attention made densely in fp32. On a CPU
flex_attention runs eagerly, forward only, and no time means anything.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dflash_offline.train.anchors import draw_anchors
from dflash_offline.train.attention import Blocks, anchor_attention

from .plain_step import Ranges, Shape, block_mask, compiled_flex, dense_attention, random_batch, ranges_of

SETS = 2
AHEAD = 20_000_000
"""Clock cycles (some 10 ms) that the GPU idles before each round, while the host starts the round's work."""


@dataclass(frozen=True)
class Arrangement:
    """One way of asking flex_attention.

    Attributes:
        name: what its row is called.
        heads: query heads that share keys `grouped` by flex itself (`enable_gqa`), met by `repeated` keys and values,
            or `folded` into the rows: then a head's rows are its A blocks of (query heads a group) x B.
        tile: rows and keys of the mask's blocks.
        head_major: inputs contiguous a head, instead of token by token as projections make them.
        options: `kernel_options`.
        backward: rows and keys of its two backward loops' tiles, stages and warps, where not flex's own choice.
        autotune: let the compiler time its candidates (for all that is not in `options`).
    """

    name: str
    heads: Literal["grouped", "repeated", "folded"] = "grouped"
    tile: tuple[int, int] = (128, 128)
    head_major: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    backward: tuple[int, int, int, int, int, int] | None = None
    autotune: bool = False

    def kernel_options(self) -> dict[str, Any] | None:
        """All that flex_attention is told."""
        if self.backward is None:
            return self.options or None
        names = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_stages", "num_warps")
        return self.options | {f"bwd_{name}": value for name, value in zip(names, self.backward, strict=True)}


SAFE = {"ROWS_GUARANTEED_SAFE": True, "PRESCALE_QK": True}
"""Every slot sees itself, so no row is empty; and queries may be scaled once, at a little more rounding."""
NARROW = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3}

ARRANGEMENTS = (
    Arrangement("flex as it comes"),
    Arrangement("keys repeated", "repeated"),
    Arrangement("backward 64x64", options=SAFE, backward=(64, 64, 64, 64, 3, 4)),
    Arrangement("heads folded into rows", "folded"),
    Arrangement("folded, backward 64x64", "folded", options=SAFE, backward=(64, 64, 64, 64, 3, 4)),
    Arrangement("autotuned", autotune=True),
    Arrangement("repeated, backward 64x64", "repeated", options=SAFE, backward=(64, 64, 64, 64, 3, 4)),
    Arrangement("mask of 64x64", tile=(64, 64), options=SAFE | NARROW, backward=(64, 64, 64, 64, 2, 4)),
    Arrangement("mask of 128x64", tile=(128, 64), options=SAFE, backward=(64, 64, 128, 64, 2, 8)),
    Arrangement("safe rows, prescaled", options=SAFE),
    Arrangement("forward 128x128, 2 stages", options=SAFE | {"fwd_BLOCK_N": 128, "fwd_num_stages": 2}),
    Arrangement("contiguous heads", head_major=True),
    Arrangement("backward 2 stages", options=SAFE, backward=(64, 128, 128, 64, 2, 8)),
    Arrangement("forward by tensor descriptors", options=SAFE | {"fwd_USE_TMA": True}),
)
"""In the order in which time for compiling them is spent."""


@dataclass(frozen=True)
class Inputs:
    """Attributes:
    packed: `[A, B, heads + 2 * kv_heads, d]`, queries, keys and values of the slots.
    context: `[T, 2 * kv_heads, d]`, keys and values of the context.
    slope: `[A, B, heads, d]`, the gradient of the output.
    """

    packed: Tensor
    context: Tensor
    slope: Tensor

    @classmethod
    def random(cls, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        """Normal values."""
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        slots, dim = (shape.anchors, shape.block), shape.head_dim
        packed = draw(*slots, shape.heads + 2 * shape.kv_heads, dim)
        return cls(packed, draw(shape.tokens, 2 * shape.kv_heads, dim), draw(*slots, shape.heads, dim))

    def query_key_value(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[A * B, heads, d]`, keys and values `[T + A * B, kv_heads, d]`."""
        heads, kv_heads = self.slope.shape[2], self.context.shape[1] // 2
        query, key, value = self.packed.flatten(0, 1).split([heads, kv_heads, kv_heads], 1)
        context_key, context_value = self.context.split(kv_heads, 1)
        return query.contiguous(), torch.cat([context_key, key]), torch.cat([context_value, value])


Found = tuple[Tensor, Tensor, Tensor, Tensor]
"""Output and gradient of the queries `[A * B, heads, d]`, gradients of keys and values `[T + A * B, kv_heads, d]`."""


@dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes:
        run: leaves to output.
        leaves, slopes: for each set of inputs, what is differentiated, and the gradient of the output.
        common: output and gradients of the leaves to the form that all share.
    """

    run: Callable[..., Tensor]
    leaves: list[tuple[Tensor, ...]]
    slopes: list[Tensor]
    common: Callable[[Tensor, tuple[Tensor, ...]], Found]

    def once(self, number: int = 0) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output and gradients of the leaves for one set of inputs."""
        out = self.run(*self.leaves[number])
        return out, torch.autograd.grad(out, self.leaves[number], self.slopes[number])


def ours(sets: list[Inputs], blocks: Blocks, window: int | None, causal: bool) -> Contender:
    """The package's own attention."""
    heads = sets[0].slope.shape[2]

    def common(out: Tensor, gradients: tuple[Tensor, ...]) -> Found:
        packed, context = gradients
        return out.flatten(0, 1), *Inputs(packed, context, out).query_key_value()

    return Contender(
        lambda packed, context: anchor_attention(packed, context, blocks, heads, window, causal),
        [(x.packed.clone().requires_grad_(), x.context.clone().requires_grad_()) for x in sets],
        [x.slope for x in sets],
        common,
    )


def with_flex(
    arrangement: Arrangement, flex: Callable[..., Tensor], sets: list[Inputs], ranges: Ranges, shape: Shape
) -> Contender:
    """flex_attention in one arrangement; `flex` is its compiled form."""
    share, folded = shape.heads // shape.kv_heads, arrangement.heads == "folded"
    split = (shape.anchors, shape.block, shape.kv_heads, share, shape.head_dim)

    def rows_in(x: Tensor) -> Tensor:
        """`[A * B, heads, d]` to `[1, heads, rows, d]`."""
        if folded:
            return x.view(split).permute(2, 0, 3, 1, 4).reshape(1, shape.kv_heads, -1, shape.head_dim)
        return keys_in(x)

    def rows_out(x: Tensor) -> Tensor:
        if not folded:
            return x[0].transpose(0, 1)
        apart = x.reshape(shape.kv_heads, shape.anchors, share, shape.block, shape.head_dim)
        return apart.permute(1, 3, 0, 2, 4).reshape(-1, shape.heads, shape.head_dim)

    def keys_in(x: Tensor) -> Tensor:
        x = x.transpose(0, 1)[None]
        return x.contiguous() if arrangement.head_major else x

    def leaves(inputs: Inputs) -> tuple[Tensor, ...]:
        query, key, value = inputs.query_key_value()
        return tuple(x.detach().requires_grad_() for x in (rows_in(query), keys_in(key), keys_in(value)))

    def common(out: Tensor, gradients: tuple[Tensor, ...]) -> Found:
        query, key, value = gradients
        return rows_out(out), rows_out(query), key[0].transpose(0, 1), value[0].transpose(0, 1)

    if folded:
        parts = (ranges.low, ranges.high, ranges.own_low, ranges.own_high)
        each = (shape.anchors, share, shape.block)
        ranges = Ranges(*(part.view(-1, 1, shape.block).expand(each).flatten().contiguous() for part in parts))
    mask = block_mask(ranges, shape.tokens + shape.anchors * shape.block, arrangement.tile)
    options = arrangement.kernel_options()

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if arrangement.heads == "repeated":
            key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
        grouped = arrangement.heads == "grouped" and share > 1
        return flex(query, key, value, block_mask=mask, enable_gqa=grouped, kernel_options=options)

    slopes = [rows_in(x.slope.flatten(0, 1)) for x in sets]
    return Contender(run, [leaves(x) for x in sets], slopes, common)


def exact(inputs: Inputs, ranges: Ranges) -> Found:
    """What all must find, made densely in fp32, one head of keys at a time."""
    query, key, value = (x.transpose(0, 1)[None].float() for x in inputs.query_key_value())
    slope = inputs.slope.flatten(0, 1).transpose(0, 1)[None].float()
    kv_heads = key.shape[1]
    share = query.shape[1] // kv_heads
    visible = ranges.visible(key.shape[2])
    found = []
    for head in range(kv_heads):
        mine = slice(head * share, (head + 1) * share)
        leaves = [
            x.clone().requires_grad_() for x in (query[:, mine], key[:, head : head + 1], value[:, head : head + 1])
        ]
        out = dense_attention(leaves[0], leaves[1], leaves[2], visible)
        found.append((out.detach(), *torch.autograd.grad(out, leaves, slope[:, mine])))
    out, *gradients = (torch.cat(parts, 1)[0].transpose(0, 1) for parts in zip(*found, strict=True))
    return out, gradients[0], gradients[1], gradients[2]


def error(found: Found, true: Found) -> float:
    """Largest relative error in norm; NaN if anything is."""
    each = [(f.float() - t).norm() / t.norm() for f, t in zip(found, true, strict=True)]
    return torch.stack(each).max().item()


@contextmanager
def backward_table(backward: tuple[int, int, int, int, int, int] | None) -> Iterator[None]:
    """Put tiles where flex_attention looks up its own: it refuses masks that its own tiles do not divide, whatever
    `kernel_options` say."""
    if backward is None:
        yield
        return
    from torch._inductor.choices import InductorChoices

    names = ("block_m1", "block_n1", "block_m2", "block_n2", "num_stages", "num_warps")
    row = SimpleNamespace(**dict(zip(names, backward, strict=True)))

    def table(*_: Any, **__: Any) -> list[SimpleNamespace]:
        return [row]

    with mock.patch.object(InductorChoices, "get_flex_attention_bwd_configs", table):
        yield


def eager_flex(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    """For a CPU: flex_attention's output as it is there, with the gradient of dense attention, for it has none."""
    with torch.no_grad():
        out = flex_attention(query.detach(), key.detach(), value.detach(), **how)
        assert isinstance(out, Tensor)
    mask = how["block_mask"]
    row, place = torch.arange(query.shape[2]), torch.arange(key.shape[2])
    visible = mask.mask_mod(None, None, row[:, None], place)
    dense = dense_attention(query, key, value, visible)
    return dense + (out - dense).detach()


def flex_of(arrangement: Arrangement, device: torch.device) -> Callable[..., Tensor]:
    """What runs an arrangement."""
    if device.type == "cpu":
        return eager_flex
    return compiled_flex(**({"mode": "max-autotune-no-cudagraphs"} if arrangement.autotune else {}))


def timed(contender: Contender, rounds: int) -> tuple[float, float, float]:
    """Median milliseconds forward, backward and both, warm."""
    times = []
    for number in range(rounds + 3):
        leaves, slope = contender.leaves[number % SETS], contender.slopes[number % SETS]
        if slope.is_cuda:
            begin, between, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            torch.cuda._sleep(AHEAD)
            begin.record()
            out = contender.run(*leaves)
            between.record()
            torch.autograd.grad(out, leaves, slope)
            end.record()
            torch.cuda.synchronize()
            times.append((begin.elapsed_time(between), between.elapsed_time(end), begin.elapsed_time(end)))
        else:
            began = time.perf_counter()
            out = contender.run(*leaves)
            half = time.perf_counter()
            torch.autograd.grad(out, leaves, slope)
            done = time.perf_counter()
            times.append(tuple(1000 * t for t in (half - began, done - half, done - began)))
        del out
    forward, backward, both = (statistics.median(column) for column in zip(*times[3:], strict=True))
    return forward, backward, both


class Bench:
    """Runs all contenders over cases; an arrangement that failed, or for which no time was left, is not tried again.

    Args:
        device: where.
        dtype: of the inputs.
        rounds: rounds that are timed.
        flex: whether flex_attention takes part.
        compile_seconds: no further arrangement is compiled once compiling has taken this long.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, rounds: int, flex: bool, compile_seconds: float):
        self._device, self._dtype, self._rounds = device, dtype, rounds
        self._arrangements = ARRANGEMENTS if flex else ()
        self._flex: dict[str, Callable[..., Tensor] | None] = {}
        self._left = compile_seconds

    def case(self, shape: Shape, window: int | None) -> None:
        """One shape and kind of layer: a row each, as measured, then the ratio."""
        batch = random_batch(replace(shape, states=1, hidden=1), self._device, 0)
        number = torch.zeros((), dtype=torch.int64, device=self._device)
        anchors = draw_anchors(batch.loss_mask, batch.doc_start, 0, number, shape.anchors)
        ranges = ranges_of(anchors, batch.doc_start, shape.block, window, shape.causal)
        sets = [Inputs.random(shape, self._device, self._dtype, seed) for seed in range(SETS)]
        seen = (ranges.high - ranges.low + ranges.own_high - ranges.own_low).sum().item()
        work = 2 * seen * shape.heads * shape.head_dim / 1e12
        kind = "full" if window is None else f"window {window}, {'causal' if shape.causal else 'both ways'}"
        print(
            f"\n{kind}, documents of {shape.documents}: {2 * work:.3f} TFLOP of products inside the mask forward, "
            f"{5 * work:.3f} backward\n"
            f"{'':36}{'first':>8}{'forward':>9}{'backward':>9}{'both':>9}{'TFLOP/s':>9}{'error':>10}",
            flush=True,
        )
        true = exact(sets[0], ranges)
        own = self._row(
            "ours", lambda: ours(sets, Blocks.of(anchors, batch.doc_start), window, shape.causal), true, 7 * work
        )
        rows = []
        for arrangement in self._arrangements:
            name = arrangement.name
            fresh = name not in self._flex
            if fresh and self._left <= 0:
                print(f"{name:36} left out: no time left for compiling", flush=True)
                continue
            flex = flex_of(arrangement, self._device) if fresh else self._flex[name]
            if flex is None:
                continue
            began = time.perf_counter()
            with backward_table(arrangement.backward):
                row = self._row(
                    name, lambda a=arrangement, f=flex: with_flex(a, f, sets, ranges, shape), true, 7 * work
                )
            if fresh:
                self._left -= time.perf_counter() - began
            self._flex[name] = None if row is None else flex
            if row is not None:
                rows.append((row, name))
        if own is not None and rows:
            (_, _, best), name = min(rows, key=lambda row: row[0][2])
            mixed = min(row[0][0] for row in rows) + min(row[0][1] for row in rows)
            print(
                f"ours is {best / own[2]:.2f} times as fast as the best ({name}), "
                f"{mixed / own[2]:.2f} times as the fastest forward and the fastest backward put together",
                flush=True,
            )

    def _row(
        self, name: str, make: Callable[[], Contender], true: Found, work: float
    ) -> tuple[float, float, float] | None:
        """Check and time one contender; what goes wrong becomes its row."""
        try:
            began = time.perf_counter()
            contender = make()
            out, gradients = contender.once()
            wrong = error(contender.common(out, gradients), true)
            first = time.perf_counter() - began
            del out, gradients
            times = timed(contender, self._rounds)
        except Exception as problem:
            text = " ".join(str(problem).split())
            print(f"{name:36} failed: {type(problem).__name__}: {text[:300]}", flush=True)
            return None
        good = wrong < (2e-2 if self._dtype == torch.bfloat16 else 1e-4)
        rate = work / times[2] * 1000
        print(
            f"{name:36}{first:7.1f}s{times[0]:9.3f}{times[1]:9.3f}{times[2]:9.3f}{rate:9.0f}{wrong:10.1e}"
            + ("" if good else "  WRONG, not counted"),
            flush=True,
        )
        return times if good else None


def check_masks(shape: Shape, window: int | None) -> None:
    """That our way of making flex_attention's mask gives what `create_block_mask` gives, on small sizes."""
    batch = random_batch(shape, "cpu", 0)
    number = torch.zeros((), dtype=torch.int64)
    anchors = draw_anchors(batch.loss_mask, batch.doc_start, 0, number, shape.anchors)
    ranges = ranges_of(anchors, batch.doc_start, shape.block, window, shape.causal)
    rows, keys = shape.anchors * shape.block, shape.tokens + shape.anchors * shape.block
    for tile in ((16, 16), (8, 4), (128, 128)):
        mine = block_mask(ranges, keys, tile)
        theirs = create_block_mask(mine.mask_mod, None, None, rows, keys, device="cpu", BLOCK_SIZE=tile)
        for one, other in zip(mine.as_tuple(False), theirs.as_tuple(False), strict=True):
            if isinstance(one, Tensor) and not (isinstance(other, Tensor) and torch.equal(one, other)):
                raise SystemExit(f"the mask in tiles of {tile} is not create_block_mask's")
    print(f"masks equal create_block_mask's (window {window})", flush=True)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", help="lengths of documents")
    parser.add_argument("--flex", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile-seconds", type=float, default=100, help="for all arrangements together")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, in sizes for it")
    arguments = parser.parse_args()
    shape = Shape.tiny() if arguments.tiny else Shape()
    device = torch.device("cpu" if arguments.tiny else "cuda")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    bench = Bench(device, dtype, arguments.rounds, arguments.flex, arguments.compile_seconds)
    name = "CPU" if device.type == "cpu" else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}; milliseconds a layer; {shape}", flush=True)
    if device.type == "cpu":
        for window in (shape.window, None):
            check_masks(shape, window)
    for documents in arguments.documents or ([32, 64] if arguments.tiny else [2048, 8192]):
        for window in (shape.window, None):
            bench.case(replace(shape, documents=documents), window)


if __name__ == "__main__":
    main()
