"""The fused LM head and loss: its time and memory beside plain chunked recomputation and the matrix products alone.

    python -m bench.loss
    python -m bench.loss --rows 1280 1536 1664 --soft-rows 640 768 832
    python -m bench.loss --stages 1 2 3 4 --tiles 1024 2048 4096
    python -m bench.loss --blocks 6 --block 4 --vocabulary 96 --width 32 --rows 9 --soft-rows 6      # on a CPU

Forward with gradient, all in one run: hard cross entropy, soft terms (KL with expected_length), and for each the
products that it must do, in the same chunks (two a chunk, a third for the target's logits), with the LM head in bf16
and in fp8, and in fp8 with sums over the vocabulary in the tensor cores alone (`FAST_BACK`). On a GPU times are medians
of CUDA events after a warm-up, and memory is the peak above what was there before; on a CPU no number means much.
With --stages (`STAGES` of kernels/loss_rows.py) or --tiles (`TILE` there) the kernels that read rows are measured on
one chunk for each; those that write gradients always.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dflash_offline.train import head as head_module
from dflash_offline.train import loss as loss_module
from dflash_offline.train.head import LmHead
from dflash_offline.train.kernels import loss_rows
from dflash_offline.train.kernels.loss_gradient import CodedSlopes, coded_slopes, slopes
from dflash_offline.train.kernels.loss_rows import hard_rows, soft_rows
from dflash_offline.train.kernels.quantise import E5M2, Rows
from dflash_offline.train.loss import LossSettings, TargetRows, block_loss, default_gamma, slot_weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
HARD = LossSettings.model_validate({})
SOFT = LossSettings.model_validate({"cross_entropy": 0, "kl": 1, "expected_length": 1})


def measured(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median milliseconds of a call, and the GiB that it needs beside what is there."""
    for _ in range(2):
        work()
    if DEVICE.type == "cpu":
        began = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - began), 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times), (torch.cuda.max_memory_allocated() - before) / 2**30


