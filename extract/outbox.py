"""From the device to the host: a batch's states are packed, checked and encoded there, and copied beside the next pass.

On a GPU the copies go through pinned buffers on a stream of their own; on a CPU the same steps are plain copies. Knows
shapes and encodings, no documents, units or stores.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..store import States
from ..store.format import Encoding
from ..store.fp8 import encode
from ..store.states import value_dtype

SLOTS = 3
"""Batches on their way at a time: one being copied, one being written, one waiting."""


class Slot:
    """Buffers for one batch on the host, pinned where there is a GPU; they grow to the largest batch and are kept."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in the buffer of that name; it holds until the next call with the name."""
        size = int(np.prod(shape)) * dtype.itemsize
        held = self._buffers.get(name)
        if held is None or len(held) < size:
            self._buffers.pop(name, None)
            held = self._buffers[name] = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return held[:size].view(dtype).view(*shape)


@dataclass
class Parcel:
    """One batch on its way to the host.

    Attributes:
        copy_seconds: what the copy took, once it has arrived.
    """

    _slot: Slot | None
    _free: queue.Queue[Slot]
    _values: Tensor
    _scales: Tensor | None
    _faults: Tensor
    _held: list[Tensor] = field(default_factory=list)
    _events: tuple[Any, Any] | None = None
    copy_seconds: float = 0.0

    def arrive(self) -> tuple[States, np.ndarray]:
        """Wait for the copy. Returns the states `[layers, n, H]` and, for each document, its faults `[2, layers,
        documents]`: tokens whose state is not finite, and 1 where all of a layer is zero."""
        if self._events is not None:
            began, ended = self._events
            ended.synchronize()
            self.copy_seconds = began.elapsed_time(ended) / 1000
        self._held.clear()
        values = self._values.numpy()
        scales = None if self._scales is None else self._scales.numpy()
        bits = values.view(value_dtype("bf16" if scales is None else "fp8"))
        return States(bits, scales), self._faults.numpy()

    def release(self) -> None:
        """Give the buffers back: the states that arrived may change from now on. May be called again."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._free.put(slot)


class Outbox:
    """The way out of one device.

    Args:
        device: where states are packed; those that were computed on another GPU are brought there.
        encoding: how they are to be kept.
    """

    waited: float
    """Seconds spent waiting for a free buffer so far: the disk is behind."""

    def __init__(self, device: torch.device, encoding: Encoding) -> None:
        self._device, self._encoding = device, encoding
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._free: queue.Queue[Slot] = queue.Queue()
        for _ in range(SLOTS):
            self._free.put(Slot(self._cuda))
        self.waited = 0.0

    @torch.inference_mode()
    def send(self, states: Sequence[Tensor], lengths: Sequence[int]) -> Parcel:
        """Pack the states of a batch's documents end to end and start their way to the host.

        Args:
            states: for each layer `[b, n, H]`.
            lengths: tokens of each row's document; what lies beyond is padding and stays.
        """
        began = time.perf_counter()
        slot = self._free.get()
        self.waited += time.perf_counter() - began
        try:
            return self._send(slot, states, lengths)
        except BaseException:
            self._free.put(slot)
            raise

    def _send(self, slot: Slot, states: Sequence[Tensor], lengths: Sequence[int]) -> Parcel:
        padded = states[0].shape[1]
        rows = np.concatenate([np.arange(n) + row * padded for row, n in enumerate(lengths)])
        owners = np.repeat(np.arange(len(lengths)), lengths)
        owner = self._to_device(slot, "owners", owners, self._device)
        devices = {state.device for state in states}
        indices = {device: self._to_device(slot, "rows", rows, device) for device in devices}
        packed = torch.empty(len(states), len(rows), states[0].shape[2], dtype=torch.bfloat16, device=self._device)
        faults = torch.zeros(2, len(states), len(lengths), dtype=torch.int32, device=self._device)
        for layer, state in enumerate(states):
            kept = packed[layer]
            kept.copy_(state.flatten(0, 1).index_select(0, indices[state.device]))
            faults[0, layer].index_add_(0, owner, (~kept.isfinite().all(-1)).int())
            faults[1, layer].index_add_(0, owner, kept.any(-1).int())
        faults[1] = (faults[1] == 0).int()
        if self._encoding == "fp8":
            codes, scales = encode_layers(packed)
            device = [codes, scales, faults]
        else:
            device = [packed.view(torch.int16), faults]
        host = [slot.buffer(str(i), tensor.shape, tensor.dtype) for i, tensor in enumerate(device)]
        events = self._copy(device, host)
        scales = host[1] if self._encoding == "fp8" else None
        return Parcel(slot, self._free, host[0], scales, host[-1], device, events)

    def _copy(self, device: Sequence[Tensor], host: Sequence[Tensor]) -> tuple[Any, Any] | None:
        if self._stream is None:
            for source, target in zip(device, host, strict=True):
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            for source, target in zip(device, host, strict=True):
                target.copy_(source, non_blocking=True)
            ended.record()
        return began, ended

    def _to_device(self, slot: Slot, name: str, values: np.ndarray, device: torch.device) -> Tensor:
        staged = slot.buffer(name, values.shape, torch.int64)
        staged.copy_(torch.from_numpy(values))
        return staged.to(device, non_blocking=True) if self._cuda else staged


def encode_layers(states: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 codes `[layers, n, H]` and scales `[layers, n]` of states, a layer at a time to spare memory."""
    pieces = [encode(layer) for layer in states]
    return torch.stack([codes for codes, _ in pieces]), torch.stack([scales for _, scales in pieces])
