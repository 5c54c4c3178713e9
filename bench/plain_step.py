"""The training step as a careful person writes it in plain PyTorch: what ours is measured against.

    python -m bench.plain_step [--documents 2048] [--torch-norms]
    python -m bench.plain_step --tiny  # on a CPU

Eager modules, flex_attention under torch.compile with a mask built once a micro-batch, the LM head's loss in chunks
whose logits are computed again on the way back, clipping by the global norm, fused AdamW on fp32 masters. Keeps nothing
of the package's own step but how anchors are drawn, so that both see the same blocks. On a CPU, where flex_attention
has no backward, attention is dense.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from dflash_offline.train.anchors import draw_anchors, supervision

EPS = 1e-6
CLIP = 1.0
LOSS_ROWS = 1280
"""Slots whose logits exist at a time: six equal chunks of the full size's 7,680, each a multiple of a matrix tile."""
FLEX_OPTIONS: dict[str, Any] = {}
"""flex_attention's `kernel_options`: the fastest that `bench.attention` finds may stand here."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a step; the defaults are the Qwen3.6-27B drafter's.

    Attributes:
        hidden, mlp: H and the MLP's width.
        heads, kv_heads, head_dim: of attention.
        sliding, full: layers with a window, then layers without.
        window, causal: W of the sliding layers, and whether their slots see only slots up to their own.
        states: target layers that `fc` reads.
        tokens, documents: T, and the length of each document in it.
        anchors, block: A and B.
        vocabulary, mask_token: of the target.
        theta, gamma: base of the rotary embedding, decay of the slots' weights.
    """

    hidden: int = 5120
    mlp: int = 17408
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    sliding: int = 4
    full: int = 1
    window: int = 2048
    causal: bool = True
    states: int = 5
    tokens: int = 8192
    documents: int = 2048
    anchors: int = 512
    block: int = 16
    vocabulary: int = 248320
    mask_token: int = 248070
    theta: float = 1e7
    gamma: float = 7.0

    @classmethod
    def tiny(cls) -> Shape:
        """A size for trying things on a CPU; sliding and full layers see different things in it."""
        return cls(
            hidden=32, mlp=48, heads=4, kv_heads=2, head_dim=16, sliding=2, window=12, states=2, tokens=64,
            documents=32, anchors=6, block=4, vocabulary=112, mask_token=111, theta=1e4, gamma=4.0,
        )  # fmt: skip

    def flops(self) -> float:
        """Operations of the matrix products that one micro-batch must execute, 2 a multiply-add.

        A product costs once forward, once for the gradient of its weights and once for that of its input, so:

        - `fc`, T rows: 2 times (nothing flows back into stored states);
        - keys and values of the context, T rows: 3 times a layer;
        - q, k, v, o and the MLP, A*B rows: 3 times a layer;
        - LM head, A*(B-1) rows as slot 0 predicts nothing: 2 times (it is frozen).

        Attention itself and anything computed a second time are not in. 124.5e12 at the default sizes.
        """
        rows = self.anchors * self.block
        layers = self.sliding + self.full
        keys_values = 2 * self.hidden * self.kv_heads * self.head_dim
        queries_out = 2 * self.hidden * self.heads * self.head_dim
        fc = 2 * self.tokens * self.states * self.hidden**2
        context = 3 * layers * self.tokens * keys_values
        blocks = 3 * layers * rows * (queries_out + keys_values + 3 * self.hidden * self.mlp)
        head = 2 * self.anchors * (self.block - 1) * self.hidden * self.vocabulary
        return 2.0 * (fc + context + blocks + head)


@dataclass(frozen=True)
class Batch:
    """Attributes:
    states: `[states, T, H]` bfloat16.
    tokens: `[T]` int64.
    loss_mask: `[T]` bool.
    doc_start: `[T]` int64, where each token's document starts.
    """

    states: Tensor
    tokens: Tensor
    loss_mask: Tensor
    doc_start: Tensor


