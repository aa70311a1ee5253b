"""Views of chat completions and completions."""

from __future__ import annotations

import time
from typing import Any

from django.http import HttpResponse
from rest_framework.request import Request
from rest_framework.response import Response

from completions.assembler import CHAT
from completions.completion_assembler import COMPLETION
from completions.completion_mapping import echoes, picks, to_completion_request
from completions.mapping import to_generation_request
from completions.stored_views import list_stored
from completions.wire.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from completions.wire.completion import Completion, CompletionRequest
from completions.wire.stored import StoredChatCompletion, StoredQuery
from inference_site.api.authentication import caller_of
from inference_site.api.payload import parse
from inference_site.api.schema import ListObject, documented
from inference_site.api.views import ApiView
from inference_site.domain.model_spec import ModelSpec
from inference_site.errors.api_errors import NotFoundError
from inference_site.generations.models import ServiceClass
from inference_site.generations.queue import new_id
from inference_site.submission.model_access import served_model
from inference_site.submission.submit import Job, submit


class ChatCompletionsView(ApiView):
    """``/v1/chat/completions``."""

    @documented(
        body=ChatCompletionRequest, answer=ChatCompletion, event=ChatCompletionChunk, queued=True
    )
    def post(self, request: Request) -> HttpResponse:
        """Create a chat completion."""
        body = parse(ChatCompletionRequest, request.data)
        spec = served_model(caller_of(request), body.model)
        asked = to_generation_request(body, spec)
        completion_id = new_id("chatcmpl-")
        is_flex = body.service_tier == "flex"
        assembly = {
            **_assembly(completion_id, spec, body),
            "choices": asked.choices,
            "logprobs": asked.top_logprobs is not None,
            "is_legacy": body.functions is not None,
            "service_tier": "flex" if is_flex else "default",
        }
        job = Job(
            CHAT,
            completion_id,
            asked,
            assembly,
            stream=bool(body.stream),
            ignored_params=body.ignored_params,
            store=self._store(request, body),
            service_class=ServiceClass.BACKGROUND if is_flex else ServiceClass.FOREGROUND,
            end_user=body.safety_identifier or body.user or "",
        )
        return submit(request, job)

    @documented(query=StoredQuery, answer=ListObject[StoredChatCompletion], errors=(NotFoundError,))
    def get(self, request: Request) -> Response:
        """List the stored chat completions of the project."""
        return list_stored(request)

    def _store(self, request: Request, body: ChatCompletionRequest) -> dict[str, Any] | None:
        """Return what the worker needs to keep the completion, if it is to be kept."""
        if not body.store:
            return None
        messages = [m.model_dump(mode="json", exclude_unset=True) for m in body.messages]
        return {
            "project_id": caller_of(request).project_id,
            "metadata": body.metadata or {},
            "messages": messages,
        }


class CompletionsView(ApiView):
    """``POST /v1/completions``."""

    @documented(body=CompletionRequest, answer=Completion, event=Completion, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Create a completion of a text or of tokens."""
        body = parse(CompletionRequest, request.data)
        spec = served_model(caller_of(request), body.model)
        asked = to_completion_request(body, spec)
        completion_id = new_id("cmpl-")
        assembly = {
            **_assembly(completion_id, spec, body),
            "echoes": echoes(body, asked),
            "logprobs": body.logprobs is not None,
            "n": body.n or 1 if picks(body) else None,
            "best_of": asked.choices,
        }
        job = Job(
            COMPLETION,
            completion_id,
            asked,
            assembly,
            stream=bool(body.stream),
            ignored_params=body.ignored_params,
            end_user=body.user or "",
        )
        return submit(request, job)


def _assembly(
    completion_id: str, spec: ModelSpec, body: ChatCompletionRequest | CompletionRequest
) -> dict[str, Any]:
    """Return what the assemblers of both kinds need to know."""
    options = body.stream_options
    return {
        "completion_id": completion_id,
        "created": int(time.time()),
        "model": spec.id,
        "stream": bool(body.stream),
        "include_usage": bool(options and options.include_usage),
        "timings": bool(body.timings),
    }
