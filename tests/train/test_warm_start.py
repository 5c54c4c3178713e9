"""Beginning with another drafter's weights: what fits is taken, what does not is named, what differs is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_drafter import drafter_settings
from test_trainer import trainer

from dflash_offline.store import Store
from dflash_offline.train.checkpoint import CheckpointError
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.warm_start import warm_start


@pytest.fixture(scope="module")
def published(filled: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter's folder as others publish them: config and weights, nothing else."""
    folder = tmp_path_factory.mktemp("published")
    last = trainer(filled, folder / "run", steps=3).run()
    (folder / "drafter").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / "drafter" / name).write_bytes((last / name).read_bytes())
    return folder / "drafter"


def fresh(**changes: Any) -> Drafter:
    drafter = Drafter(drafter_settings(**changes), 32)
    drafter.reset(5)
    return drafter


def as_stored(drafter: Drafter, folder: Path) -> bool:
    stored = load_file(folder / "model.safetensors")
    return all(torch.equal(tensor, stored[name]) for name, tensor in drafter.state_dict().items())


def copy_of(published: Path, folder: Path, weights: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    folder.mkdir()
    said = json.loads((published / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(said))
    save_file(load_file(published / "model.safetensors") if weights is None else weights, folder / "model.safetensors")
    return folder


def test_weights_are_taken_and_what_differs_is_told(published: Path, tmp_path: Path) -> None:
    drafter = fresh()
    assert warm_start(drafter, published) == []
    assert as_stored(drafter, published)
    other = fresh(block_size=6, mask_token_id=77, layer_ids=[3, 5])
    assert warm_start(other, published) == [
        "layer_ids is [1, 5] there, [3, 5] here",
        "block_size is 4 there, 6 here",
        f"mask_token_id is {drafter.settings.mask_token_id} there, 77 here",
    ]
    assert as_stored(other, published)
    half = fresh().bfloat16()
    warm_start(half, published)
    expected = load_file(published / "model.safetensors")["norm.weight"].bfloat16()
    assert torch.equal(half.state_dict()["norm.weight"], expected)


def test_other_makers_files_are_read(published: Path, tmp_path: Path) -> None:
    weights = load_file(published / "model.safetensors")
    dressed = {f"model.{name}": tensor for name, tensor in weights.items()}
    dressed |= {"model.embed_tokens.weight": torch.zeros(2, 32), "lm_head.weight": torch.zeros(2, 32)}
    drafter = fresh()
    warm_start(drafter, copy_of(published, tmp_path / "dressed", dressed))
    assert as_stored(drafter, published)
    split = copy_of(published, tmp_path / "split")
    (split / "model.safetensors").unlink()
    names = sorted(weights)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, split / file)
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    drafter = fresh()
    warm_start(drafter, split)
    assert as_stored(drafter, published)


def test_what_does_not_fit_is_named_and_nothing_is_written(published: Path, tmp_path: Path) -> None:
    def refused(drafter: Drafter, folder: Path) -> str:
        before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
        with pytest.raises(CheckpointError) as error:
            warm_start(drafter, folder)
        assert all(torch.equal(before[name], tensor) for name, tensor in drafter.state_dict().items())
        return str(error.value)

    said = refused(fresh(layer_ids=[1, 3, 5]), published)
    assert "fc.weight is 32 x 64 there, 32 x 96 here" in said
    assert "layer_ids is [1, 5] there, [1, 3, 5] here" in said
    assert "it has no layers.2.input_layernorm.weight" in refused(fresh(layer_types=["full_attention"] * 3), published)
    assert "which this drafter has not" in refused(fresh(layer_types=["full_attention"]), published)
    assert "is not a drafter's folder" in refused(fresh(), tmp_path / "gone")
    cut = copy_of(published, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((published / "model.safetensors").read_bytes()[:500])
    assert "weights cannot be read" in refused(fresh(), cut)
