"""A training run: epochs of packed batches, checkpoints, validation, and going on where a run stopped.

Everything that decides what happens next (step, epoch, place in the epoch, parts of the store) is in the checkpoint,
so a resumed run makes the same updates. Puts the other modules together; computes nothing itself.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from ..store import (
    HELDOUT,
    TRAIN,
    Batch,
    BatchStream,
    Documents,
    Store,
    load_head,
    pack,
    shuffled,
)
from ..store.progress import Listener
from .checkpoint import (
    CheckpointError,
    checkpoints,
    clear_leftovers,
    drafter_config,
    load_resume,
    save_checkpoint,
)
from .checks import changed_settings, check_documents, check_final, check_fp8, check_mask_token
from .drafter import Drafter, DrafterSettings
from .evaluate.summary import accepted_length
from .evaluate.walk import walk
from .flat import Flat
from .graphs import MemoryWatch
from .head import LmHead
from .inputs import Ends, Inputs, buffers_for
from .journal import Journal, Update
from .loss import LossSettings
from .metrics import Metrics
from .muon import MasterMuon
from .optimizer import MasterAdamW, learning_rate
from .step import Forward, TrainStep

VALIDATION_SEED = 0x5EED
"""Anchors of the validation loss are the same in every run and epoch."""


class TrainSettings(BaseModel):
    """Section `[train]`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

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
    non_finite: Literal["skip", "stop"] = Field(
        "skip", description="an update whose gradient is not finite is left out, or ends the run; named either way"
    )
    seed: int = Field(0, ge=0, description="of weights, data order and anchors")
    dtype: Literal["auto", "float32", "bfloat16", "fp8"] = Field(
        "auto",
        description="what the drafter computes in; masters are fp32. auto: bfloat16 on a GPU, float32 on the CPU; fp8: "
        "bfloat16 with matrix products in fp8, faster and coarser",
    )
    save_every: int = Field(200, ge=1, description="updates between checkpoints; each epoch ends with one too")
    keep: int = Field(2, ge=1, description="checkpoints kept")
    log_every: int = Field(10, ge=1, description="updates between lines of metrics")
    validate_documents: int = Field(64, ge=0, description="held-out documents walked after each epoch")


FREE_TO_CHANGE = {"run", "epochs", "save_every", "keep", "log_every", "validate_documents", "non_finite"}
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
    """What a drafter computes in on a device; what fp8 products leave there."""
    if said in ("auto", "fp8"):
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, said)


