"""`dflash.toml` and the target it names, the interpreter, the libraries. Downloads nothing."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from ...store import DflashError
from ..location import FILE, ConfigError, read_toml
from .check import Check, Findings

DISTRIBUTION = "dflash-offline"
PACKAGES = ("torch", "triton", "transformers", "zarr", "dask", "numpy", "crc32c")


def check_settings(folder: Path, found: Findings) -> Iterator[Check]:
    """`dflash.toml` and the target it names. Downloads nothing."""
    try:
        read_toml(folder)
    except ConfigError as error:
        if (folder / FILE).exists():
            yield Check(FILE, "broken", str(error), "correct it, or write it anew: dflash init --force")
        else:
            yield Check(FILE, "unused", "none in this directory: nothing is said of a target")
        return
    from ...extract.target import TargetError, inspect
    from ..config import load_settings
    from ..stages import target_path

    try:
        found.settings = load_settings(folder, [])
    except DflashError as error:
        yield Check(FILE, "broken", str(error), "correct that line")
        return
    yield Check(FILE, "ok", str(folder / FILE))
    name = found.settings.target.path
    where = _local_target(target_path(folder, found.settings))
    if where is None:
        yield Check("target", "warning", f"{name} is not on this machine: the first command that needs it downloads it")
        return
    try:
        found.target = inspect(where)
    except TargetError as error:
        yield Check("target", "broken", str(error), "correct target.path")
        return
    linear = found.linear_layers
    kinds = f", {linear} of them linear attention" if linear else ""
    yield Check("target", "ok", f"{name}: {found.target.num_layers} layers{kinds}")


def check_python() -> Iterator[Check]:
    """The interpreter."""
    yield Check("Python", "ok", f"{platform.python_version()}, {sys.executable}")


def check_packages() -> Iterator[Check]:
    """The libraries, against what this project's own metadata asks for."""
    from packaging.requirements import Requirement

    needed = {need.name: need for need in map(Requirement, requires(DISTRIBUTION) or [])}
    for name in PACKAGES:
        need = needed[name]
        if need.marker and not need.marker.evaluate():
            continue
        command = f"pip install '{need.name}{need.specifier}'"
        try:
            here = version(name)
        except PackageNotFoundError:
            yield Check(name, "missing", f"not installed (needs {need.specifier})", command)
            continue
        if not need.specifier.contains(here, prereleases=True):
            yield Check(name, "broken", f"{here} is here, {need.specifier} is needed", command)
        elif name == "torch":
            yield _torch(here)
        elif name == "dask":
            yield Check("dask, distributed", "ok", f"{here}, {version('distributed')}")
        else:
            yield Check(name, "ok", here)


def _torch(here: str) -> Check:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch", "broken", f"{here} cannot be loaded: {error}", "pip install --force-reinstall torch")
    return Check("torch", "ok", f"{here}, built for {f'CUDA {cuda}' if (cuda := torch.version.cuda) else 'CPUs only'}")


def _local_target(path: str) -> Path | None:
    """The target's folder if it is on this machine, in the hub's cache too."""
    folder = Path(path).expanduser()
    if folder.is_dir() or path.count("/") != 1 or path.startswith((".", "/", "~")):
        return folder  # where there is no such folder, whoever looks into it says so
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None
