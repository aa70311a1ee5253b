"""The stream of a response again: from its event log, or from what is stored once that is gone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.conf import settings

from responses_api.events import DONE, Event, encode, error_event, opening
from responses_api.models import StoredResponse
from responses_api.recovery import shown
from worker.assembly import Ending
from worker.event_log import Batch, read_log

_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


def logged(stored: StoredResponse) -> list[Batch]:
    """Return what the log has of the stream; nothing once it has expired."""
    return read_log(stored.public_id)


def compacted(stored: StoredResponse) -> list[Batch]:
    """Return the stream of a response that has ended, made from what is stored.

    The items come in the order they had, each part in one delta.
    """
    response = shown(stored)
    frames = list(opening(_beginning(response)))
    for type_, fields in _events(response, stored.error):
        frames.append(encode(type_, len(frames), fields))
    if settings.RESPONSES_SEND_DONE:
        frames.append(DONE)
    return [Batch(0, frames, Ending((), 200, b""))]


def _beginning(response: dict[str, Any]) -> dict[str, Any]:
    unset = ("completed_at", "error", "incomplete_details", "usage")
    return {**response, **dict.fromkeys(unset), "output": []}


def _events(response: dict[str, Any], error: dict[str, Any] | None) -> Iterator[Event]:
    for index, item in enumerate(response["output"]):
        yield "response.output_item.added", {"output_index": index, "item": _announced(item)}
        yield from _content(item, index)
        yield "response.output_item.done", {"output_index": index, "item": item}
    if error is not None:
        yield error_event(error)
    status = response["status"]
    name = status if status in ("completed", "incomplete") else "failed"
    yield f"response.{name}", {"response": response}


def _announced(item: dict[str, Any]) -> dict[str, Any]:
    emptied = {"content": [], "arguments": "", "input": ""}
    begun = {key: emptied.get(key, value) for key, value in item.items()}
    begun.pop("encrypted_content", None)
    return {**begun, "status": "in_progress"}


def _content(item: dict[str, Any], index: int) -> Iterator[Event]:
    place = {"item_id": item["id"], "output_index": index}
    event = _EVENTS[item["type"]]
    if item["type"] in ("function_call", "custom_tool_call"):
        field = "arguments" if item["type"] == "function_call" else "input"
        name = {"name": item["name"]} if field == "arguments" else {}
        yield f"{event}.delta", {**place, "delta": item[field]}
        yield f"{event}.done", {**place, field: item[field], **name}
        return
    for number, part in enumerate(item.get("content", ())):
        yield from _part(part, event, {**place, "content_index": number})


def _part(part: dict[str, Any], event: str, place: dict[str, Any]) -> Iterator[Event]:
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    emptied = {**part, "text": "", **({"logprobs": []} if logprobs else {})}
    yield "response.content_part.added", {**place, "part": emptied}
    if part["text"]:
        yield f"{event}.delta", {**place, "delta": part["text"], **logprobs}
    yield f"{event}.done", {**place, "text": part["text"], **logprobs}
    yield "response.content_part.done", {**place, "part": part}
