"""Stage one as a whole: every document once, whatever the workers; resumption; data that changed."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import fill
from stores import files_of, read_all
from tiny import conversation, write_data

from dflash_offline.extract import dispatch
from dflash_offline.extract.corpus import Corpus
from dflash_offline.extract.data import DataError
from dflash_offline.extract.plan import PASS_TOKENS, batches, make_plan
from dflash_offline.extract.rates import last_rate, machine_name
from dflash_offline.extract.run import Prepared, extract
from dflash_offline.extract.unit import UnitWorker, run_unit
from dflash_offline.store import HELDOUT, TRAIN, Store, StoreError, StoreFullError, open_store
from dflash_offline.store.progress import SILENT, Listener
from dflash_offline.store.prune import prune, pruned_identity

MakeStore = Callable[..., Prepared]


def all_ids(store: Store) -> list[int]:
    return [int(i) for split in (HELDOUT, TRAIN) for i in store.documents(split).ids]


def test_dask_workers_make_the_store_that_one_process_makes(
    hybrid: Path, tmp_path: Path, make_store: MakeStore
) -> None:
    data = [write_data(tmp_path / "data.jsonl", 23)]
    alone = fill(make_store(hybrid, data, tmp_path / "alone"))
    prepared = make_store(hybrid, data, tmp_path / "dask")
    run_unit(prepared.job, prepared.plan.units[1].id)  # as if an earlier run had been cut short
    seen: list[int] = []
    listener = Listener(lambda line: None, lambda total, done: seen.append(done), lambda n, _: seen.append(n))
    store = extract(prepared, ["cpu"], listener)
    assert sorted(all_ids(store)) == sorted(all_ids(alone))
    assert len(set(all_ids(store))) == 23
    assert sum(seen) == store.tokens
    for path, content in files_of(tmp_path / "alone" / "parts").items():
        assert (tmp_path / "dask" / "parts" / path).read_bytes() == content, path


def test_states_extracted_in_fp8_are_those_converted_later(hybrid: Path, tmp_path: Path, make_store: MakeStore) -> None:
    data = [write_data(tmp_path / "data.jsonl", 10)]
    later = fill(make_store(hybrid, data, tmp_path / "later"))
    at_once = fill(make_store(hybrid, data, tmp_path / "at_once", encoding="fp8"))
    later = prune(later.place, pruned_identity(later.identity, fp8=True))
    assert later.identity == at_once.identity
    for ours, theirs in zip(later.parts, at_once.parts, strict=True):
        assert ours.id == theirs.id
        folders = [tmp_path / "later" / later.parts_folder, tmp_path / "at_once" / at_once.parts_folder]
        for name in ("hidden", "final", "checksums"):
            assert files_of(folders[0] / ours.id / name) == files_of(folders[1] / ours.id / name)
    assert later.bytes_stored() < 0.6 * fill(make_store(hybrid, data, tmp_path / "whole")).bytes_stored()


def test_failed_units_are_named_after_the_rest_is_done(hybrid: Path, tmp_path: Path, make_store: MakeStore) -> None:
    prepared = make_store(hybrid, [write_data(tmp_path / "data.jsonl", 23)], tmp_path / "s")
    doomed = prepared.plan.units[1].id
    (tmp_path / "s/parts" / doomed).write_text("in the way")  # a file where the part should go
    with pytest.raises(StoreError, match=rf"1 of {len(prepared.plan.units)} units failed 3 times each.*{doomed}: "):
        extract(prepared, ["cpu"], SILENT)
    (tmp_path / "s/parts" / doomed).unlink()
    assert len(open_store(tmp_path / "s").parts) == len(prepared.plan.units) - 1


def test_extraction_stops_before_the_disk_is_full_and_goes_on_later(
    hybrid: Path, tmp_path: Path, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = make_store(hybrid, [write_data(tmp_path / "data.jsonl", 30)], tmp_path / "s", unit_tokens=200)
    parts = tmp_path / "s" / "parts"

    def shrinking(place: Any) -> int:
        return 0 if len([path for path in parts.iterdir() if path.is_dir()]) >= 2 else 1 << 40

    monkeypatch.setattr(dispatch, "room_left", shrinking)
    with pytest.raises(StoreFullError, match=r"no room is left .* units are still to do, make room and run the same"):
        extract(prepared, ["cpu"], SILENT)
    stored = len(open_store(tmp_path / "s").parts)
    assert 2 <= stored < len(prepared.plan.units)
    monkeypatch.undo()
    lines: list[str] = []
    listener = Listener(lines.append, lambda total, done: None, lambda n, _: None)
    assert len(extract(prepared, ["cpu"], listener).parts) == len(prepared.plan.units)
    assert any("forward passes" in line and "waiting for the disk" in line for line in lines)
    assert last_rate(prepared.store.identity, machine_name("cpu") or "")


def test_units_depend_on_data_and_settings_alone(hybrid: Path, tmp_path: Path, make_store: MakeStore) -> None:
    data = [write_data(tmp_path / "data.jsonl", 20)]
    first = make_store(hybrid, data, tmp_path / "a").plan
    assert make_store(hybrid, data, tmp_path / "b").plan == first
    assert make_store(hybrid, data, tmp_path / "a").plan == first  # read back
    assert sorted(d for u in first.units for d in u.documents) == list(range(20))
    assert [unit.split for unit in first.units] == sorted(unit.split for unit in first.units)
    assert make_store(hybrid, data, tmp_path / "c", unit_tokens=300).plan.units != first.units


def test_batches_cost_least_within_the_budget() -> None:
    """Against every way to cut a sequence of documents."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        lengths = sorted(rng.integers(1, 900, rng.integers(1, 9)).tolist(), reverse=True)
        budget = int(rng.integers(300, 3000))
        groups = batches(lengths, budget)
        assert [i for g in groups for i in range(g.start, g.stop)] == list(range(len(lengths)))
        costs = []
        for cuts in itertools.product([False, True], repeat=len(lengths) - 1):
            ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [len(lengths)]
            pieces = [lengths[a:b] for a, b in itertools.pairwise([0, *ends])]
            if all(piece[0] * len(piece) <= budget or len(piece) == 1 for piece in pieces):
                costs.append(sum(piece[0] * len(piece) + PASS_TOKENS for piece in pieces))
        ours = [lengths[g] for g in groups]
        assert all(piece[0] * len(piece) <= budget or len(piece) == 1 for piece in ours)
        assert sum(piece[0] * len(piece) + PASS_TOKENS for piece in ours) == min(costs)


