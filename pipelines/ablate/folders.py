"""One run's folder, read: what `train/` wrote there, whatever a kill left of it.

Any file may be missing, and a line cut short is passed over. Knows the files' form; compares nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

SECTIONS = ("drafter", "loss", "train")
"""Of a run's settings, those that make it what it is and may vary; the others make the store."""
OWN = {"run", "name"}
"""Of `[train]`, what says which run it is."""
DONE, UNFINISHED = "done", "unfinished"
"""States of a run of which its folder alone tells."""

Point = tuple[int, float]
"""An update's number, and a value there."""


@dataclass(frozen=True)
class Validation:
    """One validation of a run; what was not measured or not recorded is None.

    Attributes:
        step: updates done.
        accepted_length: tokens produced a round.
        interval: its 95% interval over documents.
        by_position: share of the rounds that accepted slots 1..B-1.
        by_tag: accepted length by the documents' tag.
        loss, accuracy: on held-out text; accuracy of all slots.
        rounds_by_tag: rounds walked; how much a tag's number rests on.
        heldout: fingerprint of the documents.
        documents: their ids, sorted.
        counts: tokens produced and rounds of each, `[documents, 2]` int64.
    """

    step: int
    accepted_length: float | None
    interval: tuple[float, float] | None
    by_position: list[float | None]
    by_tag: dict[str, float | None]
    loss: float | None
    accuracy: float | None
    rounds_by_tag: dict[str, int]
    heldout: str | None
    documents: list[str]
    counts: np.ndarray


@dataclass(frozen=True)
class Run:
    """One run, as far as its folder tells.

    Attributes:
        state, reason: in a word, and why where there is something to say.
        step, updates: updates done, and planned in all.
        settings: by `section.key`; empty where the run never began.
        store, fingerprint: where the states lie, and what they are.
        history: settings that were changed on the way, in words.
        training_loss: by step.
        seconds: of training. tokens_per_second: the median over the lines of metrics.
        validations: by step, the last one last.
    """

    name: str
    state: str
    reason: str
    step: int
    updates: int | None
    settings: dict[str, Any]
    store: str | None
    fingerprint: str | None
    devices: list[str]
    versions: dict[str, str]
    history: list[str]
    training_loss: list[Point]
    seconds: float | None
    tokens_per_second: float | None
    validations: list[Validation]

    @property
    def last(self) -> Validation | None:
        """The validation that the run is ranked by."""
        return self.validations[-1] if self.validations else None

    @property
    def accepted_length(self) -> float | None:
        """Of the last validation."""
        return self.last.accepted_length if self.last else None

    @property
    def highest(self) -> Validation | None:
        """The validation with the largest accepted length, the later of two equal ones."""
        measured = [found for found in self.validations if found.accepted_length is not None]
        return max(measured, key=lambda found: (found.accepted_length, found.step), default=None)

    @property
    def heldout_loss(self) -> list[Point]:
        """By step."""
        return [(found.step, found.loss) for found in self.validations if found.loss is not None]


def read_run(name: str, folder: Path, said: str | None) -> Run:
    """Read a run's folder, whatever of it is there.

    Args:
        said: the run's state, `word` or `word: reason`; None leaves it to what the folder says.
    """
    about = _mapping(_json(_bytes(folder / "run.json")))
    lines = _lines(folder / "metrics.jsonl")
    training = [(line["step"], value) for line in lines if (value := _number(line.get("loss"))) is not None]
    validations = _validations(lines, _lines(folder / "validation.jsonl"))
    state, _, reason = (said or (DONE if about.get("done") is True else UNFINISHED)).partition(":")
    rates = [rate for line in lines if (rate := _number(line.get("tokens_per_second"))) is not None]
    updates, step = _number(about.get("updates")), _number(about.get("step")) or 0
    return Run(
        name=name,
        state=state.strip(),
        reason=reason.strip(),
        step=max([int(step), *(line["step"] for line in lines)]),
        updates=None if updates is None else int(updates),
        settings=dict(flat(_mapping(about.get("settings")))),
        store=_text(about.get("store")),
        fingerprint=_text(about.get("fingerprint")),
        devices=list(map(str, _list(about.get("devices")))),
        versions={str(key): str(value) for key, value in _mapping(about.get("versions")).items()},
        history=[
            f"at step {entry.get('step')}: {', '.join(map(str, _list(entry.get('changed'))))}"
            for entry in map(_mapping, _list(about.get("history")))
            if entry.get("changed")
        ],
        training_loss=training,
        seconds=max((value for line in lines if (value := _number(line.get("seconds"))) is not None), default=None),
        tokens_per_second=median(rates) if rates else None,
        validations=validations,
    )


def _validations(metrics: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]]) -> list[Validation]:
    """One a step: `validation.jsonl` has most of it, the metrics the accuracy, and the rest where it is missing."""
    at: dict[int, dict[str, Any]] = {}
    for line in metrics:
        numbers = {key.removeprefix("heldout_"): value for key, value in line.items() if key.startswith("heldout_")}
        if numbers:
            ends = numbers.get("accepted_length_low"), numbers.get("accepted_length_high")
            at[line["step"]] = {**numbers, "accepted_length_interval": ends}
    for line in lines:
        at[line["step"]] = {**at.get(line["step"], {}), **line}
    return [_validation(step, values) for step, values in sorted(at.items())]


def _validation(step: int, values: Mapping[str, Any]) -> Validation:
    ends = [_number(end) for end in _list(values.get("accepted_length_interval"))]
    rows = sorted(row for row in map(_list, _list(values.get("documents"))) if len(row) == 4)
    rounds: dict[str, int] = {}
    for _, tag, _, count in rows:
        rounds[str(tag)] = rounds.get(str(tag), 0) + int(count)
    return Validation(
        step=step,
        accepted_length=_number(values.get("accepted_length")),
        interval=(ends[0], ends[1]) if len(ends) == 2 and ends[0] is not None and ends[1] is not None else None,
        by_position=[_number(share) for share in _list(values.get("acceptance_by_position"))],
        by_tag={str(tag): _number(value) for tag, value in _mapping(values.get("accepted_length_by_tag")).items()},
        loss=_number(values.get("loss")),
        accuracy=_number(values.get("accuracy")),
        rounds_by_tag=rounds,
        heldout=_text(values.get("heldout")),
        documents=[str(row[0]) for row in rows],
        counts=np.array([[int(row[2]), int(row[3])] for row in rows], np.int64).reshape(-1, 2),
    )


def flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What makes a run what it is, by `section.key`."""
    for section in SECTIONS:
        for key, value in _mapping(settings.get(section)).items():
            if section != "train" or key not in OWN:
                yield f"{section}.{key}", value


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file, by step; of two of a step the later one's values stand."""
    at: dict[int, dict[str, Any]] = {}
    for line in _bytes(path).splitlines():
        values = _mapping(_json(line))  # a line cut short by a kill is nothing
        step = values.get("step")
        if isinstance(step, int):
            at[step] = at.get(step, {}) | values  # training and validation of a step are lines of their own
    return [at[step] for step in sorted(at)]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if real and math.isfinite(value) else None
