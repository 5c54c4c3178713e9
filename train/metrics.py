"""What a run reports: one JSON object a line, and the same numbers to TensorBoard.

After a resumption nothing is said twice: what lies beyond the resumed step is dropped. Knows names and numbers only.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from ..store.files import write_atomic


class Metrics:
    """Appends to `metrics.jsonl` and TensorBoard files in a run's folder.

    Args:
        folder: the run's folder.
        step: updates done so far; later lines of an interrupted run are dropped.
    """

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_bytes().splitlines() if _step(line) <= step]
            write_atomic(path, b"".join(line + b"\n" for line in kept))
        self._file = path.open("a")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Report numbers of one step; what is not finite is left out, for JSON has no word for it."""
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        self._board.close()


def _step(line: bytes) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line cut short by a kill
