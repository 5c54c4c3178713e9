"""What the runs of an ablation came to: read from their folders, put in order, and compared with the best.

A run is ranked by the accepted length of its last validation. Two runs that walked the same documents of the same store
are compared document by document, which tells them apart far better than their own intervals do. Knows nothing of how
runs are started, and writes nothing but `results.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...store.files import write_atomic
from ...train.evaluate.summary import paired_difference
from .folders import Run, read_run
from .words import named


@dataclass(frozen=True)
class Difference:
    """A run's accepted length less the best one's, and the paired 95% interval over documents."""

    value: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Results:
    """Attributes:
    runs: the largest accepted length first; those without one last, as they were given.
    to_best: by name, for each run that can be compared with the best one.
    differing: settings, as `section.key`, that are not the same in all runs.
    common: those that are.
    obstacles: why some runs do not compare with the best, a sentence each.
    """

    runs: list[Run]
    to_best: dict[str, Difference]
    differing: list[str]
    common: dict[str, Any]
    obstacles: list[str]

    @property
    def ranked(self) -> list[Run]:
        """The runs that have an accepted length, the best first."""
        return [run for run in self.runs if run.accepted_length is not None]


def collect(
    runs: Sequence[tuple[str, Path]],
    states: Mapping[str, str],
    settings: Mapping[str, dict[str, Any]] | None = None,
) -> Results:
    """Read and compare runs.

    Args:
        runs: name and folder of each; folders may be missing or unfinished.
        states: by name, a word, or `word: reason`. A run that is not in it is finished or not by its own word.
        settings: by name and `section.key`, of runs that have yet to begin.
    """
    found = [read_run(name, folder, states.get(name)) for name, folder in runs]
    found = [run if run.settings else replace(run, settings=(settings or {}).get(run.name, {})) for run in found]
    ordered = sorted(found, key=lambda run: math.inf if run.accepted_length is None else -run.accepted_length)
    measured = [run for run in ordered if run.accepted_length is not None]
    to_best: dict[str, Difference] = {}
    for run in measured[1:]:
        if _same_documents(run, measured[0]) and _same_store(run, measured[0]):
            apart = _difference(run, measured[0])
            if math.isfinite(apart.low + apart.high):  # too few documents tell no interval
                to_best[run.name] = apart
    known = [run.settings for run in found if run.settings]
    keys = list(dict.fromkeys(key for settings in known for key in settings))
    differing = [key for key in keys if any(settings.get(key) != known[0].get(key) for settings in known)]
    common = {key: known[0].get(key) for key in keys if key not in differing}
    return Results(ordered, to_best, differing, common, _obstacles(measured))


def write_results(path: Path, results: Results) -> None:
    """Write the numbers of `results` as JSON: no curves and no documents, which are in the runs' own folders."""
    rows = [
        {
            "run": run.name,
            "state": run.state,
            "reason": run.reason,
            "step": run.step,
            "updates": run.updates,
            "accepted_length": run.accepted_length,
            "interval": run.last and run.last.interval,
            "validated_at_step": run.last and run.last.step,
            "difference_to_best": asdict(results.to_best[run.name]) if run.name in results.to_best else None,
            "highest_accepted_length": run.highest and run.highest.accepted_length,
            "highest_at_step": run.highest and run.highest.step,
            "acceptance_by_position": run.last.by_position if run.last else [],
            "accepted_length_by_tag": run.last.by_tag if run.last else {},
            "heldout_loss": run.last and run.last.loss,
            "heldout_accuracy": run.last and run.last.accuracy,
            "heldout": run.last and run.last.heldout,
            "store": run.store,
            "fingerprint": run.fingerprint,
            "seconds": run.seconds,
            "tokens_per_second": run.tokens_per_second,
            "settings": {key: run.settings.get(key) for key in results.differing},
        }
        for run in results.runs
    ]
    content = {"runs": rows, "common_settings": results.common, "not_comparable": results.obstacles}
    write_atomic(path, (json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def _difference(run: Run, best: Run) -> Difference:
    assert run.last
    assert best.last
    return Difference(*paired_difference(run.last.counts, best.last.counts))


def _same_documents(run: Run, best: Run) -> bool:
    one, other = run.last, best.last
    if one is None or other is None or not one.documents:
        return False
    return one.heldout == other.heldout and one.documents == other.documents


def _same_store(run: Run, best: Run) -> bool:
    return run.fingerprint is not None and run.fingerprint == best.fingerprint


def _obstacles(measured: Sequence[Run]) -> list[str]:
    texts = []
    for same, what in (
        (_same_store, "another store, or one that is not recorded"),
        (_same_documents, "other held-out documents, or ones that are not recorded"),
    ):
        if apart := [run.name for run in measured[1:] if not same(run, measured[0])]:
            texts.append(
                f"{named(apart)} cannot be compared with {measured[0].name}: validated on {what}. "
                "Accepted lengths on different text rank nothing."
            )
    return texts
