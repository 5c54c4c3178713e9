"""What a run trains on, in which order, and how long: epochs of packed batches over the parts a store has by then.

An epoch works on the parts that were committed when it began. A run is planned once, in packed batches: `train.epochs`
passes over the documents of the store, those included that a running extraction has yet to write. So a store that grows
bends neither the learning rate nor the length of a run, whose first passes are then short and more of them; and another
number of ranks shares out the same batches. All of it follows from ids, lengths, tags, seed and epoch. Knows no loss.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

from ..store import HELDOUT, TRAIN, Documents, Store, mixed, pack, share, shuffled
from ..store.progress import Listener
from .checks import check_documents
from .optimizer import learning_rate
from .ranks import Ranks
from .settings import TrainSettings


@dataclass
class Position:
    """Where a run stands, as its checkpoint keeps it."""

    step: int = 0
    """Updates made."""
    epoch: int = 0
    batch: int = 0
    """Batches done in this epoch, by all ranks."""
    micro: int = 0
    """Batches done in all. Anchors are drawn with these numbers."""
    parts: list[str] | None = None
    """Parts this epoch trains on; None at an epoch's start."""
    validated: int = 0
    """Updates made when the drafter was last validated."""
    heldout: list[str] | None = None
    """Parts with the held-out documents that validation uses."""
    planned: int = 0
    """Batches the run is planned for."""
    epochs: int = 0
    """`train.epochs` when it was planned; another value plans it anew."""
    steps: int | None = None
    """`train.steps` of the last call."""
    ranks: int = 1
    """Processes of the last call."""
    history: list[dict[str, object]] = field(default_factory=list)
    """What was changed on the way, and at which step."""


@dataclass(frozen=True)
class Epoch:
    """One pass.

    Attributes:
        documents: of its parts.
        groups: the documents of each packed batch, as indices.
        growing: whether more documents were planned for the store than it held.
    """

    documents: Documents
    groups: list[list[int]]
    growing: bool


