"""`dflash ablate`: the runs of a sweep over some devices, then one table and one report.

Everything that a run would refuse is refused before the first of them starts. Puts the parts of this folder together;
computes nothing itself.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...store import Store, load_head, open_store
from ...store.format import DflashError
from ..config import load_settings
from ..console import console, leave
from ..launch import DFLASH
from ..location import ConfigError
from ..stages import store_location
from ..stopping import stoppable
from .board import DONE, Board, Row
from .folders import OWN, flat, read_run
from .queue import LOG, Job, Queue
from .report import write_report
from .results import collect, write_results
from .sweep import Sweep, Variant, asked, read_sweep
from .table import show


def ablate(
    folder: Path, sweep: Path, overrides: Sequence[str], devices: Sequence[str], program: Sequence[str] = DFLASH
) -> bool:
    """Make the runs of a sweep that are not made yet, and compare all of them.

    Args:
        folder: of `dflash.toml`.
        sweep: the sweep file.
        overrides: what `--set` says, for all runs.
        devices: where to run, one process each.
        program: what to start, `dflash` by default.

    Returns:
        Whether all runs are done.

    Raises:
        ConfigError: the sweep cannot be used, or another `dflash ablate` is at it.
        StoreError, TrainError: the store cannot be used, or a variant does not fit it or the device.
        KeyboardInterrupt: it was asked to stop; runs have saved, and the table and the report say what there is.
    """
    found = read_sweep(folder, sweep, overrides)
    store = open_store(store_location(folder, found.variants[0].settings))
    _check(sweep, found, store, devices[0])
    with _hold(found.folder):
        rows = [_row(variant, store) for variant in found.variants]
        jobs = [
            _job(folder, variant, row) for variant, row in zip(found.variants, rows, strict=True) if row.state != DONE
        ]
        _announce(found, len(jobs), store)
        with stoppable("", leave) as stop, Board(found.name, rows) as board:
            queue = Queue(jobs, devices, folder, board, program)
            stop.instead(queue.stop, queue.kill)
            queue.work()
        _conclude(found, queue.states)
    if queue.asked:
        raise KeyboardInterrupt
    return all(row.state == DONE for row in rows)


def _check(path: Path, sweep: Sweep, store: Store, device: str) -> None:
    """Refuse what a run would refuse. Raises DflashError."""
    import torch

    from ...train.checks import check_run

    # Not made the current one, which would take its memory for as long as this process lives.
    head, where = load_head(store), torch.device("cpu" if device == "cpu" else f"cuda:{device}")
    for variant in sweep.variants:
        settings = variant.settings
        try:
            check_run(store, head, settings.drafter, settings.loss, settings.train, where)
        except DflashError as error:
            raise type(error)(f"{path}, variant {variant.name}: {error}") from None


def _announce(sweep: Sweep, left: int, store: Store) -> None:
    count = len(sweep.variants)
    done = f", {count - left} of them done" if left < count else ""
    console.print(f"{sweep.name}: {count} runs{done}, from {store.place}, in {sweep.folder}", markup=False)


def _row(variant: Variant, store: Store) -> Row:
    """A run as its folder tells, before anything is started."""
    run = read_run(variant.name, variant.folder, None)
    row = Row(variant.name, step=run.step, total=run.updates)
    if run.accepted_length is not None:
        row.watch({"accepted_length": run.accepted_length})
    if run.training_loss:
        row.watch({"loss": run.training_loss[-1][1]})
    if _finished(variant, store):
        row.state = DONE
    return row


def _finished(variant: Variant, store: Store) -> bool:
    """Whether the run is done as it is asked for now; whether what differs may differ is for the run to say."""
    try:
        about = json.loads((variant.folder / "run.json").read_text())
        made: dict[str, Any] = {**about["settings"]}
        made["train"] = {key: value for key, value in made["train"].items() if key not in OWN}
        return about["done"] is True and made == {
            **asked(variant.settings),
            "store": store.identity.model_dump(mode="json"),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _job(folder: Path, variant: Variant, row: Row) -> Job:
    def check() -> None:
        if load_settings(folder, variant.overrides) != variant.settings:
            raise ConfigError(f"{folder / 'dflash.toml'} was changed meanwhile: run the same command again")

    return Job(row, variant.folder, [word for text in variant.overrides for word in ("--set", text)], check)


def _conclude(sweep: Sweep, states: Mapping[str, str]) -> None:
    """The table on the terminal, the report beside the runs."""
    settings = {variant.name: dict(flat(asked(variant.settings))) for variant in sweep.variants}
    results = collect([(variant.name, variant.folder) for variant in sweep.variants], states, settings)
    show(results)
    report = sweep.folder / "report.html"
    write_report(report, results, sweep.name)
    write_results(sweep.folder / "results.json", results)
    console.print(f"the report is {report}; what a run said is in its {LOG}", markup=False)


@contextmanager
def _hold(folder: Path) -> Iterator[None]:
    """Be the only `dflash ablate` in a sweep's folder; a lock of the kernel's, which a killed holder frees.

    Raises:
        ConfigError: another one is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise ConfigError(
                f"another `dflash ablate` works on the sweep in {folder}: wait for it, or stop it"
            ) from None
        yield
    finally:
        os.close(descriptor)
