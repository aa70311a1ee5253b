"""A model on an OpenAI-compatible server: vLLM, SGLang, llama-server, Ollama, TGI.

Answers are always streamed. A run has one connection; closing it on cancellation stops the server.
One thread reads all runs. Options: see docs/engines.md.
"""

from __future__ import annotations

import asyncio
import base64
import math
import operator
from array import array
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from inference_site.core.domain.deltas import (
    CompactionDelta,
    Delta,
    EmbeddingDelta,
    Finish,
    ModerationDelta,
    PromptDelta,
    PromptProgress,
    PromptTokens,
    RankedLogprob,
    ScoreDelta,
    TextDelta,
    TokensDelta,
    Usage,
)
from inference_site.core.domain.errors import GenerationFailed, InvalidRequest
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest
from worker.engines.base import Engine, OnEnd, Sink
from worker.engines.chat.template import wire_part
from worker.engines.openai_upstream.audio import AudioReader, Form, speaking_fields
from worker.engines.openai_upstream.chunks import ChunkReader, estimated_input
from worker.engines.openai_upstream.client import Body, Upstream
from worker.engines.openai_upstream.errors import UNREADABLE
from worker.engines.openai_upstream.event_loop import Cancelled, event_loop
from worker.engines.openai_upstream.payload import Payloads
from worker.engines.openai_upstream.server import Server, server_of


def load(spec: ModelSpec) -> UpstreamEngine:
    """Return the engine once its servers were checked. One that is down is checked again later.

    Raise EngineLoadError for a key that cannot be read.
    """
    return UpstreamEngine(spec, server_of(spec))


