"""Which hosts may be fetched from."""

from __future__ import annotations

from collections.abc import Sequence


def is_listed(host: str, allowed: Sequence[str]) -> bool:
    """Return whether the host is one of these; ``.example.org`` is also all names below it."""
    name = host.lower().rstrip(".")
    return any(_matches(name, pattern.lower().rstrip(".")) for pattern in allowed)


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("."):
        return name.endswith(pattern) or name == pattern[1:]
    return name == pattern
