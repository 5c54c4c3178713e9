"""Counts of documents: they add up over ranks, and their intervals are those of a plain bootstrap."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_offline.train.evaluate.summary import Tally, interval, paired_difference, summarize
from dflash_offline.train.evaluate.walk import Round, Turn

BLOCK = 5


def some_turns(documents: int, seed: int) -> list[Turn]:
    """Random rounds; some documents have several turns, some none."""
    rng = random.Random(seed)
    turns = []
    for document in range(documents):
        for _ in range(rng.choice([0, 1, 1, 2])):
            stop = rng.randint(5, 40)
            turn = Turn(document, ("code", "chat")[document % 2], 0, stop)
            at = 0
            while at < stop - 1:
                right = rng.randint(0, BLOCK - 1)
                produced = min(right + 1, stop - 1 - at)
                turn.rounds.append(Round(at, right, produced, 1.0))
                at += produced
            turns.append(turn)
    return turns


@given(st.integers(1, 12), st.integers(0, 1000), st.integers(1, 4))
def test_counts_add_up_over_ranks_and_are_those_of_plain_loops(documents: int, seed: int, ranks: int) -> None:
    turns = some_turns(documents, seed)
    apart = [Tally.of(turns[rank::ranks], documents, BLOCK).to_array() for rank in range(ranks)]
    tags = [("code", "chat")[document % 2] for document in range(documents)]
    found = summarize(Tally.from_array(np.sum(apart, axis=0)), tags)
    rounds = [(turn, item) for turn in turns for item in turn.rounds]
    assert found["turns"] == len(turns)
    assert found["rounds"] == len(rounds)
    assert found["tokens"] == sum(item.produced for _, item in rounds)
    if rounds:
        assert found["accepted_length"] == pytest.approx(found["tokens"] / found["rounds"])
    for slot in range(1, BLOCK):
        reached = [item for turn, item in rounds if item.anchor + slot < turn.stop]
        share = found["acceptance_by_position"][slot - 1]
        if reached:
            assert share == pytest.approx(sum(item.right >= slot for item in reached) / len(reached))
        else:
            assert share is None
    for tag, length in found["accepted_length_by_tag"].items():
        own = [item.produced for turn, item in rounds if turn.tag == tag]
        assert length == pytest.approx(sum(own) / len(own))
    assert set(found["accepted_length_by_tag"]) == {turn.tag for turn in turns}


def slow_bootstrap(counts: np.ndarray, value: object, seed: int) -> tuple[float, float]:
    """Draw documents one by one."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(4000):
        drawn = counts[rng.integers(0, len(counts), len(counts))].sum(0)
        found.append(value(drawn))  # pyright: ignore[reportCallIssue]
    found.sort()
    return found[100], found[3899]


def test_intervals_are_those_of_drawing_documents() -> None:
    rng = np.random.default_rng(1)
    rounds = rng.integers(5, 60, 40)
    first = np.stack([rounds * rng.uniform(1.5, 3.5, 40), rounds], 1).round()
    second = np.stack([first[:, 0] * rng.uniform(0.9, 1.0, 40), rounds], 1).round()
    low, high = interval(first[:, 0], first[:, 1]) or (math.nan, math.nan)
    expected = slow_bootstrap(first, lambda drawn: drawn[0] / drawn[1], 5)
    width = expected[1] - expected[0]
    assert (low, high) == pytest.approx(expected, abs=0.1 * width)
    difference, near, far = paired_difference(first, second)
    total = first.sum(0)[0] / rounds.sum() - second.sum(0)[0] / rounds.sum()
    assert difference == pytest.approx(total)
    both = np.concatenate([first, second], 1)
    expected = slow_bootstrap(both, lambda drawn: drawn[0] / drawn[1] - drawn[2] / drawn[3], 6)
    assert (near, far) == pytest.approx(expected, abs=0.1 * (expected[1] - expected[0]))
    assert far - near < (high - low) / 2  # what is common to both cancels
    assert near > 0


def test_intervals_of_little() -> None:
    alike = np.full(10, 6), np.full(10, 3)
    assert interval(*alike) == pytest.approx((2.0, 2.0))
    assert interval(np.array([6, 0]), np.array([3, 0])) is None  # one document with rounds
    one = np.stack(alike, 1)
    assert paired_difference(one, one) == (0.0, 0.0, 0.0)
    assert all(math.isnan(value) for value in paired_difference(one * 0, one))
    assert interval(*alike) == interval(*alike)
