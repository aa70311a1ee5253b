"""Charts that the server draws as SVG, each with a title, a description and a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from django.utils.html import format_html_join
from django.utils.safestring import SafeString

WIDTH, HEIGHT = 720, 230
LEFT, BOTTOM, TOP = 84, 32, 14
_PLOT_WIDTH, _PLOT_HEIGHT = WIDTH - LEFT, HEIGHT - BOTTOM - TOP
_MOST_LABELS = 6

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One value for each time bucket; None where nothing was measured."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Bar:
    """One rectangle of a stacked bar."""

    series: int
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Line:
    """The SVG path of one series, with a gap where a value is missing."""

    series: int
    path: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A label on an axis."""

    place: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Everything the template draws, in a view box of ``WIDTH`` by ``HEIGHT``.

    Each entry of ``rows`` is the label of a bucket and its values as text.
    """

    id: str
    title: str
    description: str
    names: Sequence[str]
    bars: Sequence[Bar]
    lines: Sequence[Line]
    y_ticks: Sequence[Tick]
    x_ticks: Sequence[Tick]
    rows: Sequence[tuple[str, Sequence[str]]]
    is_empty: bool

    @property
    def areas(self) -> list[Line]:
        """The bars of each series as one path; a week of hours has hundreds of bars."""
        paths: dict[int, list[str]] = {}
        for bar in self.bars:
            drawn = f"M{bar.x} {bar.y}h{bar.width}v{bar.height}h-{bar.width}z"
            paths.setdefault(bar.series, []).append(drawn)
        return [Line(number, "".join(parts)) for number, parts in sorted(paths.items())]

    @property
    def table_rows(self) -> SafeString:
        """The rows as HTML, built in Python: a template needs as long for them as for the page."""
        return format_html_join(
            "\n",
            '<tr><th scope="row">{}</th>{}</tr>',
            (
                (label, format_html_join("", "<td>{}</td>", ((value,) for value in values)))
                for label, values in self.rows
            ),
        )


def chart(
    id_: str,
    title: str,
    labels: Sequence[str],
    series: Sequence[Series],
    shape: Literal["bars", "lines"],
    text: Format,
    ticks: Sequence[str] | None = None,
) -> Chart:
    """Return a chart of the series as stacked bars or as lines; ``text`` formats a value.

    ``ticks`` are short labels for the axis, one for each of ``labels``.
    """
    values = [value for one in series for value in one.values if value is not None]
    top = _top(_sums(series) if shape == "bars" else values)
    return Chart(
        id=id_,
        title=title,
        description=_description(series, labels, text),
        names=[one.name for one in series],
        bars=_stacked(series, len(labels), top) if shape == "bars" else (),
        lines=_lines(series, len(labels), top) if shape == "lines" else (),
        y_ticks=[Tick(_y(top * part / 4, top), text(top * part / 4)) for part in (0, 2, 4)],
        x_ticks=_x_ticks(ticks or labels),
        rows=[
            (label, ["—" if value is None else text(value) for value in at])
            for label, *at in zip(labels, *(one.values for one in series), strict=True)
        ],
        is_empty=not any(values),
    )


def _sums(series: Sequence[Series]) -> list[float]:
    return [sum(v or 0 for v in at) for at in zip(*(one.values for one in series), strict=True)]


def _top(values: Sequence[float]) -> float:
    """Return the smallest round number that is at least the largest value."""
    most = max(values, default=0)
    if most <= 0:
        return 1
    unit: float = 10 ** math.floor(math.log10(most))
    return next(unit * step for step in (1, 2, 4, 5, 8, 10) if unit * step >= most)


def _y(value: float, top: float) -> float:
    return round(TOP + _PLOT_HEIGHT * (1 - value / top), 1)


def _stacked(series: Sequence[Series], buckets: int, top: float) -> list[Bar]:
    step = _PLOT_WIDTH / max(1, buckets)
    gap = min(2.0, step * 0.15)
    bars: list[Bar] = []
    for place in range(buckets):
        below = 0.0
        for number, one in enumerate(series):
            value = one.values[place] or 0
            if not value:
                continue
            upper, lower = _y(below + value, top), _y(below, top)
            x = LEFT + place * step + gap / 2
            bars.append(
                Bar(number, round(x, 1), upper, round(step - gap, 1), round(lower - upper, 1))
            )
            below += value
    return bars


def _lines(series: Sequence[Series], buckets: int, top: float) -> list[Line]:
    step = _PLOT_WIDTH / max(1, buckets)
    return [Line(number, _path(one, step, top)) for number, one in enumerate(series)]


def _path(series: Series, step: float, top: float) -> str:
    """Return the SVG path; a value between two gaps becomes a short dash."""
    parts, draws = [], False
    for place, value in enumerate(series.values):
        if value is None:
            draws = False
            continue
        x, y = round(LEFT + (place + 0.5) * step, 1), _y(value, top)
        parts.append(f"L{x} {y}" if draws else f"M{x - 2} {y}L{x + 2} {y}")
        draws = True
    return "".join(parts)


def _x_ticks(labels: Sequence[str]) -> list[Tick]:
    every = max(1, math.ceil(len(labels) / _MOST_LABELS))
    step = _PLOT_WIDTH / max(1, len(labels))
    return [
        Tick(round(LEFT + (place + 0.5) * step, 1), labels[place])
        for place in range(every // 2, len(labels), every)
    ]


def _description(series: Sequence[Series], labels: Sequence[str], text: Format) -> str:
    """Return the text alternative of the chart: the highest value of each series, and its time."""
    sentences = []
    for one in series:
        found = [(value, label) for value, label in zip(one.values, labels, strict=True) if value]
        if found:
            highest, label = max(found)
            sentences.append(f"{one.name}: at most {text(highest)}, at {label}")
    return "; ".join(sentences) or "No data in this time range."