class UpstreamEngine(Engine):
    """A model of these servers (see ``worker.engines.base.Engine``)."""

    blocks = False

    def __init__(
        self, spec: ModelSpec, server: Server, payloads: type[Payloads] = Payloads
    ) -> None:
        self._server, self._upstream = server, Upstream(spec, server)
        self._payloads = payloads(spec, server)
        self._tokens = TokenService(self._upstream, server, self._payloads)

    def start(self, request: GenerationRequest, sink: Sink, ended: OnEnd) -> bool:
        """Begin the request on the event loop (see ``Engine.start``)."""
        event_loop().start(self._work(request, sink), ended)
        return True

    @property
    def fault(self) -> str:
        """Why no server can be used; empty while one can."""
        return self._upstream.addresses.fault

    @property
    def context_length(self) -> int | None:
        """The shortest context that the servers report (see ``Engine.context_length``)."""
        lengths = (one.contexts.get(one.model or "") for one in self._upstream.addresses.all)
        return min(filter(None, lengths), default=None)

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call ``on_change`` when ``fault`` changes (see ``Engine.watch``)."""
        self._upstream.health.on_change = on_change

    def close(self) -> None:
        """Close the connections."""
        self._upstream.close()

    def run(self, request: GenerationRequest, sink: Sink) -> None:
        """Run the request on the event loop while the caller waits (see ``Engine.run``)."""
        event_loop().run(self._work(request, sink))

    def _work(self, request: GenerationRequest, sink: Sink) -> Coroutine[Any, Any, None]:
        """Return the coroutine of the request; the calling thread makes its payload."""
        is_greedy = request.sampling.temperature == 0 and self._server.flavor.greedy_once
        if request.choices > 1 and is_greedy:
            sink = RepeatingSink(sink, request.choices)
            request = replace(request, choices=1)
        match request.operation:
            case "chat":
                payload = self._payloads.chat(request)
                return self._stream("/chat/completions", payload, request, sink)
            case "complete":
                payload = self._payloads.complete(request)
                return self._stream("/completions", payload, request, sink)
            case "transcribe" | "translate" as hears:
                path = "/audio/transcriptions" if hears == "transcribe" else "/audio/translations"
                return self._hear_or_speak(path, Form(request), request, sink)
            case "speak":
                return self._hear_or_speak("/audio/speech", speaking_fields(request), request, sink)
            case operation:
                return self._ask(getattr(self._tokens, operation)(request, sink))

    async def _stream(
        self, path: str, payload: dict[str, Any], request: GenerationRequest, sink: Sink
    ) -> None:
        if request.prompt_logprobs is not None:
            await self._ask(feed_prompt_logprobs(self._upstream, path, payload, request, sink))
        if not sink.cancelled:
            reader = ChunkReader(request, sink, self._upstream.errors, self._server)
            await self._upstream.stream(path, payload, reader)

    async def _hear_or_speak(
        self, path: str, body: Body, request: GenerationRequest, sink: Sink
    ) -> None:
        reader = AudioReader(request, sink, self._upstream.errors)
        await self._upstream.stream(path, body, reader)

    async def _ask(self, work: Coroutine[Any, Any, None]) -> None:
        with suppress(Cancelled):
            await work


T = TypeVar("T")

_VLLM_TEMPLATE_FIELDS = {
    *("messages", "tools", "chat_template_kwargs", "add_generation_prompt"),
    "continue_final_message",
}
_BATCH = 32
"""Prompts in one request for embeddings or scores; every server takes this many."""
_NORM_TOLERANCE = 1e-3


class TokenService:
    """Embeddings, scores, moderations, tokens and rendered prompts of one model's server."""

    def __init__(self, upstream: Upstream, server: Server, payloads: Payloads) -> None:
        self._upstream, self._server, self._payloads = upstream, server, payloads
        self._is_llama_cpp = server.flavor.tokens == "llama_cpp"

    async def embed(self, request: GenerationRequest, sink: Sink) -> None:
        """Embed the prompts (see ``Engine.embed``)."""
        tokens = 0
        form = "float" if self._server.flavor.float_embeddings else "base64"
        for first in range(0, len(request.prompts), _BATCH):
            inputs = [
                list(p) if isinstance(p, tuple) else p for p in request.prompts[first:][:_BATCH]
            ]
            payload = {"input": inputs, "encoding_format": form}
            if request.truncate:
                payload |= self._payloads.named({"truncate_prompt_tokens": -1})
            answer = await self._upstream.post("/embeddings", payload, request, sink)
            try:
                # On a thread: decoding takes milliseconds, in which the loop reads other answers.
                by_index = await asyncio.to_thread(_vectors, answer)
                vectors = [by_index[position] for position in range(len(inputs))]
                tokens += _reported_input(answer)
            except UNREADABLE as exc:
                raise GenerationFailed("The model's server sent no embeddings.") from exc
            for index, vector in enumerate(vectors, first):
                sink.feed(EmbeddingDelta(vector, index))
                sink.feed(Finish("stop", index))
            sink.feed(Usage(input_tokens=tokens))
        sink.feed(_total_usage(tokens, request))

    async def rank(self, request: GenerationRequest, sink: Sink) -> None:
        """Compare the prompts with their queries (see ``Engine.rank``)."""
        tokens = 0
        for query, first, documents in request.comparisons(_BATCH):
            body = {"query": query, "documents": documents}
            answer = await self._upstream.post("/rerank", body, request, sink)
            try:
                scores = {int(e["index"]): float(e["relevance_score"]) for e in answer["results"]}
                ordered = [scores[position] for position in range(len(documents))]
                if not all(map(math.isfinite, ordered)):
                    raise ValueError("a score that is not finite")
                tokens += _reported_input(answer)
            except UNREADABLE as exc:
                raise GenerationFailed("The model's server sent no scores.") from exc
            for index, score in enumerate(ordered, first):
                sink.feed(ScoreDelta(score, index))
                sink.feed(Finish("stop", index))
            sink.feed(Usage(input_tokens=tokens))
        sink.feed(_total_usage(tokens, request))

    async def moderate(self, request: GenerationRequest, sink: Sink) -> None:
        """Judge the prompts, or the one message (see ``Engine.moderate``)."""
        types = {"text"}
        if request.messages:
            [message] = request.messages
            parts = [wire_part(part) for part in message.parts]
            types = {"image" if part["type"] == "image_url" else "text" for part in parts}
            inputs: list[Any] = [parts or message.text]
        else:
            prompts = request.prompts
            inputs = [list(prompts[n : n + _BATCH]) for n in range(0, len(prompts), _BATCH)]
        tokens = index = 0
        for given in inputs:
            answer = await self._upstream.post("/moderations", {"input": given}, request, sink)
            expected = 1 if request.messages else len(given)
            try:
                results = [
                    _moderation(result, sorted(types, reverse=True), index + number)
                    for number, result in enumerate(answer["results"])
                ]
                tokens += _reported_input(answer)
            except UNREADABLE as exc:
                raise GenerationFailed("The model's server sent no moderation.") from exc
            if len(results) != expected:
                raise GenerationFailed("The model's server sent another number of results.")
            for result in results:
                sink.feed(result)
                sink.feed(Finish("stop", result.index))
            index += expected
        sink.feed(_total_usage(tokens, request))

    async def tokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn texts into tokens (see ``Engine.tokenize``)."""
        for index, text in enumerate(request.prompts):
            tokens = await self._tokens(str(text), request, sink)
            sink.feed(replace(tokens, index=index))
            sink.feed(Finish("stop", index))

    async def detokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn tokens into texts (see ``Engine.detokenize``)."""
        for index, tokens in enumerate(request.prompts):
            sink.feed(TextDelta(await self._text(tokens, request, sink), index))
            sink.feed(Finish("stop", index))

    async def render(self, request: GenerationRequest, sink: Sink) -> None:
        """Apply the chat template (see ``Engine.render``)."""
        if request.has_parts:
            raise InvalidRequest("A prompt with images or sounds cannot be rendered.", "messages")
        chat = self._payloads.chat(request)
        if self._is_llama_cpp:
            text = await self._ask("/apply-template", chat, "prompt", str, request, sink)
            tokens = (await self._tokens(text, request, sink)).ids
        else:
            body = {key: value for key, value in chat.items() if key in _VLLM_TEMPLATE_FIELDS}
            tokens = _ids(await self._ask("/tokenize", body, "tokens", list, request, sink))
            text = await self._text(tokens, request, sink)
        sink.feed(PromptDelta(text, tokens))
        sink.feed(Finish("stop"))

    async def _tokens(self, text: str, request: GenerationRequest, sink: Sink) -> TokensDelta:
        special, with_texts = request.add_special_tokens, request.token_texts
        if self._is_llama_cpp:
            body: dict[str, Any] = {"content": text, "add_special": special, "parse_special": True}
            body |= {"with_pieces": with_texts}
        else:
            body = {"prompt": text}
            body |= {} if special else {"add_special_tokens": False}
            body |= {"return_token_strs": True} if with_texts else {}
        answer = await self._upstream.post("/tokenize", body, request, sink, at_root=True)
        tokens, texts = _checked(answer, "tokens", list), answer.get("token_strs") or ()
        try:
            if self._is_llama_cpp and with_texts:
                texts = [piece_of(entry).decode("utf-8", "replace") for entry in tokens]
                tokens = [entry["id"] for entry in tokens]
            return TokensDelta(_ids(tokens), texts=tuple(str(each or "") for each in texts))
        except UNREADABLE as exc:
            raise GenerationFailed("The model's server sent no texts of tokens.") from exc

    async def _text(self, tokens: Any, request: GenerationRequest, sink: Sink) -> str:
        key = "content" if self._is_llama_cpp else "prompt"
        return await self._ask("/detokenize", {"tokens": tokens}, key, str, request, sink)

    async def _ask(
        self,
        path: str,
        payload: dict[str, Any],
        key: str,
        kind: type[T],
        request: GenerationRequest,
        sink: Sink,
    ) -> T:
        answer = await self._upstream.post(path, payload, request, sink, at_root=True)
        return _checked(answer, key, kind)


