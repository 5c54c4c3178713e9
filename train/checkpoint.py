"""Checkpoints: a drafter in the published layout, and beside it what an exact resumption needs.

    step-00000120/
        config.json           flat Qwen3 keys, and what readers of DFlash drafters look for
        model.safetensors     the drafter's own weights; embedding and LM head are the target's
        training/state.json, training/optimizer.safetensors

A checkpoint appears under its name by one rename, whole. Safetensors and JSON only. Knows nothing of data or steps.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ..store import DflashError, Identity
from ..store.files import rename_whole
from ..store.place import FULL
from .drafter import Drafter, DrafterSettings

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
STATE = "training/state.json"
OPTIMIZER = "training/optimizer.safetensors"
NAME = re.compile(r"step-\d{8,}")


class CheckpointError(DflashError):
    """A checkpoint that is missing, not whole, or of another shape; the message is for people."""


def drafter_config(settings: DrafterSettings, identity: Identity, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The `config.json` of a drafter.

    Args:
        identity: of the store it was trained from.
        target: the target's text config (vocabulary, special tokens).
        dtype: of the weights.
    """
    theta = settings.rope_theta
    sliding = "sliding_attention" in settings.layer_types
    ids = list(settings.layer_ids)
    shared = {
        "block_size": settings.block_size,
        "mask_token_id": settings.mask_token_id,
        "target_layer_ids": ids,
    }
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": identity.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": len(settings.layer_types),
        "num_attention_heads": settings.num_attention_heads,
        "num_key_value_heads": settings.num_key_value_heads,
        "head_dim": settings.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": settings.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": list(settings.layer_types),
        # Qwen3Config drops the window unless this is true; max_window_layers must not contradict layer_types.
        "use_sliding_window": sliding,
        "sliding_window": settings.sliding_window if sliding else None,
        "max_window_layers": len(settings.layer_types),
        # transformers 5 reads rope_parameters, older readers rope_theta.
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": target.get("max_position_embeddings", 32768),
        "vocab_size": identity.vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": target.get("bos_token_id"),
        "eos_token_id": target.get("eos_token_id"),
        "pad_token_id": target.get("pad_token_id"),
        "dtype": dtype,
        "num_target_layers": identity.num_layers,
        **shared,
        "dflash_config": {
            **shared,
            "last_layer": identity.last_layer,
            "rendering": identity.rendering,
            "target_weights": identity.target_weights,
        },
    }
    if not settings.is_causal:
        config["is_causal"] = False  # readers apply it to every layer, so it is absent otherwise
    return config


def settings_from_config(config: dict[str, Any]) -> DrafterSettings:
    """Read a drafter's shape back from a `config.json`, ours or another's of the published layout.

    Raises:
        CheckpointError: something that cannot be guessed is not said.
    """
    nested = config.get("dflash_config") or {}
    rope = config.get("rope_parameters") or {}
    depth = config.get("num_hidden_layers", 0)
    values: dict[str, Any] = {
        "layer_ids": config.get("target_layer_ids", nested.get("target_layer_ids")),
        "block_size": config.get("block_size", nested.get("block_size")),
        "mask_token_id": config.get("mask_token_id", nested.get("mask_token_id")),
        "layer_types": config.get("layer_types") or ["full_attention"] * depth,
        "is_causal": config.get("is_causal", True),
        "rope_theta": rope.get("rope_theta", config.get("rope_theta")),
    }
    if config.get("sliding_window"):
        values["sliding_window"] = config["sliding_window"]
    same = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps")
    values |= {key: config[key] for key in same if key in config}
    if missing := [key for key, value in values.items() if value is None]:
        raise CheckpointError(f"the drafter's config does not say {missing[0]}")
    try:
        return DrafterSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"the drafter's config: {first['loc'][0] if first['loc'] else ''} {first['msg']}"
        ) from None


@dataclass(frozen=True)
class Resume:
    """What `save_checkpoint` was given besides the weights, and where it was found."""

    folder: Path
    state: dict[str, Any]
    optimizer: dict[str, torch.Tensor]


