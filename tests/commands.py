"""Running `dflash` as a user does: in a process of its own, or in this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflash_offline.pipelines.cli import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `dflash` in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["dflash", *arguments])
    try:
        main()
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def dflash(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `dflash` in a folder, in a process of its own."""
    command = [sys.executable, "-m", "dflash_offline.pipelines.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
