"""The loss's kernels against their references, and the loss made with them against its formulas in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses import SETTINGS, assert_exact, assert_near_in_fp8, case, named
from torch import Tensor

from dflash_offline.train import loss as loss_module
from dflash_offline.train.kernels import loss_gradient, loss_rows
from dflash_offline.train.kernels.launch import fused
from dflash_offline.train.kernels.loss_gradient import (
    coded_slopes_kernel,
    coded_slopes_reference,
    slopes,
    slopes_reference,
)
from dflash_offline.train.kernels.loss_rows import hard_rows, hard_rows_reference, soft_rows, soft_rows_reference
from dflash_offline.train.kernels.quantise import E5M2
from dflash_offline.train.loss import LossSettings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="no GPU, and Triton's interpreter knows no fp8")
WIDTHS = [1, 37, 64, 333]
"""Vocabularies: less than a tile, one tile, several with a rest (tiles are made 64 wide here)."""


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused(torch.empty(0, device=DEVICE))
    for module in (loss_rows, loss_gradient):
        monkeypatch.setattr(module, "TILE", 64)
    for rows in (loss_module.CHUNK_ROWS, loss_module.SOFT_CHUNK_ROWS):
        monkeypatch.setitem(rows, DEVICE, 9)


def _rows(count: int, width: int, seed: int = 0, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Two lots of logits, and labels of which some are to be left alone."""
    generator = torch.Generator().manual_seed(seed)
    logits, target = (spread * torch.randn(2, count, width, generator=generator)).to(DEVICE)
    labels = torch.randint(width, (count,), generator=generator)
    return logits, target, labels.where(torch.rand(count, generator=generator) < 0.7, -1).to(DEVICE)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [1.0, 0.6])
def test_statistics_are_those_of_the_reference(width: int, scale: float) -> None:
    logits, target, labels = _rows(5, width, width)
    found, true = hard_rows(logits, labels, scale), hard_rows_reference(logits, labels, scale)
    torch.testing.assert_close(found.log_norm, true.log_norm, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.best, true.best)
    assert torch.equal(found.chosen, true.chosen)
    soft = soft_rows(logits, target, labels, scale, hard_rows(logits, labels))
    exact = soft_rows_reference(
        logits.double(), target.double(), labels, scale, (logits.double() * scale).logsumexp(-1),
        (target.double() * scale).logsumexp(-1),
    )  # fmt: skip
    ours = torch.stack([soft.overlap, soft.divergence, soft.below])
    torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "row", [[1.0, 5.0, 5.0, 2.0], [-1e30] * 4, [0.0] * 130, list(range(-200, 0)), [2e4, -2e4] * 70]
)
def test_ties_and_extremes(row: list[float]) -> None:
    logits = torch.tensor([row], dtype=torch.float32, device=DEVICE)
    for order in (logits, logits.flip(1).contiguous()):
        found = hard_rows(order, torch.zeros(1, dtype=torch.int64, device=DEVICE))
        assert int(found.best) == int((order[0] == order.max()).nonzero()[0])
        assert float(found.log_norm) == pytest.approx(float(order.double().logsumexp(-1)), rel=1e-6)


def test_what_is_no_number_shows() -> None:
    logits = torch.zeros(3, 100, device=DEVICE)
    logits[0, 70], logits[1, 3], logits[2, 99] = math.nan, math.inf, math.nan
    found = hard_rows(logits, torch.tensor([1, 2, -1], device=DEVICE))
    assert [math.isfinite(x) for x in found.log_norm.tolist()] == [False, False, True]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [None, 1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slopes_are_those_of_the_reference(width: int, scale: float | None, dtype: torch.dtype) -> None:
    logits, target, labels = _rows(5, width, width)
    weights = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    hard = hard_rows(logits, labels)
    soft = None if scale is None else soft_rows(logits, target, labels, scale, hard)
    true = slopes_reference(logits, labels, hard.log_norm, soft, weights)
    found = slopes(logits, labels, hard.log_norm, soft, weights, dtype)
    assert found.dtype == dtype
    assert found.data_ptr() == logits.data_ptr()  # over the logits
    # The interpreter cuts bfloat16 off where a GPU rounds.
    assert float((found - true).norm()) <= (1e-5 if dtype == torch.float32 else 1e-2) * float(true.norm()) + 1e-6
    assert not found[labels < 0].any()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [None, 1.0, 0.6])
