"""Processors, memory and limits."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from .check import Check

OPEN_FILES = 4096
SHARED_MEMORY = 1 << 30


def check_machine() -> Iterator[Check]:
    """Processors, memory, shared memory, open files."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check("CPU cores", "ok", f"{cores}")
    yield Check("memory", "ok", f"{_memory() / 2**30:.1f} GiB")
    shared = Path("/dev/shm")
    if shared.is_dir():
        total = shutil.disk_usage(shared).total
        small = total < SHARED_MEMORY
        said = f"{total / 2**30:.2f} GiB" + (": NCCL needs more on several GPUs" if small else "")
        remedy = "mount -o remount,size=8G /dev/shm, or for a container --shm-size=8g" if small else ""
        yield Check("/dev/shm", "warning" if small else "ok", said, remedy)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = 0 <= limit < OPEN_FILES
    said = "no limit" if limit < 0 else f"{limit:,} at a time"
    yield Check("open files", "warning" if few else "ok", said, "ulimit -n 65536" if few else "")


def _memory() -> int:
    """Bytes of memory, or what the container may use of it."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            whole = min(whole, int(Path(path).read_text()))
        except (OSError, ValueError):  # not a container's, or "max"
            continue
    return whole
