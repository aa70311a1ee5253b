"""Frames → what they say of a response's output: the assembler's fold, read backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from responses_api.events import decode
from responses_api.output import AnyItem, CallItem, MessageItem, ReasoningItem


class Transcript:
    """What the frames of a response that has not ended say of its output."""

    def __init__(self, frames: Sequence[bytes]) -> None:
        self.next_index = 0
        self.open_item: AnyItem | None = None
        self.output: list[dict[str, Any]] = []
        for frame in frames:
            self._take(decode(frame))

    def _take(self, event: dict[str, Any]) -> None:
        match event.get("type", "").removeprefix("response."):
            case "in_progress":
                self.output = []  # What was made before is of an attempt that was begun anew.
            case "output_item.added":
                self.next_index = event["output_index"] + 1
                self.open_item = _revived(event["item"], event["output_index"])
            case "output_item.done":
                self.open_item = None
                self.output.append(event["item"])
            case str(type_) if type_.endswith(".delta") and self.open_item is not None:
                self.open_item.pieces.append(event["delta"])
                if isinstance(self.open_item, MessageItem):
                    self.open_item.logprobs += event["logprobs"]

    def shown_output(self) -> list[dict[str, Any]]:
        """Return the output as it is so far."""
        if self.open_item is None:
            return self.output
        return [*self.output, self.open_item.wire("in_progress")]


def _revived(announced: dict[str, Any], index: int) -> AnyItem:
    item: AnyItem
    match announced["type"]:
        case "message":
            item = MessageItem(index)
        case "reasoning":
            item = ReasoningItem(index, None)
        case type_:
            is_custom = type_ == "custom_tool_call"
            item = CallItem(index, announced["call_id"], announced["name"], is_custom)
    item.id = announced["id"]
    return item
