"""Turns of a model that its server plays."""

from __future__ import annotations

import json
from typing import Any

from tests.upstream_server import Answer, chunks, delta, finish, text, usage

Call = tuple[str, dict[str, Any]]


def calls(*made: Call, said: str = "") -> Answer:
    """A turn of the model that makes these calls."""
    deltas = [
        delta({"tool_calls": [{"index": index, "id": f"call_{name}_{index}", "type": "function",
                               "function": {"name": name, "arguments": json.dumps(given)}}]})
        for index, (name, given) in enumerate(made)
    ]  # fmt: skip
    said_first = [text(said)] if said else []
    return chunks(*said_first, *deltas, finish("tool_calls"), usage(10, 5))


def says(*pieces: str) -> Answer:
    """A turn of the model that ends the answer."""
    return chunks(*map(text, pieces), finish(), usage(20, 7))


def search(query: str) -> Call:
    return "web_search", {"query": query}


def open_page(url: str) -> Call:
    return "open_page", {"url": url}
