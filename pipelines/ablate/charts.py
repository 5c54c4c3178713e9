"""Small charts as inline SVG text: lines over a number, and rows of values with intervals. No script, no network.

The first eight of what is drawn differ in colour, in dash and in marker, and carry a short mark, so that they can be
told apart in black and white and by people who see colours differently; whatever comes after is thin and grey. Colours
are CSS variables, which `STYLE` sets for light, dark and paper. Knows numbers and labels, nothing of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .scales import Axis, apart, spread, ticks

WIDTH, HEIGHT = 440, 270
LEFT, RIGHT, TOP, BOTTOM = 46, 28, 12, 38
"""Margins of a line chart, in its own units; on a page a unit is about a CSS pixel."""
ROW = 15
"""Height of a row of a row chart."""
MARK_GAP = 12
"""Least distance between the marks at the ends of two lines."""
POINTS_MARKED = 12
"""A line of no more points has a marker on each; a longer one has some on its way."""

LIGHT = ("#0b62b0", "#c2410c", "#00795c", "#9b2f86", "#8a6100", "#007f99", "#5a4fcf", "#222222")
DARK = ("#6db3f2", "#ff9057", "#3ecf9f", "#e58bd3", "#d9b64a", "#4fc6dd", "#aaa3ff", "#e8e8e8")
DASHES = ("", "7 3", "2 2.5", "9 3 2 3", "4 2", "12 4", "6 2 2 2 2 2", "1 3.5")
_TRIANGLE, _SQUARE = "M0-4.4 4 3-4 3Z", "M-3.2-3.2H3.2V3.2H-3.2Z"
MARKERS = (
    "M-3.6 0A3.6 3.6 0 1 0 3.6 0A3.6 3.6 0 1 0-3.6 0Z",
    _SQUARE,
    _TRIANGLE,
    "M0-4.6 4.6 0 0 4.6-4.6 0Z",
    "M0 4.4 4-3-4-3Z",
    "M-4 0H4M0-4V4",
    "M-3.2-3.2 3.2 3.2M-3.2 3.2 3.2-3.2",
    _SQUARE,
)
HOLLOW = {7}
"""Styles whose marker is not filled."""
STYLES = len(LIGHT)


def _variables(colours: Sequence[str], rest: str, grid: str) -> str:
    return "".join(f"--s{i}:{colour};" for i, colour in enumerate(colours)) + f"--rest:{rest};--grid:{grid};"


STYLE = (
    f":root{{{_variables(LIGHT, '#8b9099', '#dcdfe4')}}}\n"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_variables(DARK, '#7b818b', '#343941')}}}}}\n"
    + "".join(f".s{i}{{--c:var(--s{i})}}" for i in range(STYLES))
    + """
