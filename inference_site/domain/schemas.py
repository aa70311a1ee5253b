"""JSON schemas, as far as their size is concerned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def objects_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of a JSON value, whether it is a schema or holds some."""
    layer = [schema]
    while layer:
        value = layer.pop()
        if isinstance(value, dict):
            yield value
            layer.extend(value.values())
        elif isinstance(value, list):
            layer.extend(value)
