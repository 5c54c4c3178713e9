"""The drafter: a small Qwen3-style decoder that reads the target's states and fills a block of slots at once.

Context C = hidden_norm(fc(chosen layers)) enters every layer as extra keys and values; blocks are queries. The context
side depends on C alone, so it is computed once (`context`) and any number of blocks run against it (`blocks`).
Embedding and LM head are the target's and stay outside. Layout and formulas follow DFlash (z-lab); config in
`DrafterSettings`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn

from .attention import Blocks, anchor_attention
from .kernels.heads import norm_rope
from .kernels.norm import add_norm
from .kernels.products import product
from .kernels.swiglu import swiglu

ContextKV = list[torch.Tensor]
"""Keys and values of the context, `[T, 2 * kv_heads, head_dim]` a layer."""
DRAWN = 16
"""Weights drawn at a time: each is held in fp32 until it is copied to where it computes."""
Tables = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of positions, `[n, head_dim / 2]` fp32."""


class DrafterSettings(BaseModel):
    """Section `[drafter]`: its shape. The hidden size is always the target's."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    layer_ids: list[int] = Field(min_length=1, description="target layers it reads: any of those in the store")
    block_size: int = Field(16, ge=2, description="slots of a block: one clean token and block_size - 1 drafted ones")
    mask_token_id: int = Field(ge=0, description="token id of the slots to fill: one the target never uses")
    layer_types: list[Literal["full_attention", "sliding_attention"]] = Field(
        min_length=1, description="attention of each layer, and so the depth"
    )
    sliding_window: int = Field(2048, ge=1, description="window of the sliding layers, in tokens")
    is_causal: bool = Field(True, description="whether slots of a sliding layer see only slots up to their own")
    num_attention_heads: int = Field(32, ge=1, description="query heads")
    num_key_value_heads: int = Field(8, ge=1, description="key and value heads")
    head_dim: int = Field(128, ge=2, description="size of a head")
    intermediate_size: int = Field(ge=1, description="width of the MLP")
    rope_theta: float = Field(1e6, gt=0, description="base of the rotary embedding, over the whole head")
    rms_norm_eps: float = Field(1e-6, gt=0, description="epsilon of the norms")

    @model_validator(mode="after")
    def _divisible(self) -> DrafterSettings:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if len(set(self.layer_ids)) != len(self.layer_ids):
            raise ValueError("layer_ids names a layer twice")
        if self.head_dim % 2:
            raise ValueError("head_dim must be even")
        return self


class RMSNorm(nn.Module):
    """The weight of a norm, `[size]` (Zhang and Sennrich 2019); `kernels/norm.py` applies it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x + delta, and its norm; `[n, size]` each."""
        return add_norm(x, delta, self.weight, self.eps)


def rope_tables(positions: torch.Tensor, dim: int, theta: float) -> Tables:
    """Tables for integer positions `[n]` (Su et al. 2021, halves rotated)."""
    inverse = theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angles = positions.float()[:, None] * inverse
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Projections and norms of one layer's attention; the same weights serve context and blocks."""

    def __init__(self, settings: DrafterSettings, hidden: int, kind: str) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            settings.num_attention_heads,
            settings.num_key_value_heads,
            settings.head_dim,
        )
        self.window = settings.sliding_window if kind == "sliding_attention" else None
        self.causal = settings.is_causal
        # In this order: a run lays weights out as they are named, and products join q, k, v and k, v.
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.dim, settings.rms_norm_eps)
        self.k_norm = RMSNorm(self.dim, settings.rms_norm_eps)

    def keys_values(self, x: torch.Tensor, tables: Tables, fp8: bool) -> torch.Tensor:
        """Keys (normed, rotated) and values `[n, 2 * kv_heads, d]` of a context `[n, H]`."""
        packed = product(x, [self.k_proj.weight, self.v_proj.weight], fp8).view(-1, 2 * self.kv_heads, self.dim)
        return norm_rope(packed, 0, self.kv_heads, None, self.k_norm.weight, *tables, self.k_norm.eps)

    def forward(
        self, x: torch.Tensor, tables: Tables, context: torch.Tensor, blocks: Blocks, fp8: bool
    ) -> torch.Tensor:
        """Slots `[A * B, H]` against the context's keys and values."""
        packed = product(x, [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight], fp8)
        packed = packed.view(-1, self.heads + 2 * self.kv_heads, self.dim)
        packed = norm_rope(
            packed, self.heads, self.kv_heads, self.q_norm.weight, self.k_norm.weight, *tables, self.q_norm.eps
        )
        packed = packed.view(len(blocks.anchors), -1, *packed.shape[1:])
        out = anchor_attention(packed, context, blocks, self.heads, self.window, self.causal)
        return product(out.view(len(x), -1), [self.o_proj.weight], fp8)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020)."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor, fp8: bool) -> torch.Tensor:
        """`[n, H]` to the same."""
        gate_up = product(x, [self.gate_proj.weight, self.up_proj.weight], fp8)
        return product(swiglu(gate_up), [self.down_proj.weight], fp8)