def recomputed(hidden: Tensor, lm_head: Tensor, labels: Tensor, weights: Tensor, rows: int) -> Tensor:
    """The gradient of hard cross entropy as plain torch makes it without keeping logits."""

    def part(states: Tensor, label: Tensor, weight: Tensor) -> Tensor:
        return (weight * F.cross_entropy((states @ lm_head.T).float(), label, reduction="none")).sum()

    total = hidden.new_zeros((), dtype=torch.float32)
    step = max(1, rows // labels.shape[1])
    for first in range(0, len(hidden), step):
        chunk = slice(first, first + step)
        label = labels[chunk].reshape(-1)
        weight = weights.expand(labels.shape)[chunk].reshape(-1)
        states = hidden[chunk, 1:].reshape(len(label), -1)
        total = total + checkpoint(part, states, label, weight, use_reentrant=False)
    return torch.autograd.grad(total, hidden)[0]


def products(head: LmHead, count: int, rows: int, slots: int, soft: bool) -> Callable[[], object]:
    """The matrix products of `count` blocks alone, in chunks of so many rows."""
    step = min(count, max(1, rows // slots))
    vocabulary, width = head.weight.shape
    states = torch.randn(step * slots, width, device=DEVICE, dtype=DTYPE)
    out = torch.empty(step * slots, vocabulary, device=DEVICE)
    # As the loss has it: each row in the first half, or in fp8 the first quarter, of an fp32 row's bytes.
    kind = E5M2 if head.fp8 else DTYPE
    slope = torch.empty_like(out).view(kind)[:, :vocabulary]
    for row in slope:
        row.copy_(torch.randn(vocabulary, device=DEVICE))
    ones, labels = torch.ones(len(slope), device=DEVICE), torch.zeros(len(slope), dtype=torch.int64, device=DEVICE)

    def slopes_of(n: int) -> Tensor | CodedSlopes:
        return CodedSlopes(Rows(slope[:n], ones[:n]), labels[:n], ones[:n]) if head.fp8 else slope[:n]

    def work() -> None:
        for first in range(0, count, step):
            n = min(step, count - first) * slots
            for _ in range(1 + soft):
                head.logits(states[:n], out[:n])
            head.back(slopes_of(n))

    return work


def kernels(rows: int, vocabulary: int, stages: list[int], sizes: list[int], rounds: int) -> Table:
    """What is done to a chunk's rows, one kernel at a time: its time, and what it reads and writes a second."""
    logits, beside = torch.randn(2, rows, vocabulary, device=DEVICE)
    labels = torch.randint(vocabulary, (rows,), device=DEVICE)
    weights = torch.rand(3, rows, device=DEVICE)
    table = Table("", "stages", "tile", "ms", "TB/s", title=f"{rows} rows of {vocabulary}", title_justify="left")

    def row(title: str, moved: int, work: Callable[[], object], *said: int) -> None:
        spent, _ = measured(work, rounds)
        table.add_row(title, *(map(str, said) if said else ("", "")), f"{spent:.3f}", f"{moved / spent / 1e9:.2f}")

    size = logits.numel()
    hard = hard_rows(logits, labels)
    before = loss_rows.STAGES, loss_rows.TILE
    for loss_rows.STAGES in stages:
        for loss_rows.TILE in sizes:
            said = loss_rows.STAGES, loss_rows.TILE
            row("hard", 4 * size, lambda: hard_rows(logits, labels), *said)
            # The target's rows are read for their norms first.
            row("soft", 12 * size, lambda: soft_rows(logits, beside, labels, 1.0, hard), *said)
    loss_rows.STAGES, loss_rows.TILE = before
    # Over the logits: from the second time on they are no logits, which costs the same.
    row("gradient", 6 * size, lambda: slopes(logits, labels, hard.log_norm, None, weights, torch.bfloat16))
    row("gradient, fp8", 5 * size, lambda: coded_slopes(logits, labels, hard.log_norm, None, weights))
    return table


def fast_sums(head: LmHead) -> str:
    """How far fast sums over the vocabulary are from exact ones, of softmax gradients without their labels."""
    logits = 3 * torch.randn(256, head.weight.shape[0], device=DEVICE)
    labels = torch.zeros(256, dtype=torch.int64, device=DEVICE)
    made = coded_slopes(logits, labels, logits.logsumexp(1), None, torch.ones(3, 256, device=DEVICE))
    made.own.zero_()
    found = []
    for head_module.FAST_BACK in (True, False):
        found.append(head.back(made).double())
    fast, exact = found
    share, length = float((fast - exact).norm() / exact.norm()), float(fast.norm() / exact.norm())
    return f"fast sums over the vocabulary: {share:.1e} of their norm from exact ones, {length:.4f} as long"


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=248_320)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--rows", type=int, nargs="+", default=[loss_module.CHUNK_ROWS[DEVICE.type]])
    parser.add_argument("--soft-rows", type=int, nargs="+", default=[loss_module.SOFT_CHUNK_ROWS[DEVICE.type]])
    parser.add_argument("--plain-rows", type=int, default=2048)
    parser.add_argument("--stages", type=int, nargs="+", default=[loss_rows.STAGES])
    parser.add_argument("--tiles", type=int, nargs="+", default=[loss_rows.TILE])
    parser.add_argument("--rounds", type=int, default=10)
    said = parser.parse_args()

    torch.manual_seed(0)
    slots = said.blocks, said.block - 1
    hidden = torch.randn(said.blocks, said.block, said.width, device=DEVICE, dtype=DTYPE).requires_grad_()
    weight = torch.randn(said.vocabulary, said.width, device=DEVICE, dtype=DTYPE) * 0.02
    plain_head, fp8_head = LmHead(weight), LmHead(weight, fp8=True)
    labels = torch.randint(said.vocabulary, slots, device=DEVICE)
    mask = torch.ones(slots, dtype=torch.bool, device=DEVICE)
    final = torch.randn(8192, said.width, device=DEVICE, dtype=DTYPE)
    target = TargetRows(final, torch.randint(len(final), slots, device=DEVICE))
    weights = slot_weights(said.block, default_gamma(said.block), DEVICE)
    teraflop = 2 * labels.numel() * said.vocabulary * said.width / 1e12

    def loss(settings: LossSettings, head: LmHead) -> Callable[[], Tensor]:
        def work() -> Tensor:
            found = block_loss(hidden, head, labels, mask, settings, target)
            return torch.autograd.grad(found.numerator, hidden)[0]

        return work

    shape = f"{said.blocks} blocks of {said.block}, vocabulary {said.vocabulary}, hidden {said.width}"
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    columns = "", "rows", "ms", "TFLOP/s", "GiB", "to products", "plain to it"
    table = Table(*columns, title=f"{shape}, {DTYPE}, {name}", title_justify="left")

    def again() -> Tensor:
        return recomputed(hidden, weight, labels, weights, said.plain_rows)

    plain, memory = measured(again, said.rounds)
    rate = f"{3e3 * teraflop / plain:.0f}"  # three products: the logits are made twice
    table.add_row("plain, recomputed", str(said.plain_rows), f"{plain:.2f}", rate, f"{memory:.2f}")
    theirs, apart = again().float(), []
    for title, settings, head, fast, rows_of, sizes in (
        ("hard", HARD, plain_head, False, loss_module.CHUNK_ROWS, said.rows),
        ("hard, fp8", HARD, fp8_head, False, loss_module.CHUNK_ROWS, said.rows),
        ("hard, fp8, fast sums", HARD, fp8_head, True, loss_module.CHUNK_ROWS, said.rows),
        ("soft", SOFT, plain_head, False, loss_module.SOFT_CHUNK_ROWS, said.soft_rows),
        ("soft, fp8", SOFT, fp8_head, False, loss_module.SOFT_CHUNK_ROWS, said.soft_rows),
    ):
        soft = settings.needs_final
        head_module.FAST_BACK = fast
        for rows in sizes:
            rows_of[DEVICE.type] = rows
            alone, _ = measured(products(head, said.blocks, rows, said.block - 1, soft), said.rounds)
            ours, memory = measured(loss(settings, head), said.rounds)
            rate = (2 + soft) * 1e3 * teraflop
            table.add_row(f"{title}: products", str(rows), f"{alone:.2f}", f"{rate / alone:.0f}")
            table.add_row(
                title, str(rows), f"{ours:.2f}", f"{rate / ours:.0f}", f"{memory:.2f}", f"{ours / alone:.3f}",
                "" if soft else f"{plain / ours:.2f}",
            )  # fmt: skip
        if not soft:
            ours = loss(settings, head)().float()
            share, length = float((ours - theirs).norm() / theirs.norm()), float(ours.norm() / theirs.norm())
            apart.append(f"{title}: gradient {share:.1e} of its norm from the plain one, {length:.4f} as long")
    console = Console(highlight=False)
    console.print(table)
    console.print(kernels(said.rows[0], said.vocabulary, said.stages, said.tiles, said.rounds))
    console.print("\n".join([*apart, fast_sums(fp8_head)]), soft_wrap=True)


if __name__ == "__main__":
    main()
