"""Accepted length from states: walk through each turn as greedy decoding would.

Start at a turn's first supervised token; count the slots that are right from the first; that many plus one tokens are
produced; go on from there, to the turn's end. On text the target wrote greedily this is real decoding, round by round,
numerical near-ties aside. All turns of a batch walk in step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ...store import Batch, BatchStream, Documents, Store, pack
from ..attention import Blocks
from ..drafter import ContextKV, Drafter
from ..graphs import Pool, captured
from ..inputs import Ends, Inputs, buffers_for

AT_ONCE: tuple[int, ...] = (8, 16)
"""How many blocks a GPU drafts at a time, missing ones filled up: for fewer, reading the weights costs as much."""


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


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest token of each row of logits `[n, vocabulary]`, the first of equals, and its margin: `[n]` each.

    The margin, by which its logit exceeds the second largest, is in float32.
    """
    best, tokens = logits.max(-1)
    second = logits.scatter(-1, tokens[:, None], -torch.inf).amax(-1)
    return tokens, best.float() - second.float()


class Walker:
    """Walks the turns of one packed batch after another. A round on a GPU is a CUDA graph, replayed.

    Args:
        drafter: on its device, in the dtype to run in.
        ends: the target's, there too.
        inputs: the fixed buffers that batches come in.
        pool: memory to share with other graphs (`graphs.new_pool`).
    """

    def __init__(self, drafter: Drafter, ends: Ends, inputs: Inputs, pool: Pool = None) -> None:
        self._drafter, self._ends, self._inputs = drafter, ends, inputs
        self._context: ContextKV = []
        device = inputs.device
        # Anchors, then where their turns stop; a missing anchor stands at the batch's end.
        most = max(AT_ONCE)
        self._places = torch.tensor([[len(inputs.tokens)] * most, [0] * most], device=device)
        self._found = torch.zeros(2, most, device=device)
        rounds = [partial(self._draft_some, count) for count in AT_ONCE]
        self._look, *rounds = captured([self._take_context, *rounds], device, pool)
        self._rounds = dict(zip(AT_ONCE, rounds, strict=True))
        self._fixed = device.type == "cuda"
        """Whether rounds have as many blocks as one of `AT_ONCE`, or just those there are."""

    def walk(self, batch: Batch, documents: Documents) -> list[Turn]:
        """The turns of a batch that the inputs hold, walked to their ends.

        Args:
            documents: those that `batch.documents` counts.
        """
        turns, offsets = [], []
        at = 0
        for document in batch.documents:
            end = at + int(documents.length[document])
            for start, stop in turns_of(batch.loss_mask[at:end]):
                turns.append(Turn(document, documents.tags[document], start, stop))
                offsets.append(at)
            at = end
        places = [turn.start for turn in turns]
        self._look()
        while active := [i for i, turn in enumerate(turns) if places[i] < turn.stop - 1]:
            # Turns stand in the order of the batch, so their anchors are sorted.
            active = active[: max(AT_ONCE)] if self._fixed else active
            anchors, stops = [offsets[i] + places[i] for i in active], [offsets[i] + turns[i].stop for i in active]
            for i, right, margin in zip(active, *self._drafted(anchors, stops), strict=False):
                turn, place = turns[i], places[i]
                produced = min(int(right) + 1, turn.stop - 1 - place)
                turn.rounds.append(Round(place, int(right), produced, margin))
                places[i] += produced
        return turns

    def _drafted(self, anchors: list[int], stops: list[int]) -> list[list[float]]:
        """What `_draft` finds for those."""
        if not self._fixed:
            return self._draft(torch.tensor([anchors, stops])).tolist()
        count = min(count for count in AT_ONCE if count >= len(anchors))
        missing = count - len(anchors)
        places = [anchors + [len(self._inputs.tokens)] * missing, stops + [0] * missing]
        self._places[:, :count] = torch.tensor(places)
        self._rounds[count]()
        return self._found[:, :count].tolist()

    @torch.no_grad()
    def _take_context(self) -> None:
        inputs = self._inputs
        positions = torch.arange(len(inputs.tokens), device=inputs.device) - inputs.doc_start
        self._context = self._drafter.context(inputs.features, positions)

    def _draft_some(self, count: int) -> None:
        self._found[:, :count] = self._draft(self._places[:, :count])

    @torch.no_grad()
    def _draft(self, places: torch.Tensor) -> torch.Tensor:
        """Draft from anchors, up to their turns' stops: `[2, A]` int64 both.

        Returns:
            `[2, A]` float32: slots right, and the smallest margin of those that decided it.
        """
        anchors, stops = places
        tokens, drafter = self._inputs.tokens, self._drafter
        block, last = drafter.settings.block_size, len(tokens) - 1
        embedded = drafter.block_inputs(self._ends.embedding, tokens[anchors.clamp(max=last)])
        states = drafter.blocks(embedded, self._context, Blocks.of(anchors, self._inputs.doc_start))
        # One product: of states in three dimensions torch makes one a block, and each reads the whole LM head.
        drafted, margins = greedy(states[:, 1:].flatten(0, 1) @ self._ends.lm_head.T)
        ahead = anchors[:, None] + torch.arange(1, block, device=anchors.device)
        actual = torch.where(ahead < stops[:, None], tokens[ahead.clamp(max=last)], -1)
        right = count_right(drafted.view_as(ahead), actual)
        decided = right.clamp(max=block - 2)[:, None]
        least = margins.view_as(ahead).cummin(1).values.gather(1, decided)[:, 0]
        return torch.stack([right.float(), least])


def walk(drafter: Drafter, ends: Ends, store: Store, documents: Documents, budget: int) -> list[Turn]:
    """Walk all turns of some documents, whose states come from a store.

    Args:
        drafter: on the device and in the dtype to run in.
        ends: the target's, there too.
        budget: tokens of a packed batch; it does not change the result but for rounding.
    """
    device, dtype = ends.embedding.device, ends.embedding.dtype
    budget = max(budget, int(documents.length.max(initial=1)))
    groups = pack(documents.length.tolist(), budget)
    layers = store.layer_indices(tuple(drafter.settings.layer_ids))
    inputs = Inputs(Batch.empty(store, budget, len(layers), False), device, dtype)
    walker = Walker(drafter, ends, inputs)
    found: list[Turn] = []
    with BatchStream(store, documents, groups, budget, layers, allocate=buffers_for(device)) as stream:
        for batch in stream:
            inputs.load(batch, 0)
            inputs.take()
            found += walker.walk(batch, documents)
            inputs.sent()
    return sorted(found, key=lambda turn: (turn.document, turn.start))
