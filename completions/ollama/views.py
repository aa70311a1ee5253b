"""Views of Ollama's chats, completions and embeddings: the same submissions in other words."""

from __future__ import annotations

import time
from typing import Any, ClassVar, Literal

from django.http import HttpResponse
from rest_framework.request import Request
from rest_framework.response import Response

from completions.completion_mapping import to_completion_request
from completions.mapping import to_generation_request
from completions.ollama import answers, wire
from completions.ollama.assembler import (
    OLLAMA,
    OLLAMA_EMBEDDING,
    OllamaAssembly,
    OllamaEmbeddingAssembly,
    now,
)
from completions.ollama.mapping import to_chat, to_completion, to_embedding, to_single_chat
from completions.views.token import to_inputs
from completions.wire.completion import CompletionRequest
from completions.wire.embedding import EmbeddingRequest
from inference_site.api.authentication import caller_of
from inference_site.api.json_bodies import AnyJsonParser
from inference_site.api.payload import WireRequest, parse
from inference_site.api.schema import documented
from inference_site.api.views import ApiView
from inference_site.domain.request import GenerationRequest
from inference_site.generations.queue import new_id
from inference_site.request_fields.capabilities import ignored_fields, require_fields
from inference_site.streams.request_documents import Document
from inference_site.submission.model_access import ResolvedModel, served_model
from inference_site.submission.submit import Submission, respond

Shape = Literal["chat", "generate"]


class OllamaView(ApiView):
    """A view of Ollama's API."""

    parser_classes = (AnyJsonParser,)


class ChatView(OllamaView):
    """``POST /api/chat``."""

    @documented(
        body=wire.ChatRequest,
        answer=answers.OllamaChat,
        lines=answers.OllamaChat | answers.OllamaError,
        queued=True,
        error=answers.OllamaError,
    )
    def post(self, request: Request) -> HttpResponse:
        """Answer the messages; without any, the model is there already."""
        body = parse(wire.ChatRequest, request.data)
        if not body.messages:
            return _nothing(request, body.model, {"message": {"role": "assistant", "content": ""}})
        chat = parse(wire.OfficialChat, to_chat(body))
        model = served_model(caller_of(request), chat.model, chat)
        return _generate(request, body, chat, model, to_generation_request(chat, model), "chat")


class GenerateView(OllamaView):
    """``POST /api/generate``."""

    @documented(
        body=wire.GenerateRequest,
        answer=answers.OllamaText,
        lines=answers.OllamaText | answers.OllamaError,
        queued=True,
        error=answers.OllamaError,
    )
    def post(self, request: Request) -> HttpResponse:
        """Answer the prompt, or continue it."""
        body = parse(wire.GenerateRequest, request.data)
        if not body.prompt and not body.images:
            return _nothing(request, body.model, {"response": ""})
        if body.raw or body.suffix:
            text = parse(CompletionRequest, to_completion(body))
            model = served_model(caller_of(request), text.model, text)
            asked = to_completion_request(text, model)
            return _generate(request, body, text, model, asked, "generate")
        chat = parse(wire.OfficialChat, to_single_chat(body))
        model = served_model(caller_of(request), chat.model, chat)
        asked = to_generation_request(chat, model)
        return _generate(request, body, chat, model, asked, "generate")


class EmbedView(OllamaView):
    """``POST /api/embed``."""

    is_single: ClassVar[bool] = False

    @documented(
        body=wire.EmbedRequest,
        answer=answers.OllamaEmbeddings,
        queued=True,
        error=answers.OllamaError,
    )
    def post(self, request: Request) -> HttpResponse:
        """Embed texts."""
        return self._respond(request)

    def _respond(self, request: Request) -> HttpResponse:
        given = parse(wire.EmbedRequest, request.data)
        body = parse(EmbeddingRequest, to_embedding(given))
        caller = caller_of(request)
        model = served_model(caller, body.model, body)
        require_fields(model, "embeddings", body)
        assembly = OllamaEmbeddingAssembly(
            _shown(given.model, model),
            "float",
            body.dimensions,
            "dimensions" in model.capabilities,
            self.is_single,
            time.time(),
        )
        asked = GenerationRequest(model.spec.id, operation="embed", prompts=to_inputs(body))
        submission = Submission(
            OLLAMA_EMBEDDING,
            new_id("embd-"),
            caller,
            Document(asked, assembly),
            ignored_params=given.ignored_params,
        )
        return respond(request, submission)


class SingleEmbedView(EmbedView):
    """``POST /api/embeddings``: one text."""

    is_single = True

    @documented(
        body=wire.EmbedRequest,
        answer=answers.OllamaEmbedding,
        queued=True,
        error=answers.OllamaError,
    )
    def post(self, request: Request) -> HttpResponse:
        """Embed one text."""
        return self._respond(request)


def _generate(
    request: Request,
    body: wire.ChatRequest | wire.GenerateRequest,
    official: WireRequest,
    model: ResolvedModel,
    asked: GenerationRequest,
    shape: Shape,
) -> HttpResponse:
    stream = body.stream is not False
    submission = Submission(
        OLLAMA,
        new_id("ollama-"),
        caller_of(request),
        Document(asked, OllamaAssembly(_shown(body.model, model), shape, stream, time.time())),
        stream=stream,
        ignored_params=[*body.ignored_params, *ignored_fields(model, official, asked)],
    )
    return respond(request, submission)


def _shown(name: str, model: ResolvedModel) -> str:
    """Return what the answer calls the model: as the request does, but of a route who answers."""
    return model.spec.id if model.route else name


def _nothing(request: Request, model: str, said: dict[str, Any]) -> Response:
    served_model(caller_of(request), model)
    ended = {"done": True, "done_reason": "load"}
    return Response({"model": model, "created_at": now(), **said, **ended})
