"""Views of chat completions and completions."""

from __future__ import annotations

import time

from django.conf import settings
from django.http import HttpResponse
from rest_framework.request import Request
from rest_framework.response import Response

from completions.assemblers.chat import CHAT, ChatAssembly
from completions.assemblers.completion import COMPLETION, CompletionAssembly
from completions.completion_mapping import echoes, to_completion_request
from completions.mapping import to_generation_request
from completions.views.stored import list_stored
from completions.wire.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from completions.wire.completion import Completion, CompletionRequest
from completions.wire.stored import StoredChatCompletion, StoredQuery
from inference_site.accounts.keys import Caller
from inference_site.api.authentication import caller_of
from inference_site.api.payload import parse
from inference_site.api.schema import ListObject, documented
from inference_site.api.views import ApiView
from inference_site.errors.api_errors import NotFoundError
from inference_site.generations.models import ServiceClass
from inference_site.generations.queue import new_id
from inference_site.request_fields.capabilities import ignored_fields
from inference_site.streams.request_documents import Document, ToStore
from inference_site.submission.model_access import served_model
from inference_site.submission.submit import Submission, respond


class ChatCompletionsView(ApiView):
    """``/v1/chat/completions``."""

    @documented(
        body=ChatCompletionRequest, answer=ChatCompletion, event=ChatCompletionChunk, queued=True
    )
    def post(self, request: Request) -> HttpResponse:
        """Create a chat completion."""
        body = parse(ChatCompletionRequest, request.data)
        caller = caller_of(request)
        model = served_model(caller, body.model, body)
        asked = to_generation_request(body, model)
        is_flex = body.service_tier == "flex"
        assembly = ChatAssembly(
            new_id("chatcmpl-"),
            int(time.time()),
            model.spec.id,
            stream=bool(body.stream),
            include_usage=_includes_usage(body),
            continuous_usage=asked.running_usage,
            choices=asked.choices,
            logprobs=asked.top_logprobs is not None,
            is_legacy=body.functions is not None,
            repeats_calls=settings.TOOL_CALLS_IN_CHOICES,
            service_tier="flex" if is_flex else "default",
            timings=bool(body.timings),
            records=bool(body.store),
            token_ids=asked.token_ids,
            prompt_logprobs=asked.prompt_logprobs is not None,
        )
        submission = Submission(
            CHAT,
            assembly.completion_id,
            caller,
            Document(asked, assembly, _to_store(caller, body)),
            stream=assembly.stream,
            is_replayable=assembly.is_replayable or (not assembly.stream and bool(body.store)),
            ignored_params=ignored_fields(model, body, asked),
            service_class=ServiceClass.BACKGROUND if is_flex else ServiceClass.FOREGROUND,
            end_user=body.safety_identifier or body.user or "",
        )
        return respond(request, submission)

    @documented(query=StoredQuery, answer=ListObject[StoredChatCompletion], errors=(NotFoundError,))
    def get(self, request: Request) -> Response:
        """List the stored chat completions of the project."""
        return list_stored(request)


class CompletionsView(ApiView):
    """``POST /v1/completions``."""

    @documented(body=CompletionRequest, answer=Completion, event=Completion, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Create a completion of a text or of tokens."""
        body = parse(CompletionRequest, request.data)
        caller = caller_of(request)
        model = served_model(caller, body.model, body)
        asked = to_completion_request(body, model)
        assembly = CompletionAssembly(
            new_id("cmpl-"),
            int(time.time()),
            model.spec.id,
            stream=bool(body.stream),
            include_usage=_includes_usage(body),
            continuous_usage=asked.running_usage,
            echoes=echoes(body, asked),
            logprobs=body.logprobs is not None,
            n=body.n or 1 if body.picks else None,
            best_of=asked.choices,
            timings=bool(body.timings),
            token_ids=asked.token_ids,
            prompt_logprobs=asked.prompt_logprobs is not None,
        )
        submission = Submission(
            COMPLETION,
            assembly.completion_id,
            caller,
            Document(asked, assembly),
            stream=assembly.stream,
            ignored_params=ignored_fields(model, body, asked),
            end_user=body.user or "",
        )
        return respond(request, submission)


def _includes_usage(body: ChatCompletionRequest | CompletionRequest) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


def _to_store(caller: Caller, body: ChatCompletionRequest) -> ToStore | None:
    """Return what the worker needs to keep the completion, if it is to be kept."""
    if not body.store:
        return None
    messages = [m.model_dump(mode="json", exclude_unset=True) for m in body.messages]
    return ToStore(caller.project_id, body.metadata or {}, messages)
