"""Read-only admin of stored chat completions, which shows their messages as bubbles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse

from completions.models import StoredCompletion
from completions.storage import with_previews
from inference_site.cases.judging import text_of
from inference_site.cases.models import SavedAnswer
from inference_site.cases.sources import CaseSourceAdmin
from inference_site.core.admin_pages.base_admin import RelatedFilter, SinceFilter
from inference_site.core.admin_pages.labels import (
    Bubble,
    Piece,
    image_piece,
    may_see_content,
    text_piece,
)
from inference_site.gateway.feedback_admin import RatingFilter
from inference_site.runs.admin import ModelFilter

Message = Mapping[str, Any]


@admin.register(StoredCompletion)
class StoredCompletionAdmin(CaseSourceAdmin):
    """Admin of chat completions that were requested with ``store: true``."""

    case_endpoint = "/v1/chat/completions"
    list_display = ("short_id", "time", "project", "model", "shown_rating", "shown_metadata")
    list_filter = (RatingFilter, ModelFilter, SinceFilter, ("project", RelatedFilter))
    list_select_related = ("project",)
    fields = ("public_id", "project", "model", "metadata", "created_at")
    change_form_template = "completions/admin/stored_completion.html"

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Add previews for users who may see content."""
        rows = super().get_queryset(request)
        return with_previews(rows) if may_see_content(request) else rows

    @admin.display(description="ID")
    def short_id(self, stored: StoredCompletion) -> str:
        return f"{stored.public_id[:17]}…"

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show the messages and answers to users with the permission for content."""
        context = {**(extra_context or {}), "may_see": may_see_content(request)}
        stored = self.get_object(request, object_id) if context["may_see"] else None
        if stored is not None:
            answers = [choice["message"] for choice in stored.completion["choices"]]
            context["bubbles"] = bubbles([*stored.messages, *answers])
            context |= self.feedback_context(request, stored)
            context |= self.case_context(request, stored)
        return super().change_view(request, object_id, form_url, context)

    def saved_answer(self, stored: StoredCompletion) -> SavedAnswer:
        """Return the messages and the answer; a stored completion has no other fields."""
        return SavedAnswer(
            stored.public_id, {"messages": stored.messages}, text_of(stored.completion)
        )


def bubbles(messages: Iterable[Message]) -> list[Bubble]:
    """Return the messages of a chat as bubbles; the result of a call is in the call's bubble."""
    messages = list(_legacy_as_tools(messages))
    results = {
        message["tool_call_id"]: _pieces(message.get("content"))
        for message in messages
        if message["role"] == "tool"
    }
    called = {call["id"] for message in messages for call in message.get("tool_calls") or ()}
    return [
        bubble
        for message in messages
        if not (message["role"] == "tool" and message["tool_call_id"] in called)
        for bubble in _bubbles(message, results)
    ]


def _legacy_as_tools(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages, with calls and results of legacy ``functions`` as those of tools."""
    called: dict[str, str] = {}
    for place, message in enumerate(messages):
        if message["role"] == "function":
            yield {**message, "role": "tool", "tool_call_id": called.pop(message["name"], "")}
        elif call := message.get("function_call"):
            called[call["name"]] = id_ = f"function_call {place}"
            yield {**message, "tool_calls": [{"id": id_, "function": call}]}
        else:
            yield message


def _bubbles(message: Message, results: Mapping[str, list[Piece]]) -> Iterator[Bubble]:
    if message["role"] == "tool":
        yield Bubble("result", "tool", _pieces(message.get("content")))
        return
    if reasoning := message.get("reasoning_content"):
        yield Bubble("reasoning", "assistant", [text_piece(reasoning)])
    content = _pieces(message.get("content") or message.get("refusal"))
    if content:
        yield Bubble("message", message["role"], content)
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call.get("custom") or {}
        arguments = function.get("arguments") or function.get("input") or ""
        name, result = function.get("name", ""), results.get(call["id"])
        yield Bubble("call", message["role"], [text_piece(arguments)], name, result)


def _pieces(content: Any) -> list[Piece]:
    if isinstance(content, str):
        return [text_piece(content)]
    pieces: list[Piece] = []
    for part in content or ():
        match part["type"]:
            case "image_url":
                pieces.append(image_piece(part["image_url"]["url"]))
            case "refusal" | "text" as kind:
                pieces.append(text_piece(part[kind]))
            case other:
                pieces.append(Piece("note", f"A content part of type {other}."))
    return pieces
