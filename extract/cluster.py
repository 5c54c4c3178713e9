"""One worker process a device, under Dask: each sees its own GPU only, and is replaced when it dies.

Knows processes and environments, nothing of what they compute.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import dask.config
from distributed import Client, Nanny, Scheduler, SpecCluster

RESOURCE = "GPU"
"""The Dask resource of which every worker has one, on the CPU too: one unit at a time a device."""

# Dask's own log lines (heartbeats, closing comms) would bury ours; what matters reaches the caller as an exception.
_QUIET: Any = logging.CRITICAL


@contextmanager
def local_cluster(devices: Sequence[str]) -> Iterator[Client]:
    """Start one worker for each device ("cpu" or a GPU's number) and yield a client.

    LocalCluster cannot give each worker an environment of its own, hence the spec.
    """
    workers = {
        f"{index}-{device}": {
            "cls": Nanny,
            "options": {
                "nthreads": 1,
                "memory_limit": 0,
                "resources": {RESOURCE: 1},
                "env": _environment(device, len(devices)),
                "host": "127.0.0.1",
                "dashboard": False,
                "silence_logs": _QUIET,
            },
        }
        for index, device in enumerate(devices)
    }
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "port": 0, "dashboard": False}}
    settings = {
        "distributed.worker.memory.target": False,
        "distributed.worker.memory.spill": False,
        "distributed.scheduler.allowed-failures": 2,
    }
    with (
        dask.config.set(settings),
        SpecCluster(workers=workers, scheduler=scheduler, silence_logs=_QUIET) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.wait_for_workers(len(workers), timeout=300)
        yield client


def _environment(device: str, workers: int) -> dict[str, str]:
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    visible = "" if device == "cpu" else device
    # Numbers count the GPUs this process sees, which may itself have been given some of the machine's only.
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    if ours and visible:
        visible = ours.split(",")[int(device)].strip()
    # Dask's default of one OpenMP thread a worker is for many small tasks; here the workers share the machine.
    common = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    return {"CUDA_VISIBLE_DEVICES": visible, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **common}
