"""The compositions behind the commands: settings and devices in, a stage run, its result out.

Resolves paths against the folder of `dflash.toml`; the command line and the demo call these. Prints only through
listeners.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..store import TRAIN, Store, open_store, place_of
from ..store.format import RECORD
from ..store.place import Directory
from ..store.progress import SILENT, Listener
from ..train.settings import FREE_TO_CHANGE
from .config import Settings
from .location import ConfigError, located
from .stopping import Stop


def target_path(folder: Path, settings: Settings) -> str:
    """The target as a local folder relative to `dflash.toml`, or else as it was written (a name on the hub)."""
    local = folder / Path(settings.target.path).expanduser()
    return str(local) if local.exists() else settings.target.path


def store_location(folder: Path, settings: Settings) -> str:
    """The store's path, or its address in an object store."""
    return located(folder, settings.store.path)


def survey_extraction(folder: Path, settings: Settings, device: str, listener: Listener) -> Any:
    """What stage one would work on (`extract.run.Survey`); nothing is written."""
    from ..extract.run import survey

    files = [folder / Path(name).expanduser() for name in settings.data.files]
    target = settings.target.model_copy(update={"path": target_path(folder, settings)})
    return survey(target, settings.data, settings.extract, files, store_location(folder, settings), device, listener)


def run_extract(folder: Path, settings: Settings, devices: list[str], listener: Listener) -> Store:
    """Stage one, on devices of this machine."""
    from ..extract.cluster import shared_out
    from ..extract.run import extract, prepare

    shared_out(devices, settings.target.gpus)  # refused before anything is read
    seen = survey_extraction(folder, settings, devices[0], listener)
    warn_of_room(seen, listener)
    return extract(prepare(seen), devices, listener)


def run_extract_on(folder: Path, settings: Settings, scheduler: str, listener: Listener) -> Store:
    """Stage one, on the workers that have joined a scheduler (`dflash worker`).

    Args:
        scheduler: its address, tcp://host:port.
    """
    from ..extract.cluster import connect
    from ..extract.peers import common_device
    from ..extract.run import extract, prepare

    with connect(scheduler) as client:
        # First of all: what a state is depends on what computes it.
        device = "cpu" if common_device(client, scheduler, listener.say) == "cpu" else "0"
        seen = survey_extraction(folder, settings, device, listener)
        warn_of_room(seen, listener)
        return extract(prepare(seen), client, listener)


def warn_of_room(seen: Any, listener: Listener) -> None:
    """Say when the disk will not hold what was surveyed. Raises StoreFullError when it does not hold even one unit."""
    from ..extract.estimate import check_room, estimate

    if warning := check_room(estimate(seen)):
        listener.say(f"warning: {warning}")


def run_train(
    folder: Path,
    settings: Settings,
    devices: list[str],
    listener: Listener,
    stop: Stop | None = None,
    changed: Sequence[str] = (),
) -> Path:
    """Stage two on one device: all of a run, or the rank of it that the environment names.

    Args:
        devices: this process's device, alone.
        stop: asks the trainer to stop, once there is one.
        changed: overrides that the settings were made with; the run's name tells them.

    Returns:
        The last checkpoint's folder.

    Raises:
        Stopped: it was asked to, and has saved.
        PeerLost: another rank is gone.
    """
    from ..train.ranks import join
    from ..train.trainer import Stopped, Trainer

    [device] = devices
    run = folder / Path(settings.train.run).expanduser()
    ranks = join(torch_device(device))
    asked = threading.Event()
    if stop and ranks.joined:  # one that left before the others are ready would leave them waiting
        stop.instead(asked.set)
    try:
        store = open_store(store_location(folder, settings))
        sections = settings.drafter, settings.loss, settings.train
        begin_from = drafter_folder(folder, settings.train.init_from, listener) if ranks.leads else None
        trainer = Trainer(store, *sections, run, ranks, listener, begin_from, run_name(settings, changed))
        if stop:
            stop.instead(trainer.ask_to_stop)
            if asked.is_set():
                trainer.ask_to_stop()
        last = trainer.run()
    except Stopped:
        ranks.close()
        raise
    ranks.close()  # not after an error: it may wait for ranks that wait for this one
    return last


def drafter_folder(folder: Path, said: str | None, listener: Listener) -> Path | None:
    """The folder of the drafter that `train.init_from` names: a path, or what the hub has under that name.

    Refuses nothing: a run that goes on does not need it any more, and one that begins looks for itself.
    """
    if said is None:
        return None
    local = folder / Path(said).expanduser()
    if local.exists() or said.count("/") != 1 or said.startswith((".", "/", "~")):
        return local
    from ..extract.target import TargetError, locate

    try:
        return locate(said)
    except TargetError as error:
        listener.say(f"note: train.init_from: {str(error).removeprefix('target ')}")
        return local


def run_name(settings: Settings, changed: Sequence[str]) -> str:
    """What a run is called where many are listed: its own name, or its folder's and what differs: "drafter lr=3e-4"."""
    if settings.train.name:
        return settings.train.name
    said = [text.strip().partition(".") for text in changed]
    unsaid = FREE_TO_CHANGE - {"epochs", "steps"}  # how it reports is not what it is
    differs = [
        text
        for section, _, text in said
        if section in ("drafter", "loss") or (section == "train" and text.partition("=")[0].strip() not in unsaid)
    ]
    return " ".join([Path(settings.train.run).name, *differs])