# Triton's interpreter knows float16 alone of the dtypes that round as codes do.
@pytest.mark.parametrize(
    ("kind", "step", "smallest"),
    [(torch.float16, 2**-10, 2**-24), pytest.param(E5M2, 2**-2, 2**-16, marks=on_cuda)],
    ids=["float16", "e5m2"],
)
def test_codes_are_those_of_the_reference(
    width: int, scale: float | None, kind: torch.dtype, step: float, smallest: float
) -> None:
    logits, target, labels = _rows(5, width, width)
    labels[0] = width // 2
    weights = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    weights[:, 1] = 0
    hard = hard_rows(logits, labels)
    soft = None if scale is None else soft_rows(logits, target, labels, scale, hard)
    true = coded_slopes_reference(logits, labels, hard.log_norm, soft, weights, kind)
    found = coded_slopes_kernel(logits, labels, hard.log_norm, soft, weights, kind)
    assert found.rows.codes.dtype == kind
    assert found.rows.codes.data_ptr() == logits.data_ptr()  # over the logits
    assert torch.equal(found.rows.scales, true.rows.scales)
    torch.testing.assert_close(found.own, true.own, rtol=1e-5, atol=1e-6)
    # What rounding in fp32 puts on the other side of a border is one code off; differences of q and p are cruder.
    ours, theirs = found.rows.codes.float(), true.rows.codes.float()
    assert ((ours - theirs).abs() <= step * theirs.abs() + 1e-6 * torch.finfo(kind).max + smallest).all()
    assert (ours != theirs).float().mean() <= 0.02
    for wholly in (labels < 0, ~weights.any(0)):
        assert not ours[wholly].any()
        assert not found.own[wholly].any()


@on_cuda
@pytest.mark.parametrize("said", SETTINGS, ids=named)
def test_in_fp8_on_a_gpu(said: LossSettings) -> None:
    some = case(40, 8, 4000, width=64, device=DEVICE, dtype=torch.bfloat16)
    some.lm_head *= 0.25
    assert_near_in_fp8(some, said, 2e-3)


@pytest.mark.parametrize("said", [SETTINGS[0], SETTINGS[-1]], ids=named)
def test_in_fp8_with_kernels_around(said: LossSettings) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    assert_near_in_fp8(case(5, 5, 80, device=DEVICE, dtype=dtype), said, 2e-3)


