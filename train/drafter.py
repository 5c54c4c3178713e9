"""The drafter: a small Qwen3-style decoder that reads the target's states and fills a block of slots at once.

Context C = hidden_norm(fc(chosen layers)) enters every layer as extra keys and values; blocks are queries. The context
side depends on C alone, so it is computed once (`context`) and any number of blocks run against it (`blocks`).
Embedding and LM head are the target's and stay outside. Layout and formulas follow DFlash (z-lab); config in
`DrafterSettings`.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn

from .attention import Blocks, anchor_attention

ContextKV = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of the context, `[T, kv_heads, head_dim]` each, one pair a layer."""


class DrafterSettings(BaseModel):
    """Section `[drafter]`: its shape. The hidden size is always the target's."""

    model_config = ConfigDict(extra="forbid")

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
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., size]` to the same."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rope_tables(positions: torch.Tensor, dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[..., 1, dim]` in fp32 for integer positions `[...]` (Su et al. 2021, halves rotated)."""
    inverse = theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angles = positions.float()[..., None, None] * inverse
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply rotary tables `[..., 1, d]` to heads `[..., heads, d]`, in fp32."""
    cos, sin = tables
    wide = x.float()
    low, high = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Projections and norms of one layer's attention; the same weights serve context and blocks."""

    def __init__(self, settings: DrafterSettings, hidden: int, kind: str) -> None:
        super().__init__()
        dim = settings.head_dim
        self.shape = (settings.num_attention_heads, settings.num_key_value_heads, dim)
        self.window = settings.sliding_window if kind == "sliding_attention" else None
        self.causal = settings.is_causal
        self.q_proj = nn.Linear(hidden, settings.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, settings.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, settings.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(settings.num_attention_heads * dim, hidden, bias=False)
        self.q_norm = RMSNorm(dim, settings.rms_norm_eps)
        self.k_norm = RMSNorm(dim, settings.rms_norm_eps)

    def keys_values(
        self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (normed, rotated) and values `[..., kv_heads, d]` of `[..., H]`."""
        _, kv_heads, dim = self.shape
        key = self.k_norm(self.k_proj(x).unflatten(-1, (kv_heads, dim)))
        return rotate(key, tables), self.v_proj(x).unflatten(-1, (kv_heads, dim))

    def forward(
        self,
        x: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        context: tuple[torch.Tensor, torch.Tensor],
        blocks: Blocks,
    ) -> torch.Tensor:
        """Blocks `[A, B, H]` against the context's keys and values."""
        heads, _, dim = self.shape
        query = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (heads, dim))), tables)
        key, value = self.keys_values(x, tables)
        out = anchor_attention(query, key, value, *context, blocks, self.window, self.causal)
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020)."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., H]` to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, settings: DrafterSettings, hidden: int, kind: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, settings.rms_norm_eps)
        self.self_attn = Attention(settings, hidden, kind)
        self.post_attention_layernorm = RMSNorm(hidden, settings.rms_norm_eps)
        self.mlp = MLP(hidden, settings.intermediate_size)

    def forward(
        self,
        h: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        context: tuple[torch.Tensor, torch.Tensor],
        blocks: Blocks,
    ) -> torch.Tensor:
        """`[A, B, H]` to the same."""
        h = h + self.self_attn(self.input_layernorm(h), tables, context, blocks)
        return h + self.mlp(self.post_attention_layernorm(h))


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
        self.fc = nn.Linear(len(settings.layer_ids) * hidden_size, hidden_size, bias=False)
        self.hidden_norm = RMSNorm(hidden_size, settings.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(settings, hidden_size, kind) for kind in settings.layer_types])
        self.norm = RMSNorm(hidden_size, settings.rms_norm_eps)

    def reset(self, seed: int) -> None:
        """Draw fresh weights: normal with deviation 1 / sqrt(inputs), norms at one. The same on every device."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    drawn = torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5
                    parameter.copy_(drawn)
                else:
                    parameter.fill_(1)

    def context(self, hidden: torch.Tensor, positions: torch.Tensor) -> ContextKV:
        """Keys and values of the context.

        Args:
            hidden: `[layers, T, H]`, the target's states in the order of `settings.layer_ids`.
            positions: `[T]` int, each token's place in its document.
        """
        feature = self.hidden_norm(self.fc(hidden.transpose(0, 1).flatten(1)))
        tables = self._tables(positions)
        return [layer.self_attn.keys_values(feature, tables) for layer in self._layers()]

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
        tables = self._tables((blocks.anchors - blocks.starts)[:, None] + slots)
        h = embedded
        for layer, pair in zip(self._layers(), context, strict=True):
            h = layer(h, tables, pair, blocks)
        return self.norm(h)

    def block_inputs(self, embedding: torch.Tensor, anchor_tokens: torch.Tensor) -> torch.Tensor:
        """Embedded slots `[A, B, H]`: the clean token at the anchor `[A]`, then mask tokens."""
        count, block = anchor_tokens.shape[0], self.settings.block_size
        ids = anchor_tokens.new_full((count, block), self.settings.mask_token_id)
        ids[:, 0] = anchor_tokens
        return F.embedding(ids, embedding)

    def _tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_tables(positions, self.settings.head_dim, self.settings.rope_theta)

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]
