"""`dflash.toml`: one pydantic model of all sections, read with overrides, written with comments.

Each section's model stands beside the component it configures; this module only joins them. Knows no commands.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..extract.settings import DataSettings, ExtractSettings, TargetSettings
from ..train.drafter import DrafterSettings
from ..train.loss import LossSettings
from ..train.settings import TrainSettings
from .location import FILE, STORE_PATH, ConfigError, read_toml


class StoreSettings(BaseModel):
    """Section `[store]`."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(STORE_PATH, description="folder of the hidden-state store, or its address: s3://bucket/prefix")


class Settings(BaseModel):
    """All of `dflash.toml`. Relative paths in it start at the file's own folder."""

    model_config = ConfigDict(extra="forbid")

    target: TargetSettings
    data: DataSettings
    store: StoreSettings = Field(default_factory=lambda: StoreSettings.model_validate({}))
    extract: ExtractSettings
    drafter: DrafterSettings
    loss: LossSettings = Field(default_factory=lambda: LossSettings.model_validate({}))
    train: TrainSettings = Field(default_factory=lambda: TrainSettings.model_validate({}))


COMMENTS = {
    "target": "The model whose drafter is trained.",
    "data": "Text: rows with messages, conversations, or input_ids and loss_mask; JSONL, Parquet, or datasets.",
    "store": "Where stage one writes hidden states and stage two reads them.",
    "extract": "Stage one: dflash extract.",
    "drafter": "The drafter's shape.",
    "loss": "What the drafter is trained on: a weight for each term.",
    "train": "Stage two: dflash train.",
}


def load_settings(folder: Path, overrides: Sequence[str]) -> Settings:
    """Read `dflash.toml` in a folder, with `a.b=value` overrides.

    Raises:
        ConfigError: no such file, not TOML, an unknown key (the nearest valid one is named) or a value that does not
        fit.
    """
    return make_settings(read_toml(folder), overrides, str(folder / FILE))


def make_settings(values: dict[str, Any], overrides: Sequence[str], origin: str) -> Settings:
    """Validate a dictionary of sections with overrides. Raises ConfigError; `origin` names the values in messages."""
    check_keys(values, origin)
    merged = {section: dict(value) for section, value in values.items()}
    said = {}
    for section, key, value in parse_overrides(overrides):
        merged.setdefault(section, {})[key] = value
        said[f"{section}.{key}"] = value
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        of_section = first["type"] == "value_error"  # a sentence of ours, about several keys
        found = "" if first["type"] == "missing" or of_section else f", not {first['input']!r}"
        origin = f"--set {where}={said[where]}" if where in said else f"{origin}: {where}"
        raise ConfigError(f"{origin}: {first['msg'].removeprefix('Value error, ')}{found}") from None


def parse_overrides(overrides: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Split `a.b=value` into section, key and value (read as TOML, else taken as text). Raises ConfigError."""
    for text in overrides:
        name, equals, value = text.partition("=")
        section, dot, key = name.strip().partition(".")
        if not equals or not dot:
            raise ConfigError(f"--set {text}: write it as section.key=value, for example train.lr=3e-4")
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        check_keys({section: {key: parsed}}, f"--set {text}")
        yield section, key, parsed


def check_keys(values: dict[str, Any], origin: str, also: Sequence[str] = ()) -> None:
    """Refuse unknown sections and keys, naming the nearest valid one. Raises ConfigError.

    Args:
        also: keys, as `section.key`, that are allowed besides those of `dflash.toml`.
    """
    known = [f"{section}.{key}" for section in COMMENTS for key in _section(section).model_fields] + list(also)
    for section, content in values.items():
        if section not in COMMENTS:
            raise ConfigError(f"{origin}: unknown section [{section}]{nearest(section, list(COMMENTS))}")
        if not isinstance(content, dict):
            raise ConfigError(f"{origin}: [{section}] must be a section of keys")
        for key in content:
            name = f"{section}.{key}"
            if name not in known:
                raise ConfigError(f"{origin}: unknown key {name}{nearest(name, known)}")


def write_settings(path: Path, settings: Settings) -> None:
    """Write `dflash.toml` with every key and its comment; keys without a value are left as comments."""
    lines = ["# Written by `dflash init`. Every key can be overridden: --set section.key=value", ""]
    for section, comment in COMMENTS.items():
        lines += [f"# {comment}", f"[{section}]"]
        model = getattr(settings, section)
        for key, field in type(model).model_fields.items():
            value = getattr(model, key)
            entry = f"# {key} =" if value is None else f"{key} = {toml_value(value)}"
            lines += [f"# {field.description}", entry]
        lines.append("")
    path.write_text("\n".join(lines))


def _section(name: str) -> type[BaseModel]:
    annotation: Any = Settings.model_fields[name].annotation
    return annotation


def nearest(name: str, known: list[str]) -> str:
    """The end of a sentence about an unknown name: what was meant, or else some that are known."""
    # A key may be right and its section wrong, so the last part is tried alone too.
    tails = {full.rpartition(".")[2]: full for full in known}
    if name.rpartition(".")[2] in tails:
        return f"; did you mean {tails[name.rpartition('.')[2]]}?"
    close = difflib.get_close_matches(name, known, 1, 0.6)
    if not close and "." in name:
        close = [tails[tail] for tail in difflib.get_close_matches(name.rpartition(".")[2], list(tails), 1, 0.6)]
    some = ", ".join(known[:6]) + " and more" * (len(known) > 6)
    return f"; did you mean {close[0]}?" if close else f"; known are {some}"


def toml_value(value: Any) -> str:
    """A value as TOML writes it, and as `--set` reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # TOML's strings are written as JSON's
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(str(key))} = {toml_value(item)}" for key, item in value.items()) + "}"
    return repr(value)