def random_batch(shape: Shape, device: torch.device | str, seed: int) -> Batch:
    """Random states and tokens in documents of `shape.documents`; an eighth of each is an unsupervised prompt."""
    generator = torch.Generator(device).manual_seed(seed)
    position = torch.arange(shape.tokens, device=device)
    doc_start = position // shape.documents * shape.documents
    size = (shape.states, shape.tokens, shape.hidden)
    return Batch(
        torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16),
        torch.randint(0, shape.vocabulary, (shape.tokens,), generator=generator, device=device),
        position - doc_start >= shape.documents // 8,
        doc_start,
    )


# What a slot sees, and flex_attention's mask of it. Rows are the A*B slots; keys are T context positions, then the
# slots again.


@dataclass(frozen=True)
class Ranges:
    """Each row sees keys `low <= n < high` of the context and `own_low <= n < own_high` of its block; `[rows]` int32.

    A range that is empty is 0 to 0.
    """

    low: Tensor
    high: Tensor
    own_low: Tensor
    own_high: Tensor

    def visible(self, keys: int) -> Tensor:
        """`[rows, keys]` bool."""
        key = torch.arange(keys, device=self.low.device)
        context = (key >= self.low[:, None]) & (key < self.high[:, None])
        return context | ((key >= self.own_low[:, None]) & (key < self.own_high[:, None]))


def ranges_of(anchors: Tensor, doc_start: Tensor, block: int, window: int | None, causal: bool) -> Ranges:
    """What slots see, from `anchors` `[A]` (T marks a missing one) and `doc_start` `[T]`; causal only with a window."""
    length, count = doc_start.shape[0], anchors.shape[0]
    slot = torch.arange(block, device=anchors.device)
    start = doc_start[anchors.clamp(max=length - 1)]
    low = start[:, None].expand(count, block)
    high = torch.where(anchors < length, anchors, 0)[:, None].expand(count, block)
    first, last = torch.zeros_like(slot), torch.full_like(slot, block)
    if window is not None:
        low = torch.maximum(low, anchors[:, None] + slot - window + 1)
        first = (slot - window + 1).clamp(min=0)
        last = slot + 1 if causal else (slot + window).clamp(max=block)
    some = low < high
    base = length + block * torch.arange(count, device=anchors.device)[:, None]
    parts = (torch.where(some, low, 0), torch.where(some, high, 0), base + first, base + last)
    return Ranges(*(part.reshape(-1).int() for part in parts))


def block_mask(ranges: Ranges, keys: int, tile: tuple[int, int] = (128, 128)) -> BlockMask:
    """flex_attention's mask: what `create_block_mask` makes, from ranges instead of a boolean for each row and key."""
    low, high, own_low, own_high = ranges.low, ranges.high, ranges.own_low, ranges.own_high
    rows = low.shape[0]
    begin = torch.arange(0, keys, tile[1], device=low.device)
    end = begin + tile[1]
    some = whole = torch.zeros((), dtype=torch.bool, device=low.device)
    for first, last in ((low, high), (own_low, own_high)):
        some = some | ((first[:, None] < end) & (last[:, None] > begin))
        whole = whole | ((first[:, None] <= begin) & (last[:, None] >= end))

    def by_tile(seen: Tensor) -> Tensor:
        return F.pad(seen, (0, 0, 0, -rows % tile[0])).unflatten(0, (-1, tile[0]))

    full = by_tile(whole).all(1)
    partial = by_tile(some).any(1) & ~full

    def counts_and_places(tiles: Tensor) -> tuple[Tensor, Tensor]:
        order = tiles.int().argsort(dim=-1, descending=True, stable=True)
        return tiles.sum(-1, dtype=torch.int32)[None, None], order.int().contiguous()[None, None]

    def sees(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return ((n >= low[m]) & (n < high[m])) | ((n >= own_low[m]) & (n < own_high[m]))

    return BlockMask.from_kv_blocks(
        *counts_and_places(partial), *counts_and_places(full), tile, mask_mod=sees, seq_lengths=(rows, keys)
    )


def compiled_flex(**options: Any) -> Callable[..., Tensor]:
    """flex_attention compiled whole, for fixed shapes.

    Falling back to the uncompiled form, which would make a boolean and a float for every row and key, is an error.
    """
    limits: Any = torch._dynamo.config
    limits.recompile_limit = 64
    limits.fail_on_recompile_limit_hit = True
    return torch.compile(flex_attention, dynamic=False, fullgraph=True, **options)


@functools.cache
def _flex() -> Callable[..., Tensor]:
    return compiled_flex()


def dense_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """The same with every score made, in fp32 or wider.

    Args:
        query: `[1, heads, rows, d]`.
        key, value: `[1, kv_heads, keys, d]`.
        visible: `[rows, keys]` bool.
    """
    share = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = (x.to(wide).repeat_interleave(share, 1) for x in (key, value))
    scores = query.to(wide) @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ value).to(query.dtype)


