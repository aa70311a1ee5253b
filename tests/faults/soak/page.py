"""The section of docs/reliability.md on the soak, its last, and the plot of it."""

from __future__ import annotations

from pathlib import Path

from tests.faults.soak.sampling import Samples, Series

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reliability.md"
PLOT = PAGE.parent / "images" / "soak.svg"
_TITLE = "## Soak\n"
_HEAD = (
    _TITLE
    + """
`make soak` keeps {clients} clients of the kinds above at work for half an hour, without a fault,
and looks at every process each 10 s. Last run: {date}, {minutes:.0f} minutes, {requests:,}
requests, promises broken: {broken}. The slope is that of a line through all samples after the
first {warm_up:.0f} minutes.

![what each process held](images/soak.svg)

| process | what | after {warm_up:.0f} minutes | at the end | most | slope per hour |
|---|---|---|---|---|---|
"""
)
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 720, 150, 70, 26, 24
_COLOURS = {
    "web": "#1b6ac9",
    "worker": "#c2410c",
    "beat": "#15803d",
    "PostgreSQL": "#6d28d9",
    "Redis": "#b91c1c",
}
_PANELS = {
    "memory": "Memory, MiB (resident; of Redis, what it uses)",
    "descriptors": "Open descriptors",
    "threads": "Threads",
    "connections": "Connections to PostgreSQL",
}


def section_of(page: str) -> str:
    """Return this section of a page, which is its last; nothing if it has none."""
    _, title, rest = page.partition("\n" + _TITLE)
    return title + rest


def with_section(page: str, section: str) -> str:
    """Return the page with this section as its last."""
    return page.removesuffix(section_of(page)) + "\n" + section


def section(samples: Samples, warm_up: float, **facts: object) -> str:
    """Return the section. ``facts`` are the date, clients, requests and broken promises."""
    head = _HEAD.format(minutes=samples.minutes[-1], warm_up=warm_up, **facts)
    lines = [_line(samples, series, warm_up) for series in samples.series.values()]
    return head + "\n".join(lines) + "\n"


def _line(samples: Samples, series: Series, warm_up: float) -> str:
    after = next(i for i, m in enumerate(samples.minutes) if m >= warm_up)
    shown = [series.values[after], series.values[-1], max(series.values)]
    digits = 1 if series.unit else 0
    figures = " | ".join(f"{value:,.{digits}f} {series.unit}".strip() for value in shown)
    grows = f"{samples.slope_per_hour(series, warm_up):+,.1f} {series.unit}".strip()
    return f"| {series.process} | {series.measure} | {figures} | {grows} |"


def plot(samples: Samples) -> str:
    """Return the plot as SVG: a panel for each measure, a line for each process."""
    panels = [
        f'<g transform="translate(0 {number * _HEIGHT})">{_panel(samples, measure, title)}</g>'
        for number, (measure, title) in enumerate(_PANELS.items())
    ]
    size = f"{_WIDTH} {len(_PANELS) * _HEIGHT}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(panels)}</svg>\n'
    )


def _panel(samples: Samples, measure: str, title: str) -> str:
    found = samples.of(measure)
    most = max(max(series.values) for series in found) * 1.05 or 1.0
    floor = _HEIGHT - _BOTTOM
    drawn = [f'<text x="{_LEFT}" y="14" font-weight="bold">{title}</text>']
    for part in (0, 0.5, 1):
        y = floor - part * (floor - _TOP)
        drawn.append(f'<path d="M{_LEFT} {y}H{_WIDTH - 10}" stroke="#ddd"/>')
        drawn.append(
            f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{part * most:,.0f}</text>'
        )
    for number, series in enumerate(found):
        colour = _COLOURS[series.process]
        points = " ".join(
            f"{_x(samples, minute):.1f},{floor - value / most * (floor - _TOP):.1f}"
            for minute, value in zip(samples.minutes, series.values, strict=True)
        )
        drawn.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        at = _WIDTH - 90 * (len(found) - number)
        drawn.append(f'<text x="{at}" y="14" fill="{colour}">{series.process}</text>')
    for minute in range(0, int(samples.minutes[-1]) + 1, 5):
        at_minute = f'x="{_x(samples, minute):.1f}" y="{floor + 14}" text-anchor="middle"'
        drawn.append(f"<text {at_minute}>{minute} min</text>")
    return "".join(drawn)


def _x(samples: Samples, minute: float) -> float:
    return _LEFT + minute / (samples.minutes[-1] or 1) * (_WIDTH - _LEFT - 20)
