"""What a run is made of before its first update: drafter, weights, optimizer, and its step, captured, with validation.

Each function makes one of them from settings. Knows nothing of epochs, checkpoints or a run's folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ..store import Batch, Documents, Store
from ..store.progress import Listener
from .drafter import Drafter, DrafterSettings
from .evaluate.walk import Walker
from .flat import Flat
from .graphs import new_pool
from .head import LmHead
from .inputs import Ends, Inputs
from .loss import LossSettings
from .muon import MasterMuon
from .optimizer import MasterAdamW, Optimizer
from .ranks import Ranks, alone
from .settings import TrainSettings
from .step import Forward, TrainStep
from .validation import Stream, Validation
from .warm_start import warm_start

VALIDATION_SEED = 0x5EED
"""Anchors of the validation loss are the same in every run and epoch."""


def compute_dtype(said: str, device: torch.device) -> torch.dtype:
    """What a drafter computes in on a device; what fp8 products leave there."""
    if said in ("auto", "fp8"):
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, said)


def empty_drafter(shape: DrafterSettings, settings: TrainSettings, hidden_size: int, device: torch.device) -> Drafter:
    """A drafter on its device, its weights still to be drawn or loaded."""
    drafter = Drafter.empty(shape, hidden_size, device, compute_dtype(settings.dtype, device))
    drafter.fp8 = settings.dtype == "fp8"
    return drafter


def draw_weights(drafter: Drafter, seed: int, begin_from: Path | None, listener: Listener) -> None:
    """The weights that a run begins with: drawn, or those of the drafter in a folder.

    Raises:
        CheckpointError: that one does not fit.
    """
    if begin_from is None:
        return drafter.reset(seed)
    differing = warm_start(drafter, begin_from)
    listener.say(f"beginning with the weights of {begin_from}")
    for line in differing:
        listener.say(f"note: {line}")


def make_optimizer(drafter: Drafter, settings: TrainSettings) -> Optimizer:
    """The optimizer that the settings name, over the drafter's weights as they are."""
    clip, decay = settings.clip, settings.weight_decay
    flat = Flat(drafter, accumulates=settings.accumulate > 1)
    if settings.optimizer == "muon":
        return MasterMuon(flat, ratio=settings.muon_lr / settings.lr, clip=clip, weight_decay=decay)
    return MasterAdamW(flat, clip=clip, weight_decay=decay)


def make_step(
    drafter: Drafter,
    ends: Ends,
    optimizer: Optimizer,
    loss: LossSettings,
    settings: TrainSettings,
    store: Store,
    heldout: Callable[[], Documents],
    ranks: Ranks,
    stream: Stream,
) -> tuple[TrainStep, Validation]:
    """The step, captured on a GPU, and validation, which shares its memory.

    Args:
        store: what batches are of.
        heldout: the documents to validate on.
        ranks: of the run.
        stream: reads batches.
    """
    device, dtype = ends.embedding.device, ends.embedding.dtype
    layers = len(drafter.settings.layer_ids)
    # Tokens of a batch of validation: room for the longest document held out.
    budget = max(settings.tokens, int(heldout().length.max(initial=1)))

    def inputs(length: int) -> Inputs:
        return Inputs(Batch.empty(store, length, layers, loss.needs_final), device, dtype)

    fed = inputs(settings.tokens)
    aside = fed if budget == settings.tokens else inputs(budget)
    fixed = drafter, ends.embedding, LmHead(ends.lm_head, drafter.fp8), loss
    trained = Forward(*fixed, fed, settings.anchors, settings.seed)
    measured = Forward(*fixed, aside, settings.anchors, VALIDATION_SEED)
    pool = new_pool(device)
    step = TrainStep(trained, optimizer, measured, alone(device) if averages(settings, ranks) else ranks, pool)
    walker = Walker(drafter, ends, aside, pool)
    return step, Validation(step, walker, drafter.settings.block_size, heldout, budget, ranks, stream)


def averages(settings: TrainSettings, ranks: Ranks) -> bool:
    """Whether each rank makes updates of its own, and weights are averaged."""
    return ranks.joined and settings.sync == "average"
