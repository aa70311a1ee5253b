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
_MAX_LABELS = 6

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One value for each time bucket; None where nothing was measured."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Bar:
    """One rectangle of a stacked bar; ``series`` is the number of its series."""

    series: int
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class SeriesPath:
    """The SVG path of one series."""

    series: int
    path: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A label on an axis; ``position`` is its coordinate along the axis."""

    position: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """What the template draws, in a view box of ``WIDTH`` by ``HEIGHT``.

    Each entry of ``rows`` is the label of a bucket and its values as text.
    """

    id: str
    title: str
    description: str
    names: Sequence[str]
    bars: Sequence[Bar]
    lines: Sequence[SeriesPath]
    y_ticks: Sequence[Tick]
    x_ticks: Sequence[Tick]
    rows: Sequence[tuple[str, Sequence[str]]]
    is_empty: bool

    @property
    def areas(self) -> list[SeriesPath]:
        """The bars of each series as one path; a week of hours has hundreds of bars."""
        paths: dict[int, list[str]] = {}
        for bar in self.bars:
            rectangle = f"M{bar.x} {bar.y}h{bar.width}v{bar.height}h-{bar.width}z"
            paths.setdefault(bar.series, []).append(rectangle)
        return [SeriesPath(number, "".join(parts)) for number, parts in sorted(paths.items())]

    @property
    def table_rows(self) -> SafeString:
        """The rows as HTML; a template would take as long for them as for the rest of the page."""
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
    by_bucket = list(zip(*(one.values for one in series), strict=True))
    if shape == "bars":
        heights: list[float] = [sum(value or 0 for value in values) for values in by_bucket]
    else:
        heights = [value for values in by_bucket for value in values if value is not None]
    top = _axis_top(max(heights, default=0))
    return Chart(
        id=id_,
        title=title,
        description=_description(series, labels, text),
        names=[one.name for one in series],
        bars=_stacked_bars(series, len(labels), top) if shape == "bars" else (),
        lines=[
            SeriesPath(number, _line(one.values, top))
            for number, one in enumerate(series)
            if shape == "lines"
        ],
        y_ticks=[Tick(_y(top * part / 4, top), text(top * part / 4)) for part in (0, 2, 4)],
        x_ticks=_x_ticks(ticks or labels),
        rows=[
            (label, ["—" if value is None else text(value) for value in values])
            for label, values in zip(labels, by_bucket, strict=True)
        ],
        is_empty=not any(value for values in by_bucket for value in values),
    )


def _axis_top(highest: float) -> float:
    """Return the smallest round number that is at least the highest value."""
    if highest <= 0:
        return 1
    unit: float = 10 ** math.floor(math.log10(highest))
    return next(unit * step for step in (1, 2, 4, 5, 8, 10) if unit * step >= highest)


def _y(value: float, top: float) -> float:
    return round(TOP + _PLOT_HEIGHT * (1 - value / top), 1)


def _x(bucket: int, buckets: int) -> float:
    """Return the middle of a bucket."""
    return round(LEFT + (bucket + 0.5) * _PLOT_WIDTH / buckets, 1)


def _stacked_bars(series: Sequence[Series], buckets: int, top: float) -> list[Bar]:
    step = _PLOT_WIDTH / max(1, buckets)
    gap = min(2.0, step * 0.15)
    bars: list[Bar] = []
    for bucket in range(buckets):
        below = 0.0
        x = round(LEFT + bucket * step + gap / 2, 1)
        for number, one in enumerate(series):
            value = one.values[bucket] or 0
            if value:
                upper, lower = _y(below + value, top), _y(below, top)
                bars.append(Bar(number, x, upper, round(step - gap, 1), round(lower - upper, 1)))
                below += value
    return bars


def _line(values: Sequence[float | None], top: float) -> str:
    """Return an SVG path with gaps for missing values; a value between two gaps is a dash."""
    parts, is_drawing = [], False
    for bucket, value in enumerate(values):
        if value is None:
            is_drawing = False
            continue
        x, y = _x(bucket, len(values)), _y(value, top)
        parts.append(f"L{x} {y}" if is_drawing else f"M{x - 2} {y}L{x + 2} {y}")
        is_drawing = True
    return "".join(parts)


def _x_ticks(labels: Sequence[str]) -> list[Tick]:
    every = max(1, math.ceil(len(labels) / _MAX_LABELS))
    return [
        Tick(_x(bucket, len(labels)), labels[bucket])
        for bucket in range(every // 2, len(labels), every)
    ]


def _description(series: Sequence[Series], labels: Sequence[str], text: Format) -> str:
    """Return the text alternative: the highest value of each series, and its time."""
    sentences = []
    for one in series:
        found = [(value, label) for value, label in zip(one.values, labels, strict=True) if value]
        if found:
            highest, label = max(found)
            sentences.append(f"{one.name}: at most {text(highest)}, at {label}")
    return "; ".join(sentences) or "No data in this time range."
