"""Muon for the matrices, AdamW for the rest, on fp32 masters; the interface of `optimizer.MasterAdamW`.

Muon (Jordan et al. 2024): the momentum M of a matrix's gradient is replaced by the nearest orthogonal matrix, by five
steps of X <- a X + (b A + c A A) X, A = X X', from X = M / |M|. So an update's size does not depend on the gradient's,
and matrices need no clipping. It waits for the host a few times an update, to leave a bad gradient out.

torch's own Muon takes these steps in bfloat16 everywhere; on a CPU without bfloat16 arithmetic that is fifty times
slower than float32. Here they are in float32 on a CPU and in bfloat16 on a GPU; all else is the same (a test compares).
"""

from __future__ import annotations

import torch

from .flat import Flat
from .kernels.adamw import squared_norm
from .optimizer import MasterAdamW

MOMENTUM = 0.95
STEPS = 5
COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""a, b, c: singular values end up near 1 after few steps, from as far down as 1e-3 of the norm."""


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """About the nearest matrix with singular values of 1, `[m, n]` float32."""
    a, b, c = COEFFICIENTS
    x = matrix if matrix.device.type == "cpu" else matrix.bfloat16()
    x = x / x.norm().clamp_min(1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).float()


class MasterMuon:
    """Updates matrices by Muon and everything else by AdamW.

    Args:
        flat: the model's parameters; its gradients are read and zeroed, its weights overwritten.
        ratio: Muon's learning rate over AdamW's; both follow one schedule.
        clip, weight_decay: as in `MasterAdamW`; the clip is for what AdamW updates.
    """

    capturable: bool = False

    def __init__(self, flat: Flat, *, ratio: float, clip: float, weight_decay: float) -> None:
        rest = flat.rest()
        self.flat = flat
        self._rest = MasterAdamW(rest, clip=clip, weight_decay=weight_decay)
        self._matrices = [name for name in flat.names if name not in rest.names]
        self._masters = flat.weights[: flat.matrices].to(torch.float32, copy=True)
        self._momenta = torch.zeros_like(self._masters)
        self._ratio, self._weight_decay = ratio, weight_decay

    @property
    def skipped(self) -> torch.Tensor:
        """Updates left out so far."""
        return self._rest.skipped

    @torch.no_grad()
    def step(self, rate: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
        """One update, as `MasterAdamW.step`; the norm returned is that of all gradients."""
        gradients = self.flat.gradients[: self.flat.matrices]
        norm = (squared_norm(gradients).sqrt() / denominator).float()
        good = bool(torch.isfinite(norm))
        # A denominator of zero makes AdamW leave its part out too; so must a gradient that is bad in a matrix only.
        rest = self._rest.step(rate, denominator if good else torch.zeros_like(denominator))
        if good and bool(torch.isfinite(rest)):
            pace = float(rate) * self._ratio
            for name in self._matrices:
                gradient = self.flat.view(gradients, name).float() / denominator
                self._update(name, gradient, pace)
        if self.flat.accumulates:
            gradients.zero_()
        return torch.stack([norm, rest]).norm()

    def _update(self, name: str, gradient: torch.Tensor, rate: float) -> None:
        weight, master, momentum = (
            self.flat.view(buffer, name) for buffer in (self.flat.weights, self._masters, self._momenta)
        )
        momentum.lerp_(gradient, 1 - MOMENTUM)
        step = orthogonalized(gradient.lerp(momentum, MOMENTUM))  # Nesterov's: as if momentum were a step ahead
        # Scaled to the size of AdamW's updates, so that rates mean about the same for any shape.
        size = 0.2 * max(master.shape) ** 0.5
        master.mul_(1 - rate * self._weight_decay).add_(step, alpha=-rate * size)
        weight.copy_(master)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All that is kept from update to update but the counts, flat, fp32."""
        return [self._masters, self._momenta, *self._rest.buffers]

    @property
    def counts(self) -> list[torch.Tensor]:
        """Updates made and left out."""
        return self._rest.counts

    @torch.no_grad()
    def publish(self) -> None:
        """Write the masters into the model's weights."""
        self._rest.publish()
        self.flat.weights[: self.flat.matrices].copy_(self._masters)

    def state(self) -> dict[str, torch.Tensor]:
        """Everything an exact resumption needs, by name: views, not copies."""
        found = self._rest.state()
        for kind, buffer in (("master", self._masters), ("momentum", self._momenta)):
            found |= {f"{kind}.{name}": self.flat.view(buffer, name) for name in self._matrices}
        return found

    @torch.no_grad()
    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state` gave, and write the masters into the model's weights."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.publish()
