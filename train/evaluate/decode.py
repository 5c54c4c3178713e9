"""Real greedy speculative decoding, and plain greedy decoding to hold it against.

A round drafts a block, verifies it in one pass of the target, keeps the drafted tokens that equal the target's own, and
adds the target's next token. On a rejection the target's cache goes back to before the round, recurrent states too, and
the accepted tokens are fed again. The target is an argument; nothing here knows how it was loaded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..attention import Blocks
from ..drafter import ContextKV, Drafter
from ..inputs import Ends, side_by_side
from .walk import Round, count_right, greedy


class Target(Protocol):
    """A target that decodes with a cache which can go back."""

    def reset(self) -> None:
        """Forget everything."""
        ...

    def advance(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed tokens. Returns hidden states `[layers of the store, n, H]` bfloat16 and logits `[n, vocabulary]`."""
        ...

    def mark(self) -> Any:
        """The cache as it stands, to `rollback` to."""
        ...

    def rollback(self, mark: Any) -> None:
        """Put the cache back, exactly."""
        ...


@dataclass(frozen=True)
class Decoded:
    """What one decoding gave.

    Attributes:
        tokens: the new tokens, the end token included if it came.
        rounds: one entry a round (empty for plain decoding).
        margins: the target's margin at each new token: largest logit minus the second.
        seconds: wall time.
    """

    tokens: list[int]
    rounds: list[Round]
    margins: list[float]
    seconds: float


@torch.inference_mode()
def decode_greedy(target: Target, prompt: Sequence[int], ends: set[int], limit: int) -> Decoded:
    """Plain greedy decoding, one token a pass, until a token of `ends` or `limit` new tokens."""
    began = time.perf_counter()
    target.reset()
    tokens: list[int] = []
    margins: list[float] = []
    feed = list(prompt)
    while len(tokens) < limit and not (tokens and tokens[-1] in ends):
        _, logits = target.advance(feed)
        best, margin = _greedy(logits[-1:])
        tokens += best
        margins += margin
        feed = best
    return Decoded(tokens, [], margins, time.perf_counter() - began)


@torch.inference_mode()
def decode_speculative(
    target: Target,
    drafter: Drafter,
    head: Ends,
    layers: tuple[int, ...],
    prompt: Sequence[int],
    ends: set[int],
    limit: int,
) -> Decoded:
    """Greedy decoding with drafted blocks; gives the target's own greedy text, near-ties of its logits aside.

    Args:
        head: the target's ends, where the drafter is.
        layers: indices, in what `target.advance` returns, of the layers the drafter reads.
        prompt: token ids; positions in `Round.anchor` count from its start.
        ends: tokens that end the text.
        limit: most new tokens.
    """
    began = time.perf_counter()
    parameter = next(drafter.parameters())
    device = parameter.device
    block = drafter.settings.block_size
    target.reset()
    hidden, logits = target.advance(prompt)
    tokens, margins = _greedy(logits[-1:])
    rounds: list[Round] = []
    context = _extend(drafter, None, hidden, layers, 0)
    seen = len(prompt)  # tokens in the target's cache and in the drafter's context
    while len(tokens) < limit and tokens[-1] not in ends:
        anchor = torch.tensor([seen], device=device)
        embedded = drafter.block_inputs(head.embedding, torch.tensor([tokens[-1]], device=device))
        states = drafter.blocks(embedded, context, Blocks(anchor, torch.zeros_like(anchor)))
        drafted, doubt = _greedy(states[0, 1:] @ head.lm_head.T)
        mark = target.mark()
        hidden, logits = target.advance([tokens[-1], *drafted])
        own, certainty = _greedy(logits)
        right = int(count_right(torch.tensor([drafted]), torch.tensor([own[:-1]]))[0])
        added = own[: right + 1]
        kept = next((i + 1 for i, token in enumerate(added) if token in ends), len(added))
        kept = min(kept, limit - len(tokens))
        rounds.append(Round(seen, right, kept, min(doubt[: right + 1])))
        if right < block - 1:
            target.rollback(mark)
            target.advance([tokens[-1], *drafted[:right]])
        context = _extend(drafter, context, hidden[:, : right + 1], layers, seen)
        seen += right + 1
        tokens += added[:kept]
        margins += certainty[:kept]
    return Decoded(tokens, rounds, margins, time.perf_counter() - began)


def _greedy(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    tokens, margins = greedy(logits)
    return tokens.tolist(), margins.tolist()


def _extend(
    drafter: Drafter, context: ContextKV | None, hidden: torch.Tensor, layers: tuple[int, ...], start: int
) -> ContextKV:
    """Append the states of new tokens, the first at position `start`, to the drafter's context."""
    parameter = next(drafter.parameters())
    features = side_by_side(hidden[list(layers)].to(parameter.device, parameter.dtype))
    fresh = drafter.context(features, torch.arange(start, start + len(features), device=parameter.device))
    if context is None:
        return fresh
    return [torch.cat([known, new]) for known, new in zip(context, fresh, strict=True)]
