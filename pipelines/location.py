"""Where things lie: `dflash.toml`, and the paths and addresses in it.

Light: looking into a store loads nothing more.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from ..store.format import DflashError

FILE = "dflash.toml"
STORE_PATH = "states"
"""Where a store lies when the file does not say."""


class ConfigError(DflashError):
    """A configuration that cannot be used; the message names file and key."""


def read_toml(folder: Path) -> dict[str, Any]:
    """The sections of `dflash.toml` in a folder, unchecked.

    Raises:
        ConfigError: no such file, or not TOML.
    """
    path = folder / FILE
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no {FILE} in {folder}: run `dflash init` there first") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def located(folder: Path, said: str) -> str:
    """A path made absolute from the folder it was said in; an address such as `s3://bucket/prefix` as it is."""
    return said if "://" in said else str(folder / Path(said).expanduser())


def named_store(folder: Path) -> str:
    """The store that `dflash.toml` in a folder names.

    Raises:
        ConfigError: no such file, or its `store.path` is no text.
    """
    section = read_toml(folder).get("store", {})
    said = section.get("path", STORE_PATH) if isinstance(section, dict) else None
    if not isinstance(said, str):
        raise ConfigError(f"{folder / FILE}: store.path must be a path or an address")
    return located(folder, said)
