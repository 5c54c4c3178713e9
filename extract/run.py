"""Stage one from end to end: check everything, plan, then hand units to the workers until the store is complete.

Composes the other modules of this folder; prints through the callbacks it is given. Knows nothing of drafters.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from distributed import Client, Future, KilledWorker, as_completed
from distributed.worker import get_worker
from pydantic import BaseModel, ConfigDict, Field

from ..store import (
    HELDOUT,
    Identity,
    Place,
    Store,
    StoreError,
    StoreFullError,
    create_store,
    existing_store,
    lock_store,
    place_of,
)
from ..store.format import Encoding
from ..store.head import save_head
from ..store.progress import Listener
from .cluster import RESOURCE, local_cluster
from .corpus import Corpus, DataSettings
from .data import DataError, file_hash
from .plan import Plan, load_plan, make_plan, plan_key, save_plan, stored_documents
from .render import Renderer
from .target import (
    TargetInfo,
    TargetSettings,
    check_layer_ids,
    config_hash,
    inspect,
    load_ends,
    load_tokenizer,
    locate,
    text_hash,
    weights_hash,
)
from .tokenise import tokenise
from .unit import Job, run_unit

PROGRESS = "dflash-progress"
INDEX_EVERY = 60.0
"""Seconds between two writings of the store's index while units are under way."""


class ExtractSettings(BaseModel):
    """Section `[extract]`."""

    model_config = ConfigDict(extra="forbid")

    layer_ids: list[int] = Field(description="target layers whose output is stored, in this order")
    last_layer: Literal["pre", "post"] | None = Field(
        None,
        description="needed only if layer_ids has the target's last layer: before or after the final norm",
    )
    final: bool = Field(True, description="store the input of the LM head too (soft losses need it)")
    encoding: Encoding = Field(
        "bf16", description="how states are kept: bf16, or fp8 (e4m3, a scale a token and layer) for half the bytes"
    )
    unit_tokens: int = Field(32768, ge=1, description="tokens of one unit of work, which is one part of the store")
    batch_tokens: int = Field(16384, ge=1, description="padded tokens of one forward pass")


@dataclass(frozen=True)
class Survey:
    """What an extraction would work on; looking at it wrote nothing.

    Attributes:
        place: where the store is or will be.
        digests: sha256 of each data file, by name.
        corpus: the tokenised data.
        key: the plan's key.
        plan: the plan, when the store has it already.
    """

    info: TargetInfo
    identity: Identity
    place: Place
    digests: dict[str, str]
    corpus: Corpus
    key: str
    plan: Plan | None
    settings: ExtractSettings


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
        dtype=target.resolve_dtype(device),
        encoding=settings.encoding,
        hidden_size=info.hidden_size,
        num_layers=info.num_layers,
        vocab_size=info.vocab_size,
    )
    place = place_of(location)
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
    return Survey(info, identity, place, digests, corpus, key, plan, settings)


def prepare(seen: Survey, device: str) -> Prepared:
    """Create or open the store and put a plan in it; everything before the first forward pass.

    Args:
        device: "cpu" or a GPU's number.

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
    job = Job(str(seen.place), seen.key, str(seen.info.path), seen.identity.dtype, "cpu" if device == "cpu" else "cuda")
    return Prepared(store, plan, job)


def extract(prepared: Prepared, devices: list[str], listener: Listener) -> Store:
    """Do all units of the plan that are not in the store yet, one worker a device, and return the store.

    Args:
        devices: "cpu" or GPU numbers.
        listener: progress counts tokens.

    Raises:
        StoreError: another extraction holds the store, or units failed (all others were done first).
        StoreFullError: no room is left; the units that were under way are given up.
    """
    store = prepared.store
    with lock_store(store.place):
        try:
            _run_units(prepared, devices, listener)
        finally:
            store.refresh()
            store.write_index()
    return store


def _backend(tokenizer: Any) -> Any:
    """The Rust tokenizer inside; its serialisation is what decides the ids."""
    return tokenizer.backend_tokenizer


def _fill_head(folder: Path, info: TargetInfo) -> None:
    embedding, lm_head = load_ends(info.path)
    save_head(folder, info.path, embedding, lm_head)


def _run_units(prepared: Prepared, devices: list[str], listener: Listener) -> None:
    store, plan, job = prepared.store, prepared.plan, prepared.job
    corpus = Corpus.load(plan.folder(store.place))
    sizes = {unit.id: int(corpus.lengths[unit.documents].sum()) for unit in plan.units}
    store.refresh()
    done = {part.id for part in store.parts}
    pending = [unit for unit in plan.units if unit.id not in done]
    total, left = sum(sizes.values()), sum(sizes[unit.id] for unit in pending)
    held = sum(unit.split == HELDOUT for unit in plan.units)
    listener.say(
        f"{len(plan.units)} units ({held} of them held out), {len(plan.units) - len(pending)} done before, "
        f"{len(pending)} to do"
    )
    listener.start(total, total - left)
    if not pending:
        return
    failures: list[str] = []
    with local_cluster(devices) as client:
        client.subscribe_topic(PROGRESS, lambda event: listener.advance(event[1]["tokens"], ""))
        futures = [
            client.submit(_task, job, unit.id, key=unit.id, resources={RESOURCE: 1}, priority=-number, pure=False)
            for number, unit in enumerate(pending)
        ]
        indexed = time.monotonic()
        for future in as_completed(futures, loop=client.loop):
            _collect(client, future, failures)
            if time.monotonic() - indexed > INDEX_EVERY:  # for a trainer that reads beside us
                store.refresh()
                store.write_index()
                indexed = time.monotonic()
    if failures:
        raise StoreError(
            f"{len(failures)} of {len(pending)} units failed, the rest is in the store. First: {failures[0]}"
        )


def _task(job: Job, unit_id: str) -> int:
    worker = get_worker()
    return run_unit(job, unit_id, lambda tokens: worker.log_event(PROGRESS, {"unit": unit_id, "tokens": tokens}))


def _collect(client: Client, future: Any, failures: list[str]) -> None:
    assert isinstance(future, Future)
    if future.status == "error":
        error = future.exception()
        if isinstance(error, StoreFullError):
            raise error  # every other unit would be computed and then fail in the same way
        reason = "its worker died three times" if isinstance(error, KilledWorker) else str(error)
        failures.append(f"{future.key}: {reason}")
    future.release()