def test_a_realistic_mix_of_lengths_wastes_little() -> None:
    """Log-normal lengths, as conversations have: below 3% of what is computed is padding."""
    rng = np.random.default_rng(1)
    lengths = np.clip(np.exp(rng.normal(np.log(900), 0.85, 2000)), 40, 3072).astype(np.int64)
    count = len(lengths)
    corpus = Corpus(
        tokens=np.zeros(lengths.sum(), np.int32),
        loss_mask=np.ones(lengths.sum(), bool),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        ids=np.arange(count, dtype=np.uint64),
        heldout=np.arange(count) < 40,
        tags=["text"] * count,
        places=[""] * count,
    )
    plan = make_plan("key", {}, corpus, np.zeros(count, bool), 32768, 16384)
    computed = 0
    for unit in plan.units:
        sizes = lengths[unit.documents]
        assert sizes.sum() <= 32768
        computed += sum(int(sizes[g].max()) * (g.stop - g.start) for g in batches(sizes.tolist(), 16384))
    assert lengths.sum() > 0.97 * computed
    assert next(unit.documents[0] for unit in plan.units if unit.split == TRAIN) == 40 + lengths[40:].argmax()


def test_a_worker_that_outlives_a_store_reads_the_new_plan(hybrid: Path, tmp_path: Path, make_store: MakeStore) -> None:
    data = [write_data(tmp_path / "data.jsonl", 20)]
    fill(make_store(hybrid, data, tmp_path / "s", limit=8))
    later = make_store(hybrid, data, tmp_path / "s")  # the documents that are left
    run_unit(later.job, later.plan.units[0].id)
    shutil.rmtree(tmp_path / "s")
    anew = make_store(hybrid, data, tmp_path / "s")
    assert anew.plan.key == later.plan.key
    assert anew.plan.units != later.plan.units
    assert len(all_ids(fill(anew))) == 20


