"""A sweep file, and the settings of every run that it asks for.

    name = "shapes"               # runs go to runs/shapes/VARIANT; by default the file's own name
    [base]                        # for all runs, over dflash.toml; --set goes over it
    train.epochs = 2
    [grid]                        # every combination
    loss.gamma = [4, 7]
    drafter.depth = [1, 3]        # layers: the last of layer_types, or the first of them repeated in front
    [[variant]]                   # a run by name; where there is a grid too, all of the grid
    name = "wide"
    drafter.intermediate_size = 4096

What varies is in a run's name, for people; names stay as they are when a grid gets more values, so that finished runs
are found again. Reads and validates; starts nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..config import (
    COMMENTS,
    Settings,
    check_keys,
    load_settings,
    make_settings,
    nearest,
    parse_overrides,
    toml_value,
)
from ..location import ConfigError, read_toml
from .folders import OWN, SECTIONS

DEPTH, TYPES, RUN, NAME = "drafter.depth", "drafter.layer_types", "train.run", "train.name"
LONG = 24
"""Characters of a value in a run's name; longer ones are cut, and told apart by a digest."""
LONGEST = 200
"""Characters of a run's name, which is a folder's."""

Flat = dict[str, Any]
"""Settings by `section.key`."""


class _Named(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)


class _File(BaseModel):
    """A sweep file as it is written."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = Field(None, min_length=1)
    folder: str | None = Field(None, min_length=1)
    base: dict[str, dict[str, Any]] = Field(default_factory=dict)
    grid: dict[str, dict[str, Annotated[list[Any], Field(min_length=1)]]] = Field(default_factory=dict)
    variant: list[_Named] = Field(default_factory=list)


@dataclass(frozen=True)
class Variant:
    """One run.

    Attributes:
        name: unique in the sweep, fit for a folder.
        folder: of the run.
        overrides: what `dflash train --set` is told, `section.key=value` each.
        settings: `dflash.toml` with those.
    """

    name: str
    folder: Path
    overrides: tuple[str, ...]
    settings: Settings


@dataclass(frozen=True)
class Sweep:
    """Attributes:
    name: of the sweep.
    folder: where its runs and its report lie.
    variants: in the file's order.
    """

    name: str
    folder: Path
    variants: list[Variant]


def read_sweep(folder: Path, path: Path, overrides: Sequence[str]) -> Sweep:
    """Read a sweep file and validate the settings of all its runs.

    Args:
        folder: of `dflash.toml`.
        path: the sweep file.
        overrides: what `--set` says: for all runs, over the file's base.

    Raises:
        ConfigError: the file cannot be used; the message names it, the variant and the key.
    """
    load_settings(folder, [])  # whose own mistakes are not a variant's
    values = read_toml(folder)
    file = _read(path)
    said = _said(overrides)
    base = _flat(file.base, f"{path}, [base]")
    grid = _flat(file.grid, f"{path}, [grid]")
    named = {entry.name: _flat(entry.model_extra or {}, f"{path}, variant {entry.name}") for entry in file.variant}
    _check(path, file, said, base, grid, named)

    name = file.name or _safe(path.stem).lstrip(".-") or "sweep"
    root = file.folder or f"runs/{name}"
    types = values["drafter"]["layer_types"]
    variants = []
    for own, point in itertools.product(named or [""], _points(grid)):
        called = ",".join(filter(None, [own, _name(point)]))
        origin = f"{path}, variant {called}"
        if len(called) > LONGEST:
            raise ConfigError(f"{path}: the name {called} is too long for a folder: name fewer settings in [grid]")
        identity = {RUN: f"{root}/{called}", NAME: f"{name}/{called}"}
        changes = _merged(origin, types, base, said, named.get(own, {}), point) | identity
        settings = make_settings(_with(values, changes), [], origin)
        told = tuple(f"{key}={toml_value(value)}" for key, value in changes.items())
        variants.append(Variant(called, folder / Path(root).expanduser() / called, told, settings))
    _check_apart(path, variants)
    return Sweep(name, folder / Path(root).expanduser(), variants)


def _read(path: Path) -> _File:
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no sweep file {path}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if strangers := [key for key in content if key not in _File.model_fields]:
        key = strangers[0]
        if key in COMMENTS:
            raise ConfigError(f"{path}: write {key}'s settings below [base], [grid] or [[variant]]")
        raise ConfigError(f"{path}: unknown key {key}{nearest(key, list(_File.model_fields))}")
    try:
        return _File.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part + 1) if isinstance(part, int) else part for part in first["loc"])
        found = "" if first["type"] == "missing" else f", not {first['input']!r}"
        if where == "variant":
            raise ConfigError(f"{path}: write [[variant]], with two brackets, above each run") from None
        raise ConfigError(f"{path}: {where}: {first['msg']}{found}") from None


def _said(overrides: Sequence[str]) -> Flat:
    """What `--set` says."""
    return {f"{section}.{key}": value for section, key, value in parse_overrides(overrides)}


def _flat(tables: Mapping[str, Any], origin: str) -> Flat:
    """Tables of keys by `section.key`. Raises ConfigError where one is unknown."""
    check_keys(dict(tables), origin, also=(DEPTH,))
    flat = {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}
    if DEPTH in flat and TYPES in flat:
        raise ConfigError(f"{origin}: {DEPTH} stands for {TYPES}: say one of them")
    return flat


def _check(path: Path, file: _File, said: Flat, base: Flat, grid: Flat, named: Mapping[str, Flat]) -> None:
    """Refuse what a sweep cannot mean. Raises ConfigError."""
    if not grid and not named:
        raise ConfigError(f"{path}: there is nothing to compare: give a [grid], or a [[variant]] for each run")
    for name in filter(None, [file.name, *named]):
        if not re.fullmatch(r"[\w+=,-][\w.+=,-]*", name, re.ASCII):
            raise ConfigError(f"{path}: the name {name!r} is a folder's: write it with letters, digits and . _ + = , -")
    if twice := [name for name, count in Counter(entry.name for entry in file.variant).items() if count > 1]:
        raise ConfigError(f"{path}: two variants are named {twice[0]}")
    for key, instead in ((RUN, "folder"), (NAME, "name")):
        if key in {**base, **said}:
            raise ConfigError(f"{key} is not for a sweep, whose runs each have their own: set `{instead}` in {path}")
    for key, values in grid.items():
        if twice := [value for number, value in enumerate(values) if value in values[:number]]:
            raise ConfigError(f"{path}: [grid] lists {toml_value(twice[0])} twice for {key}")
    varied = {key: "[grid]" for key in grid}
    for name, table in named.items():
        for key in table:
            if key in grid:
                raise ConfigError(f"{path}: both [grid] and variant {name} say {key}: leave it out of one of them")
            varied[key] = f"variant {name}"
    for key, where in varied.items():
        if key in said:
            raise ConfigError(f"--set {key}: it varies in this sweep, by {where} of {path}")
        if key in (RUN, NAME):
            raise ConfigError(f"{path}, {where}: {key} is not for a sweep, whose runs each have their own")
        if key.partition(".")[0] not in SECTIONS:
            raise ConfigError(
                f"{path}, {where}: {key} cannot vary, for all runs of a sweep train from one store; what can is in "
                "[drafter], [loss] and [train]"
            )


def _check_apart(path: Path, variants: Sequence[Variant]) -> None:
    """No two are the same run. Raises ConfigError."""
    names: dict[str, Variant] = {}
    known: dict[str, Variant] = {}
    for variant in variants:
        if variant.name in names:
            raise ConfigError(f"{path}: two runs would be named {variant.name}: name them by [[variant]]")
        names[variant.name] = variant
        same = known.setdefault(str(asked(variant.settings)), variant)
        if same is not variant:
            raise ConfigError(f"{path}: variants {same.name} and {variant.name} are the same settings")


def asked(settings: Settings) -> dict[str, dict[str, Any]]:
    """The settings that make a run what it is, as its `run.json` has them."""
    found = {section: getattr(settings, section).model_dump(mode="json") for section in SECTIONS}
    for key in OWN:
        del found["train"][key]
    return found


def _points(grid: Flat) -> Iterator[Flat]:
    """Every combination of a grid; of an empty one, the one without settings."""
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _merged(origin: str, types: list[str], *tables: Flat) -> Flat:
    """Tables over each other, `drafter.depth` worked out on the layers that it finds."""
    found: Flat = {}
    for table in tables:
        found |= {key: value for key, value in table.items() if key != DEPTH}
        if DEPTH in table:
            found[TYPES] = _layers(found.get(TYPES, types), table[DEPTH], origin)
    return found


def _layers(types: list[str], depth: Any, origin: str) -> list[str]:
    """The last `depth` layers; where there are fewer, the first kind is repeated in front. Raises ConfigError."""
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise ConfigError(f"{origin}: {DEPTH} is a number of layers from 1 on, not {depth!r}")
    if not isinstance(types, list) or not types:
        return types  # refused with all else that does not fit
    return types[:1] * (depth - len(types)) + types[-depth:]


def _with(values: dict[str, Any], changes: Flat) -> dict[str, Any]:
    """Sections with settings replaced."""
    merged = {section: dict(table) for section, table in values.items()}
    for name, value in changes.items():
        section, _, key = name.partition(".")
        merged.setdefault(section, {})[key] = value
    return merged


def _name(point: Flat) -> str:
    """What a point of the grid is called: "gamma=4,seed=0"; a key in full where two end alike."""
    ends = Counter(key.rpartition(".")[2] for key in point)
    # One value or many: the name is the same when a second one comes later.
    return ",".join(
        f"{key if ends[key.rpartition('.')[2]] > 1 else key.rpartition('.')[2]}={_short(value)}"
        for key, value in point.items()
    )


def _short(value: Any) -> str:
    """A value in a folder's name."""
    text = _safe(_text(value)) or "none"
    if len(text) <= LONG:
        return text
    return f"{text[: LONG - 5]}~{hashlib.sha256(text.encode()).hexdigest()[:4]}"


def _text(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case list():
            runs = [(item, len(list(same))) for item, same in itertools.groupby(map(_text, value))]
            return "+".join(f"{count}x{item}" if count > 1 else item for item, count in runs)
        case dict():
            return "+".join(f"{key}-{_text(item)}" for key, item in value.items())
        case _:
            return str(value).removesuffix("_attention")  # of a layer's kind


def _safe(text: str) -> str:
    return re.sub(r"[^\w.+~-]+", "-", text, flags=re.ASCII)