class Layer(nn.Module):
    """A pre-norm decoder layer. The MLP's share is added by the next norm, which reads both anyway."""

    def __init__(self, settings: DrafterSettings, hidden: int, kind: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, settings.rms_norm_eps)
        self.self_attn = Attention(settings, hidden, kind)
        self.post_attention_layernorm = RMSNorm(hidden, settings.rms_norm_eps)
        self.mlp = MLP(hidden, settings.intermediate_size)

    def forward(
        self,
        h: torch.Tensor,
        delta: torch.Tensor | None,
        tables: Tables,
        context: torch.Tensor,
        blocks: Blocks,
        fp8: bool,
        done: Callable[[], None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual stream `[A * B, H]` and what is still to be added to it, both in and out.

        `done` is called in backward, once it is through all of the layer's products with blocks.
        """
        h, x = self.input_layernorm(h, delta)
        if done is not None and x.requires_grad:
            x.register_hook(lambda _: done())
        h, x = self.post_attention_layernorm(h, self.self_attn(x, tables, context, blocks, fp8))
        return h, self.mlp(x, fp8)


class Drafter(nn.Module):
    """The drafter's own weights, named as in published checkpoints.

    Args:
        settings: its shape.
        hidden_size: H, the target's.
    """

    def __init__(self, settings: DrafterSettings, hidden_size: int) -> None:
        super().__init__()
        self.settings = settings
        self.hidden_size = hidden_size
        self.fp8 = False
        """Whether products with weights are in fp8 (`kernels/products.py`)."""
        self.layer_done: Callable[[int], None] | None = None
        """Told in backward of each layer whose weights but k_proj's and v_proj's have their gradients."""
        self.fc = nn.Linear(len(settings.layer_ids) * hidden_size, hidden_size, bias=False)
        self.hidden_norm = RMSNorm(hidden_size, settings.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(settings, hidden_size, kind) for kind in settings.layer_types])
        self.norm = RMSNorm(hidden_size, settings.rms_norm_eps)

    @classmethod
    def empty(
        cls, settings: DrafterSettings, hidden_size: int, device: torch.device | str, dtype: torch.dtype
    ) -> Drafter:
        """A drafter whose weights are still to be drawn (`reset`) or loaded; nothing is spent on drawing them twice."""
        with torch.device("meta"):
            drafter = cls(settings, hidden_size)
        return drafter.to(dtype).to_empty(device=device)

    def reset(self, seed: int) -> None:
        """Draw fresh weights: normal with deviation 1 / sqrt(inputs), norms at one. The same on every device."""

        def draw(number: int, shape: torch.Size) -> torch.Tensor:
            if len(shape) != 2:
                return torch.ones(shape)
            # Each with its own generator, so that they can be drawn side by side: there may be billions.
            generator = torch.Generator().manual_seed((seed << 20) + number)
            return torch.randn(shape, generator=generator) / shape[1] ** 0.5

        parameters = list(enumerate(self.parameters()))
        with ThreadPoolExecutor() as pool, torch.no_grad():
            for first in range(0, len(parameters), DRAWN):
                some = parameters[first : first + DRAWN]
                drawn = [pool.submit(draw, number, parameter.shape) for number, parameter in some]
                for (_, parameter), values in zip(some, drawn, strict=True):
                    parameter.copy_(values.result())

    def context(self, features: torch.Tensor, positions: torch.Tensor) -> ContextKV:
        """Keys and values of the context.

        Args:
            features: `[T, layers * H]`, the target's states side by side in the order of `settings.layer_ids`.
            positions: `[T]` int, each token's place in its document.
        """
        _, feature = self.hidden_norm(product(features, [self.fc.weight], self.fp8))
        tables = self._tables(positions)
        return [layer.self_attn.keys_values(feature, tables, self.fp8) for layer in self._layers()]

    def blocks(self, embedded: torch.Tensor, context: ContextKV, blocks: Blocks) -> torch.Tensor:
        """Final hidden states of blocks, the input of the target's LM head.

        Args:
            embedded: `[A, B, H]` from `block_inputs`.
            context: from `context`.
            blocks: where the anchors stand.

        Returns:
            `[A, B, H]`; slot k predicts the token k places after the anchor, slot 0 predicts nothing.
        """
        slots = torch.arange(embedded.shape[1], device=embedded.device)
        tables = self._tables(((blocks.anchors - blocks.starts)[:, None] + slots).flatten())
        h, delta = embedded.flatten(0, 1), None
        for number, (layer, pair) in enumerate(zip(self._layers(), context, strict=True)):
            done = partial(self.layer_done, number) if self.layer_done else None
            h, delta = layer(h, delta, tables, pair, blocks, self.fp8, done)
        return self.norm(h, delta)[1].view_as(embedded)

    def block_inputs(self, embedding: torch.Tensor, anchor_tokens: torch.Tensor) -> torch.Tensor:
        """Embedded slots `[A, B, H]`: the clean token at the anchor `[A]`, then mask tokens."""
        count, block = anchor_tokens.shape[0], self.settings.block_size
        ids = anchor_tokens.new_full((count, block), self.settings.mask_token_id)
        ids[:, 0] = anchor_tokens
        return F.embedding(ids, embedding)

    def _tables(self, positions: torch.Tensor) -> Tables:
        return rope_tables(positions, self.settings.head_dim, self.settings.rope_theta)

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]
