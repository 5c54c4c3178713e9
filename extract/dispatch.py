"""Hands the units of a plan to the workers of a cluster until each is in the store or set aside.

Dask starts tasks, carries their results and says who came and went; which worker has which unit is decided here, and no
worker is given more than it has slots. So when one dies, the units it took along are known, and those that had begun
are the ones to blame. (Dask alone would send every unit to some worker's queue at once, and count a worker's death
against its whole queue.) Knows nothing of what a unit computes.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
from uuid import uuid4

from distributed import Client, Future, KilledWorker
from distributed.worker import get_worker

from ..store import HELDOUT, Store, StoreError, StoreFullError
from ..store.place import Directory
from ..store.progress import Listener
from ..store.reader import stored_bytes
from ..store.room import room_left
from .cluster import ClusterError
from .corpus import Corpus
from .peers import LOST, Roster, Worker
from .plan import Plan
from .target import TargetError
from .unit import Job, UnitReport, run_unit

TRIES = 3
"""How often a unit is tried before it is set aside. From the second on it has its worker to itself."""

DEATHS = 20
"""Workers that may die in a row without a unit being finished in between; then it is not the units' fault."""

TICK = 2.0
"""Seconds between two looks at who is there, should a message have been lost."""

INDEX_EVERY = 60.0
"""Seconds between two writings of the store's index while units are under way."""

NAMED = 5
"""Set-aside units that an error names; it counts the others."""

SICK = 3
"""Failures of a worker in a row after which it is started anew: a GPU may be left unusable by what went wrong on it."""

DIED = "its worker died"

Work = Callable[[Job, str, Callable[[int], None]], Any]
"""What a worker does with a unit: `unit.run_unit`."""


def run_plan(
    store: Store, plan: Plan, job: Job, cluster: AbstractContextManager[Client], listener: Listener
) -> list[Any]:
    """Do all units of a plan that are not in the store yet, and return their reports. The store must be held.

    Args:
        cluster: entered only when there is something to do.

    Raises:
        StoreError: units were set aside; all others are in the store.
        ClusterError, StoreFullError: as `Dispatch.run`.
    """
    corpus = Corpus.load(plan.folder(store.place))
    sizes = {unit.id: int(corpus.lengths[unit.documents].sum()) for unit in plan.units}
    store.refresh()
    done = {part.id for part in store.parts}
    pending = {name: tokens for name, tokens in sizes.items() if name not in done}
    held = sum(unit.split == HELDOUT for unit in plan.units)
    if not plan.units:
        listener.say("all these documents are in the store already")
        return []
    listener.say(
        f"{len(plan.units)} units ({held} of them held out), {len(plan.units) - len(pending)} done before, "
        f"{len(pending)} to do"
    )
    total = sum(sizes.values())
    listener.start(total, total - sum(pending.values()))
    if not pending:
        return []
    indexed = time.monotonic()

    def beat() -> None:
        nonlocal indexed
        if time.monotonic() - indexed > INDEX_EVERY:  # for a trainer that reads beside us
            store.refresh()
            store.write_index()
            indexed = time.monotonic()

    said: set[str] = set()

    def hear(report: UnitReport) -> None:
        for note in report.notes:
            if note not in said:
                listener.say(note)
        said.update(report.notes)

    def fits(tokens: int) -> bool:
        left = room_left(store.place)
        return left is None or stored_bytes(store.identity, tokens) <= left

    with cluster as client, _marked(store) as mark:
        outcome = Dispatch(client, job, pending, listener, mark, beat=beat, finished=hear, fits=fits).run()
    if outcome.set_aside:
        named = "; ".join(f"{name}: {reason}" for name, reason in list(outcome.set_aside.items())[:NAMED])
        more = len(outcome.set_aside) - NAMED
        raise StoreError(
            f"{len(outcome.set_aside)} of {len(pending)} units failed {TRIES} times each, the rest is in the store. "
            + named
            + (f"; and {more} more" if more > 0 else "")
        )
    return outcome.reports


@contextmanager
def _marked(store: Store) -> Iterator[str | None]:
    """A folder in the store while the block runs: a worker that does not see it sees another store at the same path."""
    if not isinstance(store.place, Directory):
        yield None  # an address is the same everywhere
        return
    folder = store.place.stage("run")
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Outcome:
    """What became of the units.

    Attributes:
        reports: what `work` returned for each finished unit.
        set_aside: the last error of each unit that failed three times, by its id.
    """

    reports: list[Any] = field(default_factory=list)
    set_aside: dict[str, str] = field(default_factory=dict)


