"""The tokenised corpus: every document once, with its loss mask, content hash, tag and split.

Made from rows and a renderer; kept as one safetensors file that workers read. Knows nothing of units or targets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from safetensors.numpy import load_file, save_file

from ..store import HELDOUT, TRAIN
from .data import DataError, Row
from .render import Renderer


class DataSettings(BaseModel):
    """Section `[data]`."""

    model_config = ConfigDict(extra="forbid")

    files: list[str] = Field(description="JSONL files of conversations")
    thinking: bool = Field(False, description="what the chat template gets as enable_thinking; serve with the same")
    max_length: int = Field(3072, ge=2, description="tokens kept of a document; what is longer is cut")
    heldout: float = Field(
        0.02,
        ge=0,
        lt=1,
        description="share of documents held out, by content hash; lines with a 'split' say it themselves",
    )
    tags: list[str] | None = Field(None, description="take only documents of these tags of origin")
    limit: int | None = Field(None, ge=1, description="take only the first so many training documents")
    limit_heldout: int | None = Field(None, ge=1, description="take only the first so many held-out documents")


@dataclass
class Notes:
    """What was left out or changed on the way, for a line on the terminal."""

    duplicates: int = 0
    unsupervised: int = 0
    cut: int = 0

    def lines(self) -> list[str]:
        """One line for each thing that happened."""
        return [
            text
            for count, text in (
                (self.duplicates, f"{self.duplicates} duplicate documents skipped"),
                (
                    self.unsupervised,
                    f"{self.unsupervised} documents without a supervised pair of tokens skipped",
                ),
                (self.cut, f"{self.cut} documents cut to data.max_length"),
            )
            if count
        ]


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

    @property
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
        """Read what `save` wrote."""
        arrays = load_file(folder / "corpus.safetensors")
        return cls(**arrays, **json.loads((folder / "corpus.json").read_text()))


def build_corpus(
    rows: Iterable[Row], renderer: Renderer, settings: DataSettings, vocab_size: int
) -> tuple[Corpus, Notes]:
    """Tokenise rows in order.

    Raises:
        DataError: a row cannot be rendered, a token id is outside the vocabulary, or nothing is left to learn from.
    """
    notes = Notes()
    seen: set[int] = set()
    taken: list[tuple[np.ndarray, np.ndarray, int, str | None, str, str]] = []
    for row in rows:
        if settings.tags is not None and row.tag not in settings.tags:
            continue
        if row.messages is None:
            assert row.input_ids is not None
            if max(row.input_ids) >= vocab_size:
                raise DataError(f"{row.place}: token id {max(row.input_ids)} is outside the vocabulary of {vocab_size}")
            ids, mask = np.array(row.input_ids, np.int32), np.array(row.loss_mask, bool)
        else:
            ids, mask = renderer.ids_and_mask(row)
        if len(ids) > settings.max_length:
            ids, mask = ids[: settings.max_length], mask[: settings.max_length]
            notes.cut += 1
        if not (mask[:-1] & mask[1:]).any():
            notes.unsupervised += 1
            continue
        identity = _document_id(ids, mask)
        if identity in seen:
            notes.duplicates += 1
            continue
        seen.add(identity)
        taken.append((ids, mask, identity, row.split, row.tag, row.place))
    if not taken:
        of_tags = f" of the tags {', '.join(settings.tags)}" if settings.tags else ""
        raise DataError(
            f"no document{of_tags} has two supervised tokens in a row: nothing can be learned from the data"
        )
    ids = np.array([item[2] for item in taken], np.uint64)
    heldout = _choose_heldout(ids, [item[3] for item in taken], settings.heldout)
    keep = _limited(heldout, settings)
    taken = [item for item, kept in zip(taken, keep, strict=True) if kept]
    offsets = np.concatenate([[0], np.cumsum([len(item[0]) for item in taken])]).astype(np.int64)
    corpus = Corpus(
        tokens=np.concatenate([item[0] for item in taken]),
        loss_mask=np.concatenate([item[1] for item in taken]),
        offsets=offsets,
        ids=ids[keep],
        heldout=heldout[keep],
        tags=[item[4] for item in taken],
        places=[item[5] for item in taken],
    )
    return corpus, notes


def _document_id(ids: np.ndarray, mask: np.ndarray) -> int:
    digest = hashlib.sha256(ids.astype("<i4").tobytes() + mask.astype(np.uint8).tobytes()).digest()
    return int.from_bytes(digest[:8], "little")


def _choose_heldout(ids: np.ndarray, said: list[str | None], share: float) -> np.ndarray:
    """By what the lines say if any says so; else by content hash, of lines that say nothing, and at least one."""
    if HELDOUT in said:
        return np.array([split == HELDOUT for split in said], bool)
    free = np.array([split is None for split in said], bool)
    chosen = free & ((ids % np.uint64(1_000_000)) < np.uint64(round(share * 1_000_000)))
    if share and not chosen.any() and free.sum() > 1:
        chosen[np.flatnonzero(free)[ids[free].argmin()]] = True
    return chosen


def _limited(heldout: np.ndarray, settings: DataSettings) -> np.ndarray:
    keep = np.ones(len(heldout), bool)
    for value, limit in ((True, settings.limit_heldout), (False, settings.limit)):
        if limit is not None:
            keep[np.flatnonzero(heldout == value)[limit:]] = False
    return keep
