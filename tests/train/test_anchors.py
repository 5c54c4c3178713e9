"""Anchors and supervision against plain loops over the design's sentences."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_offline.train.anchors import draw_anchors, eligible, supervision


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """loss_mask, doc_start and the document of each position (None in padding as -1)."""
    lengths = draw(st.lists(st.integers(1, 10), min_size=1, max_size=5))
    padding = draw(st.integers(0, 6))
    total = sum(lengths) + padding
    document, start = [], []
    for number, length in enumerate(lengths):
        start += [len(document)] * length
        document += [number] * length
    mask = [draw(st.booleans()) for _ in document] + [False] * padding
    start += [total] * padding
    return torch.tensor(mask), torch.tensor(start), document + [-1] * padding


@given(batches())
def test_eligible_is_a_supervised_pair_in_one_document(case: tuple[torch.Tensor, torch.Tensor, list[int]]) -> None:
    mask, start, document = case
    expected = [
        bool(i + 1 < len(document) and mask[i] and mask[i + 1] and document[i] == document[i + 1])
        for i in range(len(document))
    ]
    assert eligible(mask, start).tolist() == expected


@given(batches(), st.integers(1, 40), st.integers(0, 5), st.integers(0, 5))
@settings(max_examples=80)
def test_anchors_are_distinct_eligible_sorted_and_as_many_as_there_are(
    case: tuple[torch.Tensor, torch.Tensor, list[int]], count: int, seed: int, micro: int
) -> None:
    mask, start, document = case
    possible = set(torch.nonzero(eligible(mask, start)).flatten().tolist())
    anchors = draw_anchors(mask, start, seed, torch.tensor(micro), count).tolist()
    assert len(anchors) == count
    assert anchors == sorted(anchors)
    real = [a for a in anchors if a < len(document)]
    assert len(set(real)) == len(real) == min(count, len(possible))
    assert set(real) <= possible
    assert set(anchors) - set(real) <= {len(document)}


def test_anchors_change_with_seed_and_micro_batch_and_with_nothing_else() -> None:
    mask, start = torch.ones(500, dtype=torch.bool), torch.zeros(500, dtype=torch.int64)

    def drawn(seed: int, micro: int) -> list[int]:
        return draw_anchors(mask, start, seed, torch.tensor(micro), 60).tolist()

    assert drawn(1, 2) == drawn(1, 2)
    assert len({tuple(drawn(seed, micro)) for seed in range(4) for micro in range(4)}) == 16


def test_every_position_is_drawn_about_equally_often() -> None:
    mask, start = torch.ones(101, dtype=torch.bool), torch.zeros(101, dtype=torch.int64)
    counts = torch.zeros(101)
    for micro in range(1000):
        counts[draw_anchors(mask, start, 0, torch.tensor(micro), 20)] += 1
    # 1,000 draws of 20 of 100: 200 each, deviation sqrt(1000 * 0.2 * 0.8) = 12.6.
    assert counts[100] == 0
    assert (counts[:100] - 200).abs().max() < 5 * 12.7


@given(batches(), st.integers(2, 6))
def test_supervision_ends_at_the_first_unsupervised_or_foreign_position(
    case: tuple[torch.Tensor, torch.Tensor, list[int]], block: int
) -> None:
    mask, start, document = case
    tokens = torch.arange(len(document)) + 100
    anchors = draw_anchors(mask, start, 0, torch.tensor(0), 8)
    labels, supervised = supervision(anchors, tokens, mask, start, block)
    for row, anchor in enumerate(anchors.tolist()):
        open_ = anchor < len(document)
        for k in range(1, block):
            place = anchor + k
            open_ = open_ and place < len(document) and bool(mask[place]) and document[place] == document[anchor]
            assert bool(supervised[row, k - 1]) == open_
            assert int(labels[row, k - 1]) == (int(tokens[place]) if open_ else 0)
