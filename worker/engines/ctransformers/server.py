"""A server of one model on ctransformers, a program without Django.

``python -m worker.engines.ctransformers.server ENTRY`` with the entry as JSON. It has those of
llama.cpp's endpoints that the platform uses: ``/v1/completions`` as a stream, ``/tokenize``,
``/detokenize``, ``/v1/models`` and ``/health``. A ``grammar`` is llguidance's; the client checks
it. ``/pulse`` answers with 503 if a run has made no step since the last request for it. Closing the
connection ends a run. ``MODEL_SERVER_KEY`` is the key that requests must have.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    PromptProgress,
    TextDelta,
    TokenLogprob,
    TokensDelta,
    Usage,
)
from inference_site.core.domain.errors import ContextLengthExceeded, EngineError, InvalidRequest
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import Constraint, GenerationRequest, Sampling
from worker.engines.ctransformers.engine import CtransformersEngine, open_model
from worker.model_servers.llama_server import LOAD_FAILED

_MOST_SAID = 450
"""Characters of an error; the tail of the log keeps 500 bytes of a line."""
_MOST_BYTES = 64 * 2**20
_SAMPLING = frozenset(Sampling.__slots__)


def main() -> None:
    """Load the model, and serve it until the process ends."""
    given = orjson.loads(sys.argv[1])
    spec = ModelSpec(engine="ctransformers", **{**given, "file": Path(given["file"])})
    try:
        engine = open_model(spec)
    except EngineError as exc:
        said = "".join(c if c.isprintable() else "?" for c in str(exc))[:_MOST_SAID]
        sys.stdout.write(f"{said}\n")
        sys.exit(LOAD_FAILED)
    app = ModelServer(spec, engine, os.environ["MODEL_SERVER_KEY"]).app()
    host, port = os.environ["MODEL_SERVER_ADDRESS"].rsplit(":", 1)
    web.run_app(app, host=host, port=int(port), handler_cancellation=True, print=None)


class ModelServer:
    """The requests of one model. As many run at once as it has slots."""

    def __init__(self, spec: ModelSpec, engine: CtransformersEngine, key: str) -> None:
        self._spec, self._engine = spec, engine
        self._bearer = f"Bearer {key}"
        self._threads = ThreadPoolExecutor(spec.slots, thread_name_prefix="runs")
        self._runs: set[_Stream] = set()

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[self._checked])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/pulse", self._pulse),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._complete),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
            ]
        )
        return app

    @web.middleware
    async def _checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), self._bearer.encode()):
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        try:
            answer: web.StreamResponse = await handler(request)
        except EngineError as exc:
            error = _error(exc)
            answer = web.json_response({"error": error}, status=error["code"])
        return answer

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _pulse(self, _: web.Request) -> web.Response:
        steps = [run.takes_step() for run in self._runs]  # Each is asked.
        return web.Response(status=200 if all(steps) else 503)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._spec.id}]})

    async def _tokenize(self, asked: web.Request) -> web.Response:
        body = await _body(asked)
        request = GenerationRequest(
            self._spec.id,
            operation="tokenize",
            prompts=(body["content"],),
            add_special_tokens=body.get("add_special", False),
            token_texts=body.get("with_pieces", False),
        )
        [delta, *_] = await self._collected(request)
        assert isinstance(delta, TokensDelta)
        tokens: list[Any] = list(delta.ids)
        if delta.texts:
            pairs = zip(delta.ids, delta.texts, strict=True)
            tokens = [{"id": token, "piece": text} for token, text in pairs]
        return web.json_response({"tokens": tokens})

    async def _detokenize(self, asked: web.Request) -> web.Response:
        tokens = tuple((await _body(asked))["tokens"])
        request = GenerationRequest(self._spec.id, operation="detokenize", prompts=(tokens,))
        [delta, *_] = await self._collected(request)
        assert isinstance(delta, TextDelta)
        return web.json_response({"content": delta.text})

    async def _collected(self, request: GenerationRequest) -> list[Delta]:
        stream = _Stream(request)
        with self._running(stream):
            try:
                await stream.work(self._threads, self._engine)
            finally:
                stream.cancelled_at_client = True
        return stream.deltas

    async def _complete(self, asked: web.Request) -> web.StreamResponse:
        stream = _Stream(_completion(await _body(asked)))
        with self._running(stream):
            work = asyncio.ensure_future(stream.work(self._threads, self._engine))
            try:
                chunks = await stream.next_chunks()
                if not chunks:
                    await work  # Raises the error of the request.
                answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await answer.prepare(asked)
                while chunks:
                    await answer.write(b"".join(b"data: " + c + b"\n\n" for c in chunks))
                    chunks = await stream.next_chunks()
                try:
                    await work
                except EngineError as exc:
                    await answer.write(b"data: " + orjson.dumps({"error": _error(exc)}) + b"\n\n")
                else:
                    await answer.write(b"data: [DONE]\n\n")
                return answer
            finally:
                stream.cancelled_at_client = True
                await asyncio.gather(work, return_exceptions=True)

    @contextmanager
    def _running(self, stream: _Stream) -> Iterator[None]:
        """Include the stream in the checks of ``/pulse``."""
        self._runs.add(stream)
        try:
            yield
        finally:
            self._runs.discard(stream)


class _Stream:
    """The sink of one run; turns deltas into chunks.

    The engine reports the usage of the whole run. The choices run one after another, so a choice's
    usage is the difference to the usage at the end of the choice before it.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._used, self._before = Usage(), Usage()
        self._index = 0
        self._steps = self._seen = 0
        self._has_begun = False
        self.cancelled_at_client = False
        self.deltas: list[Delta] = []

    @property
    def cancelled(self) -> bool:
        """Whether the engine must stop now (see ``Sink``)."""
        self._steps += 1
        return self.cancelled_at_client

    def takes_step(self) -> bool:
        """Whether the run has made a step since the last call, or has not begun."""
        seen, self._seen = self._seen, self._steps
        return not self._has_begun or self._steps != seen

    def feed(self, delta: Delta) -> None:
        """Take the next delta (see ``Sink``)."""
        self._steps += 1
        if self._request.operation != "complete":
            self.deltas.append(delta)
            return
        if isinstance(delta, Usage):
            self._used = delta
            return
        chunk: dict[str, Any]
        match delta:
            case TextDelta(text, index, logprobs):
                choice = {"index": index, "text": text, "finish_reason": None}
                if logprobs:
                    choice["logprobs"] = {"content": [_logprob(entry) for entry in logprobs]}
                chunk = {"choices": [choice], **self._timings(index)}
            case Finish(reason, index, stop):
                ended = {"index": index, "text": "", "finish_reason": reason, "stop_reason": stop}
                chunk = {"choices": [ended], **self._timings(index)}
                self._before, self._index = self._used, index + 1
            case PromptProgress(total, cached, processed, elapsed_ms):
                read = {"total": total, "cache": cached, "processed": processed}
                choice = {"index": self._index, "text": "", "finish_reason": None}
                progress = {"prompt_progress": {**read, "time_ms": elapsed_ms}}
                chunk = {"choices": [choice], **progress, **self._timings(self._index)}
            case _:
                raise TypeError(f"no chunk of a completion: {type(delta).__name__}")
        self._loop.call_soon_threadsafe(self._chunks.put_nowait, orjson.dumps(chunk))

    async def work(self, threads: ThreadPoolExecutor, engine: CtransformersEngine) -> None:
        """Run the request on a thread. Raise EngineError."""

        def run() -> None:
            self._has_begun = True
            engine.run(self._request, self)

        try:
            await self._loop.run_in_executor(threads, run)
        finally:
            self._chunks.put_nowait(None)

    async def next_chunks(self) -> list[bytes]:
        """Wait for chunks and return them; return an empty list at the end."""
        found = [await self._chunks.get()]
        while found[-1] is not None and not self._chunks.empty():
            found.append(self._chunks.get_nowait())
        if found[-1] is None and len(found) > 1:
            self._chunks.put_nowait(None)  # For the next call.
        return [chunk for chunk in found if chunk is not None]

    def _timings(self, index: int) -> dict[str, Any]:
        """Return the usage of the running choice; empty for the echo of another choice."""
        if index != self._index:
            return {}
        used, before = self._used, self._before
        cached = used.cached_tokens - before.cached_tokens
        timings = {
            "cache_n": cached,
            "prompt_n": used.input_tokens - before.input_tokens - cached,
            "prompt_ms": used.prefill_ms - before.prefill_ms,
            "predicted_n": used.output_tokens - before.output_tokens,
            "predicted_ms": used.decode_ms - before.decode_ms,
        }
        return {"timings": timings}


