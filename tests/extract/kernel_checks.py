"""The fused kernels against plain torch, and a fused target against transformers, on a device.

    python kernel_checks.py     checks on the CPU, under TRITON_INTERPRET=1, in float32

`test_kernels.py` runs it so, and on a GPU in bfloat16. Triton's interpreter cuts off where a GPU rounds, so it compares
float32 only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model
from tiny import make_target
from torch import Tensor
from transformers import AutoModelForCausalLM

from dflash_offline.extract.capture import StateCapture, relative_error
from dflash_offline.extract.fused import FusedTarget, not_fusable
from dflash_offline.extract.kernels.convolution import TAPS, convolve, convolve_reference
from dflash_offline.extract.kernels.delta_rule import delta_rule, delta_rule_reference
from dflash_offline.extract.kernels.gates import (
    gated_norm,
    gated_norm_reference,
    output_gate,
    output_gate_reference,
)
from dflash_offline.extract.kernels.norm import add_norm, add_norm_reference
from dflash_offline.extract.kernels.products import Rows, quantise
from dflash_offline.extract.kernels.rope import norm_rope, norm_rope_reference
from dflash_offline.extract.kernels.swiglu import swiglu, swiglu_reference

Make = Callable[..., Tensor]


def maker(device: str, dtype: torch.dtype, seed: int) -> Make:
    """Makes random tensors of a shape."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device=device, dtype=dtype)

    return make


def both(make: Make, fp8: bool) -> Iterator[tuple[str, Rows, Tensor]]:
    """Each kernel that ends in rows, with what it must give, on sizes that are no multiple of anything."""
    for count, width in ((1, 3), (5, 70), (2, 5120)):
        x, delta, weight = make(count, width), make(count, width), make(width)
        for centred in (False, True):
            for d in (None, delta):
                total, rows = add_norm(x, d, weight, 1e-6, centred, fp8)
                expected_total, expected = add_norm_reference(x, d, weight, 1e-6, centred)
                assert torch.equal(total, expected_total)
                yield f"add_norm {count} {width} {centred} {d is None}", rows, expected
    for count, width in ((1, 1), (4, 90), (2, 3000)):
        gate_up = make(count, 2 * width, scale=3)
        yield f"swiglu {count} {width}", swiglu(gate_up, fp8), swiglu_reference(gate_up)
    for count, heads, dim in ((1, 1, 4), (3, 6, 16), (2, 5, 24)):
        outputs, weight = make(count, heads, dim), make(dim)
        gate = make(count, heads * dim * 2 + 5)[:, 3 : 3 + 2 * heads * dim].unflatten(1, (heads, 2 * dim))[:, :, dim:]
        name = f"{count} {heads} {dim}"
        yield f"gated_norm {name}", gated_norm(outputs, gate, weight, 1e-6, fp8), gated_norm_reference(
            outputs, gate, weight, 1e-6
        )  # fmt: skip
        yield f"output_gate {name}", output_gate(outputs, gate, fp8), output_gate_reference(outputs, gate)


def check_rows(device: str, dtype: torch.dtype) -> None:
    """Norm, activation and gates, in the dtype and (on a GPU) in fp8."""
    near = 1e-5 if dtype == torch.float32 else 8e-3
    for name, rows, expected in both(maker(device, dtype, 0), False):
        torch.testing.assert_close(rows.values, expected, rtol=near, atol=near, msg=name)
    if device == "cpu":
        return  # the interpreter knows no e4m3
    for name, rows, expected in both(maker(device, dtype, 1), True):
        wanted = quantise(expected)
        assert rows.scales is not None
        assert wanted.scales is not None
        torch.testing.assert_close(rows.scales, wanted.scales, rtol=1e-2, atol=0, msg=name)
        ours = rows.values.float() * rows.scales[:, None]
        # A sixteenth is half the distance of two e4m3 numbers: neither may be further from what both stand for.
        limit = expected.float().abs() / 14 + rows.scales[:, None] / 256
        assert ((ours - expected.float()).abs() <= limit).all(), name


