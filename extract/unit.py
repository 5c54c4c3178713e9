"""One unit of work, inside a worker process: forward passes over its documents, written as one part.

A worker keeps its target loaded between units. Two units may be under way in a process: one computes, while the other's
last states reach the disk. Knows the plan and the store, nothing of schedulers.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import zarr
from torch import Tensor

from ..store import PartWriter, States, Store, StoreError, open_store
from .capture import Loaded, Wanted, load_capture
from .corpus import Corpus
from .outbox import Outbox, Parcel
from .plan import Plan, Unit, batches, load_plan
from .settings import Dtype
from .target import check_fast, inspect

SAMPLE_TOKENS = 2048
"""Tokens of the plan's first document for a first pass, which compiles kernels and measures the errors of fp8."""


@dataclass(frozen=True)
class Job:
    """What a worker needs to know to do any unit of a run; small enough to travel with every task."""

    store: str
    plan: str
    target: str
    dtype: Dtype
    device: str
    """"cpu" or "cuda": a worker sees its own GPUs only."""
    gpus: int = 1
    """GPUs that the target is spread over."""
    allow_slow: bool = False
    """Run without the kernels for linear attention."""


@dataclass
class UnitReport:
    """What a unit took, in plain numbers. All zero for a part that was there already, but its tokens.

    Attributes:
        tokens: of its documents.
        computed: with padding.
        forward: seconds of forward passes (on a GPU, by its own clock).
        copy: seconds of copies to the host, beside the next pass.
        write: seconds of writing, beside the passes.
        wait: seconds that the passes waited because the disk was behind.
        splits: batches cut in two for lack of memory.
        notes: what a person should be told of the target.
        fp8_errors: of each kept layer and of final (see `capture.Loaded`).
    """

    tokens: int
    computed: int = 0
    forward: float = 0.0
    copy: float = 0.0
    write: float = 0.0
    wait: float = 0.0
    splits: int = 0
    notes: list[str] = field(default_factory=list)
    fp8_errors: list[float] = field(default_factory=list)


def run_unit(job: Job, unit_id: str, progress: Callable[[int], None] = lambda tokens: None) -> UnitReport:
    """Extract one unit and commit its part; a part that is there already is left alone.

    Args:
        progress: called with a number of tokens whenever so many more are on their way to the disk.

    Raises:
        StoreError: states are not finite or all zero (document and layer are named), or the part cannot be written.
        TargetError: the target cannot be loaded.
    """
    with _SETUP:
        if unit_id not in _plan(job.store, job.plan)[3]:  # the store was made anew since this process read it
            _plan.cache_clear()
            _workers.clear()
        store, plan, corpus, units = _plan(job.store, job.plan)
        unit = units[unit_id]
        if store.has(unit.id):
            return UnitReport(int(corpus.lengths[unit.documents].sum()))
        worker = _worker(job, store, plan, corpus)
    return worker.run(unit, progress)


