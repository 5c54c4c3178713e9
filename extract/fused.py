"""The target's forward pass with fused kernels: what `kernels/` has, put together for the layers of a loaded target.

The layers are recognised by type. A residual sum, the norm after it and (with fp8) the quantisation of what the next
product takes are one kernel; products with the same input are one product. States equal transformers' own forward pass
to bf16 rounding. Knows nothing of stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .kernels.convolution import TAPS, convolve
from .kernels.delta_rule import delta_rule
from .kernels.gates import gated_norm, output_gate
from .kernels.norm import add_norm
from .kernels.products import Product, Rows, quantise
from .kernels.rope import norm_rope
from .kernels.swiglu import swiglu


@dataclass(frozen=True)
class Family:
    """How one kind of decoder layer differs from another.

    Attributes:
        centred: norm weights are stored as their distance from one.
        gated: the query product also gives a gate for the attention's output.
    """

    centred: bool
    gated: bool


FAMILIES = {
    "Qwen3DecoderLayer": Family(centred=False, gated=False),
    "Qwen3MoeDecoderLayer": Family(centred=False, gated=False),
    "Qwen3_5DecoderLayer": Family(centred=True, gated=True),
    "Qwen3_5MoeDecoderLayer": Family(centred=True, gated=True),
}
"""The decoder layers of transformers that can be fused, by type."""


def not_fusable(model: Any) -> str | None:
    """Why a model cannot be fused, or None when it can."""
    decoder = model.get_decoder()
    config = decoder.config
    if getattr(model.config, "quantization_config", None):
        return "the target's weights are quantised"
    kinds = {type(layer).__name__ for layer in decoder.layers} - FAMILIES.keys()
    if kinds:
        return f"there are no fused kernels for {', '.join(sorted(kinds))}"
    if config.hidden_act != "silu":
        return f"there is no fused kernel for the activation {config.hidden_act}"
    if getattr(config, "linear_conv_kernel_dim", TAPS) > TAPS:
        return f"there is no fused kernel for a convolution of {config.linear_conv_kernel_dim} taps"
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        return "sliding attention of the target is not fused"
    return None


@dataclass
class Batch:
    """What all layers of a pass share.

    Attributes:
        shape: rows and tokens of the batch, b and n.
        cos, sin: `[n, rotary]`, on the device of the layer at work.
    """

    shape: tuple[int, int]
    cos: Tensor
    sin: Tensor


class FullAttention:
    """Causal attention with norms on queries and keys."""

    def __init__(self, module: Any, family: Family, fp8: bool) -> None:
        self._family, self._dim = family, module.head_dim
        self._norms = (module.q_norm.weight, module.k_norm.weight)
        self._eps = _eps(module.q_norm)
        self._in = Product([module.q_proj, module.k_proj, module.v_proj], fp8)
        self._out = Product([module.o_proj], fp8)
        self._fp8 = fp8

    def __call__(self, rows: Rows, batch: Batch) -> Tensor:
        q, k, v = (
            x.unflatten(-1, (-1, self._dim)).unflatten(0, batch.shape)
            for x in self._in(rows).split(self._in.widths, -1)
        )
        gate = None
        if self._family.gated:  # each head's queries, then its gate
            q, gate = q[:, :, 0::2], q[:, :, 1::2]
        turn = self._eps, self._family.centred, batch.cos, batch.sin
        q, k = norm_rope(q, self._norms[0], *turn), norm_rope(k, self._norms[1], *turn)
        # Without a mask the causal path is taken; the plain one would need a matrix of all pairs.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]) if q.is_cuda else nullcontext():
            heads = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
            )
        outputs = heads.transpose(1, 2).contiguous().flatten(0, 1)
        if gate is not None:
            return self._out(output_gate(outputs, gate.flatten(0, 1), self._fp8))
        flat = outputs.flatten(1)
        return self._out(quantise(flat) if self._fp8 else Rows(flat))


class LinearAttention:
    """A gated delta net: product, short convolution, gated delta rule, gated norm, product."""

    def __init__(self, module: Any, fp8: bool) -> None:
        self._heads, self._value_heads = module.num_k_heads, module.num_v_heads
        self._dim, self._value_dim = module.head_k_dim, module.head_v_dim
        taps = module.conv1d.weight.squeeze(1)
        self._taps = F.pad(taps, (TAPS - taps.shape[1], 0)).contiguous()
        self._log_a, self._dt = module.A_log, module.dt_bias
        self._norm, self._eps = module.norm.weight, _eps(module.norm)
        self._in = Product([module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a], fp8)
        self._out = Product([module.out_proj], fp8)
        self._fp8 = fp8

    def __call__(self, rows: Rows, batch: Batch) -> Tensor:
        qkv, z, b, a = self._in(rows).unflatten(0, batch.shape).split(self._in.widths, -1)
        size = self._heads * self._dim
        q = convolve(qkv, self._taps, 0, self._heads, self._dim, True)
        k = convolve(qkv, self._taps, size, self._heads, self._dim, True)
        v = convolve(qkv, self._taps, 2 * size, self._value_heads, self._value_dim, False)
        outputs = delta_rule(q, k, v, a, b, self._log_a, self._dt)
        gate = z.flatten(0, 1).unflatten(-1, (self._value_heads, self._value_dim))
        return self._out(gated_norm(outputs.flatten(0, 1), gate, self._norm, self._eps, self._fp8))


class Mlp:
    """A dense MLP with SwiGLU."""

    def __init__(self, module: Any, fp8: bool) -> None:
        self._in, self._out = Product([module.gate_proj, module.up_proj], fp8), Product([module.down_proj], fp8)
        self._fp8 = fp8

    def __call__(self, rows: Rows, batch: Batch) -> Tensor:
        return self._out(swiglu(self._in(rows), self._fp8))


class Experts:
    """A mixture of experts, as transformers runs it."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, rows: Rows, batch: Batch) -> Tensor:
        return self._module(rows.values.unflatten(0, batch.shape)).flatten(0, 1)


