"""A training run: epochs of packed batches, checkpoints, validation, and going on where a run stopped.

Everything that decides what happens next (step, epoch, place in the epoch, parts of the store) is in the checkpoint,
so a resumed run makes the same updates. Puts the other modules together; computes nothing itself.
"""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from ..store import HELDOUT, TRAIN, BatchStream, Documents, Head, Store, StoreError, load_head, pack, shuffled
from ..store.progress import Listener
from .checkpoint import (
    CheckpointError,
    checkpoints,
    clear_leftovers,
    drafter_config,
    load_resume,
    save_checkpoint,
)
from .drafter import Drafter, DrafterSettings
from .evaluate.summary import accepted_length
from .evaluate.walk import walk
from .inputs import buffers_for
from .loss import default_gamma
from .metrics import Metrics
from .muon import MasterMuon
from .optimizer import MasterAdamW, learning_rate
from .step import Totals, TrainStep

VALIDATION_SEED = 0x5EED
"""Anchors of the validation loss are the same in every run and epoch."""


class TrainSettings(BaseModel):
    """Section `[train]`."""

    model_config = ConfigDict(extra="forbid")

    run: str = Field("runs/drafter", description="folder of checkpoints and metrics; one a variant")
    epochs: int = Field(6, ge=1, description="passes over the training documents")
    tokens: int = Field(3072, ge=2, description="tokens of a packed batch")
    anchors: int = Field(512, ge=1, description="blocks drawn from a packed batch")
    accumulate: int = Field(1, ge=1, description="packed batches an update")
    lr: float = Field(6e-4, gt=0, description="peak learning rate")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw as published; muon: Muon for matrices, AdamW for the rest"
    )
    muon_lr: float = Field(0.02, gt=0, description="peak learning rate of Muon's matrices")
    warmup: float = Field(0.04, ge=0, le=1, description="share of the updates that warm up; then a cosine to zero")
    clip: float = Field(1.0, gt=0, description="largest global norm of the gradient")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's, on matrices only")
    gamma: float | None = Field(
        None, gt=0, description="decay of the slot weights; by default 7, 5, 4 for blocks of 16, 10, 8"
    )
    seed: int = Field(0, ge=0, description="of weights, data order and anchors")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="what the drafter computes in; masters are fp32. auto: bfloat16 on a GPU, float32 on the CPU",
    )
    save_every: int = Field(200, ge=1, description="updates between checkpoints; each epoch ends with one too")
    keep: int = Field(2, ge=1, description="checkpoints kept")
    log_every: int = Field(10, ge=1, description="updates between lines of metrics")
    validate_documents: int = Field(64, ge=0, description="held-out documents walked after each epoch")


FREE_TO_CHANGE = {"run", "epochs", "save_every", "keep", "log_every", "validate_documents"}
"""Settings that a resumed run may change; any other makes it another run."""


@dataclass
class _Position:
    """Where a run stands, as the checkpoint keeps it."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Micro-batches done in this epoch."""
    micro: int = 0
    """Micro-batches done in all: the number that anchors are drawn with."""
    parts: list[str] | None = None
    """Parts this epoch trains on; None at an epoch's start."""
    heldout: list[str] | None = None
    """Parts with the held-out documents that validation uses."""
    total: int = 0
    """Updates that the schedule was made for."""
    epochs: int = 0
    """`train.epochs` when it was made; another value makes it anew."""


def compute_dtype(said: str, device: torch.device) -> torch.dtype:
    """What a drafter computes in on a device."""
    if said == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, said)


