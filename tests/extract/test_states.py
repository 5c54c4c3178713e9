"""Captured states against transformers, each document run alone; and the states that are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import fill
from safetensors.torch import load_file, save_file
from stores import read_all
from tiny import make_target, write_data
from transformers import AutoModelForCausalLM

from dflash_offline.extract import target as targets
from dflash_offline.extract.capture import StateCapture, Wanted, load_model
from dflash_offline.extract.fused import not_fusable
from dflash_offline.extract.run import Prepared
from dflash_offline.extract.settings import TargetSettings
from dflash_offline.extract.target import (
    TargetError,
    check_fast,
    check_layer_ids,
    default_layer_ids,
    inspect,
    resolve_dtype,
)
from dflash_offline.extract.unit import UnitWorker, run_unit
from dflash_offline.store import HELDOUT, TRAIN, Store, StoreError


def documents_alone(store: Store, target: Path) -> Any:
    """For each stored document: its tokens, its stored states as floats, and what transformers gives for it alone."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for split in (HELDOUT, TRAIN):
        documents = store.documents(split)
        for i in range(len(documents)):
            part, start, length = store.part(int(documents.part[i])), int(documents.start[i]), int(documents.length[i])
            tokens = torch.from_numpy(part.small("tokens")[start : start + length].astype(np.int64))
            layers = len(store.identity.layer_ids)
            hidden, final = store.empty_states(layers, length), store.empty_states(1, length)
            part.read("hidden", start, start + length, tuple(range(layers)), hidden)
            part.read("final", start, start + length, (0,), final)
            with torch.no_grad():
                alone = model(input_ids=tokens[None], output_hidden_states=True)
            yield tokens, as_float(hidden.values), as_float(final.values)[0], alone


