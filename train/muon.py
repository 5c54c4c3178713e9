"""Muon for the matrices, AdamW for the rest, on fp32 masters; the interface of `optimizer.MasterAdamW`.

Muon (Jordan et al. 2024) is torch's own; its update is an orthogonalised momentum, so its size does not depend on the
gradient's, and matrices need no clipping. It waits for the host once an update, to leave a bad gradient out.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .optimizer import MasterAdamW


class MasterMuon:
    """Updates matrices by Muon and everything else by AdamW.

    Args:
        parameters: named parameters of the model; their `.grad` is read and they are overwritten.
        ratio: Muon's learning rate over AdamW's; both follow one schedule.
        clip, weight_decay: as in `MasterAdamW`; the clip is for what AdamW updates.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], *, ratio: float, clip: float, weight_decay: float
    ) -> None:
        named = list(parameters)
        self._matrices = [(name, parameter) for name, parameter in named if parameter.ndim == 2]
        self._rest = MasterAdamW(
            [(name, parameter) for name, parameter in named if parameter.ndim != 2],
            clip=clip,
            weight_decay=weight_decay,
        )
        self._masters = [nn.Parameter(parameter.detach().float().clone()) for _, parameter in self._matrices]
        # "match_rms_adamw" scales updates to the size of AdamW's, so that rates mean about the same for any shape.
        self._muon = torch.optim.Muon(self._masters, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        for master in self._masters:
            self._muon.state[master]["momentum_buffer"] = torch.zeros_like(master)
        self._ratio = ratio

    @property
    def skipped(self) -> torch.Tensor:
        """Updates left out so far."""
        return self._rest.skipped

    @torch.no_grad()
    def step(self, rate: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
        """One update, as `MasterAdamW.step`; the norm returned is that of all gradients."""
        for (_, parameter), master in zip(self._matrices, self._masters, strict=True):
            gradient = parameter.grad
            master.grad = torch.zeros_like(master) if gradient is None else gradient.float() / denominator
            parameter.grad = None
        norms = [master.grad.norm() for master in self._masters if master.grad is not None]
        norm = torch.stack(norms).norm()
        good = bool(torch.isfinite(norm))
        # A denominator of zero makes AdamW leave its part out too; so must a gradient that is bad in a matrix only.
        rest = self._rest.step(rate, denominator if good else torch.zeros_like(denominator))
        if good and bool(torch.isfinite(rest)):
            self._muon.param_groups[0]["lr"] = float(rate) * self._ratio
            self._muon.step()
            for (_, parameter), master in zip(self._matrices, self._masters, strict=True):
                parameter.copy_(master)
        return torch.stack([norm, rest]).norm()

    def state(self) -> dict[str, torch.Tensor]:
        """Everything an exact resumption needs, by name."""
        found = self._rest.state()
        for (name, _), master in zip(self._matrices, self._masters, strict=True):
            found[f"master.{name}"] = master.detach()
            found[f"momentum.{name}"] = self._muon.state[master]["momentum_buffer"]
        return found

    @torch.no_grad()
    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state` gave, and write the masters into the model's weights."""
        self._rest.load(state)
        for (name, parameter), master in zip(self._matrices, self._masters, strict=True):
            master.copy_(state[f"master.{name}"])
            self._muon.state[master]["momentum_buffer"].copy_(state[f"momentum.{name}"])
            parameter.copy_(master)
