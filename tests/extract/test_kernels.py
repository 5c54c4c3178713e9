"""Fused kernels and fused targets: under Triton's interpreter here, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import kernel_checks
import pytest
import torch
from conftest import fill
from stores import read_all
from tiny import make_target, write_data

from dflash_offline.extract.capture import Wanted, load_capture, relative_error, states_of
from dflash_offline.extract.run import Prepared

HERE = Path(__file__).parent


def test_kernels_and_fused_targets_under_the_interpreter() -> None:
    # A process of its own: Triton decides when it is imported whether it interprets.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}
    command = [sys.executable, str(HERE / "kernel_checks.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[::2] == ["hybrid", "dense", "moe"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    kernel_checks.check_rows("cuda", dtype)
    kernel_checks.check_heads("cuda", dtype)


@pytest.mark.gpu
def test_linear_attention_on_a_gpu_is_the_recurrence() -> None:
    kernel_checks.check_delta_rule("cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "moe", "hybrid"])
def test_a_fused_target_on_a_gpu_is_transformers_own(kind: str) -> None:
    # bfloat16 has 8 bits; errors of single roundings add up over 8 layers.
    assert kernel_checks.check_target(kind, "cuda", torch.bfloat16) < 0.03


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_target_over_two_gpus_gives_the_states_of_one(kind: str, tmp_path: Path) -> None:
    target, wanted = make_target(tmp_path / "target", kind), Wanted((1, 6), None, True, 8)
    ids = torch.randint(8192, (3, 40), generator=torch.Generator().manual_seed(0))
    one, two = (load_capture(target, "bfloat16", "cuda", gpus, wanted, ids[:1]) for gpus in (1, 2))
    assert two.device == torch.device("cuda:1")
    for ours, theirs in zip(states_of(two.capture, ids), states_of(one.capture, ids), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_extraction_on_a_gpu_gives_the_states_of_the_cpu(
    dtype: str, tmp_path: Path, make_store: Callable[..., Prepared]
) -> None:
    target = make_target(tmp_path / "target", "dense")
    data = [write_data(tmp_path / "data.jsonl", 12)]
    here = fill(make_store(target, data, tmp_path / "gpu", dtype=dtype))
    exact = fill(make_store(target, data, tmp_path / "cpu", dtype="float32", device="cpu"))
    limit = {"float32": 0.005, "bfloat16": 0.03, "fp8": 0.25}[dtype]
    for part in range(len(here.parts)):
        ours, theirs = (
            torch.from_numpy(read_all(store, part).values.view("int16")).view(torch.bfloat16) for store in (here, exact)
        )
        assert 0 < relative_error(ours, theirs) < limit