class Layer:
    """One decoder layer: two norms, a mixer of tokens and an MLP."""

    def __init__(self, module: Any, fp8: bool) -> None:
        family = FAMILIES[type(module).__name__]
        self.device = module.input_layernorm.weight.device
        self.mixer = (
            LinearAttention(module.linear_attn, fp8)
            if hasattr(module, "linear_attn")
            else FullAttention(module.self_attn, family, fp8)
        )
        dense = hasattr(module.mlp, "gate_proj")
        self.mlp = Mlp(module.mlp, fp8) if dense else Experts(module.mlp)
        first, second = module.input_layernorm, module.post_attention_layernorm
        self.norms = (
            (first.weight, _eps(first), family.centred, fp8),
            (second.weight, _eps(second), family.centred, fp8 and dense),
        )


class FusedTarget:
    """Runs a target's decoder and keeps the outputs of the chosen layers; mirrors `capture.StateCapture`.

    Args:
        model: a causal LM from transformers that `not_fusable` has nothing against. Its weights are joined in place:
            its own forward pass still works then, but not after `fp8`, which gives the weights up.
        layer_ids: layers whose output is kept.
        last_layer: for the last layer, "pre" or "post" the final norm.
        fp8: matrix products in fp8 (experts of a mixture stay as they are).
    """

    def __init__(self, model: Any, layer_ids: Sequence[int], last_layer: str | None, fp8: bool = False) -> None:
        decoder = model.get_decoder()
        self._embed, self._norm = decoder.embed_tokens, decoder.norm
        self._layers = [Layer(module, fp8) for module in decoder.layers]
        self._rope = decoder.rotary_emb
        self._layer_ids = tuple(layer_ids)
        self._post = len(self._layers) - 1 if last_layer == "post" else None
        self._centred = FAMILIES[type(decoder.layers[0]).__name__].centred

    @torch.inference_mode()
    def __call__(self, input_ids: Tensor) -> tuple[list[Tensor], Tensor]:
        """States of a batch of token ids `[b, n]`: for each chosen layer `[b, n, H]`, and final `[b, n, H]`, in the
        target's dtype. No attention mask: with right padding, later positions cannot reach earlier ones."""
        shape = (input_ids.shape[0], input_ids.shape[1])
        x = self._embed(input_ids.to(self._embed.weight.device, non_blocking=True)).flatten(0, 1)
        delta: Tensor | None = None
        batch = Batch(shape, *self._turns(x, shape[1]))
        kept: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            if layer.device != x.device:  # a target spread over several GPUs
                x, delta = x.to(layer.device), None if delta is None else delta.to(layer.device)
                batch = Batch(shape, batch.cos.to(layer.device), batch.sin.to(layer.device))
            with _on(layer.device):
                x, rows = add_norm(x, delta, *layer.norms[0])
                if index - 1 in self._layer_ids:
                    kept[index - 1] = x
                x, rows = add_norm(x, layer.mixer(rows, batch), *layer.norms[1])
                delta = layer.mlp(rows, batch)
        device = self._norm.weight.device
        assert delta is not None
        with _on(device):
            x, rows = add_norm(x.to(device), delta.to(device), self._norm.weight, _eps(self._norm), self._centred)
        kept[len(self._layers) - 1] = x
        final = rows.values.unflatten(0, shape)
        hidden = [final if i == self._post else kept[i].unflatten(0, shape) for i in self._layer_ids]
        return hidden, final

    def _turns(self, x: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        # The target's own module makes the tables, so every form of scaled rope is its own too.
        positions = torch.arange(tokens, device=x.device)[None]
        if type(self._rope).__name__.startswith("Qwen3_5"):  # text positions thrice: time, height and width
            positions = positions.expand(3, 1, -1)
        cos, sin = self._rope(x[:1], positions)  # of x it takes the dtype; its own GPU may be another
        return cos[0].to(x.device).contiguous(), sin[0].to(x.device).contiguous()


def _on(device: torch.device) -> Any:
    """Triton starts a kernel on the current GPU, wherever its tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _eps(norm: Any) -> float:
    return norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
