"""Views of Anthropic's Messages API."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from django.http import HttpResponse
from django.utils import timezone
from rest_framework.request import Request

from completions.anthropic import wire
from completions.anthropic.assembler import INPUT_TOKENS, MESSAGE, MessageAssembly
from completions.anthropic.mapping import (
    History,
    client_field,
    client_path,
    ignored_tools,
    long_names,
    to_chat,
    unused_thinking,
    with_client_paths,
)
from completions.anthropic.server_tools import ServerTools, numbered, server_tools
from completions.anthropic.tool_changes import PlacedTool, client_tools
from completions.mapping import cannot_continue, to_generation_request
from completions.wire.chat import DialectChat
from inference_site.accounts.keys import Caller
from inference_site.accounts.rate_limits import seconds_of
from inference_site.catalogue.fleet.fleet import context_of
from inference_site.core.domain.request import GenerationRequest
from inference_site.core.domain.site_tools import WebResult
from inference_site.core.errors.api_errors import InvalidRequestError, NotFoundError
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.payload import parse
from inference_site.gateway.api.schema import documented
from inference_site.gateway.api.views import ApiView
from inference_site.gateway.request_fields.capabilities import ignored_fields, require_endpoint
from inference_site.gateway.submission.admission import service_tier
from inference_site.gateway.submission.model_access import ResolvedModel, served_model
from inference_site.gateway.submission.submit import Submission, respond
from inference_site.runs.queue import new_id
from inference_site.runs.streams.request_documents import Assembly, Document

_LIMITS = "x-ratelimit-"
_MCP_BETA, _LISTING_BETA = "mcp-client-", "mcp-client-2026-09-15"
"""Versions of the MCP connector in the header ``anthropic-beta``: of all, and the first one whose
answers have blocks of the type ``mcp_tool_listing``."""


class MessagesApiView(ApiView):
    """A view whose answers and refusals have the rate-limit headers of Anthropic's API too."""

    def finalize_response(self, request: Request, response: Any, *args: Any, **kw: Any) -> Any:
        """Add Anthropic's headers to OpenAI's: their reset is a time, and OpenAI's a duration."""
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
        betas = request.headers.get("anthropic-beta", "")
        return respond(request, message_submission(caller_of(request), body, betas))


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
        given = _Given.of(body, caller)
        require_endpoint(given.model, "render")
        submission = Submission(
            INPUT_TOKENS,
            new_id("tok-"),
            caller,
            Document(replace(given.asked, operation="render"), Assembly()),
            ignored_params=given.ignored_params,
        )
        return respond(request, submission)


def message_submission(caller: Caller, body: wire.MessagesRequest, betas: str = "") -> Submission:
    """Return the submission of a message; ``betas`` are the names of its header. Raise ApiError."""
    if body.thread is not None and body.thread.type == "continue":
        # The client sends the whole conversation again.
        raise NotFoundError(
            "This site holds no threads; send all messages.",
            param="thread.previous_message_id",
            code="thread_not_found",
        )
    given = _Given.of(body, caller)
    model, asked, tools = given.model, given.asked, given.tools
    if asked.max_output_tokens is not None and asked.max_output_tokens >= context_of(model.spec):
        asked = replace(asked, max_output_tokens=None)  # The context is the shorter limit.
    # How much of the context is left is known only to the server that counts the prompt.
    asked = replace(asked, lowers_max_output=asked.max_output_tokens is not None)
    has_content = body.max_tokens > 0
    # "auto" is the default, and means priority for those who have it.
    tier = service_tier(caller, None if body.service_tier == "standard_only" else "priority")
    assembly = MessageAssembly(
        new_id("msg_"),
        model.spec.id,
        caller.project_id,
        stream=bool(body.stream),
        service_tier="priority" if tier.name == "priority" else "standard",
        routes=tools.routes,
        unlisted=tools.unlisted if has_content else [],
        max_searches=tools.max_searches,
        results=numbered(given.results) if tools.options else [],
        shows_listings=_knows_listings(betas),
        names=long_names(given.clients),
        hides_thinking=body.thinking is not None and body.thinking.display == "omitted",
        site_tools=tools.options if has_content else [],
        has_content=has_content,
    )
    # So the first event of a stream knows the tokens of the prompt.
    asked = replace(asked, running_usage=assembly.stream)
    return Submission(
        MESSAGE,
        assembly.message_id,
        caller,
        Document(asked, assembly),
        stream=assembly.stream,
        ignored_params=given.ignored_params,
        service_class=tier.service_class,
        end_user=given.end_user,
    )


def _knows_listings(betas: str) -> bool:
    """Whether a client knows the block ``mcp_tool_listing``, by its newest version of MCP."""
    names = (name.strip() for name in betas.split(","))
    return max((n for n in names if n.startswith(_MCP_BETA)), default="") >= _LISTING_BETA


@dataclass(frozen=True, slots=True)
class _Given:
    """A request: its model, what the engine is asked, and the tools that the site runs.

    ``clients`` are the tools of the client, ``results`` those of earlier searches among its
    messages.
    """

    model: ResolvedModel
    asked: GenerationRequest
    tools: ServerTools
    clients: list[PlacedTool]
    results: list[WebResult]
    ignored_params: list[str]
    end_user: str

    @classmethod
    def of(cls, body: wire.Prompt, caller: Caller) -> _Given:
        """Read a request. Raise InvalidRequestError naming fields of Anthropic's."""
        model = served_model(caller, body.model, body)
        tools = server_tools(body, caller.project_id)
        history = History(caller.project_id)
        has_template = "chat_template" in model.capabilities
        clients, functions = client_tools(body), tools.functions.values()
        converted = to_chat(body, history, clients, functions, has_template=has_template)
        must_call = body.tool_choice is not None and body.tool_choice.type in ("any", "tool")
        if must_call and "tools" not in converted and not tools.unlisted:
            raise InvalidRequestError(
                "Invalid 'tool_choice': there is no tool that could be called.", param="tool_choice"
            )
        try:
            chat = parse(DialectChat, converted)
            asked = to_generation_request(chat, model)
        except InvalidRequestError as exc:
            path = client_path(converted, exc.param or "")
            if path == "tools" and not body.tools:  # All tools are those of MCP servers.
                path = "mcp_servers"
            exc.name_field(path)
            raise
        asked = with_client_paths(asked, converted)
        if tools.unlisted:
            asked = _with_listing(asked, body, model)
        names: list[Any] = [*body.ignored_params, *ignored_tools(clients)]
        names += unused_thinking(body, converted)
        # Names with brackets are those of the client's tools.
        names += (n if "[" in n else client_field(n) for n in ignored_fields(model, chat, asked))
        return cls(model, asked, tools, clients, history.results, names, chat.user or "")


def _with_listing(
    asked: GenerationRequest, body: wire.Prompt, model: ResolvedModel
) -> GenerationRequest:
    """Return the request of a model that will be offered tools which are not known yet."""
    if "tools" not in model.capabilities:
        raise InvalidRequestError(
            f"Invalid 'mcp_servers': the model `{model.spec.id}` calls no tools.",
            param="mcp_servers",
            code="unsupported_parameter",
        )
    if body.tool_choice is None or body.tool_choice.type != "any" or asked.must_call:
        return asked
    if asked.response_prefix:
        raise cannot_continue(f"messages.{len(body.messages) - 1}")
    return replace(asked, must_call=True, constraint=None)