def _reported_input(answer: dict[str, Any]) -> int:
    """Return the tokens of the input that an answer reports: 0 if it reports none.

    Servers that rank report them as ``total_tokens`` alone.
    """
    usage = answer.get("usage") or {}
    return int(usage.get("prompt_tokens") or usage.get("total_tokens") or 0)


def _total_usage(reported: int, request: GenerationRequest) -> Usage:
    """Return the usage of a request: the tokens that the server reported, or an estimate."""
    return Usage(input_tokens=reported or estimated_input(request))


def _moderation(result: dict[str, Any], types: list[str], index: int) -> ModerationDelta:
    """Return a result of the server. Raise LookupError, TypeError or ValueError for a malformed."""
    categories = {str(name): bool(value) for name, value in result["categories"].items()}
    given = result.get("category_applied_input_types") or {}
    return ModerationDelta(
        bool(result["flagged"]),
        categories,
        {str(name): float(value) for name, value in result["category_scores"].items()},
        {name: tuple(map(str, given.get(name, types))) for name in categories},
        index,
    )


def _checked(answer: dict[str, Any], key: str, kind: type[T]) -> T:
    value = answer.get(key)
    if not isinstance(value, kind):
        raise GenerationFailed(f"The model's server sent no '{key}'.")
    return value


