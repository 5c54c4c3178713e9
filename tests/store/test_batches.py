"""Packing: every document once, within the budget, in an order that can be resumed and shared among ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_offline.store import Documents, StoreError, check_shares, mixed, pack, share, shuffled


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


def tagged(lengths: list[int], tags: list[str], seed: int = 0) -> Documents:
    """Documents with ids that follow from a seed."""
    ids = np.random.default_rng(seed).integers(0, 2**63, len(lengths)).astype(np.uint64)
    zeros = np.zeros(len(lengths), np.int64)
    return Documents(zeros, zeros, np.array(lengths, np.int64), ids, tags)


def mixes() -> st.SearchStrategy[Documents]:
    document = st.tuples(st.integers(1, 60), st.sampled_from(["code", "chat", "math"]))
    rows = st.lists(document, min_size=6, max_size=60)
    return rows.map(lambda rows: tagged([n for n, _ in rows], [tag for _, tag in rows]))


@given(mixes(), st.integers(0, 3))
def test_a_mixture_gives_each_tag_its_share_and_wears_documents_evenly(documents: Documents, seed: int) -> None:
    shares = {"code": 3.0, "chat": 1.0}
    places = {tag: [i for i, t in enumerate(documents.tags) if t == tag] for tag in shares}
    places = {tag: found for tag, found in places.items() if found}
    total = sum(int(documents.length[found].sum()) for found in places.values())
    weight = sum(shares[tag] for tag in places)
    used = np.zeros(len(documents), np.int64)
    for epoch in range(6):
        drawn = mixed(documents, shares, seed, epoch)
        assert "math" not in {documents.tags[i] for i in drawn}
        np.add.at(used, drawn, 1)
        for tag, found in places.items():
            tokens = sum(int(documents.length[i]) for i in drawn if documents.tags[i] == tag)
            assert abs(tokens - total * shares[tag] / weight) <= int(documents.length[found].max()) + 1
    for found in places.values():
        assert used[found].max() - used[found].min() <= 1


@given(mixes(), st.integers(0, 3), st.integers(0, 3))
def test_natural_shares_take_each_document_once_whatever_their_order(
    documents: Documents, seed: int, epoch: int
) -> None:
    shares = {
        tag: float(sum(int(n) for n, t in zip(documents.length, documents.tags, strict=True) if t == tag))
        for tag in set(documents.tags)
    }
    drawn = mixed(documents, shares, seed, epoch)
    assert sorted(drawn.tolist()) == list(range(len(documents)))
    turned = np.random.default_rng(seed).permutation(len(documents))
    other = Documents(
        documents.part, documents.start, documents.length[turned], documents.ids[turned],
        [documents.tags[i] for i in turned],
    )  # fmt: skip
    again = mixed(other, shares, seed, epoch)
    assert documents.ids[drawn].tolist() == other.ids[again].tolist()
    if len(documents) > 20:
        assert drawn.tolist() != mixed(documents, shares, seed, epoch + 1).tolist()


def test_a_share_for_no_tag_is_refused_by_the_nearest_name() -> None:
    documents = tagged([3, 4], ["code", "chat"])
    check_shares(documents, {"code": 1, "maths": 0})
    with pytest.raises(StoreError, match="did you mean chat"):
        check_shares(documents, {"chta": 1})