async def _body(asked: web.Request) -> dict[str, Any]:
    body: dict[str, Any] = orjson.loads(await asked.read())
    return body


def _completion(body: dict[str, Any]) -> GenerationRequest:
    """Return the request of the platform's payload."""
    sampling = {name: body[name] for name in _SAMPLING & body.keys()}
    bias = sampling.pop("logit_bias", {})
    if (breakers := sampling.get("dry_sequence_breakers")) is not None:
        sampling["dry_sequence_breakers"] = tuple(breakers)
    grammar = body.get("grammar")
    return GenerationRequest(
        body["model"],
        operation="complete",
        prompts=tuple(p if isinstance(p, str) else tuple(p) for p in body["prompts"]),
        sampling=Sampling(
            **sampling, logit_bias=tuple((int(token), value) for token, value in bias.items())
        ),
        max_output_tokens=body.get("max_tokens"),
        choices=body.get("n", 1),
        stop=tuple(body.get("stop", ())),
        stop_token_ids=tuple(body.get("stop_token_ids", ())),
        ignore_eos=body.get("ignore_eos", False),
        cache_prompt=body.get("cache_prompt", True),
        top_logprobs=body.get("logprobs"),
        constraint=grammar and Constraint("llguidance", grammar, "grammar"),
        echo=body.get("echo", False),
        return_progress=True,
        running_usage=True,
    )


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    known = None if math.isnan(entry.logprob) else entry.logprob
    wire: dict[str, Any] = {
        "token": entry.token,
        "logprob": known if known is None or math.isfinite(known) else -1e38,
        "bytes": list(entry.text_bytes),
    }
    return wire | {"top_logprobs": [_logprob(other) for other in entry.top]}


def _error(exc: EngineError) -> dict[str, Any]:
    """Return an error in llama.cpp's format, with additional fields for the platform."""
    error: dict[str, Any] = {"message": str(exc), "code": 500}
    if isinstance(exc, InvalidRequest):
        error |= {"code": 400, "param": exc.param}
    if isinstance(exc, ContextLengthExceeded):
        error |= {"n_ctx": exc.context_length, "n_prompt_tokens": exc.input_tokens}
        error["is_estimated"] = exc.is_estimated
    return error


if __name__ == "__main__":
    main()