@dataclass
class _Unit:
    id: str
    tokens: int
    failures: int = 0
    failed_on: set[Worker] = field(default_factory=set)


@dataclass
class _Try:
    unit: _Unit
    worker: Worker
    slots: int
    future: Future
    begun: bool = False
    tokens: int = 0


class Dispatch:
    """One run over some units. Everything happens in the thread that calls `run`: what Dask reports is queued.

    Args:
        client: of the cluster; a worker that joins while the run goes on gets units too.
        units: tokens of each unit, by id, in the order to do them.
        listener: progress counts tokens; what a failed try did is taken back.
        mark: a folder that shows a worker that it sees the store of this run (`peers.look`).
        work: what to do with a unit.
        beat: called every second or so.
        finished: called with the report of each finished unit.
        fits: whether there is room for the states of so many tokens; when not, no more units are begun.
    """

    def __init__(
        self,
        client: Client,
        job: Job,
        units: dict[str, int],
        listener: Listener,
        mark: str | None = None,
        work: Work = run_unit,
        beat: Callable[[], None] = lambda: None,
        finished: Callable[[Any], None] = lambda report: None,
        fits: Callable[[int], bool] = lambda tokens: True,
    ) -> None:
        self._client, self._job, self._work = client, job, work
        self._listener, self._beat, self._finished, self._fits = listener, beat, finished, fits
        # Other runs may use the scheduler, of this plan too (one that was killed and its successor).
        names = (f"dflash-{job.plan}-{uuid4().hex[:8]}-{number}" for number in itertools.count())
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._keys = partial(next, names)
        self._roster = Roster(client, job, mark, self._keys, listener.say, self._events.put)
        self._pending = deque(_Unit(name, tokens) for name, tokens in units.items())
        self._tries: dict[str, _Try] = {}
        self._deaths = 0
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Do the units.

        Raises:
            ClusterError: a worker that was there at the start cannot do the job, or none can; workers die whatever they
                do; there is none for too long; the scheduler is gone.
            StoreFullError: no room is left; units under way are finished first, unless one of them met with it.
        """
        topics = self._client.id, "all"  # the scheduler forgets what was said under a client's name, in time
        for topic in topics:
            self._client.subscribe_topic(topic, self._hear)
        try:
            looked = 0.0
            while self._pending or self._tries:
                if time.monotonic() - looked > TICK:
                    self._look_round()
                    looked = time.monotonic()
                self._hand_out()
                with suppress(Empty):
                    self._events.get(timeout=TICK / 2)()
                self._beat()
            return self._outcome
        finally:
            for topic in topics:
                self._client.unsubscribe_topic(topic)

    def _hear(self, event: tuple[float, Any]) -> None:
        """In the client's own thread: queue what a worker or the scheduler says."""
        message = event[1]
        if "try" in message:
            self._events.put(partial(self._advance, message["try"], message["tokens"]))
        elif message.get("action") == "add-worker":
            self._events.put(self._look_round)
        elif message.get("action") == "remove-worker":
            self._events.put(partial(self._lose, message["worker"], message["expected"]))

    def _look_round(self) -> None:
        for address in self._roster.meet():
            self._lose(address, False)

    def _hand_out(self) -> None:
        """Give units to workers that have room, the least busy first."""
        while self._pending:
            unit = self._pending[0]
            # Alone after a failure: when it kills its worker, no other unit is to blame.
            ready = self._roster.ready()
            others = [worker for worker in ready if worker not in unit.failed_on]
            takes = {worker: worker.slots if unit.failures else 1 for worker in others or ready}
            free = [worker for worker, slots in takes.items() if worker.used + slots <= worker.slots]
            if not free:
                return
            # What is under way may have been written in part: counted whole, so that the room is never short.
            if not self._fits(unit.tokens + sum(attempt.unit.tokens for attempt in self._tries.values())):
                if self._tries:
                    return
                raise StoreFullError(
                    f"no room is left for the store {self._job.store}: {len(self._pending)} units are still to do, "
                    "make room and run the same command again"
                )
            self._pending.popleft()
            worker = min(free, key=lambda worker: worker.used)
            slots = takes[worker]
            key = self._keys()
            what = _task, self._work, self._job, unit.id, self._client.id, key
            future = worker.submit(self._client, key, slots, *what)
            worker.used += slots
            self._tries[key] = _Try(unit, worker, slots, future)
            future.add_done_callback(lambda _, key=key: self._events.put(partial(self._finish, key)))

    def _advance(self, key: str, tokens: int) -> None:
        if attempt := self._tries.get(key):
            attempt.begun = True
            attempt.tokens += tokens
            self._count(tokens)

    def _count(self, tokens: int) -> None:
        if tokens:
            self._listener.advance(tokens, "")

    def _finish(self, key: str) -> None:
        """A try has come to its end, in one way or another."""
        if not (attempt := self._tries.get(key)):
            return
        future = attempt.future
        if future.cancelled():  # what Dask does when the scheduler is lost
            raise ClusterError(LOST)
        if future.status == "finished":
            try:
                report = future.result(timeout=60)
            except Exception:  # its worker died with the result: the part is in the store, as the next try will find
                return self._put_back(key)
            self._take(key)
            self._count(attempt.unit.tokens - attempt.tokens)
            self._outcome.reports.append(report)
            self._finished(report)
            self._deaths = attempt.worker.failures = 0
        elif future.status == "error":
            error = future.exception()
            if isinstance(error, StoreFullError):
                raise error  # every other unit would meet with it too
            if isinstance(error, TargetError):
                self._put_back(key)
                self._roster.refuse(attempt.worker, str(error))
            elif not isinstance(error, KilledWorker):
                self._fail(key, str(error) or type(error).__name__)
                self._distrust(attempt.worker)
            elif attempt.begun:  # a scheduler that allows no failure says so before it names the worker
                self._fail(key, DIED)
            else:
                self._put_back(key)
        else:
            self._put_back(key)

    def _lose(self, address: str, expected: bool) -> None:
        """A worker has gone: on purpose, or it died."""
        worker = self._roster.remove(address)
        if worker is None:
            return
        self._listener.say(f"{worker} {'has left' if expected else 'was lost'}")
        self._deaths += not expected
        for key in [key for key, attempt in self._tries.items() if attempt.worker is worker]:
            if self._tries[key].begun and not expected:
                self._fail(key, DIED)
            else:
                self._put_back(key)
        if self._deaths >= DEATHS:
            raise ClusterError(
                f"{self._deaths} workers died in a row without finishing a unit, the last one {worker}: "
                "see that machine's memory and its system log"
            )

    def _distrust(self, worker: Worker) -> None:
        """A unit failed there, though the worker lives."""
        worker.failures += 1
        if worker.failures < SICK:
            return
        for key in [key for key, attempt in self._tries.items() if attempt.worker is worker]:
            self._put_back(key)
        self._roster.remove(worker.address)
        self._listener.say(f"{worker} failed {SICK} units in a row and is started anew")
        self._client.restart_workers([worker.address], timeout=60, raise_for_error=False)

    def _take(self, key: str) -> _Try:
        """A try is over."""
        attempt = self._tries.pop(key)
        attempt.worker.used -= attempt.slots
        attempt.future.release()
        return attempt

    def _put_back(self, key: str) -> None:
        attempt = self._take(key)
        self._count(-attempt.tokens)
        self._pending.appendleft(attempt.unit)

    def _fail(self, key: str, reason: str) -> None:
        attempt = self._take(key)
        self._count(-attempt.tokens)
        unit = attempt.unit
        unit.failures += 1
        unit.failed_on.add(attempt.worker)
        if unit.failures < TRIES:
            self._listener.say(f"unit {unit.id} failed ({reason}), trying again")
            self._pending.append(unit)  # last: what ails it may have passed by then
        else:
            self._listener.say(f"unit {unit.id} failed {TRIES} times and is set aside ({reason})")
            self._outcome.set_aside[unit.id] = reason


def _task(work: Work, job: Job, unit: str, topic: str, key: str) -> Any:
    """In a worker: one try of a unit."""
    worker = get_worker()

    def progress(tokens: int) -> None:
        worker.log_event(topic, {"try": key, "tokens": tokens})

    progress(0)
    return work(job, unit, progress)
