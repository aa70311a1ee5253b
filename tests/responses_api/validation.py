"""Checks what the server sends under ``/v1/responses`` and ``/v1/conversations`` against schemas.

``ClientCheck`` does it for every client of the tests, while they use it for something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from jsonschema_rs import Draft202012Validator, meta

from tests.responses_api import schemas
from tests.responses_api.event_schemas import EVENTS, SOCKET_ERROR

_RESPONSE, _CONVERSATION = r"/v1/responses/[^/]+", r"/v1/conversations/[^/]+"
_BODIES: dict[tuple[str, str], schemas.Schema] = {
    ("POST", r"/v1/responses"): schemas.RESPONSE,
    ("GET", r"/v1/responses"): schemas.listing(schemas.RESPONSE),
    ("POST", r"/v1/responses/input_tokens"): schemas.INPUT_TOKENS,
    ("POST", r"/v1/responses/compact"): schemas.COMPACTED,
    ("GET", _RESPONSE): schemas.RESPONSE,
    ("DELETE", _RESPONSE): schemas.DELETED_RESPONSE,
    ("POST", rf"{_RESPONSE}/cancel"): schemas.RESPONSE,
    ("POST", rf"{_RESPONSE}/feedback"): schemas.FEEDBACK,
    ("GET", rf"{_RESPONSE}/feedback"): schemas.listing(schemas.FEEDBACK),
    ("DELETE", rf"{_RESPONSE}/feedback"): schemas.DELETED_FEEDBACK,
    ("GET", rf"{_RESPONSE}/input_items"): schemas.listing(schemas.ITEM),
    ("POST", r"/v1/conversations"): schemas.CONVERSATION,
    ("GET", _CONVERSATION): schemas.CONVERSATION,
    ("POST", _CONVERSATION): schemas.CONVERSATION,
    ("DELETE", _CONVERSATION): schemas.DELETED_CONVERSATION,
    ("GET", rf"{_CONVERSATION}/items"): schemas.listing(schemas.ITEM),
    ("POST", rf"{_CONVERSATION}/items"): schemas.listing(schemas.ITEM),
    ("GET", rf"{_CONVERSATION}/items/[^/]+"): schemas.ITEM,
    ("DELETE", rf"{_CONVERSATION}/items/[^/]+"): schemas.CONVERSATION,
}
_ENDS = ("response.completed", "response.incomplete", "response.failed")


@lru_cache
def _validator(name: str) -> Draft202012Validator:
    schema = EVENTS[name] if name in EVENTS else _by_name()[name]
    meta.validate(schema)
    return Draft202012Validator(schema)


@lru_cache
def _by_name() -> dict[str, schemas.Schema]:
    named = {f"{method} {path}": schema for (method, path), schema in _BODIES.items()}
    named |= {"an error": schemas.ERROR_ENVELOPE, "a socket's error": SOCKET_ERROR}
    return named | {"response": schemas.RESPONSE, "item": schemas.ITEM}


def check(name: str, value: object) -> None:
    """Raise AssertionError if the value violates the schema of this name."""
    error = next(_validator(name).iter_errors(value), None)
    assert error is None, f"{name} at {error.instance_path}: {error.message[:500]}"


def check_body(method: str, path: str, status: int, body: bytes) -> None:
    """Check the JSON body of an answer. Raise AssertionError."""
    value = json.loads(body)
    if status >= 400:
        check("an error", value)
        return
    # The paths of names go before those of ids.
    name = next(f"{m} {p}" for m, p in _BODIES if m == method and re.fullmatch(p, path))
    check(name, value)


class StreamCheck:
    """Follows the events of one stream. ``take`` and ``end`` raise AssertionError.

    ``first`` is the number of the first event, or None when that is not known.
    """

    def __init__(self, first: int | None = 0) -> None:
        self._next = first
        self._items: dict[int, dict[str, Any]] = {}
        self._texts: dict[str, str] = {}
        self._types: list[str] = []
        self._is_whole = first == 0
        self._sent: list[Any] = []
        self._is_lost = False

    def take(self, event: dict[str, Any]) -> None:
        """Take the next event."""
        type_ = event["type"]
        assert type_ in EVENTS, f"no event is named {type_}"
        check(type_, event)
        number = event["sequence_number"]
        assert self._next in (None, number), f"event {number} where {self._next} was due"
        self._next = number + 1
        assert not self._ended, f"{type_} after the terminal event"
        if self._is_whole and not self._types:
            assert type_ in ("response.created", "error"), f"{type_} comes first"
        self._types.append(type_)
        # The only error without a terminal event: how the response ended is not known here.
        self._is_lost = type_ == "error" and event["code"] == "stream_lost"
        self._follow(type_, event)

    def _follow(self, type_: str, event: dict[str, Any]) -> None:
        match type_.removeprefix("response."):
            case "output_item.added":
                index = event["output_index"]
                assert index not in self._items, f"a second item at {index}"
                self._items[index] = event["item"]
                self._texts[event["item"]["id"]] = ""
            case "output_item.done":
                announced = self._items.get(event["output_index"])
                if announced is not None:
                    for key in ("id", "type", "call_id", "name"):
                        assert announced.get(key) == event["item"].get(key), f"{key} changed"
                self._sent.append(event["item"])
            case "shell_call_command.added" | "shell_call_command.done" as kind:
                place = f"{event['output_index']} {event['command_index']}"
                told = self._texts.setdefault(place, "")
                assert kind.endswith("added") or told == event["command"], "deltas differ"
            case "shell_call_command.delta":
                self._texts[f"{event['output_index']} {event['command_index']}"] += event["delta"]
            case str(kind) if kind.startswith("reasoning_summary"):
                place = f"{event['item_id']} {event['summary_index']}"
                told = self._texts.setdefault(place, "")
                if kind.endswith(".delta"):
                    self._texts[place] += event["delta"]
                elif kind.endswith("done"):
                    whole = event["part"]["text"] if "part" in event else event["text"]
                    assert told == whole, "the deltas are not the whole"
            case str(kind) if kind.endswith(".delta") and self._is_known(event):
                self._texts[event["item_id"]] += event["delta"]
            case (
                "output_text.done"
                | "reasoning_text.done"
                | "refusal.done"
                | "function_call_arguments.done"
                | "custom_tool_call_input.done"
            ):
                names = ("text", "refusal", "arguments", "input")
                whole = next(event[name] for name in names if name in event)
                if self._is_known(event):
                    assert self._texts[event["item_id"]] == whole, "the deltas are not the whole"
            case "completed" | "incomplete" | "failed" if self._is_whole:
                for item in event["response"]["output"]:
                    assert item in self._sent, f"{item['id']} is not the item that was sent"

    def _is_known(self, event: dict[str, Any]) -> bool:
        if self._is_whole:
            assert event["item_id"] in self._texts, "an event of an item that was not announced"
        return event["item_id"] in self._texts

    @property
    def _ended(self) -> bool:
        return self._is_lost or (bool(self._types) and self._types[-1] in _ENDS)

    def end(self) -> None:
        """Take the end of the stream."""
        assert self._ended or not self._types, f"the stream ends after {self._types[-1]}"


class SseCheck:
    """The same for the bytes of an SSE stream."""

    def __init__(self, first: int | None = 0) -> None:
        self._events = StreamCheck(first)
        self._rest = b""
        self._is_done = False
        self._has_events = False

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes."""
        *frames, self._rest = (self._rest + chunk).split(b"\n\n")
        for frame in frames:
            self._frame(frame.decode())

    def _frame(self, frame: str) -> None:
        assert not self._is_done, f"{frame!r} after [DONE]"
        if frame.startswith(":"):  # A comment.
            return
        if frame == "data: [DONE]":
            self._is_done = True
            return
        name, _, data = frame.partition("\n")
        assert name.startswith("event: "), f"no event: {frame[:100]!r}"
        assert data.startswith("data: "), f"no data: {frame[:100]!r}"
        event = json.loads(data[len("data: ") :])
        assert name[len("event: ") :] == event["type"]
        self._has_events = True
        self._events.take(event)

    def end(self) -> None:
        """Take the end of the stream."""
        assert self._rest == b"", "the stream ends inside an event"
        self._events.end()
        assert self._is_done or not self._has_events, "the stream ends without [DONE]"