@dataclass(frozen=True)
class Mask:
    """What the layers of one kind share: flex_attention's mask on a GPU, all of it as booleans elsewhere."""

    tiles: BlockMask | None
    visible: Tensor | None

    @classmethod
    def of(cls, ranges: Ranges, keys: int) -> Mask:
        """The form for the device of `ranges`."""
        on_gpu = ranges.low.is_cuda
        return cls(block_mask(ranges, keys) if on_gpu else None, None if on_gpu else ranges.visible(keys))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[1, heads, rows, d]` from queries of that shape and keys and values `[1, kv_heads, keys, d]`."""
        if self.visible is not None:
            return dense_attention(query, key, value, self.visible)
        return _flex()(query, key, value, block_mask=self.tiles, enable_gqa=True, kernel_options=FLEX_OPTIONS or None)


# The drafter, its parameters named as in published checkpoints.


class Norm(nn.Module):
    """RMSNorm in fp32, step by step or as torch's own fused operation (`fused`)."""

    def __init__(self, size: int, fused: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` to the same."""
        if self.fused:
            return F.rms_norm(x, (x.shape[-1],), self.weight, EPS)
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


Tables = tuple[Tensor, Tensor]


def rope_tables(positions: Tensor, dim: int, theta: float) -> Tables:
    """cos and sin `[n, 1, dim]` in fp32 of positions `[n]`."""
    inverse = theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angles = (positions.float()[:, None, None] * inverse).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """Rotary embedding of `[n, heads, d]`, halves rotated, in fp32."""
    cos, sin = tables
    wide = x.float()
    low, high = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Attention of slots to the context and to themselves."""

    def __init__(self, shape: Shape, fused_norms: bool) -> None:
        super().__init__()
        self.dim = shape.head_dim
        wide, narrow = shape.heads * self.dim, shape.kv_heads * self.dim
        self.q_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)
        self.q_norm = Norm(self.dim, fused_norms)
        self.k_norm = Norm(self.dim, fused_norms)

    def forward(self, x: Tensor, context: Tensor, row_tables: Tables, key_tables: Tables, mask: Mask) -> Tensor:
        """`[rows, H]` from slots of that shape and the context's feature `[T, H]`."""

        def heads_first(x: Tensor) -> Tensor:
            return x.transpose(0, 1)[None]

        def keys(projection: nn.Module) -> Tensor:
            return torch.cat([projection(context), projection(x)]).unflatten(-1, (-1, self.dim))

        query = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim))), row_tables)
        key = rotate(self.k_norm(keys(self.k_proj)), key_tables)
        out = mask.attend(heads_first(query), heads_first(key), heads_first(keys(self.v_proj)))
        return self.o_proj(out[0].transpose(0, 1).flatten(1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[n, H]` to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, shape: Shape, fused_norms: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, fused_norms)
        self.self_attn = Attention(shape, fused_norms)
        self.post_attention_layernorm = Norm(shape.hidden, fused_norms)
        self.mlp = MLP(shape)

    def forward(self, h: Tensor, context: Tensor, row_tables: Tables, key_tables: Tables, mask: Mask) -> Tensor:
        """`[rows, H]` to the same."""
        h = h + self.self_attn(self.input_layernorm(h), context, row_tables, key_tables, mask)
        return h + self.mlp(self.post_attention_layernorm(h))


class Drafter(nn.Module):
    """The drafter's own weights."""

    def __init__(self, shape: Shape, fused_norms: bool) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.states * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = Norm(shape.hidden, fused_norms)
        self.layers = nn.ModuleList([Layer(shape, fused_norms) for _ in range(shape.sliding + shape.full)])
        self.norm = Norm(shape.hidden, fused_norms)

    def forward(self, states: Tensor, slots: Tensor, anchors: Tensor, doc_start: Tensor) -> Tensor:
        """Final states `[A, B, H]` of the embedded `slots` `[A, B, H]`."""
        shape = self.shape
        length = shape.tokens
        position = torch.arange(length, device=anchors.device) - doc_start
        before = torch.where(anchors < length, position[anchors.clamp(max=length - 1)], 0)
        places = (before[:, None] + torch.arange(shape.block, device=anchors.device)).flatten()
        row_tables = rope_tables(places, shape.head_dim, shape.theta)
        key_tables = rope_tables(torch.cat([position, places]), shape.head_dim, shape.theta)
        masks = [
            Mask.of(ranges_of(anchors, doc_start, shape.block, window, shape.causal), length + places.shape[0])
            for window in (shape.window, None)
        ]
        context = self.hidden_norm(self.fc(states.transpose(0, 1).flatten(1)))
        h = slots.flatten(0, 1)
        for number, layer in enumerate(self.layers):
            h = layer(h, context, row_tables, key_tables, masks[number >= shape.sliding])
        return self.norm(h).view_as(slots)


# The step.


def _rows_loss(rows: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    logits = F.linear(rows, head).float()
    return (F.cross_entropy(logits, labels, reduction="none") * weights).sum()


class PlainStep:
    """One whole training step: any number of `micro`, then `update`.

    Args:
        shape: its sizes.
        device: where everything lives.
        seed: of the weights and the anchors.
        dtype: what is computed in; masters and moments are fp32.
        fused_norms: RMSNorm as torch's one operation instead of step by step.

    Attributes:
        drafter: the weights that compute.
        embedding, head: `[vocabulary, H]`, frozen.
        masters: fp32, in the order of `drafter.parameters()`.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device | str,
        seed: int,
        dtype: torch.dtype = torch.bfloat16,
        fused_norms: bool = False,
    ) -> None:
        self.shape, self.device = shape, torch.device(device)
        self._seed, self._dtype = seed, dtype
        with self.device:
            self.drafter = Drafter(shape, fused_norms).to(dtype)
        generator = torch.Generator(self.device).manual_seed(seed)

        def drawn(rows: int, width: int, deviation: float) -> Tensor:
            return torch.randn(rows, width, generator=generator, device=self.device).mul_(deviation)

        self.embedding = drawn(shape.vocabulary, shape.hidden, 0.02).to(dtype)
        self.head = drawn(shape.vocabulary, shape.hidden, shape.hidden**-0.5).to(dtype)
        self._parameters: list[Tensor] = list(self.drafter.parameters())
        self.masters = [
            drawn(len(p), p.shape[1], p.shape[1] ** -0.5) if p.ndim == 2 else torch.ones(len(p), device=self.device)
            for p in self._parameters
        ]
        self._copy_masters()
        self._optimizer = torch.optim.AdamW(self.masters, lr=0.0, weight_decay=0.0, fused=True)
        self._count = torch.zeros((), dtype=torch.int64, device=self.device)
        self._denominator = torch.zeros((), device=self.device)
        slots = torch.arange(shape.block - 1, device=self.device, dtype=torch.float32)
        self._weights = torch.exp(-slots / shape.gamma)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take weights by name, as `drafter.state_dict()` names them, instead of the random ones."""
        names = [name for name, _ in self.drafter.named_parameters()]
        for name, master in zip(names, self.masters, strict=True):
            master.copy_(state[name])
        self._copy_masters()

    @torch.no_grad()
    def _copy_masters(self) -> None:
        torch._foreach_copy_(self._parameters, self.masters)  # pyright: ignore[reportPrivateImportUsage]

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Numerator (differentiable) and denominator of one micro-batch's loss."""
        shape = self.shape
        anchors = draw_anchors(batch.loss_mask, batch.doc_start, self._seed, self._count, shape.anchors)
        labels, mask = supervision(anchors, batch.tokens, batch.loss_mask, batch.doc_start, shape.block)
        ids = anchors.new_full((shape.anchors, shape.block), shape.mask_token)
        ids[:, 0] = batch.tokens[anchors.clamp(max=shape.tokens - 1)]
        slots = F.embedding(ids, self.embedding)
        hidden = self.drafter(batch.states.to(self._dtype), slots, anchors, batch.doc_start)
        weights = mask * self._weights
        rows = hidden[:, 1:].flatten(0, 1)
        numerator = torch.zeros((), device=self.device)
        for parts in zip(
            rows.split(LOSS_ROWS), labels.flatten().split(LOSS_ROWS), weights.flatten().split(LOSS_ROWS), strict=True
        ):
            numerator = numerator + checkpoint(
                _rows_loss, parts[0], self.head, parts[1], parts[2], use_reentrant=False, preserve_rng_state=False
            )
        return numerator, weights.sum()

    def micro(self, batch: Batch) -> Tensor:
        """Forward and backward of one micro-batch; gradients accumulate. Returns its loss, on the device."""
        numerator, denominator = self.loss(batch)
        numerator.backward()
        self._count += 1
        self._denominator += denominator
        return numerator.detach() / denominator

    @torch.no_grad()
    def update(self, rate: float) -> Tensor:
        """Clip, move the masters, copy them into the weights. Returns the gradient's norm before clipping."""
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        norm = torch.stack(norms).norm() / self._denominator
        # The optimizer divides by this as it reads the gradients: one pass less than scaling them first.
        optimizer: Any = self._optimizer
        optimizer.grad_scale = self._denominator * (norm / CLIP).clamp(min=1.0)
        for parameter, master, gradient in zip(self._parameters, self.masters, gradients, strict=True):
            master.grad = gradient.float()
            parameter.grad = None
        del gradients
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._copy_masters()
        self._denominator.zero_()
        return norm


def _report(shape: Shape, device: str, steps: int, fused_norms: bool) -> None:
    on_gpu = device != "cpu"
    step = PlainStep(shape, device, 0, torch.bfloat16 if on_gpu else torch.float32, fused_norms)
    batch = random_batch(shape, device, 0)
    print(f"{shape.flops() / 1e12:.4g} TFLOP of products a step", flush=True)
    began = time.perf_counter()
    losses = [step.micro(batch)]
    step.update(1e-4)
    print(f"first loss {losses[0].item():.3f}; first step {time.perf_counter() - began:.1f} s", flush=True)
    if not on_gpu:
        losses += [(step.micro(batch), step.update(3e-3))[0] for _ in range(steps)]
        print("losses: " + " ".join(f"{loss.item():.3f}" for loss in losses))
        return
    torch.cuda.reset_peak_memory_stats()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(4)] for _ in range(steps + 2)]
    for begin, between, back, end in marks:
        begin.record()
        numerator, denominator = step.loss(batch)
        between.record()
        numerator.backward()
        step._denominator += denominator
        back.record()
        step.update(1e-4)
        end.record()
        losses.append((numerator / denominator).detach())
    torch.cuda.synchronize()
    marks = marks[2:]
    parts = [statistics.median(m[i].elapsed_time(m[i + 1]) for m in marks) for i in range(3)]
    whole = statistics.median(m[0].elapsed_time(m[3]) for m in marks)
    print(
        f"forward {parts[0]:.1f}, backward with the head's second forward {parts[1]:.1f}, update {parts[2]:.1f}, step "
        f"{whole:.1f} ms: {shape.flops() / whole / 1e9:.0f} TFLOP/s, {shape.tokens / whole:.1f} Ktok/s; peak memory "
        f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB; last loss {losses[-1].item():.3f}",
        flush=True,
    )


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, help="length of the documents")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--torch-norms", action="store_true", help="RMSNorm as torch's one operation")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, in sizes for it")
    arguments = parser.parse_args()
    shape = Shape.tiny() if arguments.tiny else Shape()
    if arguments.documents:
        shape = replace(shape, documents=arguments.documents)
    _report(shape, "cpu" if arguments.tiny else "cuda", arguments.steps, arguments.torch_norms)


if __name__ == "__main__":
    main()
