"""fp8 states: encoding against the format's definition, the kernel against torch, and training from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import some_codes
from test_drafter import drafter_settings
from test_trainer import loss_settings

from dflash_offline.store import TRAIN, Batch, BatchStream, Store
from dflash_offline.store.copy import copy_store
from dflash_offline.store.fp8 import decode_bits, encode
from dflash_offline.store.progress import SILENT
from dflash_offline.store.prune import prune, pruned_identity
from dflash_offline.store.states import States
from dflash_offline.train.fp8 import decode_reference, decode_states
from dflash_offline.train.inputs import Inputs
from dflash_offline.train.ranks import alone
from dflash_offline.train.settings import TrainSettings
from dflash_offline.train.trainer import Trainer


def e4m3_values() -> list[float]:
    """Every e4m3 number that is not negative, by the definition: bias 7, no infinities, 448 the largest."""
    found = [m / 8 * 2.0**-6 for m in range(8)]
    found += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return found[:-1]  # the last code is not a number


@given(
    rows=st.integers(1, 5),
    width=st.sampled_from([1, 8, 33]),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50, deadline=None)
def test_encoding_takes_the_nearest_code(rows: int, width: int, exponent: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_t(2, (rows, width)).astype(np.float32) * np.float32(2.0**exponent)
    states = torch.from_numpy(values).bfloat16()
    codes, scales = encode(states)
    exact = states.double().numpy()
    grid = np.array(e4m3_values())
    for row in range(rows):
        scale = float(scales[row])
        assert scale == pytest.approx(np.abs(exact[row]).max() / 448, rel=1e-6)
        for column in range(width):
            target = abs(exact[row, column]) / scale
            best = np.abs(grid - target).min()
            got = decode_reference(codes[row : row + 1, column : column + 1], torch.ones(1)).double().item()
            assert abs(abs(got) - target) <= best + 1e-6 * target
            assert got == 0 or np.sign(got) == np.sign(exact[row, column])


def test_a_row_of_zeros_stays_zero() -> None:
    codes, scales = encode(torch.zeros(2, 8, dtype=torch.bfloat16))
    assert not decode_reference(codes, scales).any()


def test_decoding_in_torch_and_in_the_store_are_the_same_bits() -> None:
    codes, scales = some_codes(3, 50, 64)
    ours = decode_states(codes, scales).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(ours, decode_bits(States(codes.numpy(), scales.numpy())))


KERNEL = """
import sys, torch
sys.path.insert(0, {tests!r})
from stores import some_codes
from dflash_offline.train.fp8 import decode_kernel, decode_reference
for shape in [(1, 1, 1), (2, 3, 33), (3, 5, 256), (1, 2, 9000)]:
    codes, scales = some_codes(*shape)
    assert torch.equal(decode_kernel(codes, scales), decode_reference(codes, scales)), shape
print("same")
"""


def test_the_kernel_is_the_reference_bit_for_bit() -> None:
    # A process of its own: Triton decides when it is imported whether it interprets.
    code = KERNEL.format(tests=str(Path(__file__).parent.parent))
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "same\n", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 33), (5, 700, 5120), (1, 2, 9000)])
def test_the_kernel_on_a_gpu_is_the_reference_bit_for_bit(shape: tuple[int, int, int]) -> None:
    codes, scales = some_codes(*shape)
    assert torch.equal(decode_states(codes.cuda(), scales.cuda()).cpu(), decode_reference(codes, scales))


def features(batch: Batch) -> torch.Tensor:
    inputs = Inputs(batch, torch.device("cpu"), torch.float32)
    inputs.load(batch, 0)
    return inputs.features[: batch.used].unflatten(1, (len(batch.hidden.values), -1))


def test_batches_from_fp8_come_near_those_from_bf16(filled: Store, tmp_path: Path) -> None:
    small = copy_store(filled.place, tmp_path / "s")
    small = prune(small.place, pruned_identity(small.identity, fp8=True))
    documents = filled.documents(TRAIN)
    with (
        BatchStream(filled, documents, [[0, 1, 2]], 600, (0, 2)) as exact,
        BatchStream(small, documents, [[0, 1, 2]], 600, (0, 2)) as coarse,
    ):
        found, expected = features(next(coarse)), features(next(exact))
    # Half a unit in the last of three mantissa bits, and, far below a row's largest value, of the smallest step.
    step = expected.abs().amax(-1, keepdim=True) / 448 * 2**-9
    assert ((found - expected).abs() <= expected.abs() * (2**-4 + 2**-8) + step).all()
    assert (found - expected).norm() / expected.norm() < 0.04


def test_training_from_fp8_follows_training_from_bf16(filled: Store, tmp_path: Path) -> None:
    small = copy_store(filled.place, tmp_path / "s")
    small = prune(small.place, pruned_identity(small.identity, fp8=True))
    curves = []
    for store in (filled, small):
        settings = TrainSettings.model_validate(
            {"epochs": 2, "tokens": 256, "anchors": 24, "log_every": 1, "lr": 3e-3, "validate_documents": 4}
        )
        folder = tmp_path / store.identity.encoding
        Trainer(store, drafter_settings(), loss_settings(), settings, folder, alone(torch.device("cpu")), SILENT).run()
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        curves.append(np.array([row["loss"] for row in rows if "loss" in row]))
    assert len(curves[0]) == len(curves[1]) > 4
    assert np.abs(curves[1] / curves[0] - 1).max() < 0.02
    assert (curves[0] != curves[1]).any()