class ClientCheck:
    """Collects in ``violations`` the errors of the answers that a client gets.

    ``watch`` is an event hook for responses, of httpx and of the library the official client uses.
    """

    def __init__(self) -> None:
        self.violations: list[str] = []

    def watch(self, response: Any) -> None:
        """Check the body of an answer while the client reads it."""
        request = response.request
        if re.match(r"/v1/(responses|conversations)(/|$)", request.url.path):
            whole, name = response.iter_raw, f"{request.method} {request.url}"
            checker = _Checker(_check_of(response), name, self.violations)
            response.iter_raw = lambda *args, **named: checker.passed(whole(*args, **named))


def _check_of(response: Any) -> SseCheck | JsonCheck:
    url = response.request.url
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        after = url.params.get("starting_after")
        return SseCheck(0 if after is None else int(after) + 1)
    return JsonCheck(response.request.method, url.path, response.status_code)


class JsonCheck:
    """Follows a JSON body."""

    def __init__(self, method: str, path: str, status: int) -> None:
        self._where = method, path, status
        self._body = b""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes."""
        self._body += chunk

    def end(self) -> None:
        """Take the end of the body."""
        check_body(*self._where, self._body)


class _Checker:
    """Passes a body on, and notes the first error of its check."""

    def __init__(self, what: SseCheck | JsonCheck, name: str, violations: list[str]) -> None:
        self._what, self._name, self._violations = what, name, violations
        self._is_noted = False

    def passed(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the chunks."""
        for chunk in chunks:
            self._try(self._what.feed, chunk)
            yield chunk
        self._try(self._what.end)

    def _try(self, step: Callable[..., None], *arguments: bytes) -> None:
        if self._is_noted:
            return
        try:
            step(*arguments)
        except Exception as exc:  # noqa: BLE001  # Whatever it is, it is noted.
            self._is_noted = True
            self._violations.append(f"{self._name}: {type(exc).__name__}: {exc}")
