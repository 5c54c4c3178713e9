"""Worker processes under Dask: on this machine for one run, or joined to a scheduler that outlives runs.

A worker is a process of its own that sees its own GPUs only, and a nanny beside it that starts another when it dies.
Knows processes, environments and addresses, nothing of what workers compute.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import dask.config
from distributed import Client, Nanny, Scheduler, SpecCluster, Worker
from distributed.comm.core import connect as open_comm
from distributed.utils import silence_logging_cmgr

from ..store import DflashError

RESOURCE = "GPU"
"""The Dask resource that our workers have, on the CPU too, and that every task of ours asks for: a Dask worker of other
people's gets none.
"""

SLOTS = 2
"""How much of it a worker has, where a unit takes one: two units are in a worker at a time, each in a thread. While the
bytes of one are reaching the disk, the other computes; the unit's own lock keeps forward passes from running together.
"""

ANSWER = 10.0
"""Seconds in which a scheduler must answer."""

RESTART = "5 minutes"
"""How long a dead worker's successor may take to appear. Dask's 15 seconds are short for eight processes that all load
their libraries from one network disk.
"""

# Dask's own log lines (heartbeats, closing comms) would bury ours; what matters reaches the caller as an exception.
_QUIET: Any = logging.CRITICAL + 1

# A nanny would set OMP_NUM_THREADS and others in this process too, for the workers to inherit; ours are given theirs.
_OWN_ENVIRONMENT = {"distributed.nanny.pre-spawn-environ": {}}


class ClusterError(DflashError):
    """A scheduler or workers that cannot be used; the message says what to do."""


class QuietWorker(Worker):
    """A Dask worker that leaves Ctrl-C, which a terminal sends to every process of a command, to its nanny; and that
    prints nothing, at its end either.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        logging.getLogger("distributed").setLevel(_QUIET)
        super().__init__(*args, **options)


@contextmanager
def local_cluster(devices: Sequence[str], per_worker: int = 1) -> Iterator[Client]:
    """Start workers on this machine and yield a client; they end with the block, or with this process.

    Args:
        devices: "cpu" or GPU numbers, a worker for each `per_worker` of them.

    Raises:
        ClusterError: the devices cannot be shared out so, or a worker cannot be started.
    """
    # LocalCluster cannot give each worker an environment of its own, hence the spec.
    workers = {
        f"{index}-{_label(group)}": {"cls": Nanny, "options": {**options, "host": "127.0.0.1"}}
        for index, (group, options) in enumerate(_workers(devices, per_worker))
    }
    local = {"host": "127.0.0.1", "port": 0, "dashboard": False, "dashboard_address": "127.0.0.1:0"}
    scheduler = {"cls": Scheduler, "options": local}
    with dask.config.set({"distributed.deploy.lost-worker-timeout": RESTART, **_OWN_ENVIRONMENT}):
        try:
            cluster = SpecCluster(workers=workers, scheduler=scheduler, silence_logs=_QUIET)
        except (OSError, RuntimeError) as error:
            raise ClusterError(f"the workers could not be started on this machine: {error}") from None
        with cluster, Client(cluster, set_as_default=False) as client:
            yield client


@contextmanager
def connect(address: str) -> Iterator[Client]:
    """A client of a scheduler that runs somewhere.

    Raises:
        ClusterError: not an address, or no scheduler answers there.
    """
    address = _checked(address)
    with silence_logging_cmgr(level=_QUIET):
        try:
            client = Client(address, timeout=ANSWER, set_as_default=False)
        except (OSError, ValueError) as error:
            raise _unreachable(address, error) from None
        with client:
            yield client


def serve(
    address: str, devices: Sequence[str], per_worker: int, interface: str | None, say: Callable[[str], None]
) -> None:
    """Join workers on this machine to a scheduler, until it goes away or this process is told to stop.

    Args:
        devices: "cpu" or GPU numbers, a worker for each `per_worker` of them.
        interface: the network interface to listen on; by default the one that faces the scheduler.
        say: takes a line of text.

    Raises:
        ClusterError: no scheduler answers, or the workers cannot be started or have all ended.
    """
    with silence_logging_cmgr(level=_QUIET), dask.config.set(_OWN_ENVIRONMENT):
        asyncio.run(_serve(_checked(address), _workers(devices, per_worker), interface, say))


