"""The rules of the design that a reader could break without noticing: who imports whom, and what is never used."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("extract", "store", "train", "pipelines")
MODULES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
ALLOWED = {"store": {"store"}, "extract": {"extract", "store"}, "train": {"train", "store"}, "pipelines": set(ROOMS)}
RULED_OUT = {"pickle", "_dynamo", "_inductor", "flex_attention"}


def imported_rooms(path: Path) -> set[str]:
    """The rooms that a module imports, by its relative and absolute imports."""
    package = ["dflash_offline", *path.relative_to(ROOT).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [".".join([*base, *([node.module] if node.module else [])])]
            names += [f"{names[0]}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "dflash_offline" and len(parts) > 1:
                found.add(parts[1])
    return found & set(ROOMS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_only_what_they_may(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    assert imported_rooms(path) <= ALLOWED[room]


def test_the_rule_can_fail(tmp_path: Path) -> None:
    # The checker itself, on an import that breaks the rule.
    assert imported_rooms(ROOT / "pipelines" / "stages.py") >= {"store", "extract", "train"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_ruled_out_is_used(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "a module opens with what it is for"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not RULED_OUT & {part for name in names for part in name.split(".")}
        if isinstance(node, ast.Attribute):
            assert node.attr not in RULED_OUT
            assert not (node.attr == "compile" and getattr(node.value, "id", "") == "torch")
        if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False
        if isinstance(node, ast.keyword) and node.arg == "weights_only":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is True