def check_heads(device: str, dtype: torch.dtype) -> None:
    """Convolution and rotary position, read from the middle of wider rows."""
    near = 1e-5 if dtype == torch.float32 else 1.6e-2
    make = maker(device, dtype, 2)
    for batch, tokens, heads, dim in ((1, 1, 1, 4), (2, 7, 3, 16), (2, 37, 9, 24)):
        channels = heads * dim + 10
        x = make(batch * tokens, channels + 6).unflatten(0, (batch, tokens))[..., 2 : 2 + channels]
        weight = make(channels, TAPS)
        for normalise in (False, True):
            ours = convolve(x, weight, 7, heads, dim, normalise)
            torch.testing.assert_close(
                ours, convolve_reference(x, weight, 7, heads, dim, normalise), rtol=near, atol=near
            )
    for batch, tokens, heads, dim, rotary in ((1, 1, 1, 4, 4), (2, 6, 3, 16, 8), (1, 5, 9, 32, 32)):
        x = make(batch * tokens, 2 * heads * dim).unflatten(1, (heads, 2 * dim)).unflatten(0, (batch, tokens))
        x, weight = x[..., :dim], make(dim)
        cos, sin = make(tokens, rotary), make(tokens, rotary)
        for centred in (False, True):
            arguments = x, weight, 1e-6, centred, cos, sin
            torch.testing.assert_close(norm_rope(*arguments), norm_rope_reference(*arguments), rtol=near, atol=near)


def check_delta_rule(device: str, dtype: torch.dtype) -> None:
    """The library's gated delta rule against the recurrence, with grouped heads (the same code on a CPU)."""
    make = maker(device, dtype, 3)
    q, k = (torch.nn.functional.normalize(make(2, 150, 2, 64).float(), dim=-1).to(dtype) for _ in range(2))
    v, a, b = make(2, 150, 4, 64), make(2, 150, 4), make(2, 150, 4)
    log_a, dt = make(4, scale=0.5), make(4)
    ours = delta_rule(q, k, v, a, b, log_a, dt)
    assert relative_error(ours, delta_rule_reference(q, k, v, a, b, log_a, dt)) < 2e-2


def check_target(kind: str, device: str, dtype: torch.dtype, fp8: bool = False, hooks: bool = False) -> float:
    """A fused target against transformers' own forward pass; the largest relative error of any state.

    With `hooks` its modules have those that accelerate gives a target spread over several GPUs.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = make_target(Path(folder) / "target", kind, seed=5)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        model = model.eval().to(device)
        if hooks:
            dispatch_model(model, {"": device}, force_hooks=True)
        assert not_fusable(model) is None
        ids = torch.randint(8192, (2, 9), generator=torch.Generator().manual_seed(0)).to(device)
        layer_ids, worst = [0, 3, 7], 0.0
        for last in ("pre", "post"):
            hidden, final = StateCapture(model, layer_ids, last)(ids)
            fused_hidden, fused_final = FusedTarget(model, layer_ids, last)(ids)
            for ours, theirs in zip([*fused_hidden, fused_final], [*hidden, final], strict=True):
                assert ours.shape == theirs.shape
                worst = max(worst, relative_error(ours, theirs))
        if fp8:
            fused_hidden, fused_final = FusedTarget(model, layer_ids, "post", fp8=True)(ids)
            worst = max(
                relative_error(o, t) for o, t in zip([*fused_hidden, fused_final], [*hidden, final], strict=True)
            )
        return worst


def main() -> None:
    """All checks under the interpreter."""
    check_rows("cpu", torch.float32)
    check_heads("cpu", torch.float32)
    for kind in ("hybrid", "dense", "moe"):
        error = check_target(kind, "cpu", torch.float32, hooks=kind == "moe")
        print(kind, error)
        assert error < 1e-5


if __name__ == "__main__":
    main()