async def _serve(
    address: str, workers: list[tuple[list[str], dict[str, Any]]], interface: str | None, say: Callable[[str], None]
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await _knock(address, ANSWER)
    except (OSError, ValueError) as error:
        raise _unreachable(address, error) from None
    labels = [_label(group) for group, _ in workers]
    nannies = [
        Nanny(address, name=f"{socket.gethostname()}-{os.getpid()}-{label}", interface=interface, **options)
        for label, (_, options) in zip(labels, workers, strict=True)
    ]

    async def live(label: str, nanny: Nanny) -> None:
        await nanny
        say(f"{label}: joined {address} as {nanny.worker_address}")
        await nanny.finished()
        if not stop.is_set():
            say(f"{label}: the worker has ended")

    everything = asyncio.gather(*map(live, labels, nannies))
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([everything, stopped], return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            say("stopping: the units under way are left to other workers")
            await _sign_off(nannies)
        else:
            await everything
            await _explain_end(address, say)
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(f"the workers could not be started on this machine: {error}") from None
    finally:
        stopped.cancel()
        await asyncio.gather(*(nanny.close() for nanny in nannies), everything, return_exceptions=True)


async def _sign_off(nannies: list[Nanny]) -> None:
    """Tell the scheduler that these workers leave on purpose, so that no unit is blamed for it."""
    addresses = [nanny.worker_address for nanny in nannies if nanny.worker_address]
    try:
        async with asyncio.timeout(ANSWER):
            await nannies[0].scheduler.retire_workers(workers=addresses, close_workers=False, remove=True)
    except (OSError, TimeoutError):
        pass  # it is gone itself


async def _explain_end(address: str, say: Callable[[str], None]) -> None:
    try:
        await _knock(address, ANSWER / 5)
    except OSError:
        say(f"the scheduler at {address} is gone")
    else:
        raise ClusterError(f"all workers of this machine have ended, though the scheduler at {address} still answers")


async def _knock(address: str, timeout: float) -> None:
    comm = await open_comm(address, timeout=timeout)
    await comm.close()


def _checked(address: str) -> str:
    if not re.fullmatch(r"(\w+://)?[^/]+:\d+", address):
        raise ClusterError(f"{address} is no scheduler's address: write it like tcp://host:8786")
    return address if "://" in address else f"tcp://{address}"


def _unreachable(address: str, error: Exception) -> ClusterError:
    detail = str(error).strip().splitlines()[:1] or [type(error).__name__]
    return ClusterError(
        f"no Dask scheduler answers at {address} ({detail[0]}): start one there with `dask scheduler`, "
        "and let this machine reach its port"
    )


def shared_out(devices: Sequence[str], per_worker: int) -> list[list[str]]:
    """The devices of each worker.

    Raises:
        ClusterError: they cannot be shared out so.
    """
    if per_worker > 1 and "cpu" in devices:
        raise ClusterError("a target on the CPU cannot be spread: leave out --gpus-per-target (target.gpus)")
    if len(devices) % per_worker:
        raise ClusterError(
            f"{len(devices)} GPUs cannot be shared out {per_worker} to a target: name a multiple of {per_worker}"
        )
    return [list(devices[start : start + per_worker]) for start in range(0, len(devices), per_worker)]


def _workers(devices: Sequence[str], per_worker: int) -> list[tuple[list[str], dict[str, Any]]]:
    """The devices of each worker, and the options of its nanny."""
    groups = shared_out(devices, per_worker)
    common: dict[str, Any] = {
        "worker_class": QuietWorker,
        "nthreads": SLOTS,
        "resources": {RESOURCE: SLOTS},
        "memory_limit": 0,
        "dashboard": False,
        "silence_logs": _QUIET,
        # Its samples, a hundred a second, would stop the thread that feeds the GPU each time.
        "config": {"distributed.worker.profile.enabled": False},
    }
    return [(group, {**common, "env": _environment(group, len(groups))}) for group in groups]


def _label(group: list[str]) -> str:
    return "cpu" if group[0] == "cpu" else f"gpu{'-'.join(group)}"


def _environment(group: list[str], workers: int) -> dict[str, str]:
    # On the CPU the same number whatever the workers: a product's last bits depend on how many threads share it.
    cores = os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS") or str(cores if group[0] == "cpu" else max(1, cores // workers))
    visible = [] if group[0] == "cpu" else group
    # Numbers count the GPUs this process sees, which may itself have been given some of the machine's only.
    if ours := os.environ.get("CUDA_VISIBLE_DEVICES"):
        visible = [ours.split(",")[int(number)].strip() for number in visible]
    common = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **common}