class Trainer:
    """One run.

    Args:
        store: where states come from.
        drafter: its shape.
        loss: its loss.
        settings: how to train.
        folder: the run's folder, resolved.
        device: where to train.
        listener: where to report; progress counts updates.

    Raises:
        StoreError: the store has no such layers, no documents, one that is longer than a batch, or no final states
            where the loss needs them.
        CheckpointError: the folder holds a run with other settings.
        TrainError: fp8 does not fit the GPU or the widths.
    """

    def __init__(
        self,
        store: Store,
        drafter: DrafterSettings,
        loss: LossSettings,
        settings: TrainSettings,
        folder: Path,
        device: torch.device,
        listener: Listener,
    ) -> None:
        self._store, self._settings, self._folder, self._listener = store, settings, folder, listener
        if device.type == "cuda":
            torch.cuda.set_device(device)  # streams, events and Triton's kernels are the current device's
        self._memory: MemoryWatch | None = None
        self._layers = store.layer_indices(tuple(drafter.layer_ids))
        head = load_head(store)
        check_mask_token(drafter, store, head)
        check_final(store, loss)
        self._needs_final = loss.needs_final
        check_documents(store, store.documents(TRAIN), settings.tokens)
        if settings.dtype == "fp8":
            check_fp8(drafter, store, device)
        dtype = compute_dtype(settings.dtype, device)
        self._drafter = Drafter.empty(drafter, store.identity.hidden_size, device, dtype)
        self._drafter.reset(settings.seed)
        self._drafter.fp8 = settings.dtype == "fp8"
        flat = Flat(self._drafter, accumulates=settings.accumulate > 1)
        clip, decay = settings.clip, settings.weight_decay
        self._optimizer: MasterAdamW | MasterMuon
        if settings.optimizer == "muon":
            self._optimizer = MasterMuon(flat, ratio=settings.muon_lr / settings.lr, clip=clip, weight_decay=decay)
        else:
            self._optimizer = MasterAdamW(flat, clip=clip, weight_decay=decay)
        self._ends = Ends.of(head, device, dtype)
        kind = str(dtype).removeprefix("torch.")
        self._config = drafter_config(drafter, store.identity, head.config, kind)
        self._shape = {
            "drafter": drafter.model_dump(),
            "loss": loss.model_dump(),
            "train": settings.model_dump(exclude=FREE_TO_CHANGE) | {"dtype": "fp8" if self._drafter.fp8 else kind},
            "store": store.identity.model_dump(mode="json"),
        }
        self._at = self._resume()
        # Validation stays with the documents that were held out when the run began, whatever is added since.
        if self._at.heldout is None:
            self._at.heldout = [part.id for part in store.parts if part.split == HELDOUT]
        heldout = self._heldout()
        self._budget = max(settings.tokens, int(heldout.length.max(initial=1)))
        """Tokens of a batch of validation: room for the longest document held out."""
        inputs = self._inputs(settings.tokens, device, dtype)
        same = self._budget == settings.tokens
        aside = inputs if same else self._inputs(self._budget, device, dtype)
        fixed = self._drafter, self._ends.embedding, LmHead(self._ends.lm_head, self._drafter.fp8), loss
        trained = Forward(*fixed, inputs, settings.anchors, settings.seed)
        measured = Forward(*fixed, aside, settings.anchors, VALIDATION_SEED)
        self._step = TrainStep(trained, self._optimizer, measured)
        if device.type == "cuda":
            walk(self._drafter, self._ends, store, heldout.first(1), self._budget, rounds=2)  # takes its memory now

    def _inputs(self, length: int, device: torch.device, dtype: torch.dtype) -> Inputs:
        return Inputs(Batch.empty(self._store, length, len(self._layers), self._needs_final), device, dtype)

    def run(self) -> Path:
        """Train to the end of the last epoch. Returns the folder of the last checkpoint."""
        settings, at = self._settings, self._at
        epochs = range(at.epoch, settings.epochs)
        if not epochs:
            self._listener.say(f"{self._folder} has done its {settings.epochs} epochs; raise train.epochs to go on")
        metrics = Metrics(self._folder, at.step)
        skipped = int(self._optimizer.skipped)
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
        if epochs and int(self._optimizer.skipped) - skipped >= at.total:
            self._listener.say("warning: every update was left out; the drafter is as it was drawn")
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
        check_documents(self._store, documents, self._settings.tokens)
        return documents

    def _epoch(self, documents: Documents, groups: list[list[int]], metrics: Metrics) -> None:
        settings, at, step = self._settings, self._at, self._step
        skipped = int(self._optimizer.skipped)
        journal = Journal(metrics, self._listener, skipped, settings.non_finite == "stop")
        began, tokens = time.perf_counter(), 0
        used: list[int] = []
        with self._stream(documents, groups[at.batch :], settings.tokens) as stream:
            for batch in stream:
                step.load(batch, at.micro)
                step.micro()
                tokens += batch.used
                used += batch.documents
                at.batch, at.micro = at.batch + 1, at.micro + 1
                if not (at.batch % settings.accumulate and at.batch < len(groups)):
                    rate = learning_rate(at.step, at.total, settings.lr, settings.warmup)
                    step.update(rate)
                    at.step += 1
                    line = None
                    if at.step % settings.log_every == 0 or at.batch == len(groups):
                        seconds = time.perf_counter() - began
                        line = {
                            "epoch": at.epoch,
                            "lr": rate,
                            "tokens_per_second": tokens / seconds,
                            "share_waiting_for_data": stream.waited / seconds,
                        }
                    journal.add(Update(at.step, _names(documents, used), step.report(), line))
                    used = []
                    self._watch_memory()
                    self._listener.advance(1, journal.note)
                    if at.step % settings.save_every == 0 and at.batch < len(groups):
                        journal.settle()
                        self._save()
                step.sent()  # the batch's memory is filled anew once the next one is asked for
        journal.settle()
        at.epoch, at.batch, at.parts = at.epoch + 1, 0, None
        self._validate(metrics)  # before the checkpoint: a kill in between repeats it, and loses nothing
        self._save()
        if self._memory and (grown := self._memory.grown()):
            self._listener.say(f"GPU memory grew in epoch {at.epoch} ({grown}): it should not after the first step")

    def _watch_memory(self) -> None:
        """From the first update on, memory must stay as it is."""
        if self._memory is None and self._step.device.type == "cuda":
            self._memory = MemoryWatch(self._step.device)
            used = torch.cuda.memory_reserved(self._step.device) / 2**30
            self._listener.say(f"GPU memory: {used:.1f} GiB from here on")

    def _stream(self, documents: Documents, groups: list[list[int]], budget: int) -> BatchStream:
        buffers = buffers_for(self._step.device)
        final = self._needs_final
        return BatchStream(self._store, documents, groups, budget, self._layers, final=final, allocate=buffers)

    def _heldout(self) -> Documents:
        """The documents that validation uses."""
        return self._store.documents(HELDOUT, self._at.heldout).first(self._settings.validate_documents)

    def _validate(self, metrics: Metrics) -> None:
        heldout = self._heldout()
        if not len(heldout):
            return
        groups = pack(heldout.length.tolist(), self._budget)
        with self._stream(heldout, groups, self._budget) as stream:
            for number, batch in enumerate(stream):
                self._step.validate(batch, number)
        found = self._step.validation().numbers()
        length = accepted_length(walk(self._drafter, self._ends, self._store, heldout, self._budget))
        numbers = {f"heldout_{name}": value for name, value in found.items()}
        metrics.write(self._at.step, {**numbers, "heldout_accepted_length": length})
        self._listener.say(
            f"epoch {self._at.epoch} of {self._settings.epochs}: held-out loss {found['loss']:.3f}, "
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
        if changed := changed_settings(resume.state["settings"], self._shape):
            raise CheckpointError(
                f"{self._folder} was trained with other settings ({'; '.join(changed)}): "
                "choose another train.run, or go back to those"
            )
        self._optimizer.load(resume.optimizer)
        self._listener.say(f"resuming from {resume.folder}")
        return _Position(**resume.state["position"])


def _names(documents: Documents, used: Sequence[int]) -> list[str]:
    return [f"{int(documents.ids[index]):016x}" for index in used]
