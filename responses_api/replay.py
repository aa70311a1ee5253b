"""The stream of a response again: from its event log, or from what is stored once that is gone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from typing import Any

from django.conf import settings
from django.utils import timezone

from inference_site.generations.models import Generation
from inference_site.streams.ending import Ending
from inference_site.streams.event_log import Batch
from responses_api.events import DONE, Event, encode, error_event, opening
from responses_api.models import StoredResponse
from responses_api.recovery import shown

_CLOSING_S = 5
"""Within this time of its end the log of a response is closed, unless Redis is away."""

_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


def is_cut_off(stored: StoredResponse, logged: Sequence[Batch]) -> bool:
    """Whether the log of one that has ended will never say so: its worker died just before that,
    or Redis was away."""
    if logged[-1].ending is not None:
        return False
    patience = dt.timedelta(seconds=settings.EVENT_LOG_PATIENCE_S + _CLOSING_S)
    ended = Generation.objects.filter(public_id=stored.public_id)
    return ended.filter(finished_at__lt=timezone.now() - patience).exists()


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
