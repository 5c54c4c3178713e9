"""A run's folder: one process at a time works in it, checkpoints come and go by rule, and `run.json` says what it is.

    run.json            settings, store, versions, how far it is, what was changed on the way; written anew as a whole
    metrics.jsonl, validation.jsonl, tensorboard/       `metrics.py`
    checkpoints/step-*  `checkpoint.py`

Only rank 0 opens one. Knows files; nothing of training.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..store.files import write_atomic
from ..store.progress import Listener
from .checkpoint import (
    STATE,
    CheckpointError,
    Resume,
    checkpoint_step,
    checkpoints,
    clear_leftovers,
    load_resume,
    remove_checkpoint,
)
from .settings import TrainSettings

PATIENCE = 10.0
"""Seconds to wait for another process to leave the folder: one that was just told to stop is still saving."""


class RunFolder:
    """Args:
    path: the folder; made when the run first writes to it.
    settings: which checkpoints to keep.
    listener: told what is passed over.

    """

    def __init__(self, path: Path, settings: TrainSettings, listener: Listener) -> None:
        self.path, self._settings, self._listener = path, settings, listener
        self.checkpoints = path / "checkpoints"
        self._lock: int | None = None

    def hold(self) -> None:
        """Be the only process in it until `release`, or this process's end.

        Raises:
            CheckpointError: another one is, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CheckpointError(f"cannot write to the run's folder {self.path}: {error.strerror}") from None
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    self.release()
                    raise CheckpointError(
                        f"another `dflash train` works in {self.path}: wait for it, stop it, or set another train.run"
                    ) from None
                time.sleep(0.2)
        clear_leftovers(self.checkpoints)

    def release(self) -> None:
        """Let others in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def newest(self) -> Resume | None:
        """The newest checkpoint that can be resumed from; None in a folder without any.

        Raises:
            CheckpointError: there are checkpoints, and none of them can be.
        """
        found = checkpoints(self.checkpoints)
        for newest in reversed(found):
            try:
                return load_resume(newest)
            except CheckpointError as error:
                self._listener.say(f"passed over: {error}")
        if found:
            raise CheckpointError(
                f"no checkpoint in {self.checkpoints} can be resumed from: move that folder away to begin anew, or "
                "begin from one's weights with train.init_from and another train.run"
            )
        if step := _step_of(self.path / "run.json"):
            self._listener.say(
                f"warning: {self.path / 'run.json'} tells of {step:,} updates, but there is no checkpoint: "
                "the run begins anew"
            )
        return None

    def of_step(self, step: int) -> Path:
        """Where the checkpoint of so many updates goes."""
        return self.checkpoints / f"step-{step:08d}"

    def tidy(self, step: int) -> None:
        """Remove the checkpoints up to that of `step` that no rule keeps, and nothing else.

        Later ones could not be resumed from, or the run would stand there: they neither go nor count.
        """
        settings = self._settings
        found = [path for path in checkpoints(self.checkpoints) if checkpoint_step(path) <= step]
        stay = set(found[-settings.keep :])
        if settings.keep_every:
            stay |= {path for path in found if checkpoint_step(path) % settings.keep_every == 0}
        scored = [(score, path) for path in found if (score := _score(path)) is not None]
        if settings.keep_best and scored:
            stay.add(max(scored)[1])
        for path in found:
            if path not in stay and not remove_checkpoint(path):
                self._listener.say(f"left in place: {path} holds files that are not ours, or is a link")

    def describe(self, **values: Any) -> None:
        """Replace `run.json`."""
        try:
            write_atomic(self.path / "run.json", (json.dumps(values, indent=2) + "\n").encode())
        except OSError as error:
            self._listener.say(f"warning: cannot write {self.path / 'run.json'}: {error.strerror}")


def versions() -> dict[str, str]:
    """Of what decides numbers."""
    found = {"python": platform.python_version()}
    for name in ("dflash-offline", "torch", "triton", "numpy"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _step_of(path: Path) -> int:
    """Updates that a `run.json` tells of; 0 where it cannot be read."""
    try:
        return int(json.loads(path.read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _score(path: Path) -> float | None:
    """Accepted length at a checkpoint, if it was measured there."""
    try:
        return json.loads((path / STATE).read_text())["validation"]["accepted_length"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
