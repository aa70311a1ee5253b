"""What the scripts of Python clients share: where the site is, and how a step is reported."""

from __future__ import annotations

import base64
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path

URL = os.environ["SITE_URL"]
KEY = os.environ["SITE_KEY"]
MODEL = os.environ["SITE_MODEL"]
SMALL = os.environ["SITE_SMALL_MODEL"]
WEATHER = 'Please look.\nCALL get_weather {"city": "Oslo"}'
SUNNY = "sunny in Oslo"
PERSON = 'SAY {"name": "Ann", "age": 7}'
PICTURE = base64.b64encode(Path(__file__).with_name("picture.png").read_bytes()).decode()
SEEN = "I see 64 x 48."


def step(name: str) -> Callable[[Callable[[], object]], None]:
    """Run a function at once, and print the step with its error, if there is one."""

    def run(work: Callable[[], object]) -> None:
        error = ""
        try:
            work()
        except Exception as exc:  # noqa: BLE001  # Whatever a client raises is its result.
            error = f"{type(exc).__name__}: {exc}"[:300] or type(exc).__name__
            if "-v" in os.environ.get("SITE_OPTIONS", ""):
                traceback.print_exc()
        print("STEP " + json.dumps({"step": name, "error": error}), flush=True)

    return run


def holds(text: str | None, part: str) -> None:
    """Raise AssertionError if the text does not hold the part."""
    assert part in (text or ""), f"{part!r} is not in {text!r}"


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: The name of the city.
    """
    return f"sunny in {city}"