def test_a_batch_too_large_for_the_memory_is_split(
    hybrid: Path, tmp_path: Path, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [write_data(tmp_path / "data.jsonl", 23)]
    whole = fill(make_store(hybrid, data, tmp_path / "whole"))
    forward, seen = UnitWorker._forward, []

    def scarce(self: UnitWorker, documents: list[np.ndarray]) -> Any:
        seen.append(len(documents))
        if len(documents) > 2:
            raise torch.OutOfMemoryError("no memory")
        return forward(self, documents)

    monkeypatch.setattr(UnitWorker, "_forward", scarce)
    prepared = make_store(hybrid, data, tmp_path / "scarce")
    reports = [run_unit(prepared.job, unit.id) for unit in prepared.plan.units]
    assert max(seen) > 4
    store = open_store(tmp_path / "scarce")
    assert sum(report.splits for report in reports) > 0
    for report, part in zip(reports, store.parts, strict=True):
        said = part.provenance.get("batches split for lack of memory")
        assert said == (str(report.splits) if report.splits else None)
    assert all_ids(store) == all_ids(whole)
    for index in range(len(store.parts)):
        ours, theirs = (read_all(s, index).values.view(np.int16).astype(int) for s in (store, whole))
        assert (np.abs(ours - theirs) <= 1).mean() > 0.999  # other batches round otherwise, in the last bit


def test_a_document_that_does_not_fit_alone_is_named(
    hybrid: Path, tmp_path: Path, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_fits(self: UnitWorker, documents: list[np.ndarray]) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(UnitWorker, "_forward", none_fits)
    prepared = make_store(hybrid, [write_data(tmp_path / "data.jsonl", 6)], tmp_path / "s")
    with pytest.raises(
        StoreError, match=r"data\.jsonl, line \d+: the device's memory does not hold .* data\.max_length"
    ):
        run_unit(prepared.job, prepared.plan.units[0].id)
    assert open_store(tmp_path / "s").parts == []


def test_a_report_says_what_a_unit_took(hybrid: Path, tmp_path: Path, make_store: MakeStore) -> None:
    prepared = make_store(hybrid, [write_data(tmp_path / "data.jsonl", 9)], tmp_path / "s")
    unit = prepared.plan.units[-1]
    sent: list[int] = []
    report = run_unit(prepared.job, unit.id, sent.append)
    assert sum(sent) == report.tokens <= report.computed
    assert report.forward > 0
    assert report.write > 0
    assert run_unit(prepared.job, unit.id).computed == 0  # there already


def test_data_that_grew_is_added_and_nothing_done_twice(hybrid: Path, tmp_path: Path, make_store: MakeStore) -> None:
    path = tmp_path / "data.jsonl"
    before = all_ids(fill(make_store(hybrid, [write_data(path, 10)], tmp_path / "s")))
    prepared = make_store(hybrid, [write_data(path, 16)], tmp_path / "s")
    assert sum(len(unit.documents) for unit in prepared.plan.units) == 6
    after = all_ids(fill(prepared))
    assert set(before) < set(after)
    assert len(after) == len(set(after)) == 16


def test_another_file_is_added(hybrid: Path, tmp_path: Path, make_store: MakeStore) -> None:
    fill(make_store(hybrid, [write_data(tmp_path / "one.jsonl", 6)], tmp_path / "s"))
    store = fill(make_store(hybrid, [write_data(tmp_path / "two.jsonl", 6, first=50, heldout=0)], tmp_path / "s"))
    assert len(set(all_ids(store))) == 12


def test_data_that_changed_under_its_name_is_refused(hybrid: Path, tmp_path: Path, make_store: MakeStore) -> None:
    path = tmp_path / "data.jsonl"
    store = fill(make_store(hybrid, [write_data(path, 10)], tmp_path / "s"))
    before = all_ids(store)
    lines = path.read_text().splitlines()
    lines[4] = json.dumps({"messages": conversation(777)})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"data\.jsonl has changed"):
        make_store(hybrid, [path], tmp_path / "s")
    assert all_ids(open_store(tmp_path / "s")) == before


@pytest.mark.parametrize("change", [{"layer_ids": [1, 2, 5]}, {"thinking": True}, {"max_length": 64}, {"final": False}])
def test_settings_of_the_identity_may_not_change(
    change: dict[str, object], hybrid: Path, tmp_path: Path, make_store: MakeStore
) -> None:
    data = [write_data(tmp_path / "data.jsonl", 6)]
    make_store(hybrid, data, tmp_path / "s")
    with pytest.raises(StoreError, match="made with other settings"):
        make_store(hybrid, data, tmp_path / "s", **change)


def test_another_target_is_refused(hybrid: Path, dense: Path, tmp_path: Path, make_store: MakeStore) -> None:
    data = [write_data(tmp_path / "data.jsonl", 6)]
    make_store(hybrid, data, tmp_path / "s")
    with pytest.raises(StoreError, match="target_weights"):
        make_store(dense, data, tmp_path / "s")


def test_bad_data_leaves_no_store_behind(hybrid: Path, tmp_path: Path, make_store: MakeStore) -> None:
    path = write_data(tmp_path / "data.jsonl", 6)
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(DataError, match="line 7: not valid JSON"):
        make_store(hybrid, [path], tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_what_is_left_out_is_said(hybrid: Path, tmp_path: Path, make_store: MakeStore) -> None:
    path = write_data(tmp_path / "data.jsonl", 6)
    again = path.read_text().splitlines()[3]
    useless = json.dumps({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]})
    path.write_text(path.read_text() + again + "\n" + useless + "\n")
    prepared = make_store(hybrid, [path], tmp_path / "s", max_length=60)
    assert sum(len(unit.documents) for unit in prepared.plan.units) == 6
    store = fill(prepared)
    assert max(store.documents(TRAIN).length) <= 60


def test_documents_of_some_tags(hybrid: Path, tmp_path: Path, make_store: MakeStore) -> None:
    data = [write_data(tmp_path / "data.jsonl", 12)]
    store = fill(make_store(hybrid, data, tmp_path / "s", tags=["code"]))
    assert {tag for part in store.parts for tag in part.tags} == {"code"}
    assert len(all_ids(store)) == 6
    with pytest.raises(DataError, match="no document of the tags poems has"):
        make_store(hybrid, data, tmp_path / "none", tags=["poems"])


def test_held_out_by_content_hash_when_no_line_says(hybrid: Path, tmp_path: Path, make_store: MakeStore) -> None:
    rows = [{"messages": conversation(n)} for n in range(30)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = set(fill(make_store(hybrid, [path], tmp_path / "a", heldout=0.2)).documents(HELDOUT).ids.tolist())
    path.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    again = set(fill(make_store(hybrid, [path], tmp_path / "b", heldout=0.2)).documents(HELDOUT).ids.tolist())
    assert held == again  # the order of the file does not matter
    assert 0 < len(held) < 15


def test_token_ids_outside_the_vocabulary_are_refused(hybrid: Path, tmp_path: Path, make_store: MakeStore) -> None:
    path = tmp_path / "ids.jsonl"
    for wrong in (9000, 10**30):
        path.write_text(json.dumps({"input_ids": [1, 2, wrong], "loss_mask": [1, 1, 1]}) + "\n")
        with pytest.raises(DataError, match=f"token id {wrong} is outside the vocabulary of 8192"):
            make_store(hybrid, [path], tmp_path / "s")


def test_an_older_plan_taken_up_again_stores_nothing_twice(hybrid: Path, tmp_path: Path, make_store: MakeStore) -> None:
    data = [write_data(tmp_path / "data.jsonl", 20)]
    first = make_store(hybrid, data, tmp_path / "s")
    run_unit(first.job, first.plan.units[0].id)  # and no further
    fill(make_store(hybrid, data, tmp_path / "s", limit=10))
    ids = all_ids(fill(make_store(hybrid, data, tmp_path / "s")))
    assert len(ids) == len(set(ids)) == 20
