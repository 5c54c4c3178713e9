"""Beginning with the weights of another drafter, whoever trained it, in the published layout.

Weights only: no optimizer, no schedule. Shapes are compared before anything is written, and what the two configs say
differently is told, for it may be meant. Knows files and one drafter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .checkpoint import CONFIG, WEIGHTS, CheckpointError, settings_from_config
from .drafter import Drafter

INDEX = f"{WEIGHTS}.index.json"
TARGETS = ("embed_tokens.weight", "lm_head.weight")
"""The target's own ends, which some put beside a drafter's weights."""
SHOWN = 4
"""Keys that a message names."""


def warm_start(drafter: Drafter, folder: Path) -> list[str]:
    """Give a drafter the weights in a folder.

    Returns:
        What the configs say differently, in words.

    Raises:
        CheckpointError: the folder is no whole drafter, or its weights do not fit: nothing was written then.
    """
    config, weights = _config(folder), _weights(folder)
    theirs, ours = settings_from_config(config).model_dump(), drafter.settings.model_dump()
    differs = [f"{key} is {theirs[key]} there, {ours[key]} here" for key in ours if theirs[key] != ours[key]]
    state = drafter.state_dict()
    missing, unknown = state.keys() - weights.keys(), weights.keys() - state.keys()
    wrong = [
        f"{name} is {_shape(weights[name])} there, {_shape(state[name])} here"
        for name in sorted(state.keys() & weights.keys())
        if weights[name].shape != state[name].shape
    ]
    problems = [
        *([f"it has no {_some(missing)}"] if missing else []),
        *([f"it has {_some(unknown)}, which this drafter has not"] if unknown else []),
        *([_some(wrong)] if wrong else []),
    ]
    if problems:
        said = f" ({'; '.join(differs)})" if differs else ""
        raise CheckpointError(
            f"the weights in {folder} do not fit this drafter: {'; '.join(problems)}. "
            f"Give [drafter] the shape that they have{said}, or take train.init_from out"
        )
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(weights[name])
    return differs


def _config(folder: Path) -> dict[str, object]:
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is not a drafter's folder: {CONFIG} cannot be read ({error})") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder} is not a drafter's folder: {CONFIG} holds no settings")
    return config


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """By the names that a drafter of ours has; in one file, or in several with an index."""
    try:
        names = [WEIGHTS]
        if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        found: dict[str, torch.Tensor] = {}
        for name in names:
            found |= load_file(folder / name)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{folder} holds no whole drafter: its weights cannot be read ({error})") from None
    found = {name.removeprefix("model."): tensor for name, tensor in found.items()}
    return {name: tensor for name, tensor in found.items() if name not in TARGETS}


def _shape(tensor: torch.Tensor) -> str:
    return " x ".join(map(str, tensor.shape))


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = len(listed) - SHOWN
    return ", ".join(listed[:SHOWN]) + (f" and {more} more" if more > 0 else "")
