"""What an extraction will take, against what it took; rates that are remembered; a corpus far larger than any disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DEVICE, fill
from stores import IDENTITY
from tiny import write_data

from dflash_offline.extract.corpus import Corpus
from dflash_offline.extract.estimate import check_room, estimate
from dflash_offline.extract.rates import last_rate, remember_rate
from dflash_offline.extract.run import Survey, prepare, survey
from dflash_offline.extract.settings import DataSettings, ExtractSettings, TargetSettings
from dflash_offline.extract.target import TargetInfo
from dflash_offline.extract.unit import run_unit
from dflash_offline.store import StoreFullError, place_of
from dflash_offline.store.progress import SILENT


def look(target: Path, data: Path, store: Path, **extract: Any) -> Survey:
    """A survey with units of 2,000 tokens."""
    sizes = {"layer_ids": [1, 3, 5], "unit_tokens": 2000, "batch_tokens": 400}
    settings = ExtractSettings.model_validate({**sizes, **extract})
    files = DataSettings.model_validate({"files": [str(data)]})
    where = TargetSettings.model_validate({"path": str(target)})
    return survey(where, files, settings, [data], store, DEVICE, SILENT)


@pytest.mark.parametrize(("encoding", "final"), [("bf16", True), ("fp8", False)])
def test_what_was_estimated_is_what_it_took(encoding: str, final: bool, hybrid: Path, tmp_path: Path) -> None:
    data, where = write_data(tmp_path / "data.jsonl", 80, heldout=30), tmp_path / "states"
    seen = look(hybrid, data, where, encoding=encoding, final=final)
    before = estimate(seen)
    assert not where.exists()
    assert before.tokens_left <= before.padded_tokens_left <= before.passes_left * 400
    assert before.fits
    assert before.units == before.units_left > 2
    lengths = sorted(np.diff(seen.corpus.offsets).tolist())
    assert before.lengths["longest"] == lengths[-1]
    assert lengths[39] <= before.lengths["median"] <= lengths[40]

    prepared = prepare(seen)
    passes: list[int] = []
    first = prepared.plan.units[0]
    run_unit(prepared.job, first.id, passes.append)
    half = estimate(look(hybrid, data, where, encoding=encoding, final=final))
    assert before.passes_left - half.passes_left == len(passes)
    assert before.tokens_left - half.tokens_left == sum(passes)
    assert before.documents_left - half.documents_left == len(first.documents)
    assert half.units_left == before.units - 1

    store = fill(prepared)
    after = estimate(look(hybrid, data, where, encoding=encoding, final=final))
    assert (after.tokens_left, after.units_left, after.bytes_left, after.padded_tokens_left) == (0, 0, 0, 0)
    assert after.bytes_stored == store.bytes_stored()
    # Bytes against the files that were written. Names and sums of a part are a few kilobytes that are not counted.
    chosen = next(kind for kind in before.kinds if kind.chosen)
    assert (chosen.encoding, chosen.final) == (encoding, final)
    parts = sum(path.stat().st_size for path in (where / "parts").rglob("*/c/**/*") if path.is_file())
    assert parts == pytest.approx(chosen.bytes, rel=0.02)
    everything = sum(path.stat().st_size for path in where.rglob("*") if path.is_file())
    assert 0.5 * everything < before.bytes_left < everything
    assert after.splits["train"]["documents"] == 50
    for split, counts in after.splits.items():
        records = [part for part in store.parts if part.split == split]
        assert counts["tokens"] == sum(part.tokens for part in records)
        assert counts["supervised_tokens"] == sum(part.supervised for part in records)


def test_data_that_grew_counts_what_is_new_alone(hybrid: Path, tmp_path: Path, make_store: Callable[..., Any]) -> None:
    path = tmp_path / "data.jsonl"
    fill(make_store(hybrid, [write_data(path, 10)], tmp_path / "s"))
    seen = look(hybrid, write_data(path, 16), tmp_path / "s")
    found = estimate(seen)
    assert found.documents_left == 6
    assert found.tokens_left == int(np.diff(seen.corpus.offsets)[10:].sum())
    assert sum(counts["documents"] for counts in found.splits.values()) == 16


@pytest.fixture
def huge(tmp_path: Path) -> Survey:
    """30,000 documents of 8,000 to 16,000 tokens for a target of Qwen3.6-27B's shape. The tokens take no memory."""
    offsets = np.concatenate([[0], np.cumsum(np.random.default_rng(0).integers(8_000, 16_000, 30_000))])
    corpus = Corpus(
        tokens=np.broadcast_to(np.int32(1), offsets[-1]),
        loss_mask=np.broadcast_to(np.True_, offsets[-1]),
        offsets=offsets,
        ids=np.arange(30_000, dtype=np.uint64),
        heldout=np.arange(30_000) < 300,
        tags=["text"] * 30_000,
        places=["data.jsonl"] * 30_000,
    )
    text = {"hidden_size": 5120, "num_hidden_layers": 64, "vocab_size": 248_320}
    return Survey(
        info=TargetInfo(tmp_path, text),
        identity=IDENTITY.model_copy(update={"layer_ids": (1, 16, 31, 46, 61), "hidden_size": 5120}),
        place=place_of(tmp_path / "disk" / "states"),
        digests={},
        corpus=corpus,
        key="key",
        plan=None,
        settings=ExtractSettings.model_validate({"layer_ids": [1, 16, 31, 46, 61]}),
        device="0",
        gpus=1,
    )


