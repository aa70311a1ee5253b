"""The page of the console's parts: each component once, with its name and how to use it."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from inference_site.console.tiles import Tile
from inference_site.console.usage_page import Series, chart

STATES = {
    "good": "completed loaded ready works passed",
    "at work": "running in_progress loading judging",
    "waits": "queued draining incomplete acknowledged snoozed",
    "bad": "failed firing refused missing broken",
    "neither": "unloaded",
}
"""The words of badges, by what their colour means."""


def parts_context(request: HttpRequest) -> dict[str, Any]:
    """Return examples for the parts; the page is for administrators, as the tables are."""
    if not request.user.has_perm("auth.view_user"):
        raise PermissionDenied
    return {
        "states": {meaning: words.split() for meaning, words in STATES.items()},
        "tiles": [
            Tile("Requests", "1,204", "of these 3 failed", link="#tiles", change="12 % more"),
            Tile("Errors", "3", "of the last 5,000", is_bad=True),
        ],
        "charts": [
            chart("tokens", "Bars", _TIMES, _series("Input", "Cached", "Output"), "bars", str),
            chart("ttft", "Lines", _TIMES, _series("p50", "p95"), "lines", str),
            chart("speed", "Lines of speeds", _TIMES, _series("p50", "p5"), "lines", str),
        ],
    }


_TIMES = ("10:00", "11:00", "12:00")


def _series(*names: str) -> list[Series]:
    return [Series(name, [60 + 20 * i, 90, 40 + 30 * i]) for i, name in enumerate(names)]
