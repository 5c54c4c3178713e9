"""Where metrics go beside files and TensorBoard, when asked for: Weights & Biases, trackio.

Both have one interface (`init`, `log`, `finish`) and are imported only when asked for. A resumed run continues the run
it began there. What a tracker fails at later, a network that is gone, never ends a run. Knows names and numbers only.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..store import DflashError
from ..store.files import write_atomic

FILE = "trackers.json"
"""In a run's folder: for each tracker its run's id and the last step it was told."""


class TrackerError(DflashError):
    """A tracker that was asked for cannot be used; the message is for people."""


class Tracker:
    """One run at one tracker.

    Args:
        name: the tracker's module.
        run: what its `init` gave.
        file: where ids and steps are kept.
        step: the last step it was told in earlier processes.
        say: told once when it fails.
    """

    def __init__(self, name: str, run: Any, file: Path, step: int, say: Callable[[str], None]) -> None:
        self._name, self._run, self._file, self._step, self._say = name, run, file, step, say
        self._failed = False

    def log(self, step: int, values: dict[str, float]) -> None:
        """Tell numbers of a step; not again what an interrupted run has told already."""
        if step < self._step:
            return
        self._try(lambda: self._run.log(values, step=step))
        if step > self._step:
            self._step = step
            kept = _read(self._file)
            kept[self._name]["step"] = step
            write_atomic(self._file, json.dumps(kept, indent=2).encode())

    def close(self) -> None:
        """Tell what is left to tell."""
        self._try(self._run.finish)

    def _try(self, work: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            work()
        except Exception as error:
            # A service's client may raise anything; the run must not end for it.
            self._failed = True
            self._say(f"warning: {self._name} failed ({error}); the run goes on, and metrics.jsonl has everything")


def open_trackers(
    names: Sequence[str],
    project: str,
    run: str,
    config: dict[str, Any],
    folder: Path,
    say: Callable[[str], None],
) -> list[Tracker]:
    """Begin, or go on with, a run at each tracker.

    Args:
        names: modules: "wandb", "trackio".
        project, run: the names it has there.
        config: its settings.
        folder: the run's folder, which keeps its ids.
        say: told of failures later on.

    Raises:
        TrackerError: one is not installed, or refuses to begin.
    """
    file, found = folder / FILE, []
    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError:
            raise TrackerError(
                f"train.trackers asks for {name}, which is not installed: pip install {name}, or take it out"
            ) from None
        kept = _read(file)
        mine = kept.setdefault(name, {"id": uuid4().hex[:12], "run": run, "step": -1})
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(kept, indent=2).encode())
        # trackio knows a run by its name, Weights & Biases by an id.
        known = {"id": mine["id"], "dir": str(folder)} if name == "wandb" else {}
        try:
            begun = module.init(project=project, name=mine["run"], config=config, resume="allow", **known)
        except Exception as error:
            raise TrackerError(
                f"{name} cannot begin the run {run} ({error}): see to it, or take it out of train.trackers"
            ) from None
        found.append(Tracker(name, begun, file, mine["step"], say))
    return found


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}