def _ids(tokens: list[Any]) -> tuple[int, ...]:
    """Return the tokens. Raise GenerationFailed if they are no numbers."""
    try:
        return tuple(map(operator.index, tokens))
    except TypeError as exc:
        raise GenerationFailed("The model's server sent no tokens.") from exc


def piece_of(entry: dict[str, Any]) -> bytes:
    """Return a token's text. llama.cpp sends a part of a character as a list of bytes."""
    piece: str | list[int] = entry["piece"]
    return piece.encode() if isinstance(piece, str) else bytes(piece)


def _vectors(answer: dict[str, Any]) -> dict[int, bytes]:
    """Return the embeddings by index, as little-endian floats normalized to length 1.

    Raise LookupError, TypeError or ValueError for malformed ones.
    """
    vectors: dict[int, bytes] = {}
    for entry in answer["data"]:
        embedding = entry["embedding"]
        packed = base64.b64decode(embedding, validate=True) if isinstance(embedding, str) else None
        vector = array("f", embedding if packed is None else packed)
        if not vector:
            raise ValueError("an empty vector")
        length = math.hypot(*vector)
        if not math.isfinite(length):
            raise ValueError("a vector that is not finite")
        if length and abs(length - 1) > _NORM_TOLERANCE:
            vector = array("f", (value / length for value in vector))
        vectors[int(entry["index"])] = vector.tobytes()
    return vectors


_STREAM_FIELDS = {
    *("stream", "stream_options", "echo", "logprobs", "top_logprobs", "logprob_token_ids"),
}
"""Fields of an answer's request that the request for prompt log probabilities leaves out."""


async def feed_prompt_logprobs(
    upstream: Upstream,
    path: str,
    payload: Mapping[str, Any],
    request: GenerationRequest,
    sink: Sink,
) -> None:
    """Feed the tokens of each prompt to each of its choices. Raise Cancelled or EngineError."""
    body = {name: value for name, value in payload.items() if name not in _STREAM_FIELDS}
    body |= {"n": 1, "max_tokens": 1, "min_tokens": 0, "return_token_ids": True}
    body["prompt_logprobs"] = request.prompt_logprobs
    answer = await upstream.post(path, body, request, sink)
    # vLLM puts them into the answer of a chat, and into each choice of a completion.
    prompts = [answer] if request.operation == "chat" else answer.get("choices")
    try:
        for number, prompt in enumerate(prompts or ()):
            ids = tuple(prompt["prompt_token_ids"])
            ranked = tuple(_ranked(entry) for entry in prompt["prompt_logprobs"])
            for index in range(number * request.choices, (number + 1) * request.choices):
                sink.feed(PromptTokens(ids, index, ranked))
    except UNREADABLE as exc:
        raise GenerationFailed("The model's server sent no log probabilities.") from exc


def _ranked(entry: dict[str, Any] | None) -> dict[int, RankedLogprob] | None:
    if entry is None:
        return None
    return {
        int(id_): RankedLogprob(
            token["logprob"], token.get("rank"), token.get("decoded_token") or ""
        )
        for id_, token in entry.items()
    }


class RepeatingSink:
    """Feeds each delta of a prompt's single answer once for each of its choices.

    It passes usage on unchanged: usage counts what the server computed.
    """

    def __init__(self, sink: Sink, choices: int) -> None:
        self._sink, self._choices = sink, choices

    @property
    def cancelled(self) -> bool:
        """Whether the run is cancelled."""
        return self._sink.cancelled

    def feed(self, delta: Delta) -> None:
        """Take the next delta."""
        if isinstance(delta, Usage | PromptProgress | PromptDelta | CompactionDelta):
            self._sink.feed(delta)
            return
        first = delta.index * self._choices
        for index in range(first, first + self._choices):
            self._sink.feed(replace(delta, index=index))
