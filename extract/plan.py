"""The plan of an extraction: which documents make up which unit, decided before any forward pass and written down.

A unit becomes one part of the store. Units, their order and their batches depend on the data and the settings alone,
never on workers or on what was interrupted. Knows nothing of targets.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..store import HELDOUT, TRAIN, Place, Store, part_id
from ..store.format import PLAN, PLANS
from ..store.place import clear_errors
from ..store.sums import LIST, sum_files
from .corpus import Corpus
from .data import DataError

PASS_TOKENS = 512
"""What a forward pass costs beside its tokens, in tokens: reading the weights and starting the kernels."""


@dataclass(frozen=True)
class Unit:
    """A unit of work: its part's id, its split and its documents, as indices into the corpus in the order stored."""

    id: str
    split: str
    documents: list[int]


@dataclass(frozen=True)
class Plan:
    """Attributes:
    key: hash of data, identity and the settings that shape units.
    data: name and sha256 of each data file.
    units: held-out units first, the longest documents first in each split.
    batch_tokens: padded tokens of one forward pass.
    tokens: of the units of each split.
    """

    key: str
    data: dict[str, str]
    units: list[Unit]
    batch_tokens: int
    tokens: dict[str, int]

    def folder(self, store: Place) -> Path:
        """A local folder with the plan and its corpus, as a store has them."""
        return store.fetch(f"{PLANS}/{self.key}")


def plan_key(data: dict[str, str], *shaping: object) -> str:
    """The key of a plan: a hash of the data files and of everything that shapes units."""
    return hashlib.sha256(json.dumps([data, *shaping], sort_keys=True).encode()).hexdigest()[:16]


def make_plan(
    key: str, data: dict[str, str], corpus: Corpus, done: np.ndarray, unit_tokens: int, batch_tokens: int
) -> Plan:
    """Cut the documents that are not in the store yet into units of at most `unit_tokens` tokens, or of one document.

    Args:
        done: `[documents]` bool, those that the store holds already.
    """
    lengths = corpus.lengths
    units: list[Unit] = []
    total: dict[str, int] = {}
    for split in (HELDOUT, TRAIN):
        todo = np.flatnonzero((corpus.heldout == (split == HELDOUT)) & ~done)
        # The longest first: running out of memory shows at once. The id breaks ties, so the order is the data's own.
        order = todo[np.lexsort((corpus.ids[todo], -lengths[todo]))]
        total[split] = int(lengths[todo].sum())
        members: list[int] = []
        tokens = 0
        for position, index in enumerate(order):
            members.append(int(index))
            tokens += int(lengths[index])
            last = position == len(order) - 1
            if last or tokens + int(lengths[order[position + 1]]) > unit_tokens:
                name = part_id(split, len(units), (int(corpus.ids[m]) for m in members))
                units.append(Unit(name, split, members))
                members, tokens = [], 0
    return Plan(key, data, units, batch_tokens, total)


def batches(lengths: Sequence[int], batch_tokens: int) -> list[slice]:
    """Group documents that are sorted by falling length so that rows times the longest stay within the budget.

    Of all ways to cut the sequence, one that costs least: padded tokens, and `PASS_TOKENS` for each pass. A document
    longer than the budget goes alone.
    """
    sizes = np.asarray(lengths, np.int64)
    cost = np.zeros(len(sizes) + 1, np.int64)
    begins = np.zeros(len(sizes) + 1, np.int64)
    first = 0  # the earliest document that can share a pass with the one at hand: it only moves forward
    for stop in range(1, len(sizes) + 1):
        while first < stop - 1 and sizes[first] * (stop - first) > batch_tokens:
            first += 1
        starts = np.arange(first, stop)
        total = cost[starts] + sizes[starts] * (stop - starts) + PASS_TOKENS
        best = int(total.argmin())
        cost[stop], begins[stop] = total[best], starts[best]
    groups, stop = [], len(sizes)
    while stop:
        groups.append(slice(int(begins[stop]), stop))
        stop = int(begins[stop])
    return groups[::-1]


def save_plan(store: Place, plan: Plan, corpus: Corpus) -> None:
    """Write plan and corpus into the store, whole or not at all, in place of any other plan."""
    staged = store.stage("plan")
    try:
        with clear_errors(store):
            corpus.save(staged)
            (staged / PLAN).write_text(json.dumps(asdict(plan)))
            (staged / LIST).write_text(json.dumps(sum_files(staged)))
        store.commit(staged, f"{PLANS}/{plan.key}", PLAN)
        # An older plan, taken up again, would not know which of its documents this one stored.
        for other in store.folders(PLANS):
            if other != plan.key:
                store.remove(f"{PLANS}/{other}", PLAN)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def load_plan(store: Place, key: str) -> Plan | None:
    """The plan of that key, or None when the store has none."""
    try:
        value = json.loads(store.read(f"{PLANS}/{key}/{PLAN}"))
    except FileNotFoundError:
        return None
    units = [Unit(**unit) for unit in value["units"]]
    # A plan of an earlier version does not say its tokens.
    return Plan(value["key"], value["data"], units, value["batch_tokens"], value.get("tokens", {}))


def stored_documents(store: Store, data: dict[str, str], corpus: Corpus) -> np.ndarray:
    """Which documents of the corpus the store holds, `[documents]` bool.

    Raises:
        DataError: a data file was changed (not only added to) since parts were made from a file of its name.
    """
    ids = set(corpus.ids.tolist())
    held: set[int] = set()
    for index, record in enumerate(store.parts):
        documents = set(store.part(index).small("doc_ids").tolist())
        held |= documents
        made_from = json.loads(record.provenance.get("data", "{}"))
        changed = [name for name, digest in made_from.items() if name in data and data[name] != digest]
        lost = documents - ids
        # Documents of a file that is not among the data now are not lost but simply elsewhere.
        if changed and lost and made_from.keys() <= data.keys():
            raise DataError(
                f"{changed[0]} has changed since {store.place} was made from it: {len(lost)} documents of part "
                f"{record.id} are no longer in it. Give the new data another [store] path, or restore the file"
            )
    return np.array([int(i) in held for i in corpus.ids], bool)
