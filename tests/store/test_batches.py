"""Packing: every document once, within the budget, in an order that can be resumed and shared among ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_offline.store import Documents, pack, share, shuffled


@given(st.lists(st.integers(1, 64), max_size=200), st.integers(64, 200))
def test_packing_takes_every_document_once_within_the_budget(lengths: list[int], budget: int) -> None:
    groups = pack(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in group) <= budget for group in groups)
    assert all(groups)


def test_packing_wastes_little_on_a_realistic_mix() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 0.8, 3000).clip(30, 3072).astype(int).tolist()
    groups = pack(lengths, 3072)
    assert sum(lengths) / (len(groups) * 3072) > 0.98


def test_a_document_over_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="over the budget"):
        pack([10, 65], 64)


def documents_of(ids: list[int]) -> Documents:
    zeros = np.zeros(len(ids), np.int64)
    return Documents(zeros, zeros, zeros + 1, np.array(ids, np.uint64), [""] * len(ids))


def test_the_order_depends_on_ids_seed_and_epoch_alone() -> None:
    ids = np.random.default_rng(1).integers(0, 1 << 63, 200).tolist()
    order = [ids[i] for i in shuffled(documents_of(ids), 3, 1)]
    assert sorted(order) == sorted(ids)
    backwards = ids[::-1]
    assert [backwards[i] for i in shuffled(documents_of(backwards), 3, 1)] == order
    assert [ids[i] for i in shuffled(documents_of(ids), 3, 2)] != order
    assert [ids[i] for i in shuffled(documents_of(ids), 4, 1)] != order


@given(st.integers(0, 40), st.integers(1, 6))
def test_ranks_share_all_batches_evenly(count: int, ranks: int) -> None:
    groups = [[number] for number in range(count)]
    shares = [share(groups, rank, ranks) for rank in range(ranks)]
    assert len({len(own) for own in shares}) == 1
    assert sorted(group[0] for own in shares for group in own if group) == list(range(count))
    # A step of all ranks is a run of consecutive batches, so a position means the same for every number of ranks.
    for step, together in enumerate(zip(*shares, strict=True)):
        assert [group[0] for group in together if group] == list(range(step * ranks, min(count, (step + 1) * ranks)))
