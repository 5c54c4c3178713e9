"""What a run reports: one JSON object a line, the same numbers to TensorBoard, and to trackers that were asked for.

`metrics.jsonl` has numbers of updates and of validations, `validation.jsonl` all that a validation found. After a
resumption nothing is said twice: what lies beyond the resumed step is dropped. Knows names and numbers only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from ..store.files import write_atomic
from .trackers import Tracker


class Metrics:
    """Appends to files in a run's folder.

    Args:
        folder: the run's folder.
        step: updates done so far; later lines of an interrupted run are dropped.
        trackers: told the same numbers.

    Attributes:
        seconds: how long the run has trained, by its last line.
    """

    def __init__(self, folder: Path, step: int, trackers: Sequence[Tracker] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        lines = _kept(folder / "metrics.jsonl", step)
        _kept(folder / "validation.jsonl", step)
        self.seconds = max((line.get("seconds", 0.0) for line in lines), default=0.0)
        self._file = (folder / "metrics.jsonl").open("a")
        self._validations = (folder / "validation.jsonl").open("a")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._trackers = trackers

    def write(self, step: int, values: dict[str, float]) -> None:
        """Report numbers of one step; what is not finite is left out, for JSON has no word for it."""
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        for tracker in self._trackers:
            tracker.log(step, values)

    def write_validation(self, step: int, found: dict[str, Any]) -> None:
        """Report all that a validation found (`Validation.run`, and the epoch); its numbers as those of a step too."""
        numbers = {f"heldout_{name}": value for name, value in found.items() if isinstance(value, float)}
        names = ("heldout_accepted_length_low", "heldout_accepted_length_high")
        numbers |= dict(zip(names, found["accepted_length_interval"] or (), strict=False))
        self.write(step, numbers)
        self._validations.write(json.dumps({"step": step, **found}) + "\n")
        self._validations.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        self._validations.close()
        self._board.close()
        for tracker in self._trackers:
            tracker.close()


def _kept(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop lines beyond a step, and one that a kill cut short, from a file that may not be there; the lines left."""
    if not path.exists():
        return []
    kept = []
    for line in path.read_bytes().splitlines():
        try:
            value = json.loads(line)
            if value["step"] <= step:
                kept.append((line, value))
        except (ValueError, KeyError, TypeError):
            continue
    write_atomic(path, b"".join(line + b"\n" for line, _ in kept))
    return [value for _, value in kept]
