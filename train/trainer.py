"""A training run: epochs of packed batches on some ranks, checkpoints, validation, and going on where it stopped.

Everything that decides what happens next (step, epoch, place in the epoch, parts of the store) is in the checkpoint,
so a resumed run makes the same updates. Puts the other modules together; computes nothing itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from ..store import BatchStream, DflashError, Documents, Store, load_head
from ..store.progress import SILENT, Listener
from .assembly import averages, compute_dtype, draw_weights, empty_drafter, make_optimizer, make_step
from .checkpoint import CheckpointError, Resume, drafter_config
from .checks import changed_settings, check_run
from .course import Course, Epoch, Position
from .drafter import DrafterSettings
from .graphs import MemoryWatch
from .inputs import Ends, buffers_for
from .journal import Journal, Update
from .loss import LossSettings
from .meter import Meter
from .metrics import Metrics
from .optimizer import average, share
from .ranks import Ranks
from .run_folder import RunFolder, versions
from .saving import Saver
from .settings import FREE_TO_CHANGE, TrainSettings
from .stopping import StopSignal
from .trackers import open_trackers
from .validation import in_words


class Stopped(DflashError):
    """A run that was asked to stop, and has saved."""


class Trainer:
    """One run, as one of its ranks makes it.

    Args:
        store: where states come from.
        drafter: its shape.
        loss: its loss.
        settings: how to train.
        folder: the run's folder, resolved.
        ranks: this process and the others.
        listener: where to report; progress counts updates. Only rank 0 does.
        begin_from: the folder that `settings.init_from` means.
        name: of the run, for trackers; by default the folder's.

    Raises:
        StoreError: the store has no such layers, no documents, one that is longer than a batch, or no final states
            where the loss needs them.
        CheckpointError: the folder holds a run with other settings, or another process works in it.
        TrainError: fp8 does not fit the GPU or the widths.
    """

    def __init__(
        self,
        store: Store,
        drafter: DrafterSettings,
        loss: LossSettings,
        settings: TrainSettings,
        folder: Path,
        ranks: Ranks,
        listener: Listener,
        begin_from: Path | None = None,
        name: str | None = None,
    ) -> None:
        self._store, self._settings, self._ranks, self._name = store, settings, ranks, name or folder.name
        self._listener = listener = listener if ranks.leads else SILENT
        self._needs_final = loss.needs_final
        self._layers = store.layer_indices(tuple(drafter.layer_ids))
        device = ranks.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # streams, events and Triton's kernels are the current device's
        head = load_head(store)
        check_run(store, head, drafter, loss, settings, device)
        dtype = compute_dtype(settings.dtype, device)
        kind = str(dtype).removeprefix("torch.")
        computes = "fp8" if settings.dtype == "fp8" else kind
        self._config = drafter_config(drafter, store.identity, head.config, kind)
        self._shape = {
            "drafter": drafter.model_dump(),
            "loss": loss.model_dump(),
            "train": settings.model_dump(exclude=FREE_TO_CHANGE) | {"dtype": computes},
            "store": store.identity.model_dump(mode="json"),
        }
        self._described = {
            "settings": self._shape | {"train": settings.model_dump()},
            "store": str(store.place),
            "fingerprint": store.identity.fingerprint,
            "versions": versions(),
            "devices": ranks.devices(),
        }
        self._folder = RunFolder(folder, settings, listener)
        try:
            resume = self._resume()
            self._drafter = empty_drafter(drafter, settings, store.identity.hidden_size, device)
            if resume is None and ranks.leads:
                draw_weights(self._drafter, settings.seed, begin_from, listener)
            self._optimizer = make_optimizer(self._drafter, settings)
            if resume is not None:
                self._optimizer.load(resume.optimizer)
            share(self._optimizer, ranks)
            self._course = Course(store, settings, self._at, ranks, listener)
            made = self._drafter, Ends.of(head, device, dtype), self._optimizer
            heldout = self._course.heldout
            self._step, self._validation = make_step(*made, loss, settings, store, heldout, ranks, self._stream)
        except BaseException:
            self._folder.release()
            raise
        self._averages = averages(settings, ranks)
        self._stopping = StopSignal(ranks, self._step, self._averages)
        self._memory: MemoryWatch | None = None
        self._saver: Saver | None = None
        """Rank 0's, while the run goes on."""
        self._updates: int | None = None
        """Updates in all, as planned."""

    def ask_to_stop(self) -> None:
        """Ask the run to save and stop after the update at hand, or one soon after that all ranks know of it by.

        From any thread, or a signal's handler.
        """
        self._stopping.ask()

    def run(self) -> Path:
        """Train to the end. Returns the folder of the last checkpoint.

        Raises:
            Stopped: it was asked to stop, and has saved.
            CheckpointError: a checkpoint cannot be saved; the last whole one stands.
            TrainError: a gradient is not finite, and the settings say to stop for that.
        """
        try:
            return self._run()
        finally:
            if self._saver is not None:
                self._saver.close()
            self._folder.release()

    def _run(self) -> Path:
        at, course = self._at, self._course
        if course.finished:
            self._listener.say(
                f"{self._folder.path} is done, with {at.step:,} updates; raise train.epochs (or train.steps) to go on"
            )
            self._describe(done=True)
            return self._folder.of_step(at.step)
        course.record_changes()
        if self._ranks.leads:
            weights, optimizer = self._drafter.state_dict(), self._optimizer.state()
            self._saver = Saver(weights, optimizer, self._ranks.device, self._listener)
        self._metrics = self._open_metrics() if self._ranks.leads else None
        before = self._metrics.seconds if self._metrics else 0.0
        self._meter = Meter(self._ranks.device, before, self._listener, self._step.idle)
        skipped, first = int(self._optimizer.skipped), at.step
        try:
            while not course.finished:
                epoch = course.begin()
                if course.finished:  # fewer epochs are asked for now than are done
                    break
                if self._updates is None:
                    self._begin(epoch)
                self._epoch(epoch)
        finally:
            if self._metrics is not None:
                self._metrics.close()
        if at.step > first and int(self._optimizer.skipped) - skipped >= at.step - first:
            self._listener.say("warning: every update was left out; the drafter is as it was drawn")
        if self._saver is not None:
            self._saver.settle()
        self._describe(done=True)
        return self._folder.of_step(at.step)

    def _open_metrics(self) -> Metrics:
        settings, path, step = self._settings, self._folder.path, self._at.step
        asked, described = settings.trackers, self._described["settings"]
        trackers = open_trackers(asked, settings.project, self._name, described, path, self._listener.say)
        return Metrics(path, step, trackers)

    def _begin(self, epoch: Epoch) -> None:
        """Say what begins."""
        settings, at = self._settings, self._at
        passes = [i for group in epoch.groups for i in group]  # of a mixture not all, and some more than once
        size = sum(parameter.numel() for parameter in self._drafter.parameters())
        updates = self._course.updates(epoch)
        each = f"{settings.accumulate * self._ranks.count} x " if settings.accumulate * self._ranks.count > 1 else ""
        self._listener.say(
            f"{self._name}: {size / 1e6:,.1f} M parameters, {len(set(passes)):,} documents of "
            f"{int(epoch.documents.length[passes].sum()):,} tokens, {updates:,} updates of "
            f"{each}{settings.tokens:,} tokens, on {self._ranks.count} x {self._ranks.device.type}"
        )
        self._updates = updates
        self._listener.start(updates, at.step)
        self._describe(done=False)

    def _epoch(self, epoch: Epoch) -> None:
        settings, at, step, ranks = self._settings, self._at, self._step, self._ranks
        skipped = int(self._optimizer.skipped)
        journal = Journal(self._metrics, self._listener, self._meter, skipped, settings.non_finite == "stop")
        own, left = self._course.rest(epoch)
        first, before, stop = at.micro, at.batch, False
        if own and before and self._due(settings.validate_every, at.validated):
            self._validate()  # it was due when the run was told to stop
        with self._stream(epoch.documents, own, settings.tokens) as stream:
            self._meter.follow(stream)
            for number, batch in enumerate(stream):
                step.load(batch, first + number * ranks.count + ranks.rank)
                step.micro()
                last = number + 1 == len(own)
                if last or (number + 1) % settings.accumulate == 0:
                    done = min((number + 1) * ranks.count, left)
                    used = [i for group in epoch.groups[at.batch : before + done] for i in group]
                    rate = self._course.rate(before + done - at.batch)
                    report = step.update(rate)
                    at.step, at.batch, at.micro = at.step + 1, before + done, first + done
                    line = {"epoch": at.epoch, "lr": rate} if last or at.step % settings.log_every == 0 else None
                    names, tokens = _names(epoch.documents, used), int(epoch.documents.length[used].sum())
                    journal.add(Update(at.step, names, tokens, report, line))
                    self._watch_memory()
                    self._listener.advance(1, journal.note)
                    stop = self._between(journal, last)
                step.sent()  # the batch's memory is filled anew once the next one is asked for
        if stop and not self._course.finished:
            self._save(None)  # what an epoch ends with is done when the run goes on
            self._stop()
        if at.batch == len(epoch.groups):
            at.epoch, at.batch, at.parts = at.epoch + 1, 0, None
        # While its store is being filled a run's epochs are short, and their ends no occasion.
        ends = self._course.finished or not epoch.growing
        self._measure_and_save(
            ends or self._due(settings.validate_every, at.validated),
            ends or self._due(settings.save_every, self._saved),
        )
        if self._memory and (grown := self._memory.grown()):
            self._listener.say(f"GPU memory grew in epoch {at.epoch} ({grown}): it should not after the first step")

    def _between(self, journal: Journal, last: bool) -> bool:
        """What is due after an update: averaging, validation, a checkpoint. Whether the run stops with the epoch.

        Raises:
            Stopped: it stops here.
        """
        settings, at = self._settings, self._at
        if self._averages:
            if not last and at.step % settings.sync_every:
                return False  # ranks differ, and nothing can be measured or saved
            journal.settle()
            average(self._optimizer, self._ranks)
            journal.skipped = int(self._optimizer.skipped)  # another rank's, perhaps, who told of it
        if last:
            journal.settle()
        if self._saver is not None:
            self._saver.check()
        stop = self._stopping.due(at.step, journal.stop, last)
        if last:
            return stop  # the epoch's end validates and saves
        validate, save = (
            self._due(settings.validate_every, at.validated),
            self._due(settings.save_every, self._saved),
        )
        if not (stop or validate or save):
            return False
        journal.settle()
        with self._meter.paused():
            self._measure_and_save(validate and not stop, save or stop)
        if stop:
            self._stop()
        return False

    def _due(self, every: int | None, since: int) -> bool:
        """Whether a multiple of `every` has been reached since a step."""
        return every is not None and self._at.step // every > since // every

    def _measure_and_save(self, validate: bool, save: bool) -> None:
        """In this order: a kill in between repeats the one, and loses nothing."""
        found = self._validate() if validate else None
        if save:
            self._save(found)

    def _stop(self) -> None:
        if self._saver is not None:
            self._saver.settle()
        raise Stopped(f"stopped after {self._at.step:,} updates, which are saved; run the same command again to go on")

    def _watch_memory(self) -> None:
        """From the first update on, memory must stay as it is."""
        if self._memory is None and self._step.device.type == "cuda":
            self._memory = MemoryWatch(self._step.device)
            used = torch.cuda.memory_reserved(self._step.device) / 2**30
            self._listener.say(f"GPU memory: {used:.1f} GiB from here on")

    def _stream(self, documents: Documents, groups: list[list[int]], budget: int) -> BatchStream:
        buffers = buffers_for(self._ranks.device)
        final = self._needs_final
        return BatchStream(self._store, documents, groups, budget, self._layers, final=final, allocate=buffers)

    def _validate(self) -> dict[str, Any] | None:
        at, found = self._at, self._validation.run()
        at.validated = at.step
        if found is None:
            return None
        if self._metrics is not None:
            self._metrics.write_validation(at.step, {"epoch": at.epoch, **found})
        length = found["accepted_length"]
        self._listener.watch({"accepted_length": length} if length is not None else {})
        self._listener.say(f"step {at.step:,}, epoch {at.epoch}: {in_words(found)}")
        return found

    def _save(self, validation: dict[str, Any] | None) -> None:
        self._saved = self._at.step
        if self._ranks.joined and self._ranks.differ(self._optimizer.buffers[0].sum(dtype=torch.float64)):
            self._listener.say("warning: ranks' weights have come to differ; rank 0's are saved")
        if self._saver is None:
            return
        brief = validation and {name: validation[name] for name in ("loss", "accepted_length")}
        state = {"position": asdict(self._at), "settings": self._shape, "validation": brief}
        step, described = self._at.step, self._description(done=False)

        def saved() -> None:
            self._folder.tidy(step)
            self._folder.describe(**described)

        self._saver.save(self._folder.of_step(step), self._config, state, saved)

    def _describe(self, done: bool) -> None:
        if self._ranks.leads:
            self._folder.describe(**self._description(done))

    def _description(self, done: bool) -> dict[str, Any]:
        """What `run.json` says, as things are now."""
        step, updates = self._at.step, self._at.step if done else self._updates
        return {"done": done, "step": step, "updates": updates, "history": [*self._at.history], **self._described}

    def _resume(self) -> Resume | None:
        """Take the folder, and go where its newest checkpoint left off, if it has one; on every rank."""
        resume = None
        if self._ranks.leads:
            self._folder.hold()
            resume = self._folder.newest()
            if resume is not None:
                if changed := changed_settings(resume.state["settings"], self._shape):
                    raise CheckpointError(
                        f"{self._folder.path} was trained with other settings ({'; '.join(changed)}): "
                        "choose another train.run, or go back to those"
                    )
                self._listener.say(f"resuming from {resume.folder}")
        told = self._ranks.tell(json.dumps(resume.state["position"] if resume else {}))
        known = json.loads(told)
        self._at = Position(**{item.name: known[item.name] for item in fields(Position) if item.name in known})
        self._saved = self._at.step
        return resume


def _names(documents: Documents, used: Sequence[int]) -> list[str]:
    return [f"{int(documents.ids[index]):016x}" for index in used]
