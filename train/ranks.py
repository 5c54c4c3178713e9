"""The processes of one run, one a device: who this one is, and the few things they say to each other.

They find each other by torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), whoever set it.
Only tensors and text travel, never pickled objects. Without that environment a run is one process, and everything here
returns at once. Knows nothing of what is trained.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ..store import DflashError

PEER_LOST = 75
"""Exit code of a process that fails because another is gone: it is the other's error that matters."""


class PeerLost(DflashError):
    """Another process of the run does not answer; the message is for people."""


class Ranks:
    """The processes of a run as one of them sees them; made by `alone` or `join`. Use as a context manager.

    Attributes:
        rank: this one's number; 0 leads: it alone reads and writes the run's folder, and prints.
        count: how many there are.
        device: this one's.
        joined: whether there is a process group. There may be, of one.
    """

    def __init__(self, rank: int, count: int, device: torch.device, joined: bool) -> None:
        self.rank, self.count, self.device, self.joined = rank, count, device, joined

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the group."""
        if self.joined and dist.is_initialized():
            dist.destroy_process_group()

    def add(self, *tensors: Tensor) -> None:
        """Replace tensors by their sums over all ranks. On a GPU it may be captured. Raises PeerLost."""
        if self.joined:
            with _peers():
                for tensor in tensors:
                    dist.all_reduce(tensor)

    def begin_add(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to add a tensor beside what the device does next. Calling what is returned makes what follows wait."""
        if not self.joined:
            return lambda: None
        with _peers():
            work = dist.all_reduce(tensor, async_op=True)

        def wait() -> None:
            with _peers():
                if work is not None:
                    work.wait()

        return wait

    def largest(self, *tensors: Tensor) -> None:
        """Replace tensors by their largest values over all ranks. Raises PeerLost."""
        if self.joined:
            with _peers():
                for tensor in tensors:
                    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by rank 0's. Raises PeerLost."""
        if self.joined:
            with _peers():
                for tensor in tensors:
                    dist.broadcast(tensor, 0)

    def tell(self, text: str) -> str:
        """Rank 0's text, on every rank; what the others pass is not looked at. Raises PeerLost."""
        if not self.joined:
            return text
        content = torch.tensor(list(text.encode()) if self.leads else [], dtype=torch.uint8, device=self.device)
        size = torch.tensor(len(content), device=self.device)
        self.share([size])
        content = content if self.leads else content.new_zeros(int(size))
        self.share([content])
        return bytes(content.cpu().numpy()).decode()

    def devices(self) -> list[str]:
        """Each rank's device, by its number on its machine. Raises PeerLost."""
        if self.device.type != "cuda":
            return [str(self.device)] * self.count
        numbers = torch.zeros(self.count, dtype=torch.int64, device=self.device)
        numbers[self.rank] = self.device.index
        self.add(numbers)
        return [f"cuda:{number}" for number in numbers.tolist()]

    def differ(self, value: Tensor) -> bool:
        """Whether a scalar is not the same on all ranks. Raises PeerLost."""
        low, high = -value.double(), value.double()
        self.largest(low, high)
        return bool(high != -low)


@contextmanager
def _peers() -> Iterator[None]:
    """Turn what a backend says when another process is gone into `PeerLost`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise PeerLost(f"another process of this run is gone, or cannot be reached ({reason})") from None


def alone(device: torch.device) -> Ranks:
    """A run of one process; on a GPU without a number, on the current one."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return Ranks(0, 1, device, joined=False)


def join(device: torch.device) -> Ranks:
    """Find the other processes by the environment; a run of one where it names none.

    GPUs speak through NCCL, CPUs through gloo.

    Raises:
        PeerLost: the others do not come.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return alone(device)
    with _peers():
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), device, joined=True)
