"""One unit of work, inside a worker process: forward passes over its documents, written as one part.

A worker keeps its target loaded between units. Knows the plan and the store, nothing of schedulers.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import transformers
import zarr

from ..store import PartWriter, States, Store, StoreError, open_store
from ..store.format import Encoding
from ..store.fp8 import encode
from .corpus import Corpus
from .plan import Plan, Unit, batches, load_plan
from .target import Dtype, StateCapture, load_model


@dataclass(frozen=True)
class Job:
    """What a worker needs to know to do any unit of a run; small enough to travel with every task."""

    store: str
    plan: str
    target: str
    dtype: Dtype
    device: str
    """"cpu" or "cuda": a worker sees one GPU only."""


def run_unit(job: Job, unit_id: str, progress: Callable[[int], None] = lambda tokens: None) -> int:
    """Extract one unit and commit its part. Returns its number of tokens; a part that is there already is left alone.

    Args:
        progress: called with the number of tokens after each forward pass.

    Raises:
        StoreError: states are not finite or all zero (document and layer are named), or the part cannot be written.
        TargetError: the target cannot be loaded.
    """
    store, plan, corpus, units = _plan(job.store, job.plan)
    unit = units[unit_id]
    lengths = corpus.lengths[unit.documents]
    if store.has(unit.id):
        return int(lengths.sum())
    capture = _target(job.target, job.dtype, job.device, store.identity.layer_ids, store.identity.last_layer)
    with PartWriter(store, unit.id, lengths.tolist()) as writer:
        for group in batches(lengths.tolist(), plan.batch_tokens):
            members = unit.documents[group]
            hidden, final = _forward(capture, [corpus.tokens[corpus.rows(m)] for m in members], job.device)
            for row, member in enumerate(members):
                states, ends = hidden[row, : corpus.lengths[member]], final[row, : corpus.lengths[member]]
                _check(states, ends, store, corpus.places[member])
                encoding = store.identity.encoding
                kept = _encoded(ends[:, None], encoding) if store.identity.final else None
                writer.append(_encoded(states, encoding), kept)
            progress(int(lengths[group].sum()))
        _commit(writer, unit, corpus, plan, job.device)
    return int(lengths.sum())


@lru_cache(maxsize=1)
def _plan(location: str, key: str) -> tuple[Store, Plan, Corpus, dict[str, Unit]]:
    store = open_store(location)
    plan = load_plan(store.place, key)
    if plan is None:
        raise StoreError(f"{location} has no plan {key}")
    return store, plan, Corpus.load(plan.folder(store.place)), {unit.id: unit for unit in plan.units}


@lru_cache(maxsize=1)
def _target(path: str, dtype: Dtype, device: str, layer_ids: tuple[int, ...], last_layer: str | None) -> StateCapture:
    if device == "cpu" and "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return StateCapture(load_model(Path(path), dtype, device), layer_ids, last_layer)


def _forward(capture: StateCapture, documents: list[np.ndarray], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """States of documents, one a row, padded on the right; bfloat16, on the device."""
    ids = torch.zeros(len(documents), max(map(len, documents)), dtype=torch.int64)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = torch.from_numpy(document)
    hidden, final = capture(ids.to(device), use_cache=False)
    return hidden, final


def _check(states: torch.Tensor, final: torch.Tensor, store: Store, place: str) -> None:
    both = torch.cat([states, final[:, None]], 1).transpose(0, 1).flatten(1)
    names = [*store.identity.layer_ids, "final"]
    # One transfer a document: on a GPU each answer that is asked for by itself waits for everything before it.
    for layer, finite, some in zip(names, *torch.stack([both.isfinite().all(1), both.any(1)]).tolist(), strict=True):
        if not finite:
            raise StoreError(f"{place}: the states of layer {layer} are not finite; nothing of its unit was committed")
        if not some:
            raise StoreError(f"{place}: the states of layer {layer} are all zero; nothing of its unit was committed")


def _encoded(states: torch.Tensor, encoding: Encoding) -> States:
    """States `[n, layers, H]` as the store has them, on the CPU."""
    by_layer = states.transpose(0, 1).contiguous()
    if encoding == "fp8":
        codes, scales = encode(by_layer)
        return States(codes.cpu().numpy(), scales.cpu().numpy())
    return States(by_layer.view(torch.int16).cpu().numpy().view(np.uint16))


def _commit(writer: PartWriter, unit: Unit, corpus: Corpus, plan: Plan, device: str) -> None:
    gpu = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    rows = [corpus.rows(member) for member in unit.documents]
    writer.commit(
        split=unit.split,
        tokens=np.concatenate([corpus.tokens[r] for r in rows]),
        loss_mask=np.concatenate([corpus.loss_mask[r] for r in rows]),
        doc_ids=corpus.ids[unit.documents],
        doc_tags=[corpus.tags[member] for member in unit.documents],
        plan=plan.key,
        provenance={
            "data": json.dumps(plan.data, sort_keys=True),
            "dflash": version("dflash-offline"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "zarr": zarr.__version__,
            "device": gpu,
        },
    )
