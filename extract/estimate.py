"""What an extraction will take, before it begins: tokens, forward passes, bytes on disk, room for them, hours.

Counts with the functions that extraction itself plans with; nothing is guessed, and what is not known is None. Knows
nothing of terminals or workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np

from ..store import HELDOUT, TRAIN, StoreFullError, existing_store
from ..store.format import CHUNK_TOKENS, Encoding
from ..store.reader import stored_bytes
from ..store.room import free_space, room_left, size
from .corpus import Corpus
from .plan import Plan, Unit, batches, make_plan, stored_documents
from .target import TargetInfo

if TYPE_CHECKING:
    from .run import Survey  # which imports this module


@dataclass(frozen=True)
class Kind:
    """One way to keep the states of all the data.

    Attributes:
        final: whether the input of the LM head is kept too.
        bytes: of states, token ids and masks.
        chosen: whether the settings choose it.
    """

    encoding: Encoding
    final: bool
    bytes: int
    chosen: bool


@dataclass(frozen=True)
class Estimate:
    """What an extraction will take.

    Attributes:
        store: the store's path or address.
        layers: layers stored, `final` not counted.
        splits: "documents", "tokens" and "supervised_tokens" of each split of the data.
        lengths: "median", "p90" and "longest" tokens of a document.
        units: units of the plan, those in the store included.
        units_left: units that are still to do; what follows in `_left` is theirs.
        passes_left: forward passes.
        padded_tokens_left: positions computed, padding included.
        kinds: bytes of all the data in each encoding, with and without `final`.
        bytes_stored: what the store holds already, from other data too.
        bytes_left: what is still to be written, the head and the plan of a new store included.
        bytes_first: the least that must fit: the head and the plan of a new store, and the largest unit that is left.
        free: bytes free where the store lies; None for an object store, which does not say.
        room: `free` less what extraction leaves free.
    """

    store: str
    layers: int
    splits: dict[str, dict[str, int]]
    lengths: dict[str, int]
    units: int
    units_left: int
    documents_left: int
    tokens_left: int
    passes_left: int
    padded_tokens_left: int
    kinds: list[Kind]
    bytes_stored: int
    bytes_left: int
    bytes_first: int
    free: int | None
    room: int | None

    @property
    def padding(self) -> float:
        """Share of the positions computed that are padding."""
        return 1 - self.tokens_left / self.padded_tokens_left if self.padded_tokens_left else 0.0

    @property
    def fits(self) -> bool | None:
        """Whether there is room for what is left; None when nobody knows."""
        return None if self.room is None else self.bytes_left <= self.room

    def hours(self, rate: float, gpus: int) -> float:
        """Hours for what is left, at `rate` tokens a second a GPU."""
        return self.tokens_left / (rate * gpus) / 3600


def estimate(seen: Survey) -> Estimate:
    """What is left to do of what was surveyed. Reads the store, writes nothing.

    Raises:
        DataError: a data file was changed since the store was made from it.
        StoreError: the store cannot be read or is of another identity.
    """
    corpus, identity, store = seen.corpus, seen.identity, existing_store(seen.place, seen.identity)
    nothing = np.zeros(len(corpus), bool)
    # A plan that is there already knows what was stored before it; finding out means reading every part.
    plan = seen.plan or _plan(seen, stored_documents(store, seen.digests, corpus) if store else nothing)
    stored = {part.id for part in store.parts} if store else set()
    left = [unit for unit in plan.units if unit.id not in stored]
    lengths = corpus.lengths
    passes, padded = _computed(left, lengths, plan.batch_tokens)
    begin = 0 if seen.plan or not left else corpus.tokens.nbytes + corpus.loss_mask.nbytes
    begin += 0 if store else _head_bytes(seen.info)
    whole = _rows((_plan(seen, nothing) if store else plan).units, lengths)
    largest = max((_rows([unit], lengths) for unit in left), default=0)
    return Estimate(
        store=str(seen.place),
        layers=len(identity.layer_ids),
        splits=_splits(corpus),
        lengths={
            "median": int(np.median(lengths)),
            "p90": int(np.percentile(lengths, 90)),
            "longest": int(lengths.max()),
        },
        units=len(plan.units),
        units_left=len(left),
        documents_left=sum(len(unit.documents) for unit in left),
        tokens_left=int(sum(lengths[unit.documents].sum() for unit in left)),
        passes_left=passes,
        padded_tokens_left=padded,
        kinds=[
            Kind(encoding, final, stored_bytes(kind, whole), kind == identity)
            for encoding in get_args(Encoding)
            for final in (True, False)
            for kind in [identity.model_copy(update={"encoding": encoding, "final": final})]
        ],
        bytes_stored=store.bytes_stored() if store else 0,
        bytes_left=begin + stored_bytes(identity, _rows(left, lengths)),
        bytes_first=begin + stored_bytes(identity, largest),
        free=free_space(seen.place),
        room=room_left(seen.place),
    )


def shortage(found: Estimate) -> str | None:
    """One sentence when there is no room for what is left; None when there is, or nobody knows."""
    if found.free is None or found.fits:
        return None
    return (
        f"does not fit: {size(found.bytes_left)} needed, {size(found.free)} free where the store {found.store} lies. "
        f"Extraction stops before the disk is full and goes on when it is run again; {_remedies(found)}"
    )


def check_room(found: Estimate) -> str | None:
    """`shortage`, for an extraction that is about to begin.

    Raises:
        StoreFullError: not even one unit fits.
    """
    if found.free is not None and found.room is not None and found.bytes_first > found.room:
        raise StoreFullError(
            f"no room is left for the store {found.store}: to begin and do one unit takes {size(found.bytes_first)}, "
            f"{size(found.free)} are free, of which {size(found.free - found.room)} stay so; {_remedies(found)}"
        )
    return shortage(found)


def _remedies(found: Estimate) -> str:
    """What a person can do when there is no room, one clause."""
    chosen = next(kind for kind in found.kinds if kind.chosen)
    smaller = ["fewer extract.layer_ids"] if found.layers > 1 else []
    for kind in found.kinds:
        if chosen.encoding != "fp8" and (kind.encoding, kind.final) == ("fp8", chosen.final):
            smaller.insert(0, f"extract.encoding=fp8 ({size(kind.bytes)} in all)")
        if chosen.final and (kind.encoding, kind.final) == (chosen.encoding, False):
            smaller.append(f"extract.final=false ({size(kind.bytes)})")
    if found.bytes_stored:  # a store that has begun keeps its identity
        return "make room, set data.limit, or begin another store.path" + (
            f" with {', '.join(smaller)}" * bool(smaller)
        )
    return f"make room, or choose {', '.join([*smaller, 'a data.limit'])} or another store.path"


def _plan(seen: Survey, done: np.ndarray) -> Plan:
    sizes = seen.settings.unit_tokens, seen.settings.batch_tokens
    return make_plan(seen.key, seen.digests, seen.corpus, done, *sizes)


def _computed(units: list[Unit], lengths: np.ndarray, batch_tokens: int) -> tuple[int, int]:
    """Forward passes over units, and the positions they compute."""
    passes = padded = 0
    for unit in units:
        members = lengths[unit.documents]
        for group in batches(members.tolist(), batch_tokens):
            passes += 1
            padded += len(members[group]) * int(members[group].max())
    return passes, padded


def _rows(units: list[Unit], lengths: np.ndarray) -> int:
    """Rows stored: each part is filled up to whole chunks."""
    return sum(-(-int(lengths[unit.documents].sum()) // CHUNK_TOKENS) * CHUNK_TOKENS for unit in units)


def _splits(corpus: Corpus) -> dict[str, dict[str, int]]:
    held = np.flatnonzero(corpus.heldout)
    supervised = sum(int(np.count_nonzero(corpus.loss_mask[corpus.rows(int(index))])) for index in held)
    tokens = int(corpus.lengths[held].sum())
    others = len(corpus) - len(held), len(corpus.tokens) - tokens, int(np.count_nonzero(corpus.loss_mask)) - supervised
    names = ("documents", "tokens", "supervised_tokens")
    return {
        TRAIN: dict(zip(names, others, strict=True)),
        HELDOUT: dict(zip(names, (len(held), tokens, supervised), strict=True)),
    }


def _head_bytes(info: TargetInfo) -> int:
    """Bytes of embedding and LM head, which a new store gets first."""
    wide = 4 if "32" in str(info.text.get("dtype") or info.text.get("torch_dtype")) else 2
    return info.vocab_size * info.hidden_size * wide * (1 if info.text.get("tie_word_embeddings") else 2)
