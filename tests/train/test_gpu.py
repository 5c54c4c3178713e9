"""The same numbers on a GPU as on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import prepare_store
from safetensors.torch import load_file
from test_drafter import drafter_settings
from test_trainer import train_settings
from tiny import write_data

from dflash_offline.extract.unit import run_unit
from dflash_offline.store import TRAIN, BatchStream, States, Store, load_head, pack
from dflash_offline.store.progress import SILENT
from dflash_offline.train.anchors import draw_anchors
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.step import TrainStep
from dflash_offline.train.trainer import Trainer

pytestmark = pytest.mark.gpu


def test_anchors_are_drawn_alike() -> None:
    mask = torch.rand(3000, generator=torch.Generator().manual_seed(0)) < 0.6
    start = torch.arange(3000) // 300 * 300
    for micro in range(20):
        here = draw_anchors(mask, start, 5, torch.tensor(micro), 256)
        there = draw_anchors(mask.cuda(), start.cuda(), 5, torch.tensor(micro).cuda(), 256)
        assert torch.equal(here, there.cpu())


def test_loss_and_gradients_agree_with_the_cpu(filled: Store) -> None:
    documents = filled.documents(TRAIN)
    groups = pack(documents.length.tolist(), 512)[:2]
    head = load_head(filled)
    found = []
    for device in ("cpu", "cuda"):
        drafter = Drafter(drafter_settings(), 32)
        drafter.reset(0)
        drafter.to(device)
        step = TrainStep(drafter, head, None, 64, 3.0, 0)
        with BatchStream(filled, documents, groups, 512, filled.layer_indices((1, 5))) as stream:
            loss = torch.stack([step.micro(batch, n).numerator.detach().cpu() for n, batch in enumerate(stream)])
        found.append([loss, *(p.grad.cpu() for p in drafter.parameters() if p.grad is not None)])
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-3 * float(here.abs().max()))


def test_states_in_bf16_are_near_those_in_fp32(hybrid: Path, tmp_path: Path) -> None:
    data = [write_data(tmp_path / "data.jsonl", 8)]
    states = []
    for dtype in ("float32", "bfloat16"):
        prepared = prepare_store(hybrid, data, tmp_path / dtype, dtype=dtype)
        for unit in prepared.plan.units:
            run_unit(prepared.job, unit.id)
        prepared.store.refresh()
        found = []
        for index, record in enumerate(prepared.store.parts):
            bits = np.zeros((3, record.tokens, 32), np.uint16)
            prepared.store.part(index).read("hidden", 0, record.tokens, (0, 1, 2), States(bits))
            found.append(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float())
        states.append(torch.cat(found, 1))
    # Eight layers of bf16 rounding; 0.053 was seen on an H200, and states of another layer or token differ by 1.
    assert (states[0] - states[1]).norm() / states[0].norm() < 0.1


def test_a_run_in_bf16_resumes_bit_identical(filled: Store, tmp_path: Path) -> None:
    gpu = torch.device("cuda")
    settings = train_settings(epochs=2)
    whole = Trainer(filled, drafter_settings(), settings, tmp_path / "whole", gpu, SILENT).run()
    run = tmp_path / "cut"
    (run / "checkpoints").mkdir(parents=True)
    middle = sorted((tmp_path / "whole/checkpoints").iterdir())[2]
    (run / "checkpoints" / middle.name).symlink_to(middle)
    last = Trainer(filled, drafter_settings(), settings, run, gpu, SILENT).run()
    mine, theirs = (load_file(folder / "training/optimizer.safetensors") for folder in (last, whole))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
