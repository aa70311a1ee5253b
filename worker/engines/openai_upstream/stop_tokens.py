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
        """Return the delta, or a call in it, without the token's text and what follows it."""
        return {key: self._shortened(key, value) for key, value in delta.items()}

    def _shortened(self, key: str, value: Any) -> Any:
        match key, value:
            case (("content" | "reasoning_content" | "arguments"), str(text)):
                return text.removesuffix(self.after)
            case "function", dict(function):
                return self.shorten(function)
            case "tool_calls", list(calls):
                return [self.shorten(call) for call in calls]
            case _:
                return value


def cut_at(stop_ids: Collection[int], choice: dict[str, Any]) -> Cut | None:
    """Return the cut at the first of these tokens in a chunk's choice, or None."""
    entries = (choice.get("logprobs") or {}).get("content") or []
    for position, entry in enumerate(entries):
        if entry["id"] in stop_ids:
            # A character of which the token is a part is cut as a whole.
            after = _text(entries).removeprefix(_text(entries[:position]))
            return Cut(entry["id"], entries[:position], after)
    return None


def _text(entries: list[dict[str, Any]]) -> str:
    """Return the whole characters of these tokens."""
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "ignore")
