"""Views of chat completions, completions and models."""

from __future__ import annotations

import time
from typing import Any

from django.http import HttpResponse
from rest_framework.request import Request
from rest_framework.response import Response

from completions.assembler import CHAT
from completions.completion_assembler import COMPLETION
from completions.completion_mapping import echoes, to_completion_request
from completions.mapping import to_generation_request
from completions.stored_views import list_stored
from completions.wire.chat import ChatCompletionRequest
from completions.wire.completion import CompletionRequest
from completions.wire.models import Model, ModelList
from inference_site.http.authentication import caller_of
from inference_site.http.enqueue import Job, served_model, submit
from inference_site.http.errors import NotFoundError
from inference_site.http.payload import parse
from inference_site.http.views import ApiView
from worker.catalog import catalog
from worker.engines.base import ModelSpec
from worker.leases import live_view
from worker.queue import new_id


class ChatCompletionsView(ApiView):
    """``/v1/chat/completions``."""

    def post(self, request: Request) -> HttpResponse:
        body = parse(ChatCompletionRequest, request.data)
        spec = served_model(body.model)
        asked = to_generation_request(body, spec)
        completion_id = new_id("chatcmpl-")
        assembly = {
            **_assembly(completion_id, spec, body),
            "choices": asked.choices,
            "logprobs": asked.top_logprobs is not None,
        }
        ignored, order = body.ignored_params, self._store(request, body)
        job = Job(CHAT, completion_id, asked, assembly, bool(body.stream), ignored, order)
        return submit(request, job)

    def get(self, request: Request) -> Response:
        """List the stored ones."""
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

    def post(self, request: Request) -> HttpResponse:
        body = parse(CompletionRequest, request.data)
        spec = served_model(body.model)
        asked = to_completion_request(body, spec)
        completion_id = new_id("cmpl-")
        assembly = {
            **_assembly(completion_id, spec, body),
            "echoes": echoes(body, asked),
            "logprobs": body.logprobs is not None,
        }
        ignored = body.ignored_params
        job = Job(COMPLETION, completion_id, asked, assembly, bool(body.stream), ignored)
        return submit(request, job)


class ModelsView(ApiView):
    """``GET /v1/models``."""

    def get(self, request: Request) -> Response:
        models = [_wire_model(spec) for spec in catalog().models.values()]
        return Response(ModelList(data=models).model_dump())


class ModelView(ApiView):
    """``GET /v1/models/{id}``; the id may contain slashes."""

    def get(self, request: Request, model_id: str) -> Response:
        spec = catalog().find(model_id)
        if spec is None:
            raise NotFoundError(
                f"The model '{model_id}' does not exist", param="model", code="model_not_found"
            )
        return Response(_wire_model(spec).model_dump())


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
    }


def _wire_model(spec: ModelSpec) -> Model:
    workers = len(live_view.serving(spec.id))
    created = int(spec.file.stat().st_mtime) if spec.file and spec.file.exists() else 0
    return Model(
        id=spec.id,
        created=created,
        owned_by="inference-site",
        status="loaded" if workers else "unloaded",
        context_length=spec.context_length,
        workers=workers,
    )
