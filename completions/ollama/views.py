"""Ollama's ``/api/chat``, ``/api/generate`` and ``/api/embed``.

Each request becomes a chat completion, a completion or an embedding.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal

from django.http import HttpResponse
from rest_framework.request import Request
from rest_framework.response import Response

from completions.mapping import to_completion_request, to_generation_request
from completions.ollama import wire
from completions.ollama.assembler import (
    OLLAMA,
    OLLAMA_EMBEDDING,
    OllamaAssembly,
    OllamaEmbeddingAssembly,
    now,
)
from completions.views.tokens import to_inputs
from completions.wire.chat import DialectChat
from completions.wire.completion import CompletionRequest
from completions.wire.tokens import EmbeddingRequest
from inference_site.core.domain.request import GenerationRequest
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.json_bodies import AnyJsonParser
from inference_site.gateway.api.payload import WireRequest, parse
from inference_site.gateway.api.schema import documented
from inference_site.gateway.api.views import ApiView
from inference_site.gateway.request_fields.capabilities import ignored_fields, require_fields
from inference_site.gateway.submission.model_access import ResolvedModel, served_model
from inference_site.gateway.submission.submit import Submission, respond
from inference_site.runs.queue import new_id
from inference_site.runs.streams.request_documents import Document

_OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_FIELDS = {"response_format": "format", "reasoning_effort": "think", "enable_thinking": "think"}
"""Fields of a chat completion, and those of Ollama's that they are made from."""
_OF_LOAD = ("num_ctx",)
"""Options of Ollama that apply when a model is loaded, so no request can set them here."""
_IMAGE_TYPES = {"/9j/": "jpeg", "iVBOR": "png", "R0lGOD": "gif", "UklGR": "webp"}
"""Image formats by the beginning of their base64."""

Body = dict[str, Any]


def to_chat(body: wire.ChatRequest) -> Body:
    """Return the body of a chat completion."""
    messages = list(_messages(body.messages or ()))
    tools = {"tools": body.tools} if body.tools else {}
    return {**_run(body), **_thinking(body), **_logprobs(body), "messages": messages, **tools}


def to_single_chat(body: wire.GenerateRequest) -> Body:
    """Return the body of a chat completion for a prompt that gets the template."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    prompt = {"role": "user", "content": _content(body.prompt or "", body.images)}
    fields = {**_run(body), **_thinking(body), **_logprobs(body)}
    return {**fields, "messages": [*system, prompt]}


def to_completion(body: wire.GenerateRequest) -> Body:
    """Return the body of a completion for a prompt that is continued as it is."""
    suffix: Body = {"suffix": body.suffix} if body.suffix else {}
    if body.logprobs:
        suffix["logprobs"] = body.top_logprobs or 0
    return {"max_tokens": 2**31 - 1, **_run(body), "prompt": body.prompt or "", **suffix}


def to_embedding(body: wire.EmbedRequest) -> Body:
    """Return the body of embeddings."""
    value = body.prompt if body.input is None else body.input
    dimensions = {} if body.dimensions is None else {"dimensions": body.dimensions}
    return {"model": body.model, "input": "" if value is None else value, **dimensions}


def _run(body: wire.ChatRequest | wire.GenerateRequest) -> Body:
    fields: Body = {"model": body.model}
    for name, value in (body.options or wire.Options()).model_dump(exclude_none=True).items():
        if name in wire.Options.model_fields and name not in _OF_LOAD:
            fields[_OPTIONS.get(name, name)] = value
    if fields.get("max_tokens", 1) < 1:  # Ollama's -1 and -2: until the context is full.
        del fields["max_tokens"]
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        schema = {"name": "answer", "schema": body.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _client_field(name: str) -> str:
    """Return Ollama's name of a field of a chat completion or a completion."""
    first = re.split(r"[.\[]", name, maxsplit=1)[0]
    option = next((given for given, made in _OPTIONS.items() if made == first), first)
    if option in wire.Options.model_fields:
        return f"options.{option}{name.removeprefix(first)}"
    return _FIELDS.get(first, name)


@contextmanager
def _named_as_sent() -> Iterator[None]:
    """Have errors about a chat completion or a completion name Ollama's field."""
    try:
        yield
    except InvalidRequestError as exc:
        exc.name_field(_client_field(exc.param or ""))
        raise


