"""Recipes: named settings that `dflash init --recipe` starts from. What a target implies stays in `init`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .location import ConfigError

PUBLISHED = "published"


@dataclass(frozen=True)
class Recipe:
    """Settings that belong together. They go before what `init` infers; --set goes before them.

    Attributes:
        why: one line, which `dflash.toml` opens with.
        settings: by section and key.
        layers: attention of every layer of the drafter; by default what `init` infers.
    """

    why: str
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    layers: str | None = None


RECIPES = {
    PUBLISHED: Recipe("hard cross entropy and short blocks, as DFlash was published; for chains"),
    "draft-tree": Recipe(
        "long blocks whose whole distributions are trained, for trees that branch where the drafter is unsure",
        settings={
            "extract": {"final": True},
            "drafter": {"block_size": 32},
            # While overlaps are near 0 so is the gradient of their products, and kl, several nats a slot, does the
            # teaching. As it falls, expected_length, counted in tokens, comes to lead: with equal weights the one
            # hands over to the other by itself.
            "loss": {"cross_entropy": 0.0, "kl": 1.0, "expected_length": 1.0, "gamma": 10.0},
            "train": {"anchors": 1024},
        },
        layers="sliding_attention",
    ),
}


def recipe_of(name: str) -> Recipe:
    """The recipe of a name. Raises ConfigError, which names those that are known."""
    if name not in RECIPES:
        raise ConfigError(f"there is no recipe {name}; known are {', '.join(RECIPES)}")
    return RECIPES[name]
