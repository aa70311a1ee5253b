"""Bounds on what llama.cpp reads by recursion: past its stack the whole worker would die.

Its stack ends at some 7,000 references that lead to each other, and at some 30,000 groups in each
other.
"""

from __future__ import annotations

from typing import Any

import orjson

from inference_site.domain.errors import InvalidRequest
from worker.engines.grammars import check_references

_MOST_GROUPS = 5_000


def encode(payload: dict[str, Any]) -> bytes:
    """Return the payload's JSON. Raise InvalidRequest for schemas with too many references."""
    encoded = orjson.dumps(payload)
    check_references(encoded)
    return encoded


def check_groups(gbnf: str, param: str) -> None:
    """Raise InvalidRequest for a grammar with too many groups."""
    if gbnf.count("(") > _MOST_GROUPS:
        raise InvalidRequest(f"A grammar may hold at most {_MOST_GROUPS} groups.", param)