def _logprobs(body: wire.ChatRequest | wire.GenerateRequest) -> Body:
    return {"logprobs": True, "top_logprobs": body.top_logprobs} if body.logprobs else {}


def _thinking(body: wire.ChatRequest | wire.GenerateRequest) -> Body:
    match body.think:
        case None:
            return {}
        case bool(switch):
            return {"enable_thinking": switch}
        case effort:
            return {"reasoning_effort": effort}


def _messages(messages: Sequence[wire.Message]) -> Iterator[Body]:
    """Yield the messages; calls without ids get some, and each result the id of its call.

    Ollama needs neither a result for each call nor a call for each result. A call without a result
    gets an empty one; a result without a call becomes a message of the role ``function``.
    """
    open_calls: list[tuple[str, str]] = []
    for position, message in enumerate(messages):
        if message.role != "tool":
            yield from _empty_results(open_calls)
            open_calls = []
        entry: Body = {
            "role": message.role,
            "content": _content(message.content or "", message.images),
        }
        if message.thinking and message.role == "assistant":
            entry["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [
                (call.id or f"call_{position}_{number}", call.function)
                for number, call in enumerate(message.tool_calls)
            ]
            open_calls = [(call_id, function.name) for call_id, function in calls]
            entry["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {
                        "name": function.name,
                        "arguments": json.dumps(function.arguments),
                    },
                }
                for call_id, function in calls
            ]
        elif message.role == "tool":
            tool = message.tool_name
            if open_calls:
                # The call with this id, else the first open one of this result's tool, else the
                # first one.
                ids, names = zip(*open_calls, strict=True)
                if message.tool_call_id in ids:
                    place = ids.index(message.tool_call_id)
                else:
                    place = names.index(tool) if tool in names else 0
                entry["tool_call_id"], _ = open_calls.pop(place)
            else:
                entry |= {"role": "function", "name": tool or "tool"}
        yield entry
    yield from _empty_results(open_calls)


def _empty_results(calls: Sequence[tuple[str, str]]) -> Iterator[Body]:
    for call_id, _ in calls:
        yield {"role": "tool", "tool_call_id": call_id, "content": ""}


def _content(text: str, images: Sequence[str] | None) -> Any:
    if not images:
        return text
    parts: list[Body] = [{"type": "text", "text": text}] if text else []
    for image in images:
        kind = next((kind for mark, kind in _IMAGE_TYPES.items() if image.startswith(mark)), "png")
        url = f"data:image/{kind};base64,{image}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


Shape = Literal["chat", "generate"]


class OllamaView(ApiView):
    """A view of Ollama's API."""

    parser_classes = (AnyJsonParser,)


class ChatView(OllamaView):
    """``POST /api/chat``."""

    @documented(
        body=wire.ChatRequest,
        answer=wire.OllamaChat,
        lines=wire.OllamaChat | wire.OllamaError,
        queued=True,
        error=wire.OllamaError,
    )
    def post(self, request: Request) -> HttpResponse:
        """Answer the messages; a request without messages only checks the model."""
        body = parse(wire.ChatRequest, request.data)
        if not body.messages:
            return _empty_answer(request, body, {"message": {"role": "assistant", "content": ""}})
        return _answer_chat(request, body, to_chat(body), "chat")


class GenerateView(OllamaView):
    """``POST /api/generate``."""

    @documented(
        body=wire.GenerateRequest,
        answer=wire.OllamaText,
        lines=wire.OllamaText | wire.OllamaError,
        queued=True,
        error=wire.OllamaError,
    )
    def post(self, request: Request) -> HttpResponse:
        """Answer the prompt, or continue it."""
        body = parse(wire.GenerateRequest, request.data)
        if not body.prompt and not body.images:
            return _empty_answer(request, body, {"response": ""})
        if body.raw or body.suffix:
            for name in ("images", "system"):  # Ollama, too, takes them only with a template.
                if getattr(body, name) and (body.raw or name == "images"):
                    switch = "raw" if body.raw else "suffix"
                    raise InvalidRequestError(
                        f"Invalid '{name}': a prompt with '{switch}' has no {name}.", param=name
                    )
            with _named_as_sent():
                text = parse(CompletionRequest, to_completion(body))
                model = served_model(caller_of(request), text.model, text)
                generation = to_completion_request(text, model)
            return _generate(request, body, text, model, generation, "generate")
        return _answer_chat(request, body, to_single_chat(body), "generate")