class Course:
    """Args:
    store: where documents are.
    settings: how to train.
    at: where the run stands; changed by `begin` and `plan`.
    ranks: of the run.
    listener: told when a store has grown.
    """

    def __init__(self, store: Store, settings: TrainSettings, at: Position, ranks: Ranks, listener: Listener) -> None:
        self._store, self._settings, self._at, self._ranks, self._listener = store, settings, at, ranks, listener
        self._seen: int | None = None
        """Tokens of the epoch before."""

    @property
    def finished(self) -> bool:
        """Whether all that was planned is done."""
        at, steps = self._at, self._settings.steps
        if steps is not None:
            return at.step >= steps
        return at.epochs == self._settings.epochs and at.micro >= at.planned > 0

    def record_changes(self) -> None:
        """Keep in the history what this call does otherwise than the one before, and say it."""
        at, settings = self._at, self._settings
        before = {"train.epochs": at.epochs, "train.steps": at.steps, "processes": at.ranks}
        now = {"train.epochs": settings.epochs, "train.steps": settings.steps, "processes": self._ranks.count}
        changed = [
            f"{name} was {before[name] or 'not set'}, now {now[name] or 'not set'}"
            for name in now
            if before[name] != now[name]
        ]
        at.steps, at.ranks = settings.steps, self._ranks.count
        if at.step and changed:
            at.history.append({"step": at.step, "changed": changed})
            self._listener.say(f"from step {at.step:,} on: {'; '.join(changed)}")

    def begin(self) -> Epoch:
        """Begin an epoch, or go on with the one that the position is in.

        Raises:
            StoreError: it has no documents, or one longer than a batch.
        """
        at, store = self._at, self._store
        if at.parts is None:
            store.refresh()
            at.parts = self._agreed(TRAIN)
        documents = store.documents(TRAIN, at.parts)
        check_documents(store, documents, self._settings.tokens)
        held, planned = self._foresee(documents)
        if at.epochs != self._settings.epochs:
            at.epochs, at.planned = self._settings.epochs, 0
        if at.planned == 0 and self._settings.steps is None:
            self._plan(documents, planned / held)
        self._tell(held)
        return Epoch(documents, self._groups(documents, at.epoch), held < planned)

    def rest(self, epoch: Epoch) -> tuple[list[list[int]], int]:
        """This rank's batches from the position on, and how many all ranks have.

        Each rank has as many; the last ones may be empty.
        """
        at, settings, ranks = self._at, self._settings, self._ranks
        left = epoch.groups[at.batch :]
        if settings.steps is None:
            left = left[: max(0, at.planned - at.micro)]
        else:
            left = left[: (settings.steps - at.step) * settings.accumulate * ranks.count]
        return share(left, ranks.rank, ranks.count), len(left)

    def rate(self, batches: int) -> float:
        """The learning rate of the next update, which takes so many batches."""
        at, settings = self._at, self._settings
        if settings.steps is not None:
            return learning_rate(at.step, at.step + 1, settings.steps, settings.lr, settings.warmup)
        return learning_rate(at.micro, at.micro + batches, at.planned, settings.lr, settings.warmup)

    def updates(self, epoch: Epoch) -> int:
        """Updates of the whole run, those done included, if later epochs are like this one."""
        at, settings = self._at, self._settings
        if settings.steps is not None:
            return settings.steps
        each = settings.accumulate * self._ranks.count
        here = max(0, min(len(epoch.groups) - at.batch, at.planned - at.micro))
        later = max(0, at.planned - at.micro - here)
        whole, part = divmod(later, max(1, len(epoch.groups)))
        return at.step + math.ceil(here / each) + whole * math.ceil(len(epoch.groups) / each) + math.ceil(part / each)

    def heldout(self) -> Documents:
        """The held-out documents that validation uses: those that were there when the run began."""
        at, store = self._at, self._store
        if at.heldout is None:
            at.heldout = self._agreed(HELDOUT)
        return store.documents(HELDOUT, at.heldout).first(self._settings.validate_documents)

    def _foresee(self, documents: Documents) -> tuple[int, int]:
        """Tokens of the epoch's documents, and of all that the store is to hold, as rank 0 sees them."""
        held, steps = int(documents.length.sum()), self._settings.steps
        planned = max(held, int(self._ranks.tell(str(self._store.planned_tokens(TRAIN)))))
        if self._seen is None and planned > held:
            self._listener.say(
                f"the store holds {held:,} of {planned:,} tokens planned to train on: the run takes up what is added "
                "between epochs" + ", and its length and learning rate are planned for all of it" * (steps is None)
            )
        if self._seen is None and (missing := self._store.planned_tokens(HELDOUT) - self._tokens(HELDOUT)) > 0:
            self._listener.say(
                f"warning: held-out documents of {missing:,} tokens are still to be extracted: this run validates "
                "without them, and does not compare with runs that begin later"
            )
        return held, planned

    def _plan(self, documents: Documents, grows: float) -> None:
        """How many batches `train.epochs` passes over all that is planned make."""
        epochs = range(self._settings.epochs)
        batches = math.ceil(grows * sum(len(self._groups(documents, epoch)) for epoch in epochs))
        self._at.planned = int(self._ranks.tell(str(batches)))

    def _agreed(self, split: str) -> list[str]:
        """Parts of a split, as rank 0 sees them: one may be committed between one rank's look and another's."""
        listed = self._ranks.tell(json.dumps([part.id for part in self._store.parts if part.split == split]))
        self._store.refresh()
        return json.loads(listed)

    def _tokens(self, split: str) -> int:
        return sum(part.tokens for part in self._store.parts if part.split == split)

    def _groups(self, documents: Documents, epoch: int) -> list[list[int]]:
        settings = self._settings
        if settings.mixture:
            order = mixed(documents, settings.mixture, settings.seed, epoch)
        else:
            order = shuffled(documents, settings.seed, epoch)
        packed = pack(documents.length[order].tolist(), settings.tokens)
        return [[int(order[i]) for i in group] for group in packed]

    def _tell(self, tokens: int) -> None:
        """Say what a growing store has added since the last epoch."""
        if self._seen is not None and tokens != self._seen:
            self._listener.say(
                f"epoch {self._at.epoch + 1} trains on {tokens:,} tokens, {tokens - self._seen:,} of them new"
            )
        self._seen = tokens
