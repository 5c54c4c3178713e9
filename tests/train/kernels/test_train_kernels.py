"""The training step's kernels against their references: under Triton's interpreter here, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKS = sorted(path.name for path in HERE.glob("*_checks.py"))


def run_checks(names: list[str], interpret: bool) -> None:
    # A process of its own: Triton decides when it is imported whether it interprets.
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(HERE.parents[1]), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(str(HERE / name) for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("name", CHECKS)
def test_under_the_interpreter(name: str) -> None:
    run_checks([name], interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name: str) -> None:
    run_checks([name], interpret=False)
