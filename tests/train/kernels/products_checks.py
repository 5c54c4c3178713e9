"""Products at larger sizes on whatever device there is, and on a GPU the fp8 kernels, bit for bit, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dflash_offline.train.kernels.products import product
from dflash_offline.train.kernels.quantise import (
    E4M3,
    E5M2,
    quantise,
    quantise_kernel,
    quantise_reference,
    quantise_transposed_kernel,
    quantise_transposed_reference,
)

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
on_cuda = pytest.mark.skipif(not CUDA, reason="no GPU, and Triton's interpreter knows no fp8")


def weights_and_gradients(
    outs: list[int], width: int, dtype: torch.dtype, kept: torch.dtype
) -> tuple[list[nn.Parameter], Tensor]:
    """Parameters `[out, width]` of one buffer with gradients in another, and that other."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sum(outs), width, generator=generator) / width**0.5
    gradients = torch.randn(sum(outs), width, generator=generator).to(DEVICE, kept)
    weights = [nn.Parameter(piece) for piece in values.to(DEVICE, dtype).split(outs)]
    for weight, grad in zip(weights, gradients.split(outs), strict=True):
        weight.grad_dtype = kept
        weight.grad = grad
    return weights, gradients


def drawn(rows: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def apart(ours: Tensor | None, theirs: Tensor) -> float:
    """Relative distance in norm, in float64."""
    assert ours is not None
    return float((ours.detach().double() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(
    ("dtype", "kept", "limit", "fine"),
    [
        (torch.float32, torch.float32, 1e-5, 1e-5),
        # Gradients in float32 take sums that were never rounded to bfloat16.
        pytest.param(torch.bfloat16, torch.bfloat16, 1e-2, 1e-2, marks=on_cuda),
        pytest.param(torch.bfloat16, torch.float32, 1e-2, 1e-5, marks=on_cuda),
    ],
)
def test_two_calls_that_share_weights(dtype: torch.dtype, kept: torch.dtype, limit: float, fine: float) -> None:
    weights, gradients = weights_and_gradients([96, 32, 32], 80, dtype, kept)
    x, c = (drawn(rows, 80, dtype, rows).requires_grad_() for rows in (70, 33))
    up, down = drawn(70, 160, dtype, 1), drawn(33, 64, dtype, 2)
    was, w = gradients.double(), torch.cat([weight.detach() for weight in weights]).double()
    both = product(x, weights), product(c, weights[1:])
    torch.autograd.backward(both, (up, down))
    made = up.double().T @ x.detach().double()
    made[96:] += down.double().T @ c.detach().double()
    assert apart(both[0], x.detach().double() @ w.T) < limit
    assert apart(both[1], c.detach().double() @ w[96:].T) < limit
    assert apart(x.grad, up.double() @ w) < limit
    assert apart(c.grad, down.double() @ w[96:]) < limit
    assert apart(gradients, was + made) < fine


SHAPES = [(1, 1), (3, 33), (130, 64), (2, 4097), (129, 65), pytest.param((70, 34816), marks=on_cuda)]
# Triton's interpreter knows float16 alone of the dtypes that round as codes do.
KINDS = [torch.float16, pytest.param(E4M3, marks=on_cuda), pytest.param(E5M2, marks=on_cuda)]
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=on_cuda)]


def bits(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8).cpu()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantising_is_the_reference_bit_for_bit(shape: tuple[int, int], kind: torch.dtype, dtype: torch.dtype) -> None:
    # Rows of a wider matrix, of very different sizes, the first of zeros.
    x = drawn(shape[0], shape[1] + 8, dtype, 3)[:, : shape[1]]
    x *= torch.logspace(-12, 12, shape[0], device=x.device)[:, None].to(dtype)
    x[0] = 0
    ours, theirs = quantise_kernel(x, kind), quantise_reference(x.cpu(), kind)
    assert torch.equal(ours.scales.cpu(), theirs.scales)
    assert torch.equal(bits(ours.codes), bits(theirs.codes))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_transposing_is_the_reference_bit_for_bit(
    shape: tuple[int, int], kind: torch.dtype, dtype: torch.dtype
) -> None:
    x = drawn(shape[0], shape[1] + 8, dtype, 4)[:, : shape[1]]
    scale = x.float().abs().amax() / torch.finfo(kind).max
    ours = quantise_transposed_kernel(x, scale, kind)
    theirs = quantise_transposed_reference(x.cpu(), scale.cpu(), kind)
    assert ours.is_contiguous()
    assert torch.equal(bits(ours), bits(theirs))


@on_cuda
def test_a_value_that_is_not_finite_shows() -> None:
    for bad in (torch.inf, torch.nan):
        x = torch.ones(2, 64, device="cuda")
        x[1, 3] = bad
        made = quantise(x, E5M2)
        assert made.codes[1].float().isnan().any()
        assert not made.codes[0].float().isnan().any()


@on_cuda
@pytest.mark.parametrize("rows", [1, 100, 256])
def test_fp8_on_a_gpu_is_the_imitation_on_a_cpu(rows: int) -> None:
    weights, gradients = weights_and_gradients([96, 32, 32], 256, torch.bfloat16, torch.bfloat16)
    x = drawn(rows, 256, torch.bfloat16, 5).requires_grad_()
    dy = drawn(rows, 160, torch.bfloat16, 6)
    here = [nn.Parameter(piece) for piece in torch.cat([w.detach() for w in weights]).cpu().split([96, 32, 32])]
    gradients.zero_()
    there = x.detach().cpu().requires_grad_()
    expected = product(there, here, fp8=True)
    expected.backward(dy.cpu())
    found = product(x, weights, fp8=True)
    found.backward(dy)
    assert there.grad is not None
    assert apart(found.cpu(), expected.double()) < 5e-3
    assert apart(x.grad.cpu() if x.grad is not None else None, there.grad.double()) < 5e-3
    assert apart(gradients, dy.double().T @ x.detach().double()) < 1e-2


@on_cuda
@pytest.mark.parametrize("fp8", [False, True])
def test_a_captured_step_replays(fp8: bool) -> None:
    weights, gradients = weights_and_gradients([64, 64], 128, torch.bfloat16, torch.float32)
    x, dy = drawn(48, 128, torch.bfloat16, 7), drawn(48, 128, torch.bfloat16, 8)

    def step() -> Tensor:
        gradients.zero_()
        leaf = x.detach().requires_grad_()
        product(leaf, weights, fp8).backward(dy)
        assert leaf.grad is not None
        return leaf.grad

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dx = step()
    x.copy_(drawn(48, 128, torch.bfloat16, 9))
    graph.replay()
    replayed = dx.clone(), gradients.clone()
    expected = step()
    assert torch.equal(replayed[0], expected)
    assert torch.equal(replayed[1], gradients)
    assert gradients.any()
