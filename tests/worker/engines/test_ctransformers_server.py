"""The server in front of ctransformers, with an engine that does what a test needs."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

from aiohttp.test_utils import TestClient, TestServer

from inference_site.core.domain.deltas import Finish, PromptProgress, TextDelta, Usage
from inference_site.core.domain.errors import ContextLengthExceeded
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest
from worker.engines.base import Engine, Sink
from worker.engines.ctransformers.engine import CtransformersEngine
from worker.engines.ctransformers.server import ModelServer

KEY = {"Authorization": "Bearer key"}
ASKED = {"model": "m", "prompts": ["Hi"]}


class ToldEngine(Engine):
    """Stands still until it is let go, then says two words; a long prompt is too long for it."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.cancelled = threading.Event()

    def complete(self, request: GenerationRequest, sink: Sink) -> None:
        if request.prompts == ("long",):
            raise ContextLengthExceeded(256, 1000, "prompt", is_estimated=True)
        sink.feed(Usage(input_tokens=3, cached_tokens=1))
        sink.feed(PromptProgress(3, 1, 3, 0.5))
        self.go_on.wait(60)
        for output, text in enumerate(("a", "b"), 1):
            if sink.cancelled:
                self.cancelled.set()
                return
            sink.feed(Usage(3, 1, output))
            sink.feed(TextDelta(text))
        sink.feed(Finish("stop"))

    def tokenize(self, request: GenerationRequest, sink: Sink) -> None:
        self.go_on.wait(60)
        if sink.cancelled:
            self.cancelled.set()

    def close(self) -> None:
        """Do nothing."""


def served(test: Any) -> None:
    """Run a test against a server of one slot."""

    async def run() -> None:
        engine = ToldEngine()
        spec = ModelSpec("m", "ctransformers", slots=1)
        app = ModelServer(spec, cast("CtransformersEngine", engine), "key").app()
        async with TestClient(TestServer(app, handler_cancellation=True)) as client:
            await test(client, engine)

    asyncio.run(run())


def test_it_wants_its_key() -> None:
    async def test(client: Any, _: ToldEngine) -> None:
        assert (await client.get("/health")).status == 401
        assert (await client.get("/health", headers=KEY)).status == 200

    served(test)


def test_a_run_that_makes_no_step_has_no_pulse() -> None:
    async def test(client: Any, engine: ToldEngine) -> None:
        async def pulse() -> int:
            answer = await client.get("/pulse", headers=KEY)
            return int(answer.status)

        assert [await pulse() for _ in range(2)] == [200, 200]  # Nothing runs.
        answer = await client.post("/v1/completions", json=ASKED, headers=KEY)
        assert b"prompt_progress" in await answer.content.readline()
        assert [await pulse() for _ in range(2)] == [200, 503]
        engine.go_on.set()
        assert b"[DONE]" in await answer.read()
        assert await pulse() == 200

    served(test)


def test_a_text_is_not_tokenized_further_when_its_connection_has_ended() -> None:
    async def test(client: Any, engine: ToldEngine) -> None:
        asking = asyncio.ensure_future(
            client.post("/tokenize", json={"content": "Hi"}, headers=KEY)
        )
        await asyncio.sleep(0.5)
        asking.cancel()
        await asyncio.sleep(0.5)
        engine.go_on.set()
        assert await asyncio.to_thread(engine.cancelled.wait, 10)

    served(test)


def test_a_run_ends_when_its_connection_does() -> None:
    async def test(client: Any, engine: ToldEngine) -> None:
        answer = await client.post("/v1/completions", json=ASKED, headers=KEY)
        answer.close()
        await asyncio.sleep(0.2)
        engine.go_on.set()
        assert await asyncio.to_thread(engine.cancelled.wait, 30)

    served(test)


def test_a_refusal_names_what_is_wrong_and_both_counts() -> None:
    async def test(client: Any, _: ToldEngine) -> None:
        asked = {"model": "m", "prompts": ["long"]}
        answer = await client.post("/v1/completions", json=asked, headers=KEY)
        error = (await answer.json())["error"]
        assert answer.status == 400
        counts = {"n_ctx": 256, "n_prompt_tokens": 1000, "is_estimated": True}
        assert {name: error[name] for name in counts} == counts
        assert error["param"] == "prompt"

    served(test)
