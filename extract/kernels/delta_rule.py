"""Linear attention: the gated delta rule, by flash-linear-attention's kernels.

    S[t] = exp(g) S[t-1] + k (beta (v - k^T exp(g) S[t-1]))^T        o = S[t]^T q / sqrt(d)
    g = -exp(A) softplus(a + dt)        beta = sigmoid(b)

q and k come normalised. A head of q and k serves several heads of v. The library picks kernel configurations by timing,
unless it is given them: ours are in `configs/`, so that a rerun gives the same bytes and no minute is lost to trials.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CONFIGS = Path(__file__).parent / "configs"
"""A folder for each compute capability that was measured, a file for each of the library's kernels."""
WIDEST_HEAD = 128
"""Heads for which those were measured; wider ones may not fit into an SM's memory with them."""

_pinned = False
"""Whether the library's variables were set here, and not by a person."""


def pin_configurations(widest_head: int) -> str | None:
    """Have flash-linear-attention take its kernels' configurations from `configs/`, for bfloat16.

    To be called before anything imports the library. Whoever sets its variables is left alone. Returns what a person
    should know, or None: where nothing was measured, the library goes on picking by timing.

    Args:
        widest_head: numbers in the widest head of keys or values.
    """
    global _pinned
    major, minor = torch.cuda.get_device_capability()
    folder = CONFIGS / f"sm{major}{minor}"
    said = "FLA_CONFIG_DIR" in os.environ or "FLA_CACHE_MODE" in os.environ
    if said and not (_pinned and widest_head > WIDEST_HEAD):
        return None
    if _pinned:
        return (
            f"this process has kernels for narrower heads than {widest_head}: start its worker anew if they do not fit"
        )
    if not folder.is_dir() or widest_head > WIDEST_HEAD:
        return (
            f"no kernel configurations were measured for heads of {widest_head} on {torch.cuda.get_device_name()}: "
            "flash-linear-attention picks its own by timing, so the first pass takes a minute and a rerun may differ "
            "in the last bits"
        )
    os.environ.update(FLA_CONFIG_DIR=str(folder), FLA_CACHE_MODE="full")
    _pinned = True
    return None


def delta_rule(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, log_a: Tensor, dt: Tensor) -> Tensor:
    """Outputs `[b, n, value heads, dv]`.

    Args:
        q, k: `[b, n, heads, dk]`, each head of length one.
        v: `[b, n, value heads, dv]`.
        a, b: `[b, n, value heads]`.
        log_a, dt: `[value heads]`.
    """
    if not q.is_cuda:
        return delta_rule_reference(q, k, v, a, b, log_a, dt)
    kernels: Any = import_module("fla.ops.gated_delta_rule")
    # beta is rounded as transformers rounds it; the gate's decay stays in float32, as there.
    outputs, _ = kernels.chunk_gated_delta_rule(
        q, k, v, g=a.contiguous(), beta=b.sigmoid().contiguous(), A_log=log_a, dt_bias=dt, use_gate_in_kernel=True
    )  # fmt: skip
    return outputs


def delta_rule_reference(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, log_a: Tensor, dt: Tensor) -> Tensor:
    """The recurrence written out, a token at a time, in float32."""
    group = v.shape[2] // q.shape[2]
    queries, keys = (x.float().repeat_interleave(group, 2) for x in (q, k))
    values, beta = v.float(), b.sigmoid().float()
    decay = (-log_a.float().exp() * F.softplus(a.float() + dt.float())).exp()
    state = torch.zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], device=v.device)
    outputs = torch.empty_like(values)
    for t in range(v.shape[1]):
        state = state * decay[:, t, :, None, None]
        held = torch.einsum("bhkv,bhk->bhv", state, keys[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", keys[:, t], (values[:, t] - held) * beta[:, t, :, None])
        outputs[:, t] = torch.einsum("bhkv,bhk->bhv", state, queries[:, t]) * q.shape[3] ** -0.5
    return outputs.to(v.dtype)
