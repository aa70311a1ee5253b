"""The result of one check of `manage.py doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How severe a finding is."""

    OK = "ok"
    WARN = "warn"  # It works now, but not for long or not for everybody.
    FAIL = "fail"  # Requests fail, or will at the next restart.


@dataclass(frozen=True, slots=True)
class Finding:
    """What was checked and found; ``fix`` says what to do, and is empty when all is well."""

    level: Level
    what: str
    found: str
    fix: str = ""


Check = Callable[[], Iterable[Finding]]


def judged(what: str, found: str, fix: str, *, warn: bool = False, fail: bool = False) -> Finding:
    """Return a finding of the worst level whose condition holds."""
    level = Level.FAIL if fail else Level.WARN if warn else Level.OK
    return Finding(level, what, found, "" if level == Level.OK else fix)


def guarded(what: str, check: Check, fix: str) -> list[Finding]:
    """Return what a check finds; an exception is a finding, too."""
    try:
        return list(check())
    except Exception as exc:  # noqa: BLE001  # The doctor looks at what is broken.
        lines = str(exc).strip().splitlines() or [""]
        return [Finding(Level.FAIL, what, f"{type(exc).__name__}: {lines[0]}".rstrip(": "), fix)]
