"""The report of an ablation: one HTML file that needs nothing else, for a screen, a phone and paper.

Decides what is said and drawn; `report.html.jinja` is how it is laid out, `charts.py` how it is drawn. The same results
make the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...store.files import write_atomic
from .charts import STYLE, STYLES, Line, Row, line_chart, row_chart, swatch
from .folders import DONE, Point, Run
from .results import Results
from .words import NOTHING, decimals, named, shown, signed

BANDS = 4
"""Runs up to which each has a band around its accepted lengths; of more only the best."""
BESIDE = 4
"""Settings that differ, up to which they are columns of the results; more have a table of their own."""
DRAWN = 160
"""Points of a line."""
TAG_WIDTH = 330
"""Of a tag's chart: three fit side by side."""
TAGS = 8
"""Tags with a chart of their own: those with the most rounds."""
NO_DRAFTER = 1.0
"""The accepted length without a drafter."""


@dataclass(frozen=True)
class Figure:
    """A chart with what is written above and below it."""

    title: str
    chart: Markup
    caption: str


def write_report(path: Path, results: Results, title: str) -> None:
    """Write the report of `results` to `path`, whole or not at all."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "decimals": decimals,
        "signed": signed,
        "shown": shown,
        "breakable": _breakable,
        "key": _key,
        "duration": duration,
        "percent": lambda value: NOTHING if value is None else f"{100 * value:.1f}%",
    }
    runs = results.runs
    page = environment.get_template("report.html.jinja").render(
        title=title,
        verdict=verdict(results),
        results=results,
        beside=results.differing if len(results.differing) <= BESIDE else [],
        swatches=[Markup(swatch(_style(i))) for i in range(len(runs))],
        coloured=STYLES,
        figures=_figures(results),
        differences=_differences(results),
        tags=_tags(results),
        unfinished=[run for run in runs if run.state != DONE or run.reason],
        sources=_sources(runs),
        chart_style=Markup(STYLE),
    )
    write_atomic(path, page.encode())


def verdict(results: Results) -> str:
    """What won, by how much, and how sure that is, in a sentence or two."""
    ranked = results.ranked
    if not ranked:
        return "No run has been validated yet, so there is nothing to compare."
    best = ranked[0]
    said = f"{best.name} accepts {decimals(best.accepted_length, 2)} tokens a round{_interval(best)}"
    if len(ranked) == 1:
        return f"{said}; no other run has been validated."
    compared = [(run, results.to_best[run.name]) for run in ranked[1:] if run.name in results.to_best]
    if not compared:
        return f"{said}, the largest number here, but no other run can be compared with it."
    unclear = [run.name for run, apart in compared if not apart.clear]
    among = "" if len(compared) == len(ranked) - 1 else " of those that can be compared with it"
    if len(unclear) == len(compared):
        return f"{said}, but no run is separated from it{among}: every difference to it may be chance."
    if unclear:
        return f"{said}, the most of all runs{among}; {named(unclear)} may be as good, the others accept fewer."
    run, apart = compared[0]
    return (
        f"{said}: {-apart.value:.3f} more than the next, {run.name} (95% interval of the difference "
        f"{-apart.high:.3f} to {-apart.low:.3f}), and more than every other run{among}."
    )


def duration(seconds: float | None) -> str:
    """A length of time to the minute, or to the second below ten minutes."""
    if seconds is None:
        return NOTHING
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    if seconds < 599.5:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def smooth(points: Sequence[Point], half: int) -> list[tuple[float, float]]:
    """The mean of each point and `half` on either side (fewer at the ends), thinned to what can be seen."""
    values = np.array([value for _, value in points], np.float64)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    # As many on one side as on the other, or the ends would lean towards the middle.
    reach = np.minimum(np.minimum(places, places[::-1]), half)
    means = (sums[places + reach + 1] - sums[places - reach]) / (2 * reach + 1)
    kept = np.unique(np.linspace(0, len(values) - 1, min(DRAWN, len(values))).round().astype(int))
    return [(points[i][0], float(means[i])) for i in kept]


def _figures(results: Results) -> list[Figure]:
    runs = results.runs
    figures = [_accepted(runs), _positions(runs), _training(results), _heldout(results)]
    return [figure for figure in figures if figure.chart]


def _training(results: Results) -> Figure:
    runs = results.runs
    lines = _lines(runs, lambda run: smooth(run.training_loss, len(run.training_loss) // 80))
    end = max((x for line in lines for x, _ in line.points), default=0)
    values = [y for line in lines for _, y in line.points]
    # What a run falls from in its first steps would squash all that comes after.
    later = [y for line in lines for x, y in line.points if x > end / 10]
    top = 1.05 * float(np.quantile(later, 0.98)) if len(later) > 20 else max(values, default=0.0)
    caption = _said(
        "Lightly smoothed: a running mean over a fortieth of each run."
        if any(len(run.training_loss) >= 80 for run in runs)
        else "As logged.",
        "The largest values lie above the frame." if values and max(values) > top else "",
        _loss_note(results),
    )
    chart = line_chart("training", "Training loss", _about(runs, "training loss"), lines, "updates", top=top)
    return Figure("Training loss", Markup(chart), caption)


def _heldout(results: Results) -> Figure:
    lines = _lines(results.runs, lambda run: run.heldout_loss)
    about = _about(results.runs, "loss on held-out documents")
    chart = line_chart("heldout", "Held-out loss", about, lines, "updates")
    return Figure("Held-out loss", Markup(chart), _said("On the held-out documents.", _loss_note(results)))


def _accepted(runs: Sequence[Run]) -> Figure:
    few = sum(1 for run in runs if run.validations) <= BANDS
    lines = []
    for i, run in enumerate(runs):
        measured = [found for found in run.validations if found.accepted_length is not None]
        band = [(v.step, *v.interval) for v in measured if v.interval] if few or i == 0 else []
        lines.append(Line(str(i + 1), [(v.step, v.accepted_length or 0.0) for v in measured], _style(i), band))
    banded = any(line.band for line in lines)
    whose = "each run's" if few else "the best run's"
    chart = line_chart(
        "accepted", "Accepted length", _about(runs, "accepted length on held-out documents"), lines, "updates"
    )
    caption = f"Tokens a round on the held-out documents; shaded: {whose} 95% interval." if banded else ""
    return Figure("Accepted length", Markup(chart), caption or "Tokens a round on the held-out documents.")


def _differences(results: Results) -> Figure:
    rows = [
        Row(str(i + 1), apart.value, _style(i), (apart.low, apart.high), signed(apart.value))
        for i, run in enumerate(results.runs)
        if (apart := results.to_best.get(run.name))
    ]
    ends = [end for row in rows for end in row.interval or ()]
    chart = row_chart(
        "difference",
        "Difference to the best run",
        f"Accepted length of each run less that of {results.runs[0].name if results.runs else ''}, with intervals.",
        rows,
        "accepted length less the best run's",
        span=(min([0.0, *ends]), max([0.0, *ends])),
        base=0.0,
    )
    caption = (
        "Accepted length less that of the best run, on the same documents, with the paired 95% interval. An interval "
        "that reaches 0, the dark line, may be chance. None of them covers what another seed of training would change, "
        "and the best of many runs owes some of its lead to luck."
    )
    return Figure("Difference to the best run", Markup(chart), caption)


def _positions(runs: Sequence[Run]) -> Figure:
    def of(run: Run) -> list[tuple[float, float]]:
        shares = run.last.by_position if run.last else []
        return [(slot, share) for slot, share in enumerate(shares, 1) if share is not None]

    chart = line_chart(
        "positions",
        "Acceptance by position",
        _about(runs, "share of rounds that accepted each slot of the block"),
        _lines(runs, of),
        "slot of the block",
        from_zero=False,
        percent=True,
    )
    caption = "Last validation: the share of rounds that accepted the slot and all before it."
    return Figure("Acceptance by position", Markup(chart), caption)


def _tags(results: Results) -> list[Figure]:
    """A chart a tag, all on one axis."""
    rounds: dict[str, int] = {}
    for run in results.runs:
        for tag in run.last.by_tag if run.last else ():
            rounds[tag] = max(rounds.get(tag, 0), run.last.rounds_by_tag.get(tag, 0) if run.last else 0)
    chosen = sorted(rounds, key=lambda tag: (-rounds[tag], tag))[:TAGS]
    rows = {tag: _tag_rows(results.runs, tag) for tag in chosen}
    largest = max((row.value for some in rows.values() for row in some), default=NO_DRAFTER)
    smallest = min((row.value for some in rows.values() for row in some), default=NO_DRAFTER)
    figures = []
    for number, tag in enumerate(chosen):
        about = f"Accepted length of each run on documents tagged {tag}, at the last validation."
        chart = row_chart(
            f"tag{number}",
            tag,
            about,
            rows[tag],
            "accepted length",
            span=(min(NO_DRAFTER, smallest), max(largest, NO_DRAFTER + 0.5)),
            base=NO_DRAFTER,
            width=TAG_WIDTH,
        )
        figures.append(Figure(tag, Markup(chart), ""))
    return [figure for figure in figures if figure.chart]


def _tag_rows(runs: Sequence[Run], tag: str) -> list[Row]:
    rows = []
    for i, run in enumerate(runs):
        value = run.last.by_tag.get(tag) if run.last else None
        if value is not None:
            rows.append(Row(str(i + 1), value, _style(i), None, decimals(value, 2)))
    return rows


def _sources(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Where it all came from: each fact once, with whose it is where runs differ."""
    facts: list[tuple[str, Callable[[Run], str | None]]] = [
        ("store", lambda run: run.store),
        ("its fingerprint", lambda run: run.fingerprint),
        ("held-out documents", lambda run: str(len(run.last.documents)) if run.last and run.last.documents else None),
        ("their fingerprint", lambda run: run.last.heldout if run.last else None),
        ("devices", lambda run: shown(run.devices) if run.devices else None),
        ("versions", lambda run: ", ".join(f"{name} {version}" for name, version in run.versions.items()) or None),
    ]
    rows = []
    for name, of in facts:
        by_value: dict[str, list[str]] = {}
        for run in runs:
            if (value := of(run)) is not None:
                by_value.setdefault(value, []).append(run.name)
        for value, whose in by_value.items():
            rows.append((name, value if len(by_value) == 1 else f"{value} ({named(whose)})"))
    return rows


