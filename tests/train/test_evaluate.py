"""The walk against a plain loop, and real speculative decoding against plain greedy decoding."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import fill
from test_drafter import drafter_settings
from test_trainer import loss_settings, train_settings
from tiny import BUNDLED
from transformers import AutoModelForCausalLM

from dflash_offline.extract.cached import CachedTarget
from dflash_offline.extract.run import Prepared
from dflash_offline.store import HELDOUT, TRAIN, Documents, Head, States, Store, load_head
from dflash_offline.store.progress import SILENT
from dflash_offline.train.attention import Blocks
from dflash_offline.train.checkpoint import load_drafter
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.evaluate.decode import decode_greedy, decode_speculative
from dflash_offline.train.evaluate.parity import compare_rounds, first_difference
from dflash_offline.train.evaluate.report import evaluate_decoding
from dflash_offline.train.evaluate.summary import Tally, summarize
from dflash_offline.train.evaluate.walk import Round, Turn, Walker, greedy, turns_of, walk
from dflash_offline.train.inputs import Ends, side_by_side
from dflash_offline.train.ranks import alone
from dflash_offline.train.trainer import Trainer

CPU = torch.device("cpu")


def model_of(target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def bundled_rows(count: int) -> list[dict[str, Any]]:
    """The shortest single-turn conversations that the bundled target wrote greedily."""
    rows = [json.loads(line) for line in (BUNDLED / "conversations.jsonl").read_text().splitlines()]
    greedy = [row for row in rows if row["split"] == "heldout" and len(row["messages"]) == 2]
    return sorted(greedy, key=lambda row: len(str(row["messages"])))[:count]


@pytest.fixture(scope="module")
def greedy_store(tmp_path_factory: pytest.TempPathFactory, make_store: Callable[..., Prepared]) -> Store:
    """A store of texts that the bundled target wrote itself, greedily."""
    folder = tmp_path_factory.mktemp("greedy")
    path = folder / "greedy.jsonl"
    path.write_text("".join(json.dumps({**row, "split": "train"}) + "\n" for row in bundled_rows(8)))
    return fill(make_store(BUNDLED / "target", [path], folder / "states", layer_ids=[1, 5], heldout=0.0))


@pytest.fixture(scope="module")
def trained(greedy_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    """A drafter that has learned much of these very texts: rounds of every length occur."""
    settings = train_settings(epochs=70, tokens=1024, anchors=96, lr=5e-3, save_every=1000)
    folder = tmp_path_factory.mktemp("run")
    shape = drafter_settings(mask_token_id=8180, head_dim=32, intermediate_size=256, sliding_window=64)
    last = Trainer(greedy_store, shape, loss_settings(), settings, folder, alone(CPU), SILENT).run()
    return load_drafter(last, torch.float32, CPU)[0]


def slow_walk(drafter: Drafter, head: Head, store: Store, documents: Documents, index: int) -> list[Round]:
    """The rounds of a document's turns, each block drafted alone."""
    part, start, length = (
        store.part(int(documents.part[index])),
        int(documents.start[index]),
        int(documents.length[index]),
    )
    tokens = part.small("tokens")[start : start + length].tolist()
    mask = part.small("loss_mask")[start : start + length].tolist()
    bits = np.zeros((2, length, store.identity.hidden_size), np.uint16)
    part.read("hidden", start, start + length, store.layer_indices((1, 5)), States(bits))
    hidden = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()
    embedding, lm_head = head.embedding.float(), head.lm_head.float()
    rounds = []
    place = 0
    while place < length:
        if not mask[place] or place + 1 >= length or not mask[place + 1]:
            place += 1
            continue
        end = place
        while end < length and mask[end]:
            end += 1
        while place < end - 1:
            context = drafter.context(side_by_side(hidden[:, :place]), torch.arange(place))
            embedded = drafter.block_inputs(embedding, torch.tensor([tokens[place]]))
            where = Blocks(torch.tensor([place]), torch.tensor([0]))
            logits = drafter.blocks(embedded, context, where)[0, 1:] @ lm_head.T
            drafted = logits.argmax(-1).tolist()
            first, second = logits.sort(descending=True).values[:, :2].T
            right = 0
            while right < len(drafted) and place + 1 + right < end and drafted[right] == tokens[place + 1 + right]:
                right += 1
            produced = min(right + 1, end - 1 - place)
            margin = float((first - second)[: right + 1].min())
            rounds.append(Round(place, right, produced, margin))
            place += produced
        place = end
    return rounds


