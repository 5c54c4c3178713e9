"""Flat buffers; AdamW against torch's own; what a bad or empty update must not do; the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_drafter import drafter_settings
from torch import nn

from dflash_offline.train.attention import Blocks
from dflash_offline.train.drafter import Drafter, DrafterSettings
from dflash_offline.train.flat import ALIGN, BLOCK, Flat
from dflash_offline.train.kernels.products import product
from dflash_offline.train.muon import MasterMuon
from dflash_offline.train.optimizer import MasterAdamW, learning_rate


def model(dtype: torch.dtype = torch.float32) -> nn.ParameterDict:
    generator = torch.Generator().manual_seed(0)
    matrix = nn.Parameter(torch.randn(6, 5, generator=generator).to(dtype))
    return nn.ParameterDict({"matrix": matrix, "norm": nn.Parameter(torch.ones(5, dtype=dtype))})


def optimizer_of(kind: str, flat: Flat) -> MasterAdamW | MasterMuon:
    if kind == "muon":
        return MasterMuon(flat, ratio=5.0, clip=1.0, weight_decay=0.1)
    return MasterAdamW(flat, clip=1.0, weight_decay=0.1)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def small_drafter() -> Drafter:
    settings = DrafterSettings.model_validate(
        {
            "layer_ids": [1, 2],
            "mask_token_id": 0,
            "layer_types": ["full_attention", "sliding_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "intermediate_size": 24,
            "rope_theta": 1e4,
        }
    )
    drafter = Drafter(settings, 16)
    drafter.reset(0)
    return drafter


def test_flat_keeps_values_and_joins_matrices_that_are_multiplied_together() -> None:
    drafter = small_drafter()
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    flat = Flat(drafter)
    assert set(flat.names) == set(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
    for layer in range(2):
        for group in (
            [f"layers.{layer}.self_attn.{kind}_proj.weight" for kind in "qkv"],
            [f"layers.{layer}.mlp.{kind}_proj.weight" for kind in ("gate", "up")],
        ):
            parts: list[torch.Tensor] = [drafter.get_parameter(name) for name in group]
            joined = torch.as_strided(parts[0], (sum(p.shape[0] for p in parts), 16), (16, 1))
            assert torch.equal(joined, torch.cat(parts))
            for buffer in (flat.weights, flat.gradients):
                places = [flat.view(buffer, name) for name in group]
                assert all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(places))


def parameters_of_any_size() -> nn.ParameterList:
    return nn.ParameterList(
        [torch.ones(3), torch.full((5, 7), 2.0), torch.full((1, 1, 4), 3.0), torch.full((2, 8), 4.0)]
    )


def test_flat_puts_matrices_first_at_aligned_places() -> None:
    module = parameters_of_any_size()
    flat = Flat(module)
    assert flat.names == ["1", "3", "0", "2"]
    assert flat.matrices % BLOCK == 0
    assert len(flat.weights) % BLOCK == 0
    for name, parameter in module.named_parameters():
        start = parameter.storage_offset()
        assert parameter.data_ptr() == flat.view(flat.weights, name).data_ptr()
        assert gradient_of(parameter).data_ptr() == flat.view(flat.gradients, name).data_ptr()
        assert start % ALIGN == 0
        assert (start < flat.matrices) == (parameter.ndim == 2)
    assert flat.weights.sum() == 3 + 2 * 35 + 3 * 4 + 4 * 16  # and so the gaps are zero
    rest = flat.rest()
    assert (rest.names, rest.matrices) == (["0", "2"], 0)
    for name in rest.names:
        assert rest.view(rest.weights, name).data_ptr() == flat.view(flat.weights, name).data_ptr()
        assert rest.view(rest.gradients, name).data_ptr() == flat.view(flat.gradients, name).data_ptr()


def test_flat_refuses_parameters_of_several_dtypes() -> None:
    with pytest.raises(ValueError, match="one dtype"):
        Flat(nn.ParameterList([torch.ones(3), torch.ones(3, dtype=torch.bfloat16)]))
    with pytest.raises(ValueError, match="one dtype"):
        Flat(nn.Module())


def test_gradients_in_fp32_add_up_in_place_under_bf16_weights() -> None:
    module = model(torch.bfloat16)
    flat = Flat(module)
    at = flat.gradients.data_ptr()
    for _ in range(300):
        sum((p.sum() for p in module.parameters()), torch.zeros(())).backward()
    # bf16 would stop at 256, where adding one is lost.
    assert all(torch.equal(gradient_of(p), torch.full(p.shape, 300.0)) for p in module.parameters())
    assert flat.gradients.data_ptr() == at
    assert flat.gradients.sum() == 300 * 35
    MasterAdamW(flat, clip=1.0, weight_decay=0.0).step(torch.tensor(0.1), torch.tensor(1.0))
    assert all(gradient_of(p).dtype == torch.float32 for p in module.parameters())
    assert not flat.gradients.any()


def test_it_is_torchs_adamw_with_clipping_and_division() -> None:
    ours, theirs = model(), model()
    mine = MasterAdamW(Flat(ours), clip=1.0, weight_decay=0.1)
    reference = torch.optim.AdamW(
        [{"params": [theirs["matrix"]], "weight_decay": 0.1}, {"params": [theirs["norm"]], "weight_decay": 0.0}],
        lr=0.01,
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            gradient = torch.randn(a.shape, generator=generator) * (10 if step % 2 else 0.01)
            gradient_of(a).copy_(gradient * 7.0)  # ours is a sum that the denominator divides
            b.grad = gradient
        norm = mine.step(torch.tensor(0.01), torch.tensor(7.0))
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        reference.step()
        assert float(norm) == pytest.approx(float(expected), rel=1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("where", ["matrix", "norm"])
@pytest.mark.parametrize(("gradient", "denominator"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, 0.0)])
def test_a_bad_or_empty_update_leaves_no_trace(gradient: float, denominator: float, where: str, kind: str) -> None:
    module = model()
    flat = Flat(module)
    optimizer = optimizer_of(kind, flat)

    def good_step() -> None:
        for parameter in module.parameters():
            gradient_of(parameter).fill_(1)
        optimizer.step(torch.tensor(0.01), torch.tensor(1.0))

    good_step()
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    weights = flat.weights.clone()
    gradient_of(module[where]).fill_(gradient)
    optimizer.step(torch.tensor(0.01), torch.tensor(denominator))
    after = optimizer.state()
    assert float(after.pop("skipped")) == float(before.pop("skipped")) + 1
    assert float(optimizer.skipped) == 1
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert torch.equal(weights, flat.weights)
    assert not flat.gradients.any()
    good_step()
    assert all(torch.isfinite(tensor).all() for tensor in optimizer.state().values())
    assert not torch.equal(weights, flat.weights)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_addresses_stay_and_gaps_stay_zero(kind: str) -> None:
    module = parameters_of_any_size()
    flat = Flat(module)
    optimizer = optimizer_of(kind, flat)

    def addresses() -> Iterator[int]:
        yield from (p.data_ptr() for p in module.parameters())
        yield from (gradient_of(p).data_ptr() for p in module.parameters())
        yield from (tensor.data_ptr() for tensor in optimizer.state().values())

    before = list(addresses())
    for _ in range(3):
        sum((p.square().sum() for p in module.parameters()), torch.zeros(())).backward()
        optimizer.step(torch.tensor(0.1), torch.tensor(1.0))
    assert list(addresses()) == before
    for buffer in (flat.weights, flat.gradients):
        assert buffer.count_nonzero() == sum(flat.view(buffer, name).count_nonzero() for name in flat.names)


def test_norm_weights_in_bf16_move() -> None:
    module = model(torch.bfloat16)
    optimizer = MasterAdamW(Flat(module), clip=1e9, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        for parameter in module.parameters():
            gradient_of(parameter).copy_(torch.randn(parameter.shape, generator=generator) + 0.5)
        optimizer.step(torch.tensor(1e-5), torch.tensor(1.0))
    # Steps of 1e-5 are far below bf16's spacing of 0.004 under 1.0; only fp32 masters add them up.
    assert (module["norm"] < 1.0).all()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_loading_restores_masters_and_weights(kind: str, tmp_path: Path) -> None:
    module = model(torch.bfloat16)
    optimizer = optimizer_of(kind, Flat(module))
    for parameter in module.parameters():
        gradient_of(parameter).fill_(1)
    optimizer.step(torch.tensor(0.1), torch.tensor(1.0))
    second = "momentum" if kind == "muon" else "second"
    assert {"count", "skipped", "master.matrix", "master.norm", f"{second}.matrix", "first.norm"} < set(
        optimizer.state()
    )
    save_file(optimizer.state(), tmp_path / "state")
    saved = load_file(tmp_path / "state")
    fresh = model(torch.bfloat16)
    other = optimizer_of(kind, Flat(fresh))
    other.load(saved)
    for a, b in zip(module.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(saved[name], tensor) for name, tensor in other.state().items())


def test_the_schedule_warms_up_and_falls_to_zero() -> None:
    rates = [learning_rate(step, step + 1, 100, 1.0, 0.04) for step in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert 0 < rates[-1] < 0.001
    assert learning_rate(500, 501, 100, 1.0, 0.04) == 0


def test_muon_is_torchs_own_but_for_rounding() -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((12, 40), (40, 12), (16, 16))]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    flat = Flat(nn.ParameterList([*ours, torch.nn.Parameter(torch.ones(3))]))
    optimizer = MasterMuon(flat, ratio=5.0, clip=1.0, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.05, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    before = [parameter.detach().clone() for parameter in ours]
    for _ in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            other.grad = torch.randn_like(mine)
            gradient_of(mine).copy_(other.grad * 3)
        optimizer.step(torch.tensor(0.01), torch.tensor(3.0))
        reference.step()
    for mine, other, start in zip(ours, theirs, before, strict=True):
        # bfloat16 keeps 8 bits, through fifteen products.
        assert (mine - other).norm() < 0.05 * (other - start).norm()


def test_a_matrix_without_a_part_in_the_backward_pass_is_noticed() -> None:
    module = nn.ParameterList([nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(4, 8))])
    flat = Flat(module, accumulates=False)
    for used in (2, 1):
        flat.begin()
        sum(product(torch.ones(3, 8), [weight]).sum() for weight in list(module)[:used]).backward()  # pyright: ignore
        if used == 2:
            flat.end()
    with pytest.raises(AssertionError, match="had no part"):
        flat.end()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_gradients_written_over_are_those_that_are_added_to_zeros(optimizer: str) -> None:
    """One backward pass an update: what the last update left in the gradients must not be seen."""
    found = []
    for accumulates in (True, False):
        drafter = Drafter(drafter_settings(), 32)
        drafter.reset(0)
        flat = Flat(drafter, accumulates)
        step = optimizer_of(optimizer, flat)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            flat.begin()
            context = drafter.context(torch.randn(20, 64, generator=generator), torch.arange(20))
            where = Blocks(torch.tensor([3, 9, 15]), torch.tensor([0, 0, 0]))
            drafter.blocks(torch.randn(3, 4, 32, generator=generator), context, where).square().sum().backward()
            step.step(torch.tensor(0.01), torch.tensor(2.0))
        assert bool(flat.gradients.any()) != accumulates
        found.append({name: tensor.clone() for name, tensor in step.state().items()})
    for name, tensor in found[0].items():
        assert torch.equal(found[1][name], tensor), name