def _lines(runs: Sequence[Run], points: Callable[[Run], Sequence[tuple[float, float]]]) -> list[Line]:
    return [Line(str(i + 1), points(run), _style(i)) for i, run in enumerate(runs)]


def _style(index: int) -> int | None:
    return index if index < STYLES else None


def _about(runs: Sequence[Run], what: str) -> str:
    names = named([f"{i} {run.name}" for i, run in enumerate(runs[:STYLES], 1)], STYLES)
    rest = f", and {len(runs) - STYLES} others" if len(runs) > STYLES else ""
    return f"Lines of the {what} of the runs {names}{rest}; their last values are in the table of results."


def _loss_note(results: Results) -> str:
    keys = [key for key in results.differing if key.startswith("loss.") or key == "drafter.block_size"]
    if not keys:
        return ""
    return f"Runs that differ in {named(keys)} measure different losses: compare their accepted lengths."


def _interval(run: Run) -> str:
    ends = run.last.interval if run.last else None
    return f" (95% interval {ends[0]:.2f} to {ends[1]:.2f})" if ends else ""


def _said(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _breakable(text: Any) -> Markup:
    """Text that may break between the parts that names of runs and settings are made of."""
    return Markup(escape(str(text)).replace(",", ",<wbr>").replace("_", "_<wbr>"))


def _key(name: str) -> Markup:
    """A setting's section on a line, its key on the next."""
    section, _, key = name.partition(".")
    return Markup(f"{escape(section)}.<br>") + _breakable(key)
