"""What makes training the demo target fast on a Hopper GPU: linear attention kernels that are right there.

flash-linear-attention 0.6.0 refuses the backward pass of the gated delta rule on Hopper GPUs under Triton 3.4
to 3.7.0, because one of its kernels comes out wrong there. That kernel works on each chunk of 64 tokens
alone, so batched matrix products do the same work. `use_kernels` puts them in its place; `check` compares
values and gradients with the recurrence written out, and raises if they differ by more than bf16 explains.

    python hopper.py    runs the check
"""

from __future__ import annotations

import importlib
from typing import Any

import torch


def chunk_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    h: torch.Tensor,
    dh: torch.Tensor,
    g: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    chunk_size: int = 64,
    **unused: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, w and the gate of every chunk.

    q, k, v, do, dv are [batch, tokens, heads, dim]; v holds the corrected values. h and dh are [batch,
    chunks, heads, key dim, value dim]: the states at the chunks' starts, and the gradients of those at their
    ends. g [batch, tokens, heads] is the running sum of the log gates within a chunk, in units of log 2.
    """
    batch, tokens, heads, _ = q.shape
    if tokens % chunk_size or v.shape[2] != heads:
        raise ValueError("whole chunks and equal numbers of heads only")

    def chunks(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, chunk_size)).transpose(2, 3)  # [batch, chunks, heads, chunk, ...]

    def tokens_of(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(2, 3).reshape(batch, tokens, heads, *x.shape[4:])

    q, k, v, do, dv = (chunks(x) for x in (q, k, v, do, dv))
    h, dh = h.to(do.dtype), dh.to(do.dtype)
    gate = chunks(g.float())
    last = gate[..., -1:]
    dq = (do @ h.mT).float() * (gate.exp2() * scale)[..., None]
    dk = (v @ dh.mT).float() * (last - gate).exp2()[..., None]
    dw = -(dv @ h.mT)
    dlast = (h.float() * dh.float()).sum((-1, -2)) * last[..., 0].exp2() + (dk * k).sum((-1, -2))
    future = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).triu(1)
    between = (gate[..., :, None] - gate[..., None, :]).masked_fill(future, float("-inf")).exp2()
    scores = ((do @ v.mT).float() * between * scale).to(do.dtype)
    dq = dq + scores @ k
    dk = dk + scores.mT @ q
    dgate = (dq * q).sum(-1) - (dk * k).sum(-1)
    dgate[..., -1] += dlast
    return tokens_of(dq.to(q.dtype)), tokens_of(dk.to(k.dtype)), tokens_of(dw), tokens_of(dgate)


def use_kernels() -> None:
    """Let flash-linear-attention's gated delta rule call `chunk_gradients`, with no autotuning.

    Call it before anything imports the library. Autotuning compiles dozens of variants of every kernel, over
    a minute in all, for a part of the step that is small at this model's sizes.
    """
    autotuner: Any = importlib.import_module("triton.runtime.autotuner")
    original = autotuner.Autotuner.__init__

    def with_one_config(self: Any, fn: Any, names: Any, configs: list[Any], *args: Any, **more: Any) -> None:
        chosen = sorted(configs, key=lambda c: (abs(c.num_warps - 4), abs(c.num_stages - 2)))[:1]
        original(self, fn, names, chosen, *args, **more)

    autotuner.Autotuner.__init__ = with_one_config
    module: Any = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    module.chunk_bwd_dqkwg = chunk_gradients


def shifted_convolution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: None = None,
    activation: str | None = None,
    **more: object,
) -> torch.Tensor:
    """A short causal depthwise convolution over [batch, channels, tokens] as a sum of shifted products."""
    if bias is not None or activation != "silu":
        raise ValueError("no bias, and silu after it")
    x = hidden_states.transpose(1, 2)
    taps, tokens = weight.shape[1], x.shape[1]
    padded = torch.nn.functional.pad(x, (0, 0, taps - 1, 0))
    out = padded[:, :tokens] * weight[:, 0].to(x.dtype)
    for tap in range(1, taps):
        out = out + padded[:, tap : tap + tokens] * weight[:, tap].to(x.dtype)
    return torch.nn.functional.silu(out).transpose(1, 2)


def use_shifted_convolution() -> None:
    """Replace the plain torch convolution, whose depthwise weight gradient is slow, in training."""
    module: Any = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    module.causal_conv1d_fn = shifted_convolution


def recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """The gated delta rule, token by token."""
    q = torch.nn.functional.normalize(q, dim=-1) * q.shape[-1] ** -0.5
    k = torch.nn.functional.normalize(k, dim=-1)
    state = q.new_zeros(q.shape[0], q.shape[2], k.shape[-1], v.shape[-1])
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        held = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], (v[:, t] - held) * beta[:, t, :, None])
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1)


def check(limit: float = 0.03) -> dict[str, float]:
    """Relative errors of the output and of each gradient against fp64; raises above the limit."""
    kernels: Any = importlib.import_module("fla.ops.gated_delta_rule")

    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (2, 256, 4, 64),
        "k": (2, 256, 4, 64),
        "v": (2, 256, 4, 64),
        "g": (2, 256, 4),
        "beta": (2, 256, 4),
    }
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    values["g"] = -torch.nn.functional.softplus(values["g"] - 2)
    values["beta"] = values["beta"].sigmoid()
    up = torch.randn(shapes["v"], generator=generator).bfloat16()
    half = {n: x.cuda().to(torch.float32 if n == "g" else torch.bfloat16).requires_grad_() for n, x in values.items()}
    full = {n: x.detach().double().requires_grad_() for n, x in half.items()}
    got, _ = kernels.chunk_gated_delta_rule(**half, use_qk_l2norm_in_kernel=True)
    want = recurrence(**full)
    got.backward(up.cuda())
    want.backward(up.cuda().double())
    pairs: dict[str, tuple[Any, Any]] = {"output": (got, want)}
    pairs |= {f"d{n}": (half[n].grad, full[n].grad) for n in shapes}
    errors = {n: ((a.double() - b).norm() / b.norm()).item() for n, (a, b) in pairs.items()}
    print("linear attention against fp64:", {n: f"{e:.1e}" for n, e in errors.items()}, flush=True)
    if not max(errors.values()) < limit:
        raise RuntimeError("the linear attention kernels are wrong on this machine")
    return errors


if __name__ == "__main__":
    use_kernels()
    check()
