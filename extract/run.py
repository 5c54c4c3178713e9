"""Stage one from end to end: check everything, plan, then hand units to the workers until the store is complete.

Composes the other modules of this folder; prints through the callbacks it is given. Knows nothing of drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from distributed import Client

from ..store import (
    Identity,
    Place,
    Store,
    create_store,
    existing_store,
    lock_store,
    place_of,
)
from ..store.head import save_head
from ..store.progress import Listener
from ..store.room import check_writable
from .cluster import local_cluster
from .corpus import Corpus
from .data import DataError, file_hash
from .dispatch import run_plan
from .plan import Plan, load_plan, make_plan, plan_key, save_plan, stored_documents
from .rates import machine_name, remember_rate
from .render import Renderer
from .settings import DataSettings, ExtractSettings, TargetSettings
from .summary import device_rate, summary
from .target import (
    TargetInfo,
    check_fast,
    check_layer_ids,
    config_hash,
    inspect,
    load_ends,
    load_tokenizer,
    locate,
    resolve_dtype,
    text_hash,
    weights_hash,
)
from .tokenise import tokenise
from .unit import Job


@dataclass(frozen=True)
class Survey:
    """What an extraction would work on; looking at it wrote nothing.

    Attributes:
        place: where the store is or will be.
        digests: sha256 of each data file, by name.
        corpus: the tokenised data.
        key: the plan's key.
        plan: the plan, when the store has it already.
        device: "cpu" or a GPU's number: what kind of device it is for.
        gpus: GPUs that a target is spread over.
    """

    info: TargetInfo
    identity: Identity
    place: Place
    digests: dict[str, str]
    corpus: Corpus
    key: str
    plan: Plan | None
    settings: ExtractSettings
    device: str
    gpus: int


@dataclass(frozen=True)
class Prepared:
    """A store with a plan in it, and what a worker needs to do the plan's units."""

    store: Store
    plan: Plan
    job: Job


def survey(
    target: TargetSettings,
    data: DataSettings,
    settings: ExtractSettings,
    files: list[Path],
    location: str | Path,
    device: str,
    listener: Listener,
) -> Survey:
    """Check target, data and store, and tokenise; nothing is written where the store lies.

    Args:
        files: the data files, resolved.
        location: the store's path, or its address in an object store.
        device: "cpu" or a GPU's number; it decides the dtype where the settings leave it open.

    Raises:
        DataError, TargetError, StoreError: something cannot be used.
    """
    info = inspect(locate(target.path))
    check_layer_ids(settings.layer_ids, info.num_layers, settings.last_layer)
    if device != "cpu" and torch.cuda.is_available():  # on other machines their workers see to it
        check_fast(info, settings.allow_slow)
    if len({path.name for path in files}) != len(files):
        raise DataError("two data files have the same name: the store tells them apart by it, rename one")
    digests = {path.name: file_hash(path) for path in files}
    tokenizer = load_tokenizer(info.path)
    renderer = Renderer(tokenizer, data.thinking)
    identity = Identity(
        target_weights=weights_hash(info.path),
        target_config=config_hash(info),
        tokenizer=text_hash(_backend(tokenizer).to_str()),
        chat_template=text_hash(str(tokenizer.chat_template)),
        rendering=renderer.mode,
        max_length=data.max_length,
        layer_ids=tuple(settings.layer_ids),
        last_layer=settings.last_layer,
        final=settings.final,
        dtype=resolve_dtype(target, device),
        encoding=settings.encoding,
        hidden_size=info.hidden_size,
        num_layers=info.num_layers,
        vocab_size=info.vocab_size,
    )
    place = place_of(location)
    check_writable(place)
    existing_store(place, identity)  # refused now, not after an hour of tokenising
    shaping = (data.model_dump(exclude={"files"}), settings.unit_tokens, settings.batch_tokens)
    key = plan_key(digests, identity.model_dump(mode="json"), *shaping)
    plan = load_plan(place, key)
    if plan is not None:
        corpus = Corpus.load(plan.folder(place))
    else:
        corpus, notes = tokenise(files, digests, info, renderer, data, listener)
        listener.say(f"{len(corpus)} documents, {len(corpus.tokens):,} tokens")
        for line in notes.lines():
            listener.say(line)
    return Survey(info, identity, place, digests, corpus, key, plan, settings, device, target.gpus)


def prepare(seen: Survey) -> Prepared:
    """Create or open the store and put a plan in it; everything before the first forward pass.

    Raises:
        DataError, StoreError: the store cannot be made or extended; one that did not exist is not begun.
    """
    store = create_store(seen.place, seen.identity, lambda folder: _fill_head(folder, seen.info))
    plan = seen.plan
    if plan is None:
        with lock_store(seen.place):
            store.refresh()
            done = stored_documents(store, seen.digests, seen.corpus)
            sizes = seen.settings.unit_tokens, seen.settings.batch_tokens
            plan = make_plan(seen.key, seen.digests, seen.corpus, done, *sizes)
            save_plan(seen.place, plan, seen.corpus)
    job = Job(
        str(seen.place),
        seen.key,
        str(seen.info.path),
        seen.identity.dtype,
        "cpu" if seen.device == "cpu" else "cuda",
        seen.gpus,
        seen.settings.allow_slow,
    )
    return Prepared(store, plan, job)


def extract(prepared: Prepared, devices: Sequence[str] | Client, listener: Listener) -> Store:
    """Do all units of the plan that are not in the store yet, and return the store.

    Args:
        devices: "cpu" or GPU numbers of this machine, or else the client of a cluster with workers of ours.
        listener: progress counts tokens.

    Raises:
        StoreError: another extraction holds the store, or units failed (all others were done first).
        StoreFullError: no room is left; what is stored stays.
        ClusterError: the workers cannot be used or cannot load the target, or are gone.
    """
    store, plan, job = prepared.store, prepared.plan, prepared.job
    # A unit that an extraction which was killed left going on another machine may still end. It does no harm: what it
    # had staged is cleared now, so its commit fails, or it has committed and this run leaves the part alone.
    with lock_store(store.place):
        try:
            cluster = nullcontext(devices) if isinstance(devices, Client) else local_cluster(devices, job.gpus)
            reports = run_plan(store, plan, job, cluster, listener)
        finally:
            store.refresh()
            store.write_index()
    for line in summary(reports, store.identity):
        listener.say(line)
    # What workers of other machines reached says nothing of the devices here.
    machine = None if isinstance(devices, Client) else machine_name(devices[0])
    if machine and (rate := device_rate(reports, job.gpus)):
        remember_rate(store.identity, machine, rate)
    return store


def _backend(tokenizer: Any) -> Any:
    """The Rust tokenizer inside; its serialisation is what decides the ids."""
    return tokenizer.backend_tokenizer


def _fill_head(folder: Path, info: TargetInfo) -> None:
    embedding, lm_head = load_ends(info.path)
    save_head(folder, info.path, embedding, lm_head)
