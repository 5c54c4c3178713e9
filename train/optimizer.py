"""AdamW on fp32 masters, the learning-rate schedule, and clipping: everything between gradients and new weights.

Learning rate, step count and gradient scale are tensors on the device, so nothing here waits for the host. Knows
lists of tensors, nothing of drafters.
"""

# pyright: reportPrivateImportUsage=false
# torch._foreach_* is what torch.optim itself is made of.

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn


def learning_rate(step: int, total: int, peak: float, warmup: float) -> float:
    """Linear warm-up over the share `warmup` of `total` steps, then a cosine to zero. `step` counts from 0."""
    rising = max(1, round(total * warmup))
    if step < rising:
        return peak * (step + 1) / rising
    progress = min(1.0, (step - rising) / max(1, total - rising))
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


class MasterAdamW:
    """AdamW (Loshchilov and Hutter 2019) whose weights and moments are fp32 whatever the model computes in.

    Args:
        parameters: named parameters of the model; their `.grad` is read and they are overwritten.
        clip: largest global norm of the gradient.
        weight_decay: applied to matrices, never to norms.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        clip: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        named = list(parameters)
        self.names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self.masters = [parameter.detach().float().clone() for parameter in self._parameters]
        self.first = [torch.zeros_like(master) for master in self.masters]
        self.second = [torch.zeros_like(master) for master in self.masters]
        device = self.masters[0].device
        self.count = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self._clip, self._decay, self._betas, self._eps = clip, weight_decay, betas, eps

    @torch.no_grad()
    def step(self, rate: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
        """One update from the accumulated gradients, which are cleared.

        Args:
            rate: learning rate, fp32 scalar.
            denominator: what the accumulated gradients are divided by; zero skips the update.

        Returns:
            The gradient's norm before clipping. A zero denominator or a gradient that is not finite changes nothing and
            is counted in `skipped`.
        """
        gradients = [
            parameter.grad.float() if parameter.grad is not None else torch.zeros_like(master)
            for parameter, master in zip(self._parameters, self.masters, strict=True)
        ]
        norm = torch.stack(torch._foreach_norm(gradients)).norm() / denominator
        good = torch.isfinite(norm) & (denominator > 0)
        scale = (self._clip / norm.clamp(min=self._clip)) / denominator
        torch._foreach_mul_(gradients, torch.where(good, scale, 0.0))
        for gradient in gradients:
            gradient.nan_to_num_(0.0, 0.0, 0.0)  # inf * 0 is nan; a bad update must leave no trace
        self.count += good
        self.skipped += ~good
        beta1, beta2 = self._betas
        keep1, keep2 = (torch.where(good, beta, 1.0) for beta in (beta1, beta2))
        torch._foreach_mul_(self.first, keep1)
        torch._foreach_add_(self.first, gradients, alpha=1 - beta1)
        torch._foreach_mul_(self.second, keep2)
        torch._foreach_addcmul_(self.second, gradients, gradients, value=1 - beta2)
        correction1 = 1 - beta1 ** self.count.clamp(min=1)
        correction2 = 1 - beta2 ** self.count.clamp(min=1)
        pace = torch.where(good, rate / correction1, 0.0)
        for master, first, second in zip(self.masters, self.first, self.second, strict=True):
            if self._decay and master.ndim > 1:
                master.mul_(1 - torch.where(good, rate * self._decay, 0.0))
            master.sub_(pace * first / ((second / correction2).sqrt() + self._eps))
        for parameter, master in zip(self._parameters, self.masters, strict=True):
            parameter.copy_(master)
            parameter.grad = None
        return norm

    def state(self) -> dict[str, torch.Tensor]:
        """Everything an exact resumption needs, by name."""
        found = {"count": self.count, "skipped": self.skipped}
        for kind, tensors in (("master", self.masters), ("first", self.first), ("second", self.second)):
            found |= {f"{kind}.{name}": tensor for name, tensor in zip(self.names, tensors, strict=True)}
        return found

    @torch.no_grad()
    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state` gave, and write the masters into the model's weights."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        for parameter, master in zip(self._parameters, self.masters, strict=True):
            parameter.copy_(master)
