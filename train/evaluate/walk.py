"""Accepted length from states: walk through each turn as greedy decoding would.

Start at a turn's first supervised token; count the slots that are right from the first; that many plus one tokens are
produced; go on from there, to the turn's end. On text the target wrote greedily this is real decoding, round by round,
numerical near-ties aside. All turns of a batch walk in step.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch

from ...store import Batch, BatchStream, Documents, Store, pack
from ..attention import Blocks
from ..drafter import Drafter
from ..inputs import Ends, buffers_for, device_states, side_by_side

AT_ONCE = 8
"""Blocks a GPU drafts at a time, missing ones filled up: its memory then stays as it is from round to round."""


@dataclass(frozen=True)
class Round:
    """One round of drafting.

    Attributes:
        anchor: position in the document of the token drafted from.
        right: drafted tokens accepted.
        produced: tokens the round adds: `right` + 1, less at the turn's end.
        margin: smallest difference of the two largest logits over the slots that decided the round; near zero is a tie.
    """

    anchor: int
    right: int
    produced: int
    margin: float


@dataclass
class Turn:
    """One assistant turn and the rounds it took.

    Attributes:
        document: index in the `Documents` walked.
        tag: the document's tag of origin.
        start, stop: the turn's supervised positions in the document.
    """

    document: int
    tag: str
    start: int
    stop: int
    rounds: list[Round] = field(default_factory=list)


def turns_of(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """Runs of supervised positions in a document's mask `[n]`: its turns, those with a pair of tokens to predict."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2) if b - a > 1]


def count_right(drafted: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Slots right from the first, `[A]`, of drafted and actual tokens `[A, n]`; -1 in `actual` past a turn's end."""
    return (drafted == actual).cumprod(1).sum(1)


@torch.inference_mode()
def walk(
    drafter: Drafter,
    ends: Ends,
    store: Store,
    documents: Documents,
    budget: int,
    rounds: int | None = None,
    share: tuple[int, int] = (0, 1),
) -> list[Turn]:
    """Walk all turns of the given documents.

    Args:
        drafter: on the device and in the dtype to run in.
        ends: the target's, there too.
        budget: tokens of a packed batch; it does not change the result but for rounding.
        rounds: stop each batch after so many, to try things out.
        share: take every batch whose number is the first modulo the second: what one of several ranks walks.
    """
    device = ends.embedding.device
    budget = max(budget, int(documents.length.max(initial=1)))
    groups = pack(documents.length.tolist(), budget)[share[0] :: share[1]]
    layers = store.layer_indices(tuple(drafter.settings.layer_ids))
    found: list[Turn] = []
    with BatchStream(store, documents, groups, budget, layers, allocate=buffers_for(device)) as stream:
        for batch in stream:
            found += _walk_batch(drafter, ends, batch, documents, rounds)
    return sorted(found, key=lambda turn: (turn.document, turn.start))


def _walk_batch(
    drafter: Drafter,
    ends: Ends,
    batch: Batch,
    documents: Documents,
    rounds: int | None,
) -> list[Turn]:
    device, dtype = ends.embedding.device, ends.embedding.dtype
    length = len(batch.tokens)
    doc_start = torch.from_numpy(batch.doc_start.astype(np.int64)).to(device)
    tokens = torch.from_numpy(batch.tokens.astype(np.int64)).to(device)
    features = side_by_side(device_states(batch.hidden, device, dtype))
    context = drafter.context(features, torch.arange(length, device=device) - doc_start)
    turns, offsets = [], []
    at = 0
    for document in batch.documents:
        end = at + int(documents.length[document])
        for start, stop in turns_of(batch.loss_mask[at:end]):
            turns.append(Turn(document, documents.tags[document], start, stop))
            offsets.append(at)
        at = end
    block = drafter.settings.block_size
    places = [turn.start for turn in turns]
    fixed = device.type == "cuda"
    for _ in itertools.count() if rounds is None else range(rounds):
        active = [i for i, turn in enumerate(turns) if places[i] < turn.stop - 1]
        if not active:
            break
        # Turns stand in the order of the batch, so their anchors are sorted.
        active = active[:AT_ONCE] if fixed else active
        missing = AT_ONCE - len(active) if fixed else 0
        anchors = torch.tensor([offsets[i] + places[i] for i in active] + [length] * missing, device=device)
        stops = torch.tensor([offsets[i] + turns[i].stop for i in active] + [0] * missing, device=device)
        blocks = Blocks.of(anchors, doc_start)
        first = tokens[anchors.clamp(max=length - 1)]
        states = drafter.blocks(drafter.block_inputs(ends.embedding, first), context, blocks)
        best = (states[:, 1:] @ ends.lm_head.T).float().topk(2, -1)
        drafted = best.indices[..., 0]
        margins = (best.values[..., 0] - best.values[..., 1]).tolist()
        ahead = anchors[:, None] + torch.arange(1, block, device=device)
        actual = torch.where(ahead < stops[:, None], tokens[ahead.clamp(max=length - 1)], -1)
        for row, (i, right) in enumerate(zip(active, count_right(drafted, actual).tolist(), strict=False)):
            turn, place = turns[i], places[i]
            produced = min(right + 1, turn.stop - 1 - place)
            turn.rounds.append(Round(place, right, produced, min(margins[row][: right + 1])))
            places[i] += produced
    return turns
