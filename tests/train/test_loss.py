"""The loss against its formulas in fp64, values and gradients; its settings."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses import SETTINGS, TERMS, assert_exact, assert_near_in_fp8, case, decoded, exact_loss, named
from losses import settings as loss_settings
from pydantic import ValidationError

from dflash_offline.store import DflashError
from dflash_offline.train import loss as loss_module
from dflash_offline.train.head import LmHead
from dflash_offline.train.kernels.loss_gradient import coded_slopes, slopes, slopes_reference
from dflash_offline.train.kernels.loss_rows import hard_rows, soft_rows
from dflash_offline.train.loss import LossSettings, block_loss, default_gamma, slot_weights


@pytest.fixture(params=[1, 9, 10_000])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    for rows in (loss_module.CHUNK_ROWS, loss_module.SOFT_CHUNK_ROWS):
        monkeypatch.setitem(rows, "cpu", request.param)
    return request.param


@pytest.mark.parametrize("said", SETTINGS, ids=named)
@pytest.mark.usefixtures("chunk")
def test_values_and_gradients_are_those_of_the_formulas(said: LossSettings) -> None:
    assert_exact(case(9, 5, 37), said)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(2, 7), st.integers(2, 40), st.sampled_from(SETTINGS), st.integers(0, 99))
def test_any_shape(blocks: int, block: int, vocabulary: int, said: LossSettings, seed: int) -> None:
    assert_exact(case(blocks, block, vocabulary, seed=seed), said)


@pytest.mark.parametrize("said", SETTINGS, ids=named)
def test_nothing_supervised_is_nothing(said: LossSettings) -> None:
    some = case(3, 4, 11, supervised=False)
    found = some.loss(said)
    (gradient,) = torch.autograd.grad(found.numerator, some.hidden)
    assert found.numerator.item() == found.denominator.item() == 0
    assert not gradient.any()


def test_states_of_unsupervised_slots_do_not_matter() -> None:
    some, said = case(6, 5, 23), SETTINGS[-1]
    true = exact_loss(some, said)
    with torch.no_grad():
        some.hidden[:, 1:][~some.mask] = math.nan
        some.hidden[:, 0] = math.nan
    found = some.loss(said)
    (gradient,) = torch.autograd.grad(found.numerator, some.hidden)
    assert found.numerator.item() == pytest.approx(float(true.numerator), rel=1e-5)
    torch.testing.assert_close(gradient.double(), true.gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("said", [SETTINGS[0], SETTINGS[-1]], ids=named)
def test_of_equal_logits_the_lowest_index_counts(said: LossSettings) -> None:
    some = case(4, 3, 10)
    some.lm_head[7] = some.lm_head[2]
    with torch.no_grad():
        some.hidden.copy_(50 * some.lm_head[2])
    some.mask[:] = True
    for label, right in ((2, 4.0), (7, 0.0)):
        some.labels[:] = label
        assert some.loss(said).correct.tolist() == [right, right]


def test_a_drafter_that_is_the_target_has_nothing_to_learn_from_it() -> None:
    some = case(5, 4, 19)
    with torch.no_grad():
        some.hidden[:, 1:] = some.target.final[some.target.positions]
    some.mask[:] = True
    said = loss_settings(cross_entropy=0, kl=1, total_variation=1, lk_log=1, lk_mixed=1, expected_length=1)
    found = some.loss(said)
    (gradient,) = torch.autograd.grad(found.numerator, some.hidden)
    assert float(gradient.norm()) < 1e-5
    assert found.overlap.tolist() == pytest.approx([5.0] * 3)
    # All that is left is the length: three slots a block, at the weight of a whole block.
    assert (found.numerator / found.denominator).item() == pytest.approx(-3, rel=1e-5)


def test_whole_blocks_weigh_expected_length_beside_other_terms_as_alone() -> None:
    some = case(6, 8, 29)
    some.mask[:] = True
    for weights in ("decay", "none", "dpace"):
        entropy, length, both = (
            some.loss(loss_settings(cross_entropy=c, expected_length=e, weights=weights))
            for c, e in ((1, 0), (0, 2), (1, 2))
        )
        parts = sum((x.numerator / x.denominator).item() for x in (entropy, length))
        assert (both.numerator / both.denominator).item() == pytest.approx(parts, rel=1e-5)


def test_distant_distributions_stay_finite() -> None:
    logits = torch.tensor([[300.0, 0.0, -300.0], [0.0, 300.0, 0.0]])
    labels = torch.tensor([2, 0])
    hard = hard_rows(logits, labels)
    soft = soft_rows(logits, logits.flip(1), labels, 1.0, hard)
    weights = torch.stack([torch.ones(2), torch.ones(2), 1 / soft.overlap.clamp(min=loss_module.LEAST_OVERLAP)])
    assert torch.isfinite(slopes(logits, labels, hard.log_norm, soft, weights, torch.float32)).all()
    assert (hard.log_norm - hard.chosen).tolist() == [600, 300]
    assert soft.divergence.tolist() == [600, 0]


def test_an_outer_factor_reaches_the_gradient_once() -> None:
    some = case(2, 3, 11)
    (once,) = torch.autograd.grad(some.loss(loss_settings()).numerator, some.hidden)
    found = some.loss(loss_settings()).numerator * 3
    (thrice,) = torch.autograd.grad(found, some.hidden, retain_graph=True)
    torch.testing.assert_close(thrice, once * 3)
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.grad(found, some.hidden)


def test_without_gradients_the_numbers_are_the_same() -> None:
    some, said = case(4, 5, 23), SETTINGS[-1]
    with torch.no_grad():
        measured = some.loss(said)
    learned = some.loss(said)
    assert not measured.numerator.requires_grad
    for name in ("numerator", "denominator", "correct", "supervised", "overlap"):
        assert torch.equal(getattr(measured, name), getattr(learned, name))
        assert name == "numerator" or not getattr(learned, name).requires_grad


def test_bfloat16_is_near() -> None:
    some = case(9, 5, 37, dtype=torch.bfloat16)
    for said in (SETTINGS[0], SETTINGS[-1]):
        found, true = some.loss(said), exact_loss(some, said)
        (gradient,) = torch.autograd.grad(found.numerator, some.hidden)
        assert gradient.dtype == torch.bfloat16
        assert float((gradient.double() - true.gradient).norm() / true.gradient.norm()) < 0.03
        assert found.numerator.item() == pytest.approx(float(true.numerator), rel=0.02)


@pytest.mark.parametrize("said", SETTINGS, ids=named)
def test_an_lm_head_in_fp8_is_near(said: LossSettings) -> None:
    assert_near_in_fp8(case(9, 5, 48), said)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("said", [SETTINGS[0], SETTINGS[-1]], ids=named)
def test_fp8_leaves_alone_what_is_not_supervised(said: LossSettings) -> None:
    some = case(6, 5, 32)
    (once,) = torch.autograd.grad(some.loss(said, fp8=True).numerator, some.hidden)
    with torch.no_grad():
        some.hidden[:, 1:][~some.mask] = math.nan
        some.hidden[:, 0] = math.nan
    found = some.loss(said, fp8=True)
    (gradient,) = torch.autograd.grad(found.numerator, some.hidden)
    assert torch.equal(gradient, once)
    nothing = case(3, 4, 16, supervised=False)
    found = nothing.loss(said, fp8=True)
    (gradient,) = torch.autograd.grad(found.numerator, nothing.hidden)
    assert found.numerator.item() == 0
    assert not gradient.any()


@pytest.mark.parametrize("scale", [None, 1.0, 0.6])
def test_codes_hold_what_their_format_can(scale: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, target = 4 * torch.randn(2, 7, 300, generator=generator)
    labels = torch.randint(300, (7,), generator=generator)
    labels[3] = -1
    logits[4, labels[4]] = 30.0  # right, and sure of it
    weights = torch.rand(3, 7, generator=generator)
    weights[:, 5] = 0
    weights[:2, 6], weights[2, 6] = 0, 1e20  # as where lk_log finds no overlap
    hard = hard_rows(logits, labels)
    soft = None if scale is None else soft_rows(logits, target, labels, scale, hard)
    true = slopes_reference(logits.double(), labels, hard.log_norm, soft, weights.double())
    found = coded_slopes(logits.clone(), labels, hard.log_norm, soft, weights)
    values = found.rows.codes.double() * found.rows.scales.double()[:, None]
    label = labels.clamp(min=0)[:, None]
    size = true.abs().amax(1)
    assert not values.gather(1, label).any()
    assert ((found.own - true.gather(1, label)[:, 0]).abs() <= 1e-5 * size).all()
    true.scatter_(1, label, 0)
    # Two bits of mantissa: an eighth at most, or half of the smallest step; and what rounding in fp32 does.
    bound = found.rows.scales.double()[:, None] * torch.finfo(torch.float8_e5m2).max
    assert ((values - true).abs() <= true.abs() / 8 + bound * (2**-17 / 57344 + 1e-5)).all()
    assert (true.abs() <= bound * (1 + 1e-5)).all()
    assert not values[[3, 5]].any()
    assert torch.isfinite(values).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_multiplies_as_torch_does_and_in_fp8_as_its_codes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(n, 32, generator=generator).to(dtype) for n in (48, 5))
    slope = torch.randn(5, 48, generator=generator)
    plain, coded = LmHead(weight), LmHead(weight, fp8=True)
    assert torch.equal(plain.logits(rows, torch.empty(5, 48)), (rows @ weight.T).float())
    assert torch.equal(plain.back(slope.to(dtype)), slope.to(dtype) @ weight)
    expected = decoded(rows) @ decoded(weight).T
    torch.testing.assert_close(coded.logits(rows, torch.empty(5, 48)).double(), expected, rtol=1e-5, atol=1e-5)


def test_an_fp8_head_says_which_sizes_it_takes() -> None:
    for shape in ((40, 16), (16, 24)):
        with pytest.raises(DflashError, match="multiples of 16; this one has " + " and ".join(map(str, shape))):
            LmHead(torch.zeros(shape), fp8=True)
    assert not LmHead(torch.zeros(40, 24)).fp8


def test_gamma_and_weights_are_as_published() -> None:
    assert [default_gamma(b) for b in (32, 16, 10, 8)] == [10, 7, 5, 4]
    weights = slot_weights(4, 2.0, torch.device("cpu"))
    assert weights.tolist() == pytest.approx([1.0, math.exp(-0.5), math.exp(-1.0)])


def test_settings_that_mean_nothing_are_refused() -> None:
    for wrong in (
        {"cross_entropy": 0},
        {"kl": -1},
        {"temperature": 0},
        {"dpace_alpha": 0},
        {"dpace_alpha": 1.5},
        {"gamma": 0},
        {"weights": "linear"},
        {"mse": 1},
    ):
        with pytest.raises(ValidationError):
            LossSettings.model_validate(wrong)
    assert [term for term in TERMS if LossSettings.model_validate({term: 1}).needs_final] == list(TERMS[1:])


def test_terms_that_need_the_target_say_so() -> None:
    some = case(2, 3, 11)
    with pytest.raises(ValueError, match="last hidden states"):
        block_loss(some.hidden, LmHead(some.lm_head), some.labels, some.mask, loss_settings(kl=1))
