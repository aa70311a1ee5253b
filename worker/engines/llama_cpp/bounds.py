"""Bounds on schemas for llama.cpp's own grammar engine, which has none.

It gets the parameters of tools that a model may call, and schemas for answers after thoughts.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

from inference_site.domain.errors import InvalidRequest
from inference_site.domain.request import objects_in

_MOST_OPTIONAL = 200
"""Properties of one object that need not be there. Their number squared is the time they take: 200
take a fifth of a second before the answer begins, 1,000 take 20 s."""
_MOST_OPERATORS = 50
"""In one pattern, each as often as groups repeat it. With 200 letters that may be there or not, a
token takes 20 s."""
_OPERATOR = re.compile(r"[?*+|{]")
_GROUP_COUNT = re.compile(r"\)\{(?:\d*,)?(\d{0,9})")


def check_schemas(schemas: Any, param: str) -> None:
    """Raise InvalidRequest for schemas that would keep llama.cpp too busy."""
    cost = 0
    for inner in objects_in(schemas):
        properties, required = inner.get("properties"), inner.get("required")
        if isinstance(properties, dict):
            names = required if isinstance(required, list) else []
            cost += sum(name not in names for name in properties) ** 2
        if isinstance(pattern := inner.get("pattern"), str) and _cost(pattern) > _MOST_OPERATORS:
            raise InvalidRequest("A pattern of the schema is too complex for this model.", param)
    if cost > _MOST_OPTIONAL**2:
        raise InvalidRequest("The schema has too many optional properties for this model.", param)


def _cost(pattern: str) -> int:
    counts = (int(count or 0) for count in _GROUP_COUNT.findall(pattern))
    return len(_OPERATOR.findall(pattern)) * prod(max(1, count) for count in counts)
