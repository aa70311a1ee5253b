"""Waiting until the site that ``manage.py serve`` starts is ready, and saying why it is not."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException

from inference_site.supervisor.stack import Stack

_MODEL = re.compile(r"([^,(]+?)(?: \(([^)]*)\))?(?:, |$)")
_SAY_AGAIN_S = 5.0
_PERIOD_S = 0.25
"""Each look is a request with a connection to PostgreSQL of its own."""


def wait_until_ready(url: str, stack: Stack, say: Callable[[str], None]) -> list[str]:
    """Return when the site can answer; return the models that could not be loaded.

    Say what is waited for. Raise ServiceError when the web process or the worker cannot start.
    """
    said, say_at = "", time.monotonic() + _SAY_AGAIN_S
    while True:
        fault = _fault(url)
        waiting = _waiting(fault)
        if fault is not None and not waiting:
            return sorted(_models(fault))
        stack.supervisor.restart_dead()
        stack.require_started()
        if waiting and waiting != said and time.monotonic() > say_at:
            said, say_at = waiting, time.monotonic() + _SAY_AGAIN_S
            say(f"waiting for {waiting}")
        time.sleep(_PERIOD_S)


def _fault(url: str) -> dict[str, str] | None:
    """Return the checks that fail, with what they say; None while nothing answers."""
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=5) as answer:  # noqa: S310  # Our own address.
            models: dict[str, str] = json.loads(answer.read())["models"]
        # A worker of an earlier ``serve`` may have said so.
        coming = [f"{name} (loading)" for name, state in models.items() if state == "restarting"]
        return {"workers": f"no live worker for: {', '.join(coming)}"} if coming else {}
    except urllib.error.HTTPError as exc:
        checks: dict[str, str] = json.loads(exc.read()).get("checks", {"web": "busy"})
        return {name: text for name, text in checks.items() if text != "ok"}
    except (OSError, HTTPException):
        return None


def _waiting(fault: dict[str, str] | None) -> str:
    """Return what may still become ready, in words; models that have failed will not."""
    if fault is None:
        return "the web process"
    parts = [name for name in fault if name != "workers"]
    loading = [f"{model} ({state})" for model, state in _models(fault).items() if state != "failed"]
    return ", ".join([*parts, *loading])


def _models(fault: dict[str, str]) -> dict[str, str]:
    """Return the models that no worker serves, with their states."""
    _, _, named = fault.get("workers", "").partition(": ")
    return {found[1]: found[2] or "starting" for found in _MODEL.finditer(named)}
