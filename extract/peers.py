"""The workers of a cluster: who is there, what each says of itself, and whether it can do a job.

A worker on another machine may have another installation, another disk under the same path, another target; each is
asked before it is given units. Knows nothing of units; `look` runs inside the workers.
"""

from __future__ import annotations

import hashlib
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from distributed import Client, Future

from ..store import StoreError, open_store
from ..store.place import Directory
from .cluster import RESOURCE, ClusterError
from .plan import load_plan
from .target import TargetError, check_fast, inspect, weight_files
from .unit import Job

PATIENCE = 600.0
"""Seconds to wait for workers where there are none."""

GRACE = 60.0
"""Seconds to wait for all workers that are there at the start to answer."""

LOST = "the scheduler is gone; what was done is in the store, and the same command goes on with the rest"

SAMES = ("dflash-offline", "torch", "transformers")
"""Packages whose versions must agree: states differ between them in the last bits, or more."""

KERNELS = ("triton", "fla-core")
"""Others whose versions must agree where there are GPUs."""

OWN = ("host", "device", "GPUs")
"""What workers say that may differ between them."""

_SAMPLE = 65536
_SAMPLES = 32


@dataclass(eq=False)
class Worker:
    """A worker and how much of it is in use.

    Attributes:
        slots: the amount of `cluster.RESOURCE` that it has.
        asked: what it will say of itself; None once that is known.
        refused: it cannot do the job.
        used: slots that are taken.
        failures: units that failed there since one was finished.
    """

    address: str
    name: str
    host: str
    slots: int
    asked: Future | None = None
    refused: bool = False
    used: int = 0
    failures: int = 0

    def __str__(self) -> str:
        return f"worker {self.name} on {self.host}"

    def submit(self, client: Client, key: str, slots: int, function: Callable[..., Any], *args: Any) -> Future:
        """Start a task on this worker and no other."""
        return client.submit(
            function, *args, key=key, workers=[self.address], resources={RESOURCE: slots}, pure=False, retries=0
        )


class Roster:
    """The workers of a cluster that can do a job; one that joins later is asked and added.

    Args:
        mark: a folder that shows a worker that it sees the store of this run (`look`).
        keys: gives keys of tasks, each once.
        say: takes a line of text.
        post: takes what is to be done, in the thread of the roster's owner, when a worker has answered.
        patience: seconds to go on without any worker.
    """

    def __init__(
        self,
        client: Client,
        job: Job,
        mark: str | None,
        keys: Callable[[], str],
        say: Callable[[str], None],
        post: Callable[[Callable[[], None]], None],
        patience: float = PATIENCE,
    ) -> None:
        self._client, self._job, self._mark, self._keys = client, job, mark, keys
        self._say, self._post, self._patience = say, post, patience
        self._ours = look(job, mark)
        self._workers: dict[str, Worker] = {}
        self._missing: set[str] = set()
        self._alone_since = self._began = time.monotonic()
        self._complete = False

    def ready(self) -> list[Worker]:
        """Workers to give units to: none before all that were there at the start have been accepted, or have not
        answered for too long."""
        silent = [worker for worker in self._workers.values() if worker.asked]
        if not self._complete and silent:
            if time.monotonic() - self._began < GRACE:
                return []
            self._say(
                f"no answer yet from {', '.join(map(str, silent))} (at work for another run?): the others begin without"
            )
        self._complete = True
        return [worker for worker in self._workers.values() if not (worker.asked or worker.refused)]

    def meet(self) -> set[str]:
        """See who is there, and ask newcomers. Returns the addresses of those that have gone without a message.

        Raises:
            ClusterError: the scheduler is gone, or nobody has been there for too long.
        """
        if self._client.status != "running":
            raise ClusterError(LOST)
        present = workers_of(self._client)
        missing = self._workers.keys() - present.keys()
        silent = missing & self._missing  # at two looks in a row: else the message may still be under way
        self._missing = missing
        for address in present.keys() - self._workers.keys():
            said = present[address]
            worker = Worker(address, str(said["name"]), said["host"], int(said["resources"][RESOURCE]))
            self._workers[address] = worker
            # It takes the whole worker: what a run that was killed left going there has ended when it answers.
            worker.asked = worker.submit(self._client, self._keys(), worker.slots, look, self._job, self._mark)
            worker.asked.add_done_callback(lambda _, worker=worker: self._post(lambda: self._answer(worker)))
        now = time.monotonic()
        if self._workers:
            self._alone_since = now
        elif now - self._alone_since > self._patience:
            raise ClusterError(f"no worker has been there for {self._patience:.0f} seconds; the units done are stored")
        return silent

    def remove(self, address: str) -> Worker | None:
        """Strike a worker off; None when it is not on the roster."""
        return self._workers.pop(address, None)

    def _answer(self, worker: Worker) -> None:
        if worker.asked is None or self._workers.get(worker.address) is not worker:
            return
        try:
            reason = refusal(worker.asked.result(timeout=60), self._ours, self._job)
        except Exception as error:
            reason = str(error) or type(error).__name__
        worker.asked = None
        if reason is not None:
            self.refuse(worker, reason)

    def refuse(self, worker: Worker, reason: str) -> None:
        """A worker cannot do the job.

        Raises:
            ClusterError: it was there at the start, or it was the last.
        """
        if worker.refused:
            return
        worker.refused = True
        text = f"{worker} cannot be used: {reason}"
        if not self._complete or all(other.refused for other in self._workers.values()):
            raise ClusterError(text)
        self._say(f"{text}; the others go on")