@on_cuda
@pytest.mark.parametrize("said", [SETTINGS[0], SETTINGS[-1]], ids=named)
def test_in_fp8_over_a_whole_vocabulary(said: LossSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    some = case(12, 8, 248_320, width=256, device=DEVICE, dtype=torch.bfloat16)
    some.lm_head *= 0.2
    found, plain = some.loss(said, fp8=True), some.loss(said)
    ours, theirs = (torch.autograd.grad(x.numerator, some.hidden)[0].float() for x in (found, plain))
    assert found.numerator.item() == pytest.approx(plain.numerator.item(), rel=0.02)
    assert float((ours - theirs).norm()) < 0.25 * float(theirs.norm())


@on_cuda
def test_reading_ahead_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    logits, target, labels = _rows(40, 50_001)
    seen = []
    for stages in (1, 2, 3, 4):
        monkeypatch.setattr(loss_rows, "STAGES", stages)
        hard = hard_rows(logits, labels)
        soft = soft_rows(logits, target, labels, 1.0, hard)
        seen.append((hard.log_norm, hard.best, hard.chosen, soft.overlap, soft.divergence, soft.below))
    for other in seen[1:]:
        torch.testing.assert_close(other, seen[0], rtol=1e-5, atol=1e-6)  # lanes may be added in another order
        assert torch.equal(other[1], seen[0][1])


@pytest.mark.skipif(DEVICE == "cpu", reason="many threads of one program, and the order in which they store")
def test_a_long_row_lies_over_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    logits, target, labels = _rows(300, 248_320)
    weights = torch.rand(3, 300, device=DEVICE)
    weights[2] = 0  # where q is p but for rounding, either may be the smaller, and this term's slope jumps
    hard = hard_rows(logits, labels)
    for soft in (None, soft_rows(logits, target, labels, 1.0, hard)):
        true = slopes_reference(logits, labels, hard.log_norm, soft, weights).bfloat16()
        found = slopes(logits.clone(), labels, hard.log_norm, soft, weights, torch.bfloat16)
        # Of two ways to the same number in fp32 some are rounded apart; a number out of place would be quite another.
        torch.testing.assert_close(found, true, rtol=0.02, atol=1e-9)
        coded = coded_slopes_reference(logits, labels, hard.log_norm, soft, weights)
        made = coded_slopes_kernel(logits.clone(), labels, hard.log_norm, soft, weights)
        codes, expected = made.rows.codes.float(), coded.rows.codes.float()
        torch.testing.assert_close(codes, expected, rtol=0.26, atol=2**-16)
        assert float((codes != expected).float().mean()) < 1e-3
        torch.testing.assert_close(made.own, coded.own, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs more memory than a CPU's test should take")
def test_rows_beyond_two_to_the_31_numbers() -> None:
    logits = torch.zeros(9000, 248_320, device=DEVICE)
    logits[8999, 248_319] = 9
    labels = torch.full((9000,), -1, device=DEVICE)
    labels[8999] = 248_319
    found = hard_rows(logits, labels)
    assert int(found.best[8999]) == 248_319
    assert float(found.chosen[8999]) == 9
    slope = slopes(logits, labels, found.log_norm, None, torch.ones(3, 9000, device=DEVICE), torch.bfloat16)
    assert float(slope[8999, 248_319]) == pytest.approx(math.exp(9) / (math.exp(9) + 248_319) - 1, rel=1e-2)
    assert float(slope[8999].float().sum()) == pytest.approx(0, abs=1e-2)


@pytest.mark.parametrize("said", SETTINGS, ids=named)
def test_the_loss_with_kernels_is_that_of_the_formulas(said: LossSettings) -> None:
    assert_exact(case(5, 5, 70, device=DEVICE), said)


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 4), st.integers(2, 5), st.integers(2, 90), st.sampled_from(SETTINGS), st.integers(0, 99))
def test_any_shape(blocks: int, block: int, vocabulary: int, said: LossSettings, seed: int) -> None:
    assert_exact(case(blocks, block, vocabulary, seed=seed, device=DEVICE), said)


@pytest.mark.parametrize("said", [SETTINGS[0], SETTINGS[-1]], ids=named)
def test_nothing_supervised_is_nothing(said: LossSettings) -> None:
    some = case(3, 4, 70, supervised=False, device=DEVICE)
    found = some.loss(said)
    (gradient,) = torch.autograd.grad(found.numerator, some.hidden)
    assert found.numerator.item() == found.denominator.item() == 0
    assert not gradient.any()


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter cuts bfloat16 off where a GPU rounds")
@pytest.mark.parametrize("said", SETTINGS, ids=named)
def test_in_bfloat16(said: LossSettings) -> None:
    assert_exact(case(40, 8, 4000, width=64, device=DEVICE, dtype=torch.bfloat16), said, 1e-2)


@pytest.mark.skipif(DEVICE == "cpu", reason="a graph of CUDA")
@pytest.mark.parametrize("fp8", [False, True])
def test_in_a_captured_graph_it_is_the_same_each_time(fp8: bool) -> None:
    some, said = case(40, 8, 4000, width=64, device=DEVICE, dtype=torch.bfloat16), SETTINGS[-1]
    loss = some.loss(said, fp8)
    (gradient,) = torch.autograd.grad(loss.numerator, some.hidden)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = some.loss(said, fp8)
        (captured,) = torch.autograd.grad(again.numerator, some.hidden)
    for _ in range(2):
        graph.replay()
        assert torch.equal(captured, gradient)
        assert torch.equal(again.numerator, loss.numerator)
