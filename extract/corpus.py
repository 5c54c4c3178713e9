"""The tokenised corpus: every document once, with its loss mask, content hash, tag and split.

Put together from pieces in order; kept as one safetensors file that workers map. Knows nothing of units or targets, nor
of how text becomes tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ..store import HELDOUT, TRAIN
from .data import DataError
from .settings import DataSettings


@dataclass
class Notes:
    """What was left out or changed on the way, for a line on the terminal.

    Attributes:
        first_duplicate: "PLACE repeats PLACE".
    """

    duplicates: int = 0
    first_duplicate: str = ""
    unsupervised: int = 0
    cut: int = 0

    def lines(self) -> list[str]:
        """One line for each thing that happened."""
        found = []
        if self.duplicates:
            found.append(f"{self.duplicates} duplicate documents skipped; the first: {self.first_duplicate}")
        if self.unsupervised:
            found.append(f"{self.unsupervised} documents without a supervised pair of tokens skipped")
        if self.cut:
            found.append(f"{self.cut} documents cut to data.max_length")
        return found


@dataclass(frozen=True)
class Corpus:
    """Documents end to end.

    Attributes:
        tokens: `[tokens]` int32.
        loss_mask: `[tokens]` bool.
        offsets: `[documents + 1]` int64.
        ids: `[documents]` uint64, the first eight bytes of the sha256 of ids and mask.
        heldout: `[documents]` bool.
        tags: tag of origin of each document.
        places: file and line of each document.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    ids: np.ndarray
    heldout: np.ndarray
    tags: list[str]
    places: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def lengths(self) -> np.ndarray:
        """`[documents]` int64, tokens of each."""
        return np.diff(self.offsets)

    def rows(self, index: int) -> slice:
        """Where document `index` stands in `tokens`."""
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))

    def split(self, index: int) -> str:
        """The split of document `index`."""
        return HELDOUT if self.heldout[index] else TRAIN

    def save(self, folder: Path) -> None:
        """Write the corpus into a folder."""
        arrays = {name: getattr(self, name) for name in ("tokens", "loss_mask", "offsets", "ids", "heldout")}
        save_file(arrays, folder / "corpus.safetensors")
        (folder / "corpus.json").write_text(json.dumps({"tags": self.tags, "places": self.places}))

    @classmethod
    def load(cls, folder: Path) -> Corpus:
        """Read what `save` wrote. Arrays are mapped, not read: the workers of a machine share their memory."""
        return cls(**_mapped(folder / "corpus.safetensors"), **json.loads((folder / "corpus.json").read_text()))


@dataclass(frozen=True)
class Piece:
    """The documents of some rows, tokenised, in order.

    Attributes:
        rows: how many rows were looked at.
        tokens, loss_mask: as in `Corpus`.
        lengths: `[documents]` int64.
        ids, tags, places: as in `Corpus`.
        splits: what each row said of its split.
        unsupervised, cut: as in `Notes`.
    """

    rows: int
    tokens: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray
    ids: np.ndarray
    splits: list[str | None]
    tags: list[str]
    places: list[str]
    unsupervised: int
    cut: int


def assemble(pieces: Iterable[Piece], settings: DataSettings) -> tuple[Corpus, Notes]:
    """Put tokenised rows together in order, each document once.

    Raises:
        DataError: nothing is left to learn from.
    """
    notes = Notes()
    seen: dict[int, int] = {}
    # Grown in place: the corpus is in memory once, at five bytes a token, with no copy made in the end.
    tokens, loss_mask = bytearray(), bytearray()
    lengths: list[int] = []
    splits: list[str | None] = []
    tags: list[str] = []
    places: list[str] = []
    for piece in pieces:
        notes.unsupervised += piece.unsupervised
        notes.cut += piece.cut
        stops = np.cumsum(piece.lengths)
        for i, (identity, stop) in enumerate(zip(piece.ids.tolist(), stops.tolist(), strict=True)):
            if identity in seen:
                notes.duplicates += 1
                if not notes.first_duplicate:
                    notes.first_duplicate = f"{piece.places[i]} repeats {places[seen[identity]]}"
                continue
            seen[identity] = len(lengths)
            length = int(piece.lengths[i])
            tokens += piece.tokens[stop - length : stop].tobytes()
            loss_mask += piece.loss_mask[stop - length : stop].tobytes()
            lengths.append(length)
            splits.append(piece.splits[i])
            tags.append(piece.tags[i])
            places.append(piece.places[i])
    if not lengths:
        of_tags = f" of the tags {', '.join(settings.tags)}" if settings.tags else ""
        raise DataError(
            f"no document{of_tags} has two supervised tokens in a row: nothing can be learned from the data"
        )
    ids = np.array(list(seen), np.uint64)
    corpus = Corpus(
        tokens=np.frombuffer(tokens, np.int32),
        loss_mask=np.frombuffer(loss_mask, bool),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        ids=ids,
        heldout=_choose_heldout(ids, splits, settings.heldout),
        tags=tags,
        places=places,
    )
    return _limited(corpus, settings), notes


def _mapped(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file, mapped into memory; what is written to them stays in this process."""
    kinds = {"I32": np.int32, "I64": np.int64, "U64": np.uint64, "BOOL": np.bool_}
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
    return {
        name: np.asarray(
            np.memmap(path, kinds[entry["dtype"]], "c", start + entry["data_offsets"][0], tuple(entry["shape"]))
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _choose_heldout(ids: np.ndarray, said: list[str | None], share: float) -> np.ndarray:
    """By what the lines say if any says so; else by content hash, of lines that say nothing, and at least one."""
    if HELDOUT in said:
        return np.array([split == HELDOUT for split in said], bool)
    free = np.array([split is None for split in said], bool)
    chosen = free & ((ids % np.uint64(1_000_000)) < np.uint64(round(share * 1_000_000)))
    if share and not chosen.any() and free.sum() > 1:
        chosen[np.flatnonzero(free)[ids[free].argmin()]] = True
    return chosen


def _limited(corpus: Corpus, settings: DataSettings) -> Corpus:
    """The first so many documents of each split, as the settings say."""
    keep = np.ones(len(corpus), bool)
    for value, limit in ((True, settings.limit_heldout), (False, settings.limit)):
        if limit is not None:
            keep[np.flatnonzero(corpus.heldout == value)[limit:]] = False
    if keep.all():
        return corpus
    kept_tokens = np.repeat(keep, corpus.lengths)
    return Corpus(
        tokens=corpus.tokens[kept_tokens],
        loss_mask=corpus.loss_mask[kept_tokens],
        offsets=np.concatenate([[0], np.cumsum(corpus.lengths[keep])]).astype(np.int64),
        ids=corpus.ids[keep],
        heldout=corpus.heldout[keep],
        tags=[tag for tag, kept in zip(corpus.tags, keep, strict=True) if kept],
        places=[place for place, kept in zip(corpus.places, keep, strict=True) if kept],
    )