.rest{--c:var(--rest)}
.chart text{font:12px system-ui,sans-serif;fill:currentColor}
.chart .mark{font-weight:700;fill:var(--c)}
.chart .grid{stroke:var(--grid);stroke-width:1}
.chart .axis{stroke:currentColor;stroke-width:1;opacity:.6}
.chart .line{fill:none;stroke:var(--c);stroke-width:1.6;stroke-linejoin:round}
.chart .s0 .line{stroke-width:2.4}
.chart .rest .line{stroke-width:1;opacity:.75}
.chart .band{fill:var(--c);opacity:.14}
.chart .point{fill:var(--c);stroke:var(--c);stroke-width:1.4}
.chart .hollow{fill:var(--page,#fff)}
.chart .lead{stroke:var(--c);stroke-width:.7}
"""
)
"""CSS that the charts need."""


@dataclass(frozen=True)
class Line:
    """Attributes:
    mark: a character or two that stand at its end; none on a grey line.
    points: x and y, by x.
    style: 0..7, or None for grey.
    band: x, low and high of a shaded interval.
    """

    mark: str
    points: Sequence[tuple[float, float]]
    style: int | None
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Row:
    """Attributes:
    mark: what stands at its left.
    value: where its marker is.
    style: 0..7, or None for grey.
    interval: ends of a whisker; without one a stem goes from the chart's base to the value.
    text: what stands at its right.
    """

    mark: str
    value: float
    style: int | None
    interval: tuple[float, float] | None
    text: str


def line_chart(
    key: str,
    title: str,
    description: str,
    lines: Sequence[Line],
    x_title: str,
    *,
    from_zero: bool = True,
    top: float | None = None,
    percent: bool = False,
) -> str:
    """Lines over whole numbers.

    Args:
        key: unlike that of any other chart of the page: a word.
        title, description: for those who do not see it.
        lines: the most important first; it is drawn over the others.
        x_title: what x counts.
        from_zero: whether x begins at 0, or else at its smallest value.
        top: what lies above is cut off.
        percent: whether y is a share.

    Returns:
        An `<svg>`; nothing where no line has a point.
    """
    drawn = [line for line in lines if line.points]
    if not drawn:
        return ""
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points] + [y for line in drawn for _, *ends in line.band for y in ends]
    ceiling = max(ys) if top is None else min(top, max(ys))
    across = spread(0 if from_zero else min(xs), max(xs), 6, LEFT, WIDTH - RIGHT, whole=True)
    floor = 0.0 if percent else min(ys)
    upwards = ticks(floor, max(ceiling, floor), 6)
    up = Axis(upwards, upwards[0], upwards[-1], HEIGHT - BOTTOM, TOP)
    parts = [_open(key, title, description, WIDTH, HEIGHT)]
    frame = f"M{LEFT - 5} {TOP - 5}H{WIDTH - RIGHT + 5}V{HEIGHT - BOTTOM + 5}H{LEFT - 5}Z"
    parts.append(f'<clipPath id="{key}-c"><path d="{frame}"/></clipPath>')
    for tick in up.ticks:
        y = _n(up.at(tick))
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y}" dy=".35em" text-anchor="end">{up.label(tick, percent)}</text>')
    parts += _bottom(across, HEIGHT - BOTTOM, x_title)
    parts.append(f'<g clip-path="url(#{key}-c)">')
    parts += [_line(line, across, up) for line in reversed(drawn)]
    parts.append("</g>")
    parts += _end_marks(drawn, across, up)
    return "".join([*parts, "</svg>"])


def row_chart(
    key: str,
    title: str,
    description: str,
    rows: Sequence[Row],
    x_title: str,
    *,
    span: tuple[float, float],
    base: float,
    width: float = WIDTH,
) -> str:
    """A row for each value, with its interval or a stem from a base.

    Args:
        key, title, description: as for `line_chart`.
        x_title: what the values are.
        span: what the axis must hold; several charts of one span compare.
        base: where a line stands, and stems begin.
        width: in CSS pixels, about.
    """
    if not rows:
        return ""
    bottom = TOP + ROW * len(rows) + 4
    room = 7 * max(len(row.text) for row in rows) + 16
    across = spread(*span, 5, 32, width - room)
    parts = [_open(key, title, description, width, bottom + BOTTOM)]
    for tick in across.ticks:
        parts.append(f'<path class="grid" d="M{_n(across.at(tick))} {TOP - 4}V{bottom}"/>')
    parts.append(f'<path class="axis" d="M{_n(across.at(base))} {TOP - 4}V{bottom}"/>')
    parts += _bottom(across, bottom, x_title)
    for number, row in enumerate(rows):
        y = TOP + ROW * number + ROW / 2
        x = _n(across.at(row.value))
        start, stop = row.interval or (base, row.value)
        ends = "".join(f"M{_n(across.at(end))} {_n(y - 3)}v6" for end in row.interval or ())
        parts.append(
            f'<g class="{_class(row.style)}">'
            f'<text class="mark" x="22" y="{_n(y)}" dy=".35em" text-anchor="end">{escape(row.mark)}</text>'
            f'<path class="line" d="M{_n(across.at(start))} {_n(y)}H{_n(across.at(stop))}{ends}"/>'
            f'{_marker(row.style, x, _n(y))}</g><text x="{_n(width - 2)}" y="{_n(y)}" dy=".35em" text-anchor="end">'
            f"{escape(row.text)}</text>"
        )
    return "".join([*parts, "</svg>"])


def swatch(style: int | None) -> str:
    """A sample of a line, for a legend; said by the text beside it, so nothing for those who do not see it."""
    dash = _dash(style)
    return (
        f'<svg class="chart swatch" viewBox="0 0 34 12" width="34" height="12" aria-hidden="true">'
        f'<g class="{_class(style)}"><path class="line"{dash} d="M1 6H33"/>{_marker(style, "17", "6")}</g></svg>'
    )


def _open(key: str, title: str, description: str, width: float, height: float) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {_n(width)} {_n(height)}" role="img" aria-labelledby="{key}-t {key}-d">'
        f'<title id="{key}-t">{escape(title)}</title><desc id="{key}-d">{escape(description)}</desc>'
    )


def _bottom(across: Axis, y: float, title: str) -> list[str]:
    parts = [f'<path class="axis" d="M{_n(across.start)} {_n(y)}H{_n(across.stop)}"/>']
    for tick in across.ticks:
        x = _n(across.at(tick))
        parts.append(f'<path class="axis" d="M{x} {_n(y)}v4"/>')
        parts.append(f'<text x="{x}" y="{_n(y + 16)}" text-anchor="middle">{across.label(tick)}</text>')
    middle = _n((across.start + across.stop) / 2)
    return [*parts, f'<text x="{middle}" y="{_n(y + 32)}" text-anchor="middle">{escape(title)}</text>']


def _line(line: Line, across: Axis, up: Axis) -> str:
    places = [(_n(across.at(x)), _n(up.at(y))) for x, y in line.points]
    parts = [f'<g class="{_class(line.style)}">']
    if line.band:
        over = [f"{_n(across.at(x))} {_n(up.at(high))}" for x, _, high in line.band]
        under = [f"{_n(across.at(x))} {_n(up.at(low))}" for x, low, _ in reversed(line.band)]
        parts.append(f'<path class="band" d="M{"L".join(over + under)}Z"/>')
    if len(places) > 1:
        parts.append(f'<path class="line"{_dash(line.style)} d="M{"L".join(" ".join(place) for place in places)}"/>')
    if line.style is not None or len(places) == 1:
        parts += [_marker(line.style, *places[at]) for at in _marked(len(places), line.style or 0)]
    return "".join([*parts, "</g>"])


def _marked(count: int, style: int) -> list[int]:
    """Which points of a line have a marker: all of few, else six, elsewhere in each style."""
    if count <= POINTS_MARKED:
        return list(range(count))
    return [int((turn + (style + 0.5) / STYLES) * count / 6) for turn in range(6)]


def _end_marks(lines: Sequence[Line], across: Axis, up: Axis) -> list[str]:
    """The marks at the lines' ends: in a column where lines reach the right edge, moved apart; else at the end."""
    parts, column = [], []
    for line in lines:
        x, y = across.at(line.points[-1][0]), max(up.at(line.points[-1][1]), TOP)
        if line.style is None or not line.mark:
            continue
        if across.stop - x < 8:
            column.append((y, x, line))
        else:
            parts.append(_mark(line, x + 7, y))
    column.sort(key=lambda item: item[0])
    heights = apart([y for y, _, _ in column], MARK_GAP, TOP, HEIGHT - BOTTOM)
    for (y, x, line), height in zip(column, heights, strict=True):
        if abs(height - y) > 3:
            way = f"M{_n(x + 4)} {_n(y)}L{_n(across.stop + 10)} {_n(height)}"
            parts.append(f'<path class="lead {_class(line.style)}" d="{way}"/>')
        parts.append(_mark(line, across.stop + 12, height))
    return parts


def _mark(line: Line, x: float, y: float) -> str:
    return f'<text class="mark {_class(line.style)}" x="{_n(x)}" y="{_n(y)}" dy=".35em">{escape(line.mark)}</text>'


def _marker(style: int | None, x: str, y: str) -> str:
    if style is None:
        return f'<path class="point" transform="translate({x} {y}) scale(.6)" d="{MARKERS[0]}"/>'
    hollow = " hollow" if style in HOLLOW else ""
    return f'<path class="point{hollow}" transform="translate({x} {y})" d="{MARKERS[style]}"/>'


def _class(style: int | None) -> str:
    return "rest" if style is None else f"s{style}"


def _dash(style: int | None) -> str:
    return f' stroke-dasharray="{DASHES[style]}"' if style is not None and DASHES[style] else ""


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