class Trainer:
    """One run.

    Args:
        store: where states come from.
        drafter: its shape.
        settings: how to train.
        folder: the run's folder, resolved.
        device: where to train.
        listener: where to report; progress counts updates.

    Raises:
        StoreError: the store has no such layers, no documents, or one that is longer than a batch.
        CheckpointError: the folder holds a run with other settings.
    """

    def __init__(
        self,
        store: Store,
        drafter: DrafterSettings,
        settings: TrainSettings,
        folder: Path,
        device: torch.device,
        listener: Listener,
    ) -> None:
        self._store, self._settings, self._folder, self._listener = store, settings, folder, listener
        self._layers = store.layer_indices(tuple(drafter.layer_ids))
        head = load_head(store)
        _check_mask_token(drafter, store, head)
        self._head = head
        self._drafter = Drafter(drafter, store.identity.hidden_size)
        self._drafter.reset(settings.seed)
        dtype = compute_dtype(settings.dtype, device)
        self._drafter.to(device, dtype)
        named = self._drafter.named_parameters()
        clip, decay = settings.clip, settings.weight_decay
        self._optimizer: MasterAdamW | MasterMuon
        if settings.optimizer == "muon":
            ratio = settings.muon_lr / settings.lr
            self._optimizer = MasterMuon(named, ratio=ratio, clip=clip, weight_decay=decay)
        else:
            self._optimizer = MasterAdamW(named, clip=clip, weight_decay=decay)
        gamma = settings.gamma or default_gamma(drafter.block_size)
        self._step = TrainStep(self._drafter, head, self._optimizer, settings.anchors, gamma, settings.seed)
        self._measure = TrainStep(self._drafter, head, None, settings.anchors, gamma, VALIDATION_SEED)
        self._config = drafter_config(drafter, store.identity, head.config, str(dtype).removeprefix("torch."))
        self._shape = {
            "drafter": drafter.model_dump(),
            "train": settings.model_dump(exclude=FREE_TO_CHANGE) | {"dtype": str(dtype).removeprefix("torch.")},
            "store": store.identity.model_dump(mode="json"),
        }
        self._at = self._resume()
        # Validation stays with the documents that were held out when the run began, whatever is added since.
        if self._at.heldout is None:
            self._at.heldout = [part.id for part in store.parts if part.split == HELDOUT]
        self._skipped = int(self._optimizer.skipped)

    def run(self) -> Path:
        """Train to the end of the last epoch. Returns the folder of the last checkpoint."""
        settings, at = self._settings, self._at
        epochs = range(at.epoch, settings.epochs)
        if not epochs:
            self._listener.say(f"{self._folder} has done its {settings.epochs} epochs; raise train.epochs to go on")
        metrics = Metrics(self._folder, at.step)
        try:
            for _ in epochs:
                documents = self._begin_epoch()
                if at.epochs != settings.epochs:
                    # Made once and kept: a store that grows must not bend the schedule of a run that goes on.
                    at.epochs = settings.epochs
                    at.total = sum(self._updates(self._groups(documents, epoch)) for epoch in range(settings.epochs))
                if at.epoch == epochs.start:
                    self._listener.start(at.total, at.step)
                self._epoch(documents, self._groups(documents, at.epoch), metrics)
        finally:
            metrics.close()
        return checkpoints(self._checkpoints)[-1]

    def _groups(self, documents: Documents, epoch: int) -> list[list[int]]:
        """The documents of each packed batch of an epoch."""
        order = shuffled(documents, self._settings.seed, epoch)
        packed = pack(documents.length[order].tolist(), self._settings.tokens)
        return [[int(order[i]) for i in group] for group in packed]

    def _updates(self, groups: list[list[int]]) -> int:
        return math.ceil(len(groups) / self._settings.accumulate)

    @property
    def _checkpoints(self) -> Path:
        return self._folder / "checkpoints"

    def _begin_epoch(self) -> Documents:
        at = self._at
        if at.parts is None:
            self._store.refresh()
            at.parts = [part.id for part in self._store.parts if part.split == TRAIN]
        documents = self._store.documents(TRAIN, at.parts)
        if not len(documents):
            raise StoreError(f"the store {self._store.place} has no training documents yet")
        longest = int(documents.length.argmax())
        if documents.length[longest] > self._settings.tokens:
            raise StoreError(
                f"document {documents.ids[longest]:016x} of part {self._store.parts[documents.part[longest]].id} has "
                f"{documents.length[longest]} tokens, more than train.tokens = {self._settings.tokens}: raise that"
            )
        return documents

    def _epoch(self, documents: Documents, groups: list[list[int]], metrics: Metrics) -> None:
        settings, at = self._settings, self._at
        totals = Totals.zero(self._drafter.settings.block_size, self._step.device)
        began, tokens = time.perf_counter(), 0
        with self._stream(documents, groups[at.batch :], settings.tokens) as stream:
            for batch in stream:
                totals.add(self._step.micro(batch, at.micro))
                tokens += batch.used
                at.batch, at.micro = at.batch + 1, at.micro + 1
                if at.batch % settings.accumulate and at.batch < len(groups):
                    continue
                rate = learning_rate(at.step, at.total, settings.lr, settings.warmup)
                norm = self._step.update(rate)
                at.step += 1
                note = ""
                if at.step % settings.log_every == 0 or at.batch == len(groups):
                    numbers = self._numbers(totals, norm, rate, tokens, time.perf_counter() - began, stream.waited)
                    metrics.write(at.step, numbers)
                    note = f"loss {numbers['loss']:.3f}"
                    totals = Totals.zero(self._drafter.settings.block_size, self._step.device)
                self._listener.advance(1, note)
                if at.step % settings.save_every == 0 and at.batch < len(groups):
                    self._save()
        at.epoch, at.batch, at.parts = at.epoch + 1, 0, None
        self._validate(metrics)  # before the checkpoint: a kill in between repeats it, and loses nothing
        self._save()

    def _stream(self, documents: Documents, groups: list[list[int]], budget: int) -> BatchStream:
        buffers = buffers_for(self._step.device)
        return BatchStream(self._store, documents, groups, budget, self._layers, allocate=buffers)

    def _numbers(
        self, totals: Totals, norm: torch.Tensor, rate: float, tokens: int, seconds: float, waited: float
    ) -> dict[str, float]:
        skipped = int(self._optimizer.skipped)
        if skipped > self._skipped:
            self._listener.say(
                f"{skipped - self._skipped} of the updates before step {self._at.step} were skipped: "
                "the gradient was not finite, or nothing was supervised"
            )
            self._skipped = skipped
        return {
            **totals.numbers(),
            "epoch": self._at.epoch,
            "lr": rate,
            "grad_norm": float(norm),
            "tokens_per_second": tokens / seconds,
            "share_waiting_for_data": waited / seconds,
            "skipped_updates": skipped,
        }

    @torch.no_grad()
    def _validate(self, metrics: Metrics) -> None:
        settings, block = self._settings, self._drafter.settings.block_size
        heldout = self._store.documents(HELDOUT, self._at.heldout).first(settings.validate_documents)
        if not len(heldout):
            return
        totals = Totals.zero(block, self._step.device)
        budget = max(settings.tokens, int(heldout.length.max()))
        groups = pack(heldout.length.tolist(), budget)
        with self._stream(heldout, groups, budget) as stream:
            for number, batch in enumerate(stream):
                totals.add(self._measure.loss(batch, number))
        turns = walk(self._drafter, self._head, self._store, heldout, budget)
        length = accepted_length(turns)
        numbers = {f"heldout_{name}": value for name, value in totals.numbers().items()}
        metrics.write(self._at.step, {**numbers, "heldout_accepted_length": length})
        self._listener.say(
            f"epoch {self._at.epoch} of {settings.epochs}: held-out loss {numbers['heldout_loss']:.3f}, "
            f"accepted length {length:.2f}"
        )

    def _save(self) -> None:
        state = {"position": vars(self._at), "settings": self._shape}
        folder = self._checkpoints / f"step-{self._at.step:08d}"
        save_checkpoint(folder, self._drafter, self._config, state, self._optimizer.state())
        for old in checkpoints(self._checkpoints)[: -self._settings.keep]:
            # Renamed first: a kill half way through leaves nothing that looks like a checkpoint.
            doomed = old.rename(old.with_name(f".removing.{old.name}"))
            shutil.rmtree(doomed)

    def _resume(self) -> _Position:
        clear_leftovers(self._checkpoints)
        resume = None
        for newest in reversed(checkpoints(self._checkpoints)):
            try:
                resume = load_resume(newest)
                break
            except CheckpointError as error:
                self._listener.say(f"passed over: {error}")
        if resume is None:
            return _Position()
        if changed := _changed(resume.state["settings"], self._shape):
            raise CheckpointError(
                f"{self._folder} was trained with other settings ({'; '.join(changed)}): "
                "choose another train.run, or go back to those"
            )
        self._optimizer.load(resume.optimizer)
        self._listener.say(f"resuming from {resume.folder}")
        return _Position(**resume.state["position"])


def _check_mask_token(drafter: DrafterSettings, store: Store, head: Head) -> None:
    mask = drafter.mask_token_id
    if mask >= store.identity.vocab_size:
        raise StoreError(f"drafter.mask_token_id {mask} is outside the vocabulary of {store.identity.vocab_size}")
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        if mask in head.special_ids(name):
            raise StoreError(f"drafter.mask_token_id {mask} is the target's {name}: choose an id the target never uses")


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    found = []
    for section in now:
        for key, value in now[section].items():
            old = before.get(section, {}).get(key)
            if old != value:
                found.append(f"{section}.{key} was {old}, now {value}")
    return found
