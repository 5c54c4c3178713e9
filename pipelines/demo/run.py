"""`dflash demo`: init, extract, train and evaluate on the bundled target, by the same code that real runs use.

Sized for two CPU cores and a few minutes; everything it sets is an override of what `dflash init` would write.
"""

from __future__ import annotations

import shlex
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from ...store import HELDOUT, Head, Store, load_head
from ...store.stats import store_info
from ...train.drafter import Drafter
from ...train.evaluate.report import evaluate_states
from ..config import Settings, load_settings
from ..console import console, reporting
from ..init import init
from ..location import FILE
from ..show import number, show_evaluation
from ..show_store import show_info
from ..stages import run_evaluate, run_extract, run_train

OVERRIDES = {
    "data.tags": '["complete", "continue"]',  # a drafter for code; prose is harder and would need more time
    "data.limit_heldout": 60,
    "extract.final": "false",  # plain cross entropy does not need it
    "drafter.intermediate_size": 256,
    "drafter.block_size": 4,  # what a drafter learns in minutes is worth a short block
    "train.tokens": 576,
    "train.anchors": 160,
    "train.epochs": 5,
    "train.lr": 3e-3,
    "train.optimizer": "muon",  # learns most in few updates
    "train.weight_decay": 0.1,
    "train.validate_documents": 12,
}
DECODED = 12
"""Held-out documents that are really decoded."""


def demo(folder: Path, devices: list[str]) -> dict[str, Any]:
    """Run the demo in a folder, made if need be; what is done already is not repeated. Returns the evaluation."""
    folder.mkdir(parents=True, exist_ok=True)
    overrides = [f"{key}={value}" for key, value in OVERRIDES.items()]
    with as_file(files("dflash_offline.pipelines") / "demo") as bundled:
        target, data = str(bundled / "target"), str(bundled / "conversations.jsonl")
        _say("init", "--target", target, "--data", data, *(part for text in overrides for part in ("--set", text)))
        path, _ = init(folder.absolute(), target, [data], overrides, force=_is_a_demo(folder, target))
        console.print(f"wrote {path}")
        settings = load_settings(folder, [])

        gpus = ",".join(devices)
        _say("extract", "--gpus", gpus)
        with reporting("extract", "tokens") as listener:
            store = run_extract(folder, settings, devices, listener)
        show_info(store_info(store))

        _say("train", "--gpus", gpus)
        with reporting("train", "updates") as listener:
            run_train(folder, settings, devices[:1], listener)

        _say("evaluate", "--gpus", gpus, "--target", "--documents", str(DECODED))
        with reporting("decode", "turns") as listener:
            result = run_evaluate(folder, settings, devices[0], decode=True, documents=DECODED, listener=listener)
            everything = run_evaluate(folder, settings, devices[0])
    show_evaluation(result)
    untrained = untrained_length(settings, store, load_head(store))
    console.print(
        f"accepted length from the states of all {everything['states']['documents']} held-out documents: "
        f"{number(everything['states']['accepted_length'])} trained, {number(untrained)} untrained"
    )
    return result


def untrained_length(settings: Settings, store: Store, head: Head) -> float | None:
    """Accepted length of a drafter with fresh weights: what training is measured against."""
    drafter = Drafter(settings.drafter, store.identity.hidden_size)
    drafter.reset(settings.train.seed)
    documents = store.documents(HELDOUT)
    return evaluate_states(drafter, head, store, documents, settings.train.tokens)["accepted_length"]


def _is_a_demo(folder: Path, target: str) -> bool:
    """Whether the `dflash.toml` in a folder is an earlier demo's, which may be written anew."""
    return (folder / FILE).is_file() and load_settings(folder, []).target.path == target


def _say(*words: str) -> None:
    console.print(f"\n$ dflash {shlex.join(words)}", style="bold", markup=False)