class EmbedView(OllamaView):
    """``POST /api/embed``."""

    is_single: ClassVar[bool] = False

    @documented(
        body=wire.EmbedRequest,
        answer=wire.OllamaEmbeddings,
        queued=True,
        error=wire.OllamaError,
    )
    def post(self, request: Request) -> HttpResponse:
        """Embed texts."""
        return self._respond(request)

    def _respond(self, request: Request) -> HttpResponse:
        ollama_body = parse(wire.EmbedRequest, request.data)
        if not (ollama_body.prompt if ollama_body.input is None else ollama_body.input):
            return self._empty_answer(request, ollama_body.model)
        body = parse(EmbeddingRequest, to_embedding(ollama_body))
        caller = caller_of(request)
        model = served_model(caller, body.model, body)
        require_fields(model, "embeddings", body)
        assembly = OllamaEmbeddingAssembly(
            model.name_in_answer(ollama_body.model),
            "float",
            body.dimensions,
            "dimensions" in model.capabilities,
            self.is_single,
            time.time(),
        )
        generation = GenerationRequest(
            model.spec.id,
            operation="embed",
            prompts=to_inputs(body),
            truncate=ollama_body.truncate is not False,
        )
        submission = Submission(
            OLLAMA_EMBEDDING,
            new_id("embd-"),
            caller,
            Document(generation, assembly),
            ignored_params=ollama_body.ignored_params,
        )
        return respond(request, submission)

    def _empty_answer(self, request: Request, model: str) -> Response:
        """Return Ollama's answer to a request that only loads a model. Raise if it is unknown."""
        served_model(caller_of(request), model)
        if self.is_single:
            return Response(wire.OllamaEmbedding(embedding=[]).model_dump())
        none = wire.OllamaEmbeddings(
            model=model, embeddings=[], total_duration=0, load_duration=0, prompt_eval_count=0
        )
        return Response(none.model_dump())


class SingleEmbedView(EmbedView):
    """``POST /api/embeddings``: one text."""

    is_single = True

    @documented(
        body=wire.EmbedRequest,
        answer=wire.OllamaEmbedding,
        queued=True,
        error=wire.OllamaError,
    )
    def post(self, request: Request) -> HttpResponse:
        """Embed one text."""
        return self._respond(request)


def _answer_chat(
    request: Request, body: wire.ChatRequest | wire.GenerateRequest, converted: Body, shape: Shape
) -> HttpResponse:
    """Answer a chat. As by Ollama, ``think: false`` is ignored for a model without a switch."""
    with _named_as_sent():
        chat = parse(DialectChat, converted)
        model = served_model(caller_of(request), chat.model, chat)
        is_idle = body.think is False and "chat_template" not in model.capabilities
        if is_idle:
            chat = chat.model_copy(update={"enable_thinking": None})
        generation = to_generation_request(chat, model)
    return _generate(request, body, chat, model, generation, shape, ["think"] if is_idle else ())


def _generate(
    request: Request,
    body: wire.ChatRequest | wire.GenerateRequest,
    official: WireRequest,
    model: ResolvedModel,
    generation: GenerationRequest,
    shape: Shape,
    ignored: Sequence[str] = (),
) -> HttpResponse:
    stream = body.stream is not False
    name = model.name_in_answer(body.model)
    # Ollama has no error for a limit above what the prompt leaves of the context.
    generation = replace(generation, lowers_max_output=generation.max_output_tokens is not None)
    submission = Submission(
        OLLAMA,
        new_id("ollama-"),
        caller_of(request),
        Document(generation, OllamaAssembly(name, shape, stream, time.time())),
        stream=stream,
        ignored_params=[
            *body.ignored_params,
            *map(_client_field, ignored_fields(model, official, generation)),
            *ignored,
        ],
    )
    return respond(request, submission)


def _empty_answer(
    request: Request, body: wire.ChatRequest | wire.GenerateRequest, content: dict[str, Any]
) -> Response:
    """Return Ollama's answer to a request that only loads or unloads a model.

    Raise if the model is unknown.
    """
    served_model(caller_of(request), body.model)
    end = {"done": True, "done_reason": body.done_reason}
    return Response({"model": body.model, "created_at": now(), **content, **end})
