"""Output items while they are made: each knows its events and what it has come to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import orjson

from inference_site.domain.deltas import TokenLogprob
from inference_site.generations.queue import new_id
from responses_api.events import Event
from responses_api.items import output_text
from responses_api.sealing import seal

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OpenItem(Protocol):
    """An item that is being made, at its place in the output."""

    delta_type: bytes
    """Type of the events that carry its pieces."""

    def opening(self) -> Iterator[Event]:
        """Yield the events that announce it."""

    def closing(self, status: ItemStatus) -> Iterator[Event]:
        """Yield the events that end it."""

    def wire(self, status: ItemStatus) -> dict[str, Any]:
        """Return it as the response shows it."""


class MessageItem:
    """What the model says."""

    delta_type = b"response.output_text.delta"

    def __init__(self, index: int) -> None:
        self.id, self._index = new_id("msg_"), index
        self.pieces: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.tail = b',"logprobs":[]}\n\n'

    def opening(self) -> Iterator[Event]:
        item = {"id": self.id, "type": "message", "status": "in_progress"}
        yield _added(self._index, {**item, "role": "assistant", "content": []})
        yield "response.content_part.added", {**self._place(), "part": output_text("")}

    def closing(self, status: ItemStatus) -> Iterator[Event]:
        text, place = "".join(self.pieces), self._place()
        done = {**place, "text": text, "logprobs": self.logprobs}
        yield "response.output_text.done", done
        yield "response.content_part.done", {**place, "part": self._part(text)}
        yield _done(self._index, self.wire(status))

    def wire(self, status: ItemStatus) -> dict[str, Any]:
        content = [self._part("".join(self.pieces))]
        item = {"id": self.id, "type": "message", "status": status}
        return {**item, "role": "assistant", "content": content}

    def head(self) -> dict[str, Any]:
        """Return the fields of its deltas that never change."""
        return self._place()

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self._index, "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        return {**output_text(text), "logprobs": self.logprobs}


class ReasoningItem:
    """What the model thinks before it speaks. ``seal_for`` is the project it is sealed for."""

    delta_type = b"response.reasoning_text.delta"
    tail = b"}\n\n"

    def __init__(self, index: int, seal_for: int | None) -> None:
        self.id, self._index, self._seal_for = new_id("rs_"), index, seal_for
        self._sealed = ""
        self.pieces: list[str] = []

    def opening(self) -> Iterator[Event]:
        item = {"id": self.id, "type": "reasoning", "status": "in_progress"}
        yield _added(self._index, {**item, "summary": [], "content": []})
        yield "response.content_part.added", {**self.head(), "part": self._part("")}

    def closing(self, status: ItemStatus) -> Iterator[Event]:
        text = "".join(self.pieces)
        yield "response.reasoning_text.done", {**self.head(), "text": text}
        yield "response.content_part.done", {**self.head(), "part": self._part(text)}
        yield _done(self._index, self.wire(status))

    def wire(self, status: ItemStatus) -> dict[str, Any]:
        text = "".join(self.pieces)
        sealed: dict[str, str] = {}
        if self._seal_for is not None:  # Once: what is sealed twice is two different texts.
            self._sealed = self._sealed or seal(text, self._seal_for)
            sealed = {"encrypted_content": self._sealed}
        item = {"id": self.id, "type": "reasoning", "status": status, "summary": []}
        return {**item, "content": [self._part(text)], **sealed}

    def head(self) -> dict[str, Any]:
        """Return the fields of its deltas that never change."""
        return {"item_id": self.id, "output_index": self._index, "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}


class CallItem:
    """A call of a function, or of a custom tool, which takes one text."""

    tail = b"}\n\n"

    def __init__(self, index: int, call_id: str, name: str, is_custom: bool) -> None:
        self.id, self._index = new_id("ctc_" if is_custom else "fc_"), index
        self._call_id, self._name = call_id, name
        self.pieces: list[str] = []
        self._is_custom = is_custom
        self._type = "custom_tool_call" if is_custom else "function_call"
        self._field = "input" if is_custom else "arguments"
        event = "custom_tool_call_input" if is_custom else "function_call_arguments"
        self._event = f"response.{event}"
        self.delta_type = f"{self._event}.delta".encode()

    def opening(self) -> Iterator[Event]:
        yield _added(self._index, self._item("in_progress", ""))

    def closing(self, status: ItemStatus) -> Iterator[Event]:
        text = self._text()
        if not self.pieces:  # Readers expect a delta, also of a call without arguments.
            yield f"{self._event}.delta", {**self.head(), "delta": text}
        name = {} if self._is_custom else {"name": self._name}
        yield f"{self._event}.done", {**self.head(), self._field: text, **name}
        yield _done(self._index, self.wire(status))

    def wire(self, status: ItemStatus) -> dict[str, Any]:
        return self._item(status, self._text())

    def head(self) -> dict[str, Any]:
        """Return the fields of its deltas that never change."""
        return {"item_id": self.id, "output_index": self._index}

    def _text(self) -> str:
        return "".join(self.pieces) or ("" if self._is_custom else "{}")

    def _item(self, status: str, text: str) -> dict[str, Any]:
        called = {"call_id": self._call_id, "name": self._name, self._field: text}
        return {"id": self.id, "type": self._type, "status": status, **called}


AnyItem = MessageItem | ReasoningItem | CallItem


def delta_start(item: AnyItem) -> bytes:
    """Return what the frame of each of its deltas has between its number and its text."""
    return b"," + orjson.dumps(item.head())[1:-1] + b',"delta":'


def wire_logprobs(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return log probabilities as responses tell them."""
    return [
        {**_logprob(entry), "top_logprobs": [_logprob(other) for other in entry.top]}
        for entry in logprobs
    ]


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.text_bytes)}


def _added(index: int, item: dict[str, Any]) -> Event:
    return "response.output_item.added", {"output_index": index, "item": item}


def _done(index: int, item: dict[str, Any]) -> Event:
    return "response.output_item.done", {"output_index": index, "item": item}