def assert_same(mine: list[Round], expected: list[Round]) -> None:
    ours, theirs = ([replace(item, margin=0.0) for item in rounds] for rounds in (mine, expected))
    assert ours == theirs
    assert [item.margin for item in mine] == pytest.approx([item.margin for item in expected], abs=1e-4)


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, -1.0, 4.0, -torch.inf]], dtype=torch.bfloat16)
    tokens, margins = greedy(logits)
    assert tokens.tolist() == [1, 0]
    assert margins.tolist() == [0.0, 1.0]
    assert margins.dtype == torch.float32


@torch.no_grad()
@pytest.mark.parametrize("at_once", [None, (1, 3), (2,), (8, 16)])
@pytest.mark.parametrize("budget", [1, 200, 4000])
def test_the_walk_equals_a_plain_loop(
    budget: int,
    at_once: tuple[int, ...] | None,
    trained: Drafter,
    greedy_store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if at_once:  # as on a GPU: rounds of one size or another, filled up
        make = Walker.__init__

        def fixed(walker: Walker, *arguments: Any) -> None:
            make(walker, *arguments)
            walker._fixed = True

        monkeypatch.setattr("dflash_offline.train.evaluate.walk.AT_ONCE", at_once)
        monkeypatch.setattr(Walker, "__init__", fixed)
    documents, head = greedy_store.documents(TRAIN), load_head(greedy_store)
    turns = walk(trained, Ends.beside(head, trained), greedy_store, documents, budget)
    for index in range(len(documents)):
        mine = [item for turn in turns if turn.document == index for item in turn.rounds]
        assert_same(mine, slow_walk(trained, head, greedy_store, documents, index))
    rounds = [item.produced for turn in turns for item in turn.rounds]
    assert sum(rounds) / len(rounds) > 1.3  # else this shows nothing


@torch.no_grad()
def test_the_walk_over_many_turns(filled: Store) -> None:
    drafter = Drafter(drafter_settings(), 32)
    drafter.reset(0)
    documents, head = filled.documents(HELDOUT), load_head(filled)
    turns = walk(drafter, Ends.beside(head, drafter), filled, documents, 400)
    assert len(turns) > len(documents)
    for index in range(len(documents)):
        mine = [item for turn in turns if turn.document == index for item in turn.rounds]
        assert_same(mine, slow_walk(drafter, head, filled, documents, index))


def test_decoding_agrees_with_the_states_round_by_round(trained: Drafter, greedy_store: Store) -> None:
    documents, head = greedy_store.documents(TRAIN).first(4), load_head(greedy_store)
    target = CachedTarget(model_of(BUNDLED / "target"), greedy_store.identity.layer_ids, None)
    end = 8177  # <|im_end|>
    found = evaluate_decoding(target, trained, head, greedy_store, documents, {end}, 512)
    assert found["turns_that_agree"] == found["turns"] == 4
    assert found["turns_equal_to_greedy"] == found["turns_equal_to_store"] == 4
    assert found["rounds_same_as_states"] >= 0.9 * found["rounds"]
    assert found["accepted_length"] > 1.3
    assert 1 < found["rounds"] < found["tokens"]


class Guesser:
    """In place of a drafter: proposes what `script` says, so that every pattern of acceptance occurs."""

    def __init__(self, truth: Sequence[int], rights: Sequence[int], block: int, vocabulary: int) -> None:
        self.settings = drafter_settings(block_size=block)
        self._truth, self._rights, self._block, self._vocabulary = truth, list(rights), block, vocabulary
        self._parameter = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[torch.Tensor] = []

    def parameters(self) -> Any:
        return iter([self._parameter])

    def context(self, features: torch.Tensor, positions: torch.Tensor) -> Any:
        self.seen.append(features)
        return [positions.float()[:, None, None]]

    def block_inputs(self, embedding: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, self._block, 1)

    def blocks(self, embedded: torch.Tensor, context: Any, blocks: Blocks) -> torch.Tensor:
        anchor = int(blocks.anchors[0])
        assert context[0].flatten().tolist() == list(range(anchor))  # every position before the anchor, once
        right = self._rights.pop(0)
        states = torch.zeros(1, self._block, self._vocabulary)
        for k in range(1, self._block):
            true = self._truth[anchor + k] if anchor + k < len(self._truth) else 0
            states[0, k, true if k <= right else (true + 1) % self._vocabulary] = 1
        return states


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_text_and_states_are_the_targets_own_whatever_is_accepted(kind: str, request: pytest.FixtureRequest) -> None:
    """Recurrent states, convolution states and keys go back exactly: after any pattern of acceptance the text is the
    greedy text, and the states handed to the drafter are those of one pass over it."""
    model = model_of(request.getfixturevalue(kind))
    target = CachedTarget(model, [1, 5], None)
    prompt = np.random.default_rng(5).integers(10, 8000, 9).tolist()
    plain = decode_greedy(target, prompt, set(), 60)
    # The whole text is only right if the target is far from ties on it; this one is.
    assert min(plain.margins) > 1e-4
    rights = [0, 1, 4, 2, 0, 3, 4, 4, 1, 0, 2, 3] * 4
    guesser: Any = Guesser([*prompt, *plain.tokens], rights, 5, 8192)
    head = Ends(torch.zeros(1, 1), torch.eye(8192))
    fast = decode_speculative(target, guesser, head, (0, 1), prompt, set(), 60)
    assert fast.tokens == plain.tokens
    taken = [r.right for r in fast.rounds]
    assert taken[:-1] == rights[: len(taken) - 1]
    assert sum(r.produced for r in fast.rounds) == 59
    text = torch.tensor([[*prompt, *plain.tokens]])
    alone = model(input_ids=text, output_hidden_states=True).hidden_states
    seen = torch.cat(guesser.seen).unflatten(1, (2, -1)).transpose(0, 1)
    for row, layer in enumerate((1, 5)):
        exact = alone[layer + 1][0, : seen.shape[1]]
        assert (seen[row][: len(exact)] - exact).norm() / exact.norm() < 2**-8


def test_decoding_stops_at_an_end_token_inside_a_block(hybrid: Path) -> None:
    target = CachedTarget(model_of(hybrid), [1, 5], None)
    prompt = [11, 12, 13, 400]
    plain = decode_greedy(target, prompt, set(), 30).tokens
    end = plain[next(i for i in range(5, 30) if plain[i] not in plain[:i])]
    stop = plain.index(end) + 1
    guesser: Any = Guesser([*prompt, *plain], [4] * 20, 5, 8192)
    head = Ends(torch.zeros(1, 1), torch.eye(8192))
    fast = decode_speculative(target, guesser, head, (0, 1), prompt, {end}, 30)
    assert fast.tokens == plain[:stop] == decode_greedy(target, prompt, {end}, 30).tokens
    assert sum(r.produced for r in fast.rounds) == stop - 1


def turn(*rounds: tuple[int, int, int], stop: int = 100) -> Turn:
    return Turn(0, "code", 0, stop, [Round(a, r, p, 1.0) for a, r, p in rounds])


def test_accepted_length_is_tokens_over_rounds() -> None:
    turns = [turn((0, 2, 3), (3, 0, 1)), turn((0, 3, 2), stop=3)]
    summary = summarize(Tally.of(turns, 1, 4), ["code"])
    assert summary["accepted_length"] == pytest.approx(6 / 3)
    # Slot 3 is reached by the first two rounds alone: the last round's turn ends before it.
    assert summary["acceptance_by_position"] == pytest.approx([2 / 3, 2 / 3, 0.0])
    assert (summary["turns"], summary["rounds"], summary["tokens"]) == (2, 3, 6)
    assert summarize(Tally.of([], 1, 4), ["code"])["accepted_length"] is None


def test_turns_are_runs_with_a_pair_to_predict() -> None:
    mask = np.array([0, 1, 1, 0, 1, 0, 1, 1, 1], bool)
    assert turns_of(mask) == [(1, 3), (6, 9)]


def test_parity_names_the_first_disagreement() -> None:
    one = [Round(0, 1, 2, 0.5), Round(2, 0, 1, 0.3)]
    assert compare_rounds(one, one).agrees(0.01)
    near = compare_rounds(one, [one[0], Round(2, 1, 2, 1e-4)])
    assert (near.same, near.agrees(0.01), near.margin) == (1, True, 1e-4)
    far = compare_rounds(one, [one[0], Round(2, 1, 2, 0.4)])
    assert not far.agrees(0.01)
    assert not compare_rounds(one, one[:1]).agrees(0.01)
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