def look(job: Job | None = None, mark: str | None = None) -> dict[str, str]:
    """What this process is, and what it sees of a job, each under a name for people.

    Args:
        mark: a folder that exists in the job's store while its run goes on.

    Raises:
        StoreError, TargetError: it sees no such store or target.
    """
    import torch

    said = {
        "host": socket.gethostname(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "GPUs": str(torch.cuda.device_count()),
        "Python": platform.python_version().rpartition(".")[0],
        **{name: _version(name) for name in SAMES + (KERNELS if torch.cuda.is_available() else ())},
    }
    if job is None:
        return said
    store = open_store(job.store)
    if load_plan(store.place, job.plan) is None or (mark and not Path(mark).is_dir()):
        raise StoreError(f"the path {job.store} leads to another store there: mount the same one at the same path")
    if isinstance(store.place, Directory):
        store.place.stage("look").rmdir()  # it can be written
    if not Path(job.target).is_dir():
        raise TargetError(f"there is no target {job.target} there: mount or copy it at the same path")
    if job.device != "cpu" and torch.cuda.is_available():
        check_fast(inspect(Path(job.target)), job.allow_slow)
    return {**said, "target": _fingerprint(Path(job.target))}


def refusal(theirs: dict[str, str], ours: dict[str, str], job: Job) -> str | None:
    """Why a worker cannot have units of a job, or None when it can. `ours` is what `look` says in this process."""
    if theirs["device"] != job.device:
        return f"it runs on {_named(theirs['device'])}, and this extraction on {_named(job.device)}"
    if job.device == "cuda" and int(theirs["GPUs"]) != job.gpus:
        return f"it has {theirs['GPUs']} GPUs for a target of {job.gpus}: start it with --gpus-per-target {job.gpus}"
    for name, value in ours.items():
        if name not in OWN and theirs.get(name) != value:
            return f"its {name} is {theirs.get(name)}, and the one here is {value}"
    return None


def workers_of(client: Client) -> dict[str, dict[str, Any]]:
    """Dask's record of each worker that has our resource, by address."""
    found = client.scheduler_info()["workers"]
    return {address: worker for address, worker in found.items() if worker["resources"].get(RESOURCE, 0) >= 1}


def common_device(client: Client, address: str, say: Callable[[str], None], patience: float = PATIENCE) -> str:
    """ "cpu" or "cuda", on which all workers of a scheduler run; waits until there is one.

    Raises:
        ClusterError: no worker came, one cannot say what it is, or they differ.
    """
    deadline = None
    while not (workers := workers_of(client)):
        if deadline is None:
            say(
                f"waiting for workers, {patience / 60:.0f} minutes at most: run `dflash worker --scheduler {address}` "
                "on a machine with GPUs"
            )
            deadline = time.monotonic() + patience
        if time.monotonic() > deadline:
            raise ClusterError(f"no worker came to {address} in {patience:.0f} seconds")
        time.sleep(0.5)
    answers: Any = client.run(look, workers=list(workers), on_error="return")
    devices = {}
    for worker, answer in answers.items():
        name = f"worker {workers[worker]['name']} on {workers[worker]['host']}"
        if isinstance(answer, BaseException):
            raise ClusterError(f"{name} cannot be used: {answer}")
        devices[answer["device"]] = name
    if len(devices) > 1:
        raise ClusterError(
            f"the workers at {address} are of two kinds ({devices['cpu']} has no GPU, {devices['cuda']} has one): "
            "their states would differ, so keep to one kind"
        )
    return next(iter(devices))


def _fingerprint(folder: Path) -> str:
    """A hash of samples of the weights: another target's differ in every layer, and reading all would take minutes."""
    found = hashlib.sha256()
    for path in weight_files(folder):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(number * size // _SAMPLES)
                found.update(file.read(_SAMPLE))
    return found.hexdigest()[:12]


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]  # not the build: this process may have no GPU
    except PackageNotFoundError:
        return "none"


def _named(device: str) -> str:
    return "the CPU" if device == "cpu" else "a GPU"
