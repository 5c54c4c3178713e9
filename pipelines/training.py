"""How `dflash train` runs: in this process, as one rank of several, or by starting ranks. Holds nothing of training."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

from ..store.format import DflashError
from ..store.progress import SILENT
from .console import console, fail, leave, reason, reporting
from .devices import choose_devices, own_device, own_rank
from .json_lines import write_done
from .launch import PEER_LOST, launch
from .stopping import STOPPED, Stop, is_child, stoppable


def train(folder: Path, gpus: str, overrides: list[str], wait: bool, as_json: bool) -> int:
    """Stage two on devices of this machine, or as the rank that torchrun's variables name. Resumes by itself.

    Args:
        folder: of `dflash.toml`.
        gpus: what `--gpus` says.
        overrides: what `--set` says.
        wait: first wait for the store's first training documents.
        as_json: report by JSON lines.

    Returns:
        The exit code: 0, or `STOPPED` when it was asked to stop.

    Raises:
        DflashError: something that a person can put right. A rank says it itself, and ends.
    """
    rank = own_rank()
    leads = rank in (None, 0)

    def last() -> None:
        if leads:
            leave()
            fail("ended without saving; the same command goes on from the last checkpoint, or begins anew")

    quiet = as_json or is_child() or not leads
    notice = "" if quiet else "dflash: stopping at the next step, and saving"
    if notice and rank is None:
        notice += "; asked again it ends at once"
    try:
        with stoppable(notice, last) as stop:
            made = _train(folder, gpus, overrides, wait, as_json, stop)
    except Exception as error:
        if rank is None:
            raise
        _end(error)
    if made is None:
        return STOPPED
    if as_json and leads:
        write_done(made, sys.stdout)
    elif leads:
        console.print(f"the drafter is in {made}")
    return 0


def _train(folder: Path, gpus: str, overrides: list[str], wait: bool, as_json: bool, stop: Stop) -> Path | str | None:
    """Returns the last checkpoint's folder, or None when it was stopped."""
    from .config import load_settings
    from .stages import run_train, store_location, wait_for_documents

    rank = own_rank()
    settings = load_settings(folder, overrides)
    devices = choose_devices(gpus)
    if rank is not None:
        devices = [own_device(devices)]
    with nullcontext(SILENT) if rank else reporting("train", "updates", as_json=as_json) as listener:
        if len(devices) > 1:
            arguments = ["train", "--gpus", gpus, "--json", *(["--wait"] if wait else [])]
            arguments += [word for text in overrides for word in ("--set", text)]
            return launch(devices, arguments, folder, listener, stop)

        from ..train.trainer import Stopped  # takes seconds, in which nothing is waited for yet

        try:
            if wait:
                wait_for_documents(store_location(folder, settings), listener.say)
            return run_train(folder, settings, devices, listener, stop, overrides)
        except Stopped:
            return None


def _end(error: Exception) -> NoReturn:
    """End a rank that failed, not in good order: its threads may wait for ranks that wait for it."""
    from ..train.ranks import PeerLost

    if isinstance(error, DflashError | OSError):
        fail(reason(error))
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(PEER_LOST if isinstance(error, PeerLost) else 1)
