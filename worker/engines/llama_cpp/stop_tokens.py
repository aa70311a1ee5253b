"""Stop tokens: llama.cpp stops at texts, so a stop by token id is found in the log probabilities.

They name the id of each token. A token that has no text of its own brings no chunk, and is not
seen; those that end a sequence end it anyway.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a choice ends: at this token, after the entries before it."""

    token: int
    before: list[dict[str, Any]]
    after: str

    def shorten(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return the delta without the token's text and what follows it."""
        return {
            key: value.removesuffix(self.after) if isinstance(value, str) else value
            for key, value in delta.items()
        }


def cut_at(stop_ids: Collection[int], choice: dict[str, Any]) -> Cut | None:
    """Return the cut at the first of these tokens in a chunk's choice, or None."""
    entries = (choice.get("logprobs") or {}).get("content") or []
    for position, entry in enumerate(entries):
        if entry["id"] in stop_ids:
            rest = b"".join(bytes(e["bytes"]) for e in entries[position:])
            return Cut(entry["id"], entries[:position], rest.decode("utf-8", "ignore"))
    return None
