"""Views of Anthropic's Messages API."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from django.http import HttpResponse
from django.utils import timezone
from rest_framework.request import Request

from completions.anthropic import wire
from completions.anthropic.assembler import INPUT_TOKENS, MESSAGE, MessageAssembly
from completions.anthropic.mapping import ignored_tools, to_chat
from completions.mapping import to_generation_request
from completions.wire.chat import DialectChat
from inference_site.accounts.keys import Caller
from inference_site.accounts.rate_limits import seconds_of
from inference_site.catalogue.fleet.fleet import context_of
from inference_site.core.domain.request import GenerationRequest
from inference_site.core.errors.api_errors import InvalidRequestError, NotFoundError
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.payload import parse
from inference_site.gateway.api.schema import documented
from inference_site.gateway.api.views import ApiView
from inference_site.gateway.request_fields.capabilities import ignored_fields, require_endpoint
from inference_site.gateway.submission.model_access import ResolvedModel, served_model
from inference_site.gateway.submission.service_tiers import service_tier
from inference_site.gateway.submission.submit import Submission, respond
from inference_site.runs.queue import new_id
from inference_site.runs.streams.request_documents import Assembly, Document

_LIMITS = "x-ratelimit-"


class MessagesApiView(ApiView):
    """A view whose answers and refusals have the rate-limit headers of Anthropic's API too."""

    def finalize_response(self, request: Request, response: Any, *args: Any, **kw: Any) -> Any:
        """Add them; the reset is a time there, and here a duration."""
        response = super().finalize_response(request, response, *args, **kw)
        for name in [name for name in response.headers if name.lower().startswith(_LIMITS)]:
            kind, subject = name[len(_LIMITS) :].split("-", 1)
            value = response[name]
            if kind == "reset":
                reset = timezone.now() + timedelta(seconds=seconds_of(value))
                value = reset.isoformat(timespec="seconds").replace("+00:00", "Z")
            response[f"anthropic-ratelimit-{subject}-{kind}"] = value
        return response


class MessagesView(MessagesApiView):
    """``POST /v1/messages``."""

    @documented(
        body=wire.MessagesRequest,
        answer=wire.MessagesAnswer,
        event=wire.MessagesEvent,
        queued=True,
        error=wire.MessagesError,
    )
    def post(self, request: Request) -> HttpResponse:
        """Create a message: the assistant's next turn, or the rest of its last one."""
        body = parse(wire.MessagesRequest, request.data)
        return respond(request, message_submission(caller_of(request), body))


class CountTokensView(MessagesApiView):
    """``POST /v1/messages/count_tokens``."""

    @documented(
        body=wire.CountTokensRequest,
        answer=wire.InputTokens,
        queued=True,
        error=wire.MessagesError,
    )
    def post(self, request: Request) -> HttpResponse:
        """Count the tokens that the model would read."""
        body = parse(wire.CountTokensRequest, request.data)
        caller = caller_of(request)
        model, chat, asked = _asked(body, caller)
        require_endpoint(model, "render")
        submission = Submission(
            INPUT_TOKENS,
            new_id("tok-"),
            caller,
            Document(replace(asked, operation="render"), Assembly()),
            ignored_params=_ignored(body, model, chat, asked),
        )
        return respond(request, submission)


def message_submission(caller: Caller, body: wire.MessagesRequest) -> Submission:
    """Return the submission of a message. Raise ApiError."""
    if body.thread is not None and body.thread.type == "continue":
        # The client sends the whole conversation again.
        raise NotFoundError(
            "This site holds no threads; send all messages.",
            param="thread.previous_message_id",
            code="thread_not_found",
        )
    model, chat, asked = _asked(body, caller)
    if asked.max_output_tokens is not None and asked.max_output_tokens >= context_of(model.spec):
        asked = replace(asked, max_output_tokens=None)  # The context is the shorter limit.
    # "auto" is the default, and means priority for those who have it.
    tier = service_tier(caller, None if body.service_tier == "standard_only" else "priority")
    assembly = MessageAssembly(
        new_id("msg_"),
        model.spec.id,
        caller.project_id,
        stream=bool(body.stream),
        service_tier="priority" if tier.name == "priority" else "standard",
    )
    # So the first event of a stream knows the tokens of the prompt.
    asked = replace(asked, running_usage=assembly.stream)
    return Submission(
        MESSAGE,
        assembly.message_id,
        caller,
        Document(asked, assembly),
        stream=assembly.stream,
        ignored_params=_ignored(body, model, chat, asked),
        service_class=tier.service_class,
        end_user=chat.user or "",
    )


def _asked(
    body: wire.MessagesRequest | wire.CountTokensRequest, caller: Caller
) -> tuple[ResolvedModel, DialectChat, GenerationRequest]:
    """Return the model, the request as a chat completion, and the engine's request.

    Raise InvalidRequestError naming fields of Anthropic's.
    """
    model = served_model(caller, body.model, body)
    has_template = "chat_template" in model.capabilities
    fields = to_chat(body, caller.project_id, has_template=has_template)
    chat = parse(DialectChat, fields)
    try:
        return model, chat, to_generation_request(chat, model)
    except InvalidRequestError as exc:
        if (exc.param or "").startswith("messages["):  # Its places are those of the chat.
            exc.param = "messages"
        raise


def _ignored(
    body: wire.MessagesRequest | wire.CountTokensRequest,
    model: ResolvedModel,
    chat: DialectChat,
    asked: GenerationRequest,
) -> list[str]:
    names: list[Any] = [*body.ignored_params, *ignored_tools(body)]
    return names + ignored_fields(model, chat, asked)