def wait_for_documents(location: str, say: Callable[[str], None], seconds: float = 2.0) -> None:
    """Wait until a store is there and its first training documents are, for training beside `dflash extract`.

    Args:
        say: told once, if there is something to wait for.
        seconds: between looks.

    Raises:
        StoreError: something else is there.
    """
    told = False
    while not _has_documents(location):
        if not told:
            say(f"waiting for the first training documents of {location}")
            told = True
        time.sleep(seconds)


def _has_documents(location: str) -> bool:
    place = place_of(location)
    if isinstance(place, Directory):
        there = place.path.is_file() or (place.path.is_dir() and any(place.path.iterdir()))
    else:
        there = place.exists(RECORD)
    return there and any(part.split == TRAIN for part in open_store(place).parts)


def run_evaluate(
    folder: Path,
    settings: Settings,
    device: str,
    *,
    checkpoint: Path | None = None,
    decode: bool = False,
    documents: int | None = None,
    listener: Listener = SILENT,
) -> dict[str, Any]:
    """Evaluate a drafter on the store's held-out documents.

    Args:
        checkpoint: a drafter's folder; by default the last checkpoint of the run that the settings name.
        decode: decode with the target too, on `documents` documents.
        documents: how many documents to use; by default all for states and 8 for decoding.

    Raises:
        ConfigError: there is no checkpoint, or nothing is held out.
        CheckpointError, StoreError, TargetError: one of them cannot be used, or they do not belong together.
    """
    from ..store import HELDOUT, load_head
    from ..train.assembly import compute_dtype
    from ..train.checkpoint import load_drafter
    from ..train.evaluate.report import evaluate_decoding, evaluate_states

    store = open_store(store_location(folder, settings))
    checkpoint = checkpoint or last_checkpoint(folder, settings)
    where = torch_device(device)
    drafter, config = load_drafter(checkpoint, compute_dtype(settings.train.dtype, where), where)
    trained = check_belongs(config, store, checkpoint)
    heldout = store.documents(HELDOUT)
    if not len(heldout):
        raise ConfigError(f"the store {store.place} holds no held-out documents: extract with data.heldout above 0")
    head = load_head(store)
    budget = settings.train.tokens
    result: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "store": str(store.place),
        "rendering": store.identity.rendering,
        "rendering_trained": trained.get("rendering"),
        "block_size": drafter.settings.block_size,
        "states": evaluate_states(drafter, head, store, heldout.first(documents or len(heldout)), budget),
    }
    if decode:
        chosen = heldout.first(documents or 8)
        target, ends = decoding_target(folder, settings, store, device)
        result["decoding"] = evaluate_decoding(target, drafter, head, store, chosen, ends, budget, listener)
    return result


def check_belongs(config: dict[str, Any], store: Store, checkpoint: Path) -> dict[str, Any]:
    """Refuse a drafter made for another target than the store's. Returns what its config says of its training.

    Raises:
        ConfigError: hidden size, number of layers, weights or last layer differ (the field is named).
    """
    identity, nested = store.identity, config.get("dflash_config") or {}
    said = {
        "hidden_size": config.get("hidden_size"),
        "num_layers": config.get("num_target_layers"),
        "target_weights": nested.get("target_weights"),
    }
    if "last_layer" in nested:
        said["last_layer"] = nested["last_layer"]
    for field, value in said.items():
        # Other makers' drafters leave some of these out.
        if value is not None and value != getattr(identity, field):
            raise ConfigError(
                f"the drafter {checkpoint} was trained for another target than the store {store.place} holds "
                f"({field} differs)"
            )
    return nested


def decoding_target(folder: Path, settings: Settings, store: Store, device: str) -> tuple[Any, set[int]]:
    """The store's own target, loaded to decode, and the tokens that end its turns.

    Raises:
        ConfigError: the target's weights are not those the store was made with, or it names no end token.
    """
    from ..extract.cached import CachedTarget
    from ..extract.capture import load_model
    from ..extract.target import locate, weights_hash

    path = locate(target_path(folder, settings))
    identity = store.identity
    if weights_hash(path) != identity.target_weights:
        raise ConfigError(f"target {path} has other weights than the one the store {store.place} was made with")
    # A server decodes in bfloat16, also from states that were computed with products in fp8.
    model = load_model(path, identity.dtype, "cpu" if device == "cpu" else f"cuda:{device}")
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = path / name
        said = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        ends |= {said} if isinstance(said, int) else set(said or [])
    if not ends:
        raise ConfigError(f"target {path} names no eos_token_id: decoding would not know where a turn ends")
    return CachedTarget(model, identity.layer_ids, identity.last_layer), ends


def last_checkpoint(folder: Path, settings: Settings) -> Path:
    """The last whole checkpoint of the run that the settings name. Raises ConfigError when there is none."""
    from ..train.checkpoint import checkpoints

    run = folder / Path(settings.train.run).expanduser()
    found = checkpoints(run / "checkpoints")
    if not found:
        raise ConfigError(f"there is no checkpoint in {run}: run `dflash train` first, or pass --checkpoint")
    return found[-1]


def torch_device(device: str) -> Any:
    """The torch device of "cpu" or a GPU's number; a GPU is made the current one, which is what kernels run on."""
    import torch

    found = torch.device("cpu" if device == "cpu" else f"cuda:{device}")
    if found.type == "cuda":
        torch.cuda.set_device(found)
    return found
