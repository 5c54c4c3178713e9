"""Saves a run beside its training: the state is copied to the host between two updates, and a thread writes it down.

Qwen3.6-27B's drafter has 24 GB of state. Copied to memory that the GPU's bus reaches directly it takes half a second,
written to a disk twenty: so the run waits for the first only, and for the second where the next save is due before it
has ended. Knows checkpoints, nothing of what is in them.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..store.progress import Listener
from .checkpoint import save_checkpoint

LATE = 1.0
"""Seconds of waiting for the save before from which on the run says so."""


class Saver:
    """Args:
    drafter, optimizer: what is saved of them, by name: tensors that stay where they are.
    device: where they are.
    listener: told when saving is what a run waits for.
    """

    def __init__(
        self,
        drafter: Mapping[str, torch.Tensor],
        optimizer: Mapping[str, torch.Tensor],
        device: torch.device,
        listener: Listener,
    ) -> None:
        self._live, self._device, self._listener = (drafter, optimizer), device, listener
        self._told = False
        self._pinned: int | None = None
        """The address of memory that is to be given back."""
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._host = self._thread.submit(self._make_room)  # takes seconds, and is first used at the first save

    def save(self, folder: Path, config: dict[str, Any], state: dict[str, Any], then: Callable[[], None]) -> None:
        """Save what there is now as the checkpoint `folder`; it appears there, whole, some time later.

        Args:
            then: called in the saving thread once it is there.

        Raises:
            CheckpointError: the save before this one could not be written.
        """
        began = time.perf_counter()
        self.settle()
        host = self._host.result()
        if (waited := time.perf_counter() - began) > LATE and self._writing is not None and not self._told:
            self._listener.say(
                f"the run waited {waited:.0f} s for its disk: a checkpoint is due before the one before is written; "
                "raise train.save_every, or put train.run on a faster disk"
            )
            self._told = True
        for there, here in zip(self._live, host, strict=True):
            for name, tensor in there.items():
                here[name].copy_(tensor.detach(), non_blocking=True)
        copied = torch.cuda.Event() if self._device.type == "cuda" else None
        if copied is not None:
            copied.record()

        def write() -> None:
            if copied is not None:
                copied.synchronize()
            save_checkpoint(folder, host[0], config, state, host[1])
            then()

        self._writing = self._thread.submit(write)

    def check(self) -> None:
        """Raise the CheckpointError of a save that has failed, if one has."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    def settle(self) -> None:
        """Wait until all that was saved is on the disk. Raises CheckpointError where it could not be written."""
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        """Wait as `settle` does, and end; what went wrong is left to those who asked."""
        self._thread.shutdown(wait=True)
        if self._pinned is not None:
            _runtime().cudaHostUnregister(self._pinned)

    def _make_room(self) -> list[dict[str, torch.Tensor]]:
        """Host memory like the state, in one piece that is pinned for a GPU."""
        tensors = [tensor for live in self._live for tensor in live.values()]
        ends, total = [], 0
        for tensor in tensors:
            total += -total % 16 + tensor.nbytes
            ends.append(total)
        room = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without them
            room.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(room, dtype=torch.uint8)
        if self._device.type == "cuda":
            # The system gives pages as they are touched: were that left to CUDA, training would stand still meanwhile.
            # By numpy: torch would start threads for it, beside which those of the training process sleep and wake.
            memory.numpy()[:: mmap.PAGESIZE] = 0
            # Registered, not allocated as pinned: torch's own allocator rounds up to a power of two.
            with torch.cuda.device(self._device):
                code = int(_runtime().cudaHostRegister(memory.data_ptr(), total, 0))
            if code == 0:
                self._pinned = memory.data_ptr()
            else:
                self._listener.say(
                    f"note: {total / 2**30:.1f} GiB of memory could not be pinned for checkpoints (CUDA error "
                    f"{code}): the run waits some seconds for each"
                )
        places = iter(zip(tensors, ends, strict=True))
        return [
            {name: _at(memory, end, like) for name, (like, end) in zip(live, places, strict=False)}
            for live in self._live
        ]


def _at(memory: torch.Tensor, end: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor of some shape and dtype whose bytes end there."""
    return memory[end - like.nbytes : end].view(like.dtype).view(like.shape)


def _runtime() -> Any:
    """CUDA's runtime library; untyped in torch."""
    return torch.cuda.cudart()
