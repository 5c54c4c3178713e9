"""Work captured once as a CUDA graph and replayed: no launch costs, no new memory, no shapes that move.

Captured in the process and thread that replays it, with gradients on where the work makes them. On a CPU work is simply
called. Knows nothing of what is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Work = Callable[[], None]

WARM_UPS = 2
"""Calls before the capture: kernels are compiled, and libraries have picked theirs and made their workspaces."""


Pool = Any
"""Memory that graphs share, one after another: torch's handle; None for a call's own, and where there are no graphs."""


def new_pool(device: torch.device) -> Pool:
    """Memory for `captured`: what one call's graphs use while they run, another's may use after them."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def captured(works: Sequence[Work], device: torch.device, pool: Pool = None) -> list[Work]:
    """Graphs of some pieces of work, to be called in any order, in one pool of memory; one after another they share it.

    Work must have the same shapes each time, take what changes from fixed buffers, leave its results in fixed buffers,
    and wait for nothing. It is called a few times here: the caller puts right what that leaves behind.
    """
    if device.type != "cuda":
        return list(works)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            for work in works:
                work()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # what warming up took would lie idle beside the graphs' own pool
    pool = pool or new_pool(device)
    replays: list[Work] = []
    for work in works:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            work()
        replays.append(graph.replay)
    return replays


class MemoryWatch:
    """Whether a GPU's allocator asked for memory since this was made (or last asked)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._counts()

    def grown(self) -> str | None:
        """What was added since, in words, or None. From here on counts anew."""
        before, self._before = self._before, self._counts()
        segments, calls = (now - then for now, then in zip(self._before, before, strict=True))
        return f"{segments} new segments, {calls} calls of cudaMalloc" if segments or calls else None

    def _counts(self) -> tuple[int, int]:
        if self._device.type != "cuda":
            return 0, 0
        stats = torch.cuda.memory_stats(self._device)
        return stats["segment.all.allocated"], stats["num_device_alloc"]