def save_checkpoint(
    folder: Path,
    weights: dict[str, torch.Tensor],
    config: dict[str, Any],
    state: dict[str, Any],
    optimizer: dict[str, torch.Tensor],
) -> None:
    """Write a checkpoint under the name `folder`, whole or not at all.

    Args:
        weights: the drafter's, contiguous, on the CPU; `optimizer` likewise.
        config: `drafter_config`.
        state: where the run stands.

    Raises:
        CheckpointError: the disk refused it (full, read-only); earlier checkpoints are untouched.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=".saving.", dir=folder.parent))
    except OSError as error:
        raise CheckpointError(f"cannot save a checkpoint in {folder.parent}: {_reason(error)}") from None
    try:
        staged.chmod(0o755)
        (staged / "training").mkdir()
        save_file(weights, staged / WEIGHTS)
        save_file(optimizer, staged / OPTIMIZER)
        (staged / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        (staged / STATE).write_text(json.dumps(state, indent=2) + "\n")
        if not rename_whole(staged, folder):
            # Something of that name that is not whole: it gives way.
            doomed = folder.rename(folder.with_name(f".removing.{folder.name}"))
            rename_whole(staged, folder)
            shutil.rmtree(doomed)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot save the checkpoint {folder}: {_reason(error)}") from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _reason(error: OSError | SafetensorError) -> str:
    """What a person can do about it comes with it."""
    # safetensors wraps the system's error in its own, as text.
    full = error.errno in FULL if isinstance(error, OSError) else "os error 28" in str(error)
    if full:
        return "no room is left on the disk; make room and run the same command again"
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def clear_leftovers(folder: Path) -> None:
    """Put right what a kill left half saved or half removed; nothing else is touched.

    A checkpoint that was to give way to another of its name, which then did not come, is put back.
    """
    for path in folder.glob(".removing.*"):
        named = folder / path.name.removeprefix(".removing.")
        if not named.exists() and all((path / name).is_file() for name in (WEIGHTS, CONFIG, STATE, OPTIMIZER)):
            path.rename(named)
    for path in [*folder.glob(".saving.*"), *folder.glob(".removing.*")]:
        shutil.rmtree(path, ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, the oldest first; one half written or empty has another name or no weights."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if NAME.fullmatch(path.name))
    return sorted(
        (path for path in found if (path / WEIGHTS).is_file() and (path / CONFIG).is_file()), key=checkpoint_step
    )


def checkpoint_step(folder: Path) -> int:
    """Updates made before a checkpoint, by its name."""
    return int(folder.name.rpartition("-")[2])


def remove_checkpoint(folder: Path) -> bool:
    """Remove a checkpoint, unless something that is not of it lies in it, or it is a link: then nothing happens."""
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    if folder.is_symlink() or files - {WEIGHTS, CONFIG, STATE, OPTIMIZER, "training"}:
        return False
    # Renamed first: a kill half way through leaves nothing that looks like a checkpoint.
    shutil.rmtree(folder.rename(folder.with_name(f".removing.{folder.name}")))
    return True


def load_drafter(folder: Path, dtype: torch.dtype, device: torch.device) -> tuple[Drafter, dict[str, Any]]:
    """The drafter of a checkpoint and its config.

    Raises:
        CheckpointError: files are missing or do not fit together.
    """
    try:
        config = json.loads((folder / CONFIG).read_text())
        weights = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is not a whole drafter checkpoint: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("hidden_size"), int):
        raise CheckpointError(f"{folder}: the drafter's config does not say hidden_size")
    drafter = Drafter.empty(settings_from_config(config), config["hidden_size"], "cpu", torch.float32)
    try:
        drafter.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder}: weights and config do not fit: {str(error).splitlines()[-1].strip()}"
        ) from None
    return drafter.to(device, dtype), config


def load_resume(folder: Path) -> Resume:
    """What a run needs to go on from a checkpoint.

    Raises:
        CheckpointError: the checkpoint holds no training state, or a file of it is not whole.
    """
    try:
        with safe_open(folder / WEIGHTS, "pt"):
            pass  # its header tells how long it must be
        return Resume(folder, json.loads((folder / STATE).read_text()), load_file(folder / OPTIMIZER))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be resumed from: {error}") from None