def test_tens_of_terabytes_are_said_before_the_first_pass(huge: Survey, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(count: float) -> None:
        usage = shutil.disk_usage("/")._replace(total=10**14, free=int(count))
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    free(3e12)
    found = estimate(huge)
    tokens = int(huge.corpus.offsets[-1])
    assert found.tokens_left == tokens > 3e8
    states, ends = tokens * 6 * 5120 * 2, 2 * 248_320 * 5120 * 2
    assert states + ends < found.bytes_left < 1.01 * (states + ends)
    assert found.bytes_left > 2e13
    assert found.fits is False
    said = check_room(found)
    assert said is not None
    assert "does not fit: 22.2 TB needed, 3.0 TB free" in said
    for remedy in ("extract.encoding=fp8 (11.1 TB in all)", "fewer extract.layer_ids", "data.limit", "store.path"):
        assert remedy in said
    assert found.hours(rate=10_000, gpus=5) == pytest.approx(tokens / 50_000 / 3600)

    free(100e12)
    assert check_room(estimate(huge)) is None
    free(5e9)  # less than the target's ends and one unit
    with pytest.raises(StoreFullError, match="no room is left for the store"):
        check_room(estimate(huge))


def test_rates_are_remembered_by_what_decides_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert last_rate(IDENTITY, "some GPU") is None
    remember_rate(IDENTITY, "some GPU", 9100.0)
    remember_rate(IDENTITY, "another GPU", 100.0)
    remember_rate(IDENTITY, "some GPU", 9200.5)
    assert last_rate(IDENTITY, "some GPU") == 9200.5
    assert last_rate(IDENTITY, "another GPU") == 100
    for change in ({"encoding": "fp8"}, {"dtype": "bfloat16"}, {"target_config": "e" * 64}):
        assert last_rate(IDENTITY.model_copy(update=change), "some GPU") is None
    (tmp_path / "dflash" / "rates.json").write_text("{broken")
    assert last_rate(IDENTITY, "some GPU") is None
    remember_rate(IDENTITY, "some GPU", 5.0)
    assert last_rate(IDENTITY, "some GPU") == 5
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    remember_rate(IDENTITY, "some GPU", 5.0)  # nowhere to keep it, and no reason to fail
    assert last_rate(IDENTITY, "some GPU") is None