def as_float(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()


def assert_bf16_close(stored: torch.Tensor, exact: torch.Tensor) -> None:
    """Equal to bf16 rounding: half a unit in the last of 8 bits, and what fp32 sums in another order differ by."""
    assert ((stored - exact).abs() <= exact.abs() * 2**-8 + 2e-5 * exact.abs().max()).all()


@pytest.mark.parametrize("kind", ["hybrid", "dense", "moe", "nested"])
def test_states_equal_each_document_run_alone(kind: str, tmp_path: Path, make_store: Callable[..., Prepared]) -> None:
    target = make_target(tmp_path / "target", kind, seed=3)
    prepared = make_store(target, [write_data(tmp_path / "data.jsonl", 12)], tmp_path / "states", layer_ids=[0, 3, 6])
    store = fill(prepared)
    count = 0
    for _, hidden, final, alone in documents_alone(store, target):
        for row, layer in enumerate(store.identity.layer_ids):
            assert_bf16_close(hidden[row], alone.hidden_states[layer + 1][0])
        assert_bf16_close(final, alone.hidden_states[-1][0])  # after the final norm
        count += 1
    assert count == 12


def test_final_is_what_the_lm_head_takes(filled: Store, hybrid: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(hybrid, dtype=torch.float32)
    for _, _, final, alone in documents_alone(filled, hybrid):
        logits = final @ model.lm_head.weight.T
        assert (logits - alone.logits[0]).norm() / alone.logits[0].norm() < 2**-8


@pytest.mark.parametrize("where", ["pre", "post"])
def test_the_last_layer_before_and_after_the_norm(
    where: str, hybrid: Path, tmp_path: Path, make_store: Callable[..., Prepared]
) -> None:
    data = [write_data(tmp_path / "data.jsonl", 4)]
    store = fill(make_store(hybrid, data, tmp_path / "s", layer_ids=[2, 7], last_layer=where))
    model: Any = AutoModelForCausalLM.from_pretrained(hybrid, dtype=torch.float32)
    for _, hidden, final, alone in documents_alone(store, hybrid):
        post = alone.hidden_states[-1][0]
        if where == "post":
            assert_bf16_close(hidden[1], post)
            assert torch.equal(hidden[1], final)
        else:
            with torch.no_grad():
                normed = model.model.norm(hidden[1])
            assert (normed - post).norm() / post.norm() < 2**-7
            assert not torch.allclose(hidden[1], post, rtol=0.1)


def test_the_vocabulary_projection_is_never_computed(hybrid: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(hybrid, dtype=torch.float32)
    model.lm_head.register_forward_hook(lambda *_: pytest.fail("the LM head ran"))
    hidden, final = StateCapture(model, [1, 2], None)(torch.ones(2, 5, dtype=torch.int64))
    assert [state.shape for state in hidden] == [(2, 5, 32)] * 2
    assert final.shape == (2, 5, 32)


def test_weights_that_are_not_all_there_are_refused(dense: Path, tmp_path: Path) -> None:
    """transformers would run with random numbers in their place."""
    target = tmp_path / "target"
    shutil.copytree(dense, target)
    weights = load_file(target / "model.safetensors")
    lost = "model.layers.2.mlp.up_proj.weight"
    save_file({k: v for k, v in weights.items() if k != lost}, target / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match=rf"1 of its weights are missing in its files \({lost}\)"):
        load_model(target, "float32", "cpu")
    save_file({**weights, lost: weights[lost][:, 1:].contiguous()}, target / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match=rf"1 of its weights are of another shape in its files \({lost}\)"):
        load_model(target, "float32", "cpu")


def test_what_cannot_be_fused_is_said(dense: Path) -> None:
    model = load_model(dense, "float32", "cpu")
    assert not_fusable(model) is None
    model.config.quantization_config = {"quant_method": "fp8"}
    assert "quantised" in (not_fusable(model) or "")
    del model.config.quantization_config
    model.get_decoder().layers[3] = torch.nn.Linear(2, 2)
    assert not_fusable(model) == "there are no fused kernels for Linear"


@pytest.mark.parametrize("kind", ["hybrid", "dense", "nested"])
def test_only_the_layers_that_are_needed_are_loaded_and_run(
    kind: str, tmp_path: Path, make_store: Callable[..., Prepared]
) -> None:
    target = make_target(tmp_path / "target", kind, seed=3)
    data = [write_data(tmp_path / "data.jsonl", 4)]
    whole = fill(make_store(target, data, tmp_path / "whole", layer_ids=[0, 4]))
    store = fill(make_store(target, data, tmp_path / "s", layer_ids=[0, 4], final=False))
    for part in range(len(store.parts)):
        assert np.array_equal(read_all(store, part).values, read_all(whole, part).values)
    assert len(load_model(target, "float32", "cpu", layers=5).get_decoder().layers) == 5


@pytest.mark.parametrize(
    ("layer_ids", "last", "final", "layers"),
    [([0, 4], None, True, 8), ([0, 4], None, False, 5), ([7], "pre", False, 8), ([7, 2], "post", False, 8)],
)
def test_layers_that_must_run(layer_ids: list[int], last: str | None, final: bool, layers: int) -> None:
    assert Wanted(tuple(layer_ids), last, final, 8).layers == layers


def test_a_hybrid_without_fast_kernels_is_refused_on_a_gpu(
    hybrid: Path, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    with pytest.raises(
        TargetError, match=r"6 of the target's 8 layers .*pip install flash-linear-attention.*allow-slow"
    ):
        check_fast(inspect(hybrid), False)
    check_fast(inspect(hybrid), True)
    check_fast(inspect(dense), False)


def test_fp8_is_refused_on_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="fp8 needs a GPU"):
        resolve_dtype(TargetSettings(path=str(tmp_path), dtype="fp8"), "cpu")


@pytest.mark.parametrize(
    ("value", "says"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (0.0, "all zero")]
)
def test_bad_states_are_refused_with_document_and_layer(
    value: float,
    says: str,
    hybrid: Path,
    tmp_path: Path,
    make_store: Callable[..., Prepared],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared = make_store(hybrid, [write_data(tmp_path / "data.jsonl", 8)], tmp_path / "s")
    train = next(item for item in prepared.plan.units if item.split == TRAIN)
    forward = UnitWorker._forward

    def broken(*arguments: Any) -> Any:
        states = [state.clone() for state in forward(*arguments)]
        if value == 0:
            states[2][1] = 0
        else:
            states[2][1, 4, 7] = value
        return states

    monkeypatch.setattr(UnitWorker, "_forward", broken)
    with pytest.raises(StoreError, match=rf"data\.jsonl, line \d+: the states of layer 5 are {says}"):
        run_unit(prepared.job, train.id)
    prepared.store.refresh()
    assert prepared.store.parts == []
    monkeypatch.undo()
    assert run_unit(prepared.job, train.id).tokens > 0  # redone once the cause is gone


def test_default_layers_are_those_published() -> None:
    assert default_layer_ids(36) == (1, 9, 17, 25, 33)
    assert default_layer_ids(64) == (1, 16, 31, 46, 61)
    assert default_layer_ids(8, 1) == (4,)


@pytest.mark.parametrize(
    ("ids", "last", "says"),
    [
        ([], None, "is empty"),
        ([1, 1], None, "twice"),
        ([1, 8], None, "layer id 8 is out of range: the target has layers 0 to 7"),
        ([-1], None, "out of range"),
        ([7], None, "set extract.last_layer"),
    ],
)
def test_layer_ids_the_target_cannot_give(ids: list[int], last: str | None, says: str) -> None:
    with pytest.raises(TargetError, match=says):
        check_layer_ids(ids, 8, last)


def test_targets_that_cannot_be_used(tmp_path: Path, hybrid: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    with pytest.raises(TargetError, match="not a causal language model"):
        inspect(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    with pytest.raises(TargetError, match="cannot be read"):
        inspect(tmp_path)
    with pytest.raises(TargetError, match=r"no config\.json"):
        inspect(tmp_path / "empty")