class UnitWorker:
    """A loaded target with the way out of its device.

    Args:
        store, plan, corpus: where units come from and go to.
        loaded: the target.
    """

    def __init__(self, store: Store, plan: Plan, corpus: Corpus, loaded: Loaded) -> None:
        self._store, self._plan, self._corpus = store, plan, corpus
        self._loaded, self._device = loaded, loaded.device
        self._outbox = Outbox(loaded.device, store.identity.encoding)
        self._turn = threading.Lock()
        """Held by the unit that computes."""

    def run(self, unit: Unit, progress: Callable[[int], None] = lambda tokens: None) -> UnitReport:
        """Do one unit; raises what `run_unit` raises."""
        lengths = self._corpus.lengths[unit.documents]
        report = UnitReport(int(lengths.sum()), notes=self._loaded.notes, fp8_errors=self._loaded.fp8_errors)
        parcels: list[Parcel] = []
        try:
            # What waits to be written is in the outbox's buffers, so there is no more of it than they hold.
            with PartWriter(self._store, unit.id, lengths.tolist(), queue_bytes=sys.maxsize) as writer:
                self._compute(unit, lengths.tolist(), parcels, writer, report, progress)
                self._commit(writer, unit, report)
                report.write = writer.seconds
        finally:  # a unit that is given up gives its buffers back too
            for parcel in parcels:
                parcel.release()
        return report

    def _compute(
        self,
        unit: Unit,
        lengths: list[int],
        parcels: list[Parcel],
        writer: PartWriter,
        report: UnitReport,
        progress: Callable[[int], None],
    ) -> None:
        under_way: list[Passed] = []
        with self._turn:
            waited = self._outbox.waited
            todo = batches(lengths, self._plan.batch_tokens)
            while todo:
                group = todo.pop(0)
                members = unit.documents[group]
                passed = self._pass(members)
                if passed is None and under_way:  # the last pass's states take memory too
                    self._deliver(under_way.pop(0), writer, report, progress)
                    passed = self._pass(members)
                if passed is None:  # the memory does not hold it: once more, in two
                    todo[:0] = self._halves(group, members)
                    report.splits += 1
                    continue
                under_way.append(passed)
                parcels.append(passed.parcel)
                if len(under_way) > 1:  # the device has the next pass to do, so the one before can be waited for
                    self._deliver(under_way.pop(0), writer, report, progress)
            report.wait = self._outbox.waited - waited
        for passed in under_way:
            self._deliver(passed, writer, report, progress)

    def _pass(self, members: list[int]) -> Passed | None:
        """One forward pass over some documents, started on its way out; None when the memory does not hold it."""
        documents = [self._corpus.tokens[self._corpus.rows(m)] for m in members]
        clock = _Clock(self._device)
        try:
            parcel = self._outbox.send(self._forward(documents), [len(d) for d in documents])
            clock.stop()
        except torch.OutOfMemoryError:
            parcel = None
        if parcel is None:
            # Here, not above: while the error lives, so do the tensors of the frames it names.
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            return None
        return Passed(members, len(documents) * max(map(len, documents)), clock, parcel)

    def _forward(self, documents: list[np.ndarray]) -> list[Tensor]:
        """States of documents, one a row, padded on the right: of each kept layer, and final where it is kept."""
        pinned = self._device.type == "cuda"  # else copying them would wait for the pass before
        ids = torch.zeros(len(documents), max(map(len, documents)), dtype=torch.int64, pin_memory=pinned)
        for row, document in enumerate(documents):
            ids[row, : len(document)] = torch.from_numpy(document)
        hidden, final = self._loaded.capture(ids)
        return [*hidden, final] if self._store.identity.final else hidden

    def _halves(self, group: slice, members: list[int]) -> list[slice]:
        if len(members) == 1:
            raise StoreError(
                f"{self._corpus.places[members[0]]}: the device's memory does not hold a pass over this document of "
                f"{self._corpus.lengths[members[0]]} tokens: lower data.max_length, or spread the target over more GPUs"
            )
        middle = (group.start + group.stop) // 2
        return [slice(group.start, middle), slice(middle, group.stop)]

    def _deliver(self, passed: Passed, writer: PartWriter, report: UnitReport, progress: Callable[[int], None]) -> None:
        states, faults = passed.parcel.arrive()
        self._check(faults, passed.members)
        layers = len(self._store.identity.layer_ids)
        final = _layers(states, layers, layers + 1) if self._store.identity.final else None
        writer.append(_layers(states, 0, layers), final, passed.parcel.release)
        report.computed += passed.computed
        report.forward += passed.clock.seconds()
        report.copy += passed.parcel.copy_seconds
        progress(len(states))

    def _check(self, faults: np.ndarray, members: list[int]) -> None:
        for kind, said in ((0, "not finite"), (1, "all zero")):
            for layer, document in np.argwhere(faults[kind]):
                name = [*self._store.identity.layer_ids, "final"][layer]
                raise StoreError(
                    f"{self._corpus.places[members[document]]}: the states of layer {name} are {said}; "
                    "nothing of its unit was committed"
                )

    def _commit(self, writer: PartWriter, unit: Unit, report: UnitReport) -> None:
        corpus, plan = self._corpus, self._plan
        gpu = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else platform.machine()
        rows = [corpus.rows(member) for member in unit.documents]
        provenance = {
            "data": json.dumps(plan.data, sort_keys=True),
            "dflash": version("dflash-offline"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "zarr": zarr.__version__,
            "device": gpu,
            "forward": self._loaded.path,
        }
        if find_spec("fla"):
            provenance["flash-linear-attention"] = version("fla-core")
        if report.splits:  # other batches round otherwise: a rerun need not give the same bytes
            provenance["batches split for lack of memory"] = str(report.splits)
        writer.commit(
            split=unit.split,
            tokens=np.concatenate([corpus.tokens[r] for r in rows]),
            loss_mask=np.concatenate([corpus.loss_mask[r] for r in rows]),
            doc_ids=corpus.ids[unit.documents],
            doc_tags=[corpus.tags[member] for member in unit.documents],
            plan=plan.key,
            provenance=provenance,
        )


class _Clock:
    """Seconds from its making to `stop`, by the device's own clock where it has one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks = [self._now()]

    def stop(self) -> None:
        self._marks.append(self._now())

    def seconds(self) -> float:
        began, ended = self._marks
        if self._device.type == "cuda":
            ended.synchronize()
        return began.elapsed_time(ended) / 1000 if self._device.type == "cuda" else ended - began

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


@dataclass(frozen=True)
class Passed:
    """A batch after its forward pass: its documents, its tokens with padding, and its states on their way."""

    members: list[int]
    computed: int
    clock: _Clock
    parcel: Parcel


_SETUP = threading.Lock()
"""The target is loaded once, however many units of a process come first."""


@lru_cache(maxsize=1)
def _plan(location: str, key: str) -> tuple[Store, Plan, Corpus, dict[str, Unit]]:
    store = open_store(location)
    plan = load_plan(store.place, key)
    if plan is None:
        raise StoreError(f"{location} has no plan {key}")
    return store, plan, Corpus.load(plan.folder(store.place)), {unit.id: unit for unit in plan.units}


_workers: dict[Job, UnitWorker] = {}


def _worker(job: Job, store: Store, plan: Plan, corpus: Corpus) -> UnitWorker:
    if job not in _workers:
        _workers.clear()  # the last run's target makes room for this one's
        if job.device == "cpu" and "OMP_NUM_THREADS" in os.environ:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        identity = store.identity
        wanted = Wanted(identity.layer_ids, identity.last_layer, identity.final, identity.num_layers)
        sample = corpus.tokens[corpus.rows(plan.units[0].documents[0])][:SAMPLE_TOKENS].astype(np.int64)
        ids = torch.from_numpy(sample)[None].to(job.device)
        if job.device != "cpu":
            check_fast(inspect(Path(job.target)), job.allow_slow)
        loaded = load_capture(Path(job.target), job.dtype, job.device, job.gpus, wanted, ids)
        _workers[job] = UnitWorker(store, plan, corpus, loaded)
    return _workers[job]


def _layers(states: States, start: int, stop: int) -> States:
    """Some layers of states, a view."""
    return States(states.values[start:stop], None if states.scales is None else states.scales[start:stop])
