"""AdamW on fp32 masters, the learning-rate schedule, and clipping: everything between gradients and new weights.

Learning rate, step count and gradient scale are tensors on the device, so nothing here waits for the host and an
update can be captured in a CUDA graph. Knows flat buffers, nothing of drafters.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from .flat import Flat
from .kernels.adamw import adamw, squared_norm
from .ranks import Ranks


class Optimizer(Protocol):
    """What a run asks of an optimizer: `MasterAdamW` or `muon.MasterMuon`."""

    capturable: bool
    """Whether `step` may be captured in a CUDA graph."""
    flat: Flat

    @property
    def skipped(self) -> torch.Tensor:
        """Updates left out so far, a scalar on the device."""
        ...

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All that is kept from update to update but the counts, flat, fp32."""
        ...

    @property
    def counts(self) -> list[torch.Tensor]:
        """Scalars that count updates."""
        ...

    def step(self, rate: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
        """One update; the gradient's norm."""
        ...

    def publish(self) -> None:
        """Write the masters into the model's weights."""
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """Everything an exact resumption needs, by name."""
        ...

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state` gave."""
        ...


def learning_rate(before: int, after: int, total: int, peak: float, warmup: float) -> float:
    """Linear warm-up over the share `warmup` of `total`, then a cosine to zero.

    Args:
        before, after: where the update begins and ends, of `total`: batches, or updates.
    """
    rising = max(1, round(total * warmup))
    if before < rising:
        return peak * min(1.0, after / rising)
    progress = min(1.0, (before - rising) / max(1, total - rising))
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


class MasterAdamW:
    """AdamW (Loshchilov and Hutter 2019) whose weights and moments are fp32 whatever the model computes in.

    Args:
        flat: the model's parameters; its gradients are read and zeroed, its weights overwritten.
        clip: largest global norm of the gradient.
        weight_decay: applied to matrices, never to norms.
    """

    capturable: bool = True

    def __init__(
        self,
        flat: Flat,
        *,
        clip: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.flat = flat
        self.masters = flat.weights.to(torch.float32, copy=True)
        self.first = torch.zeros_like(self.masters)
        self.second = torch.zeros_like(self.masters)
        self.count = torch.zeros((), device=self.masters.device)
        self.skipped = torch.zeros_like(self.count)
        self._clip, self._decay, self._betas, self._eps = clip, weight_decay, betas, eps

    @torch.no_grad()
    def step(self, rate: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
        """One update from the accumulated gradients, which are zeroed if more are to be added to them.

        Args:
            rate: learning rate, fp32 scalar.
            denominator: what the accumulated gradients are divided by, fp32 scalar; zero skips the update.

        Returns:
            The gradient's norm before clipping, fp32 scalar. A zero denominator or a gradient that is not finite
            changes nothing and is counted in `skipped`.
        """
        flat = self.flat
        norm = squared_norm(flat.gradients).sqrt() / denominator
        good = torch.isfinite(norm) & (denominator > 0)
        self.count += good
        self.skipped += ~good
        # In fp64: 1 - 0.999 in fp32 is off by 5e-5 of itself.
        beta1, beta2 = self._betas
        count = self.count.clamp(min=1).double()
        scale = self._clip / norm.clamp(min=self._clip) / denominator
        pace = rate / (1 - beta1**count)
        scalars = torch.stack([good.double(), scale, pace, 1 - beta2**count, 1 - rate.double() * self._decay])
        adamw(
            self.masters, self.first, self.second, flat.gradients, flat.weights, scalars.float(), flat.matrices,
            self._betas, self._eps, flat.accumulates,
        )  # fmt: skip
        return norm.float()

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All that is kept from update to update but the counts, flat, fp32."""
        return [self.masters, self.first, self.second]

    @property
    def counts(self) -> list[torch.Tensor]:
        """Updates made and left out."""
        return [self.count, self.skipped]

    @torch.no_grad()
    def publish(self) -> None:
        """Write the masters into the model's weights."""
        self.flat.weights.copy_(self.masters)

    def state(self) -> dict[str, torch.Tensor]:
        """Everything an exact resumption needs, by name: views, not copies."""
        found = {"count": self.count, "skipped": self.skipped}
        for kind, buffer in (("master", self.masters), ("first", self.first), ("second", self.second)):
            found |= {f"{kind}.{name}": self.flat.view(buffer, name) for name in self.flat.names}
        return found

    @torch.no_grad()
    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state` gave, and write the masters into the model's weights."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.publish()


def share(optimizer: Optimizer, ranks: Ranks) -> None:
    """Give rank 0's weights and optimizer to all ranks."""
    ranks.share([*optimizer.buffers, *optimizer.counts])
    optimizer.publish()


@torch.no_grad()
def average(optimizer: Optimizer, ranks: Ranks) -> None:
    """Replace weights and moments by their means over ranks that have made updates of their own (local steps).

    Moments too, so that all ranks stand alike afterwards and one checkpoint holds them. Of counts the largest is taken.
    """
    for buffer in optimizer.buffers:
        ranks.add(buffer)
        buffer.div_(ranks.count)
    ranks.largest(*optimizer.counts)
    optimizer.publish()
