"""`dflash init`: a `dflash.toml` with everything the target's config implies.

The drafter's shape follows published drafters and its own rules; heads and rope are never copied from the target. A
recipe (`recipes.py`) goes before what is inferred, and what was said on the command line before both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..extract.data import DataError, read_rows
from ..extract.target import TargetInfo, default_layer_ids, inspect, load_tokenizer, locate
from .config import make_settings, parse_overrides, write_settings
from .location import FILE, ConfigError
from .recipes import PUBLISHED, recipe_of


def init(
    folder: Path, target: str, data: Sequence[str], overrides: Sequence[str], force: bool, recipe: str = PUBLISHED
) -> tuple[Path, TargetInfo]:
    """Write `dflash.toml` into a folder.

    Args:
        recipe: a name in `RECIPES`.

    Raises:
        ConfigError, TargetError, DataError: the file exists, target, data or recipe cannot be used, or something must
            be said.
    """
    path, chosen = folder / FILE, recipe_of(recipe)
    if path.exists() and not force:
        raise ConfigError(f"{path} exists: remove it, or pass --force to write it anew")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: create it first")
    local = folder / Path(target).expanduser()
    info = inspect(locate(str(local) if local.is_dir() else target))
    for name in data:
        # One row shows whether this is data at all; extraction checks every line.
        if next(read_rows([folder / Path(name).expanduser()]), None) is None:
            raise DataError(f"the data file {name} is empty")
    said = {(section, key): value for section, key, value in parse_overrides(overrides)}
    layer_ids = said.get(("extract", "layer_ids")) or list(default_layer_ids(info.num_layers))
    values: dict[str, Any] = {
        "target": {"path": target},
        "data": {
            "files": list(data),
            "max_length": min(3072, info.text.get("max_position_embeddings") or 3072),
        },
        # Small targets run on CPUs, where small batches stay in the cache: 2.3 against 1.4 thousand tokens a second.
        "extract": {"layer_ids": layer_ids, "batch_tokens": 2048 if info.hidden_size < 1024 else 16384},
        "drafter": drafter_shape(info, layer_ids, said),
    }
    for section, content in chosen.settings.items():
        values[section] = {**values.get(section, {}), **content}
    if chosen.layers:
        values["drafter"]["layer_types"] = [chosen.layers] * len(values["drafter"]["layer_types"])
    write_settings(path, make_settings(values, overrides, "dflash init"))
    path.write_text(f"# Recipe {recipe}: {chosen.why}.\n{path.read_text()}")
    return path, info


def drafter_shape(info: TargetInfo, layer_ids: list[int], said: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """The `[drafter]` section for a target.

    Heads of 128 (64 below a hidden size of 1,024), at most 32, four to a key-value head; the depth is a fourth of the
    target's, at most 5; hybrid targets get sliding layers and one full layer at the end, as published for Qwen3.6-27B.

    Args:
        layer_ids: the layers extracted; the drafter reads all of them.
        said: overrides by (section, key); what they give need not be inferred.

    Raises:
        ConfigError: the MLP's width or the mask token cannot be inferred; the key to set is named.
    """
    hidden, text = info.hidden_size, info.text
    head_dim = 128 if hidden >= 1024 else 64
    heads = max(1, min(32, hidden // head_dim))
    kv_heads = max(1, heads // 4)
    depth = max(1, min(5, info.num_layers // 4))
    hybrid = "linear_attention" in (text.get("layer_types") or [])
    shape: dict[str, Any] = {
        "layer_ids": layer_ids,
        "block_size": 16 if hidden >= 1024 else 8,
        "layer_types": ["sliding_attention" if hybrid else "full_attention"] * (depth - 1) + ["full_attention"],
        "num_attention_heads": heads - heads % kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rope_theta": float((text.get("rope_parameters") or {}).get("rope_theta") or text.get("rope_theta") or 1e6),
    }
    for key in ("intermediate_size", "mask_token_id"):
        if ("drafter", key) in said:
            shape[key] = said["drafter", key]
    if "intermediate_size" not in shape:
        width = text.get("intermediate_size")
        if not width:
            raise ConfigError(
                "the target's config has no intermediate_size (a mixture of experts may have none) to take the width "
                f"of the drafter's MLP from: pass --set drafter.intermediate_size=N, for example {3 * hidden}"
            )
        shape["intermediate_size"] = width
    if "mask_token_id" not in shape:
        shape["mask_token_id"] = mask_token(info)
    return shape


def mask_token(info: TargetInfo) -> int:
    """An id the target never uses: the first past the tokenizer's own, which is what published drafters took.

    Raises:
        ConfigError: the embedding has no such row.
    """
    used = max(load_tokenizer(info.path).get_vocab().values()) + 1
    if used < info.vocab_size:
        return used
    raise ConfigError(
        f"all {info.vocab_size} token ids of the target are in use: choose one that its text never holds, not its "
        "padding or end token, and pass --set drafter.mask_token_id=N"
    )
