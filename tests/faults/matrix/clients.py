"""Clients of every kind, which ask until they are stopped and note what they are told.

The scripted model says numbered words slowly, so that a lost or a repeated piece of a text shows.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import httpx

from tests.faults.matrix.ledger import Ledger, Request

_PATIENCE_S = 120.0
"""How long a client polls, or comes back to a stream, before it gives up."""
_CANCELLED_S = 45.0
"""A response that is cancelled ends by then, also if its worker was killed in that moment."""
_RETRY_S = 0.5
_ENDED = {"completed", "incomplete", "failed", "cancelled"}
_TERMINAL = {f"response.{status}" for status in _ENDED} | {"error"}

_STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}

Event = dict[str, Any]


class Client:
    """One client: a connection pool, and what it asks with; ``model`` is a scripted one."""

    def __init__(self, url: str, key: str, ledger: Ledger, model: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        self.http = httpx.AsyncClient(base_url=url, headers=headers, timeout=60)
        self._ledger, self._model = ledger, model
        self._conversation = ""
        self._is_compacted = False
        """Whether the last stream was made anew without the deltas that it once had."""

    def _begin(self, client: str, words: int, **facts: Any) -> tuple[Request, str]:
        """Note a request; return it and the script that makes the model say its text."""
        tag = f"{client.replace(', ', '-').replace(' ', '-')}-{secrets.token_hex(8)}"
        said = [f"{number} " for number in range(words)]
        steps = [step for word in said for step in ({"text": word}, {"sleep_ms": 60})]
        request = Request(client, tag, "".join(said), **facts)
        return self._ledger.begin(request), json.dumps(steps)

    def _chat(self, client: str, **fields: Any) -> tuple[Request, Event]:
        stored = bool(fields.get("store"))
        request, script = self._begin(client, random.randint(5, 80), is_stored=stored)
        messages = [{"role": "user", "content": script}]
        return request, {"model": self._model, "messages": messages, "user": request.tag, **fields}

    def _response(self, client: str, words: int = 0, **fields: Any) -> tuple[Request, Event]:
        request, script = self._begin(
            client,
            words or random.randint(5, 80),
            is_response=True,
            is_stored=True,
            is_background=bool(fields.get("background")),
            conversation=fields.get("conversation", ""),
        )
        body = {"model": self._model, "input": script, "safety_identifier": request.tag}
        return request, body | fields

    async def chat(self) -> None:
        """Ask for a chat completion in one piece, sometimes one that is kept."""
        request, body = self._chat("chat", store=random.random() < 0.5)
        await self._whole(request, "/v1/chat/completions", body)

    async def chat_stream(self) -> None:
        """Read a streamed chat completion to its end."""
        request, body = self._chat("chat, streamed", **_STREAMED)
        await self._read(request, "/v1/chat/completions", body)

    async def leaver(self) -> None:
        """Leave a stream after a few frames."""
        request, body = self._chat("chat, left", **_STREAMED)
        await self._read(request, "/v1/chat/completions", body, leave_after=random.randint(1, 20))

    async def keyed(self) -> None:
        """Send one request again under one key until it is answered."""
        request, body = self._chat("chat, one key")
        request.has_key = True
        headers = {"Idempotency-Key": request.tag}
        for _ in range(40):
            answer = await self._post("/v1/chat/completions", body, headers=headers)
            if answer is not None and answer.status_code not in (409, 429, 500, 502, 503):
                break
            await asyncio.sleep(_RETRY_S)
        _take_answer(request, answer)
        # Once more, as if the answer had not come: that may not run again.
        await self._post("/v1/chat/completions", body, headers=headers)

    async def response(self) -> None:
        """Ask for a stored response in one piece."""
        request, body = self._response("response")
        await self._whole(request, "/v1/responses", body)

    async def response_stream(self) -> None:
        """Read the events of a stored response."""
        request, body = self._response("response, streamed", stream=True)
        await self._read(request, "/v1/responses", body)

    async def turn(self) -> None:
        """Add a turn to a conversation of one's own."""
        if not self._conversation:
            made = await self._post("/v1/conversations", {})
            if made is None or made.status_code != 200:
                await asyncio.sleep(_RETRY_S)
                return
            self._conversation = made.json()["id"]
        request, body = self._response("response, a turn", 10, conversation=self._conversation)
        await self._whole(request, "/v1/responses", body)
        if random.random() < 0.1:  # It would grow beyond the context of the model.
            self._conversation = ""

    async def background(self) -> None:
        """Ask for a response in the background and look until it has ended."""
        request, body = self._response("background, polled", background=True)
        if await self._accepted(request, body):
            await self._poll(request)

    async def cancelled(self) -> None:
        """Cancel a response in the background that has begun."""
        request, body = self._response("background, cancelled", 400, background=True)
        if not await self._accepted(request, body):
            return
        await asyncio.sleep(random.random())
        for _ in range(40):
            answer = await self._post(f"/v1/responses/{request.id}/cancel", {})
            if answer is not None and answer.status_code < 500:
                break
            await asyncio.sleep(_RETRY_S)
        is_over = answer is not None and answer.json().get("status") in _ENDED
        cancelled_at = asyncio.get_running_loop().time()
        await self._poll(request)
        took_s = asyncio.get_running_loop().time() - cancelled_at
        if request.outcome == "ok" and not is_over:
            request.problems.append("cancelled, and it ran to its end")
        elif took_s > _CANCELLED_S:
            request.problems.append(f"its cancel took {took_s:.0f} s")

    async def resumed(self) -> None:
        """Read a response in the background; come back whenever the stream is cut."""
        request, body = self._response("background, streamed", background=True, stream=True)
        events: list[Event] = []
        await self._follow(request, events, self._events("POST", "/v1/responses", json=body), 10)
        if not events:
            request.end("cut")
            return
        deadline = asyncio.get_running_loop().time() + _PATIENCE_S
        while not _is_terminal(events[-1]):
            if asyncio.get_running_loop().time() > deadline:
                request.problems.append("the stream did not end")
                break
            params = {"stream": "true", "starting_after": str(events[-1]["sequence_number"])}
            path = f"/v1/responses/{request.id}"
            if not await self._follow(request, events, self._events("GET", path, params=params)):
                await asyncio.sleep(_RETRY_S)
        if events[-1].get("code") == "stream_lost":
            await self._poll(request)  # The run itself may go on.
        _take_events(request, events, is_compacted=self._is_compacted)

    async def probe(self) -> bool:
        """Ask something short; return whether it was answered."""
        body = {"model": self._model, "messages": [{"role": "user", "content": '[{"text":"ok"}]'}]}
        answer = await self._post("/v1/chat/completions", body, timeout=3)
        return answer is not None and answer.status_code == 200

    async def _post(self, path: str, body: Event, **options: Any) -> httpx.Response | None:
        try:
            return await self.http.post(path, json=body, **options)
        except httpx.TransportError:
            return None

    async def _whole(self, request: Request, path: str, body: Event) -> None:
        _take_answer(request, await self._post(path, body))

    async def _accepted(self, request: Request, body: Event) -> bool:
        answer = await self._post("/v1/responses", body)
        if answer is None or answer.status_code != 200:
            _take_answer(request, answer)
            return False
        request.id = answer.json()["id"]
        return True

    async def _poll(self, request: Request) -> None:
        deadline = asyncio.get_running_loop().time() + _PATIENCE_S
        while asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_RETRY_S)
            try:
                answer = await self.http.get(f"/v1/responses/{request.id}")
            except httpx.TransportError:
                continue
            if answer.status_code == 404:
                request.problems.append("an accepted response is not found")
                break
            if answer.status_code == 200 and answer.json()["status"] in _ENDED:
                _take_response(request, answer.json())
                return
        request.end("error", "never ended for its client")
        request.problems.append(request.told)

    async def _read(
        self, request: Request, path: str, body: Event, leave_after: int | None = None
    ) -> None:
        """Read a stream to its end, or leave it after so many events."""
        events: list[Event] = []
        stream = self._events("POST", path, json=body)
        ended = await self._follow(request, events, stream, leave_after)
        if leave_after is not None and len(events) >= leave_after:
            request.end("left")
        elif not ended and request.outcome == "open":
            _check_numbers(request, events)
            request.end("cut")
        else:
            _take_events(request, events)

    async def _follow(
        self,
        request: Request,
        events: list[Event],
        stream: AsyncGenerator[Event, None],
        leave_after: int | None = None,
    ) -> bool:
        """Take the events of a stream; return whether it came to its ``[DONE]``."""
        try:
            async with aclosing(stream):
                async for event in stream:
                    if event == {}:
                        return True
                    events.append(event)
                    known = event.get("id") or event.get("response", {}).get("id")
                    request.id = request.id or known or ""
                    if len(events) == leave_after:
                        return False
            request.problems.append("a stream ended without [DONE]")
        except httpx.TransportError:
            pass
        except _RefusedError as exc:
            if not events:
                _take_answer(request, exc.answer)
        return False

    async def _events(self, method: str, path: str, **options: Any) -> AsyncGenerator[Event, None]:
        """Yield the events of a stream, then an empty one for its ``[DONE]``."""
        async with self.http.stream(method, path, **options) as answer:
            if answer.status_code != 200:
                await answer.aread()
                raise _RefusedError(answer)
            self._is_compacted = answer.headers.get("x-replay") == "compacted"
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    yield {} if data == "[DONE]" else json.loads(data)


class _RefusedError(Exception):
    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer


KINDS: dict[str, Callable[[Client], Awaitable[Any]]] = {
    "chat": Client.chat,
    "chat, streamed": Client.chat_stream,
    "chat, left": Client.leaver,
    "chat, one key": Client.keyed,
    "response": Client.response,
    "response, streamed": Client.response_stream,
    "response, a turn": Client.turn,
    "background, polled": Client.background,
    "background, cancelled": Client.cancelled,
    "background, streamed": Client.resumed,
}


async def ask_until(stopped: asyncio.Event, client: Client, kind: str) -> None:
    """Ask for things of this kind, one after the other, until the event is set."""
    while not stopped.is_set():
        await KINDS[kind](client)
        await asyncio.sleep(random.random() * 0.3)


def _take_answer(request: Request, answer: httpx.Response | None) -> None:
    """Note an answer in one piece."""
    if answer is None:
        request.end("cut")
        return
    try:
        body = answer.json()
    except ValueError:
        request.problems.append(f"an answer {answer.status_code} that is no JSON")
        body = {}
    if answer.status_code != 200:
        _take_error(request, answer.status_code, body.get("error") or {})
    elif request.is_response:
        _take_response(request, body)
    else:
        _take_completion(request, body, body["choices"][0]["message"]["content"])


def _take_error(request: Request, status: int, error: Event) -> None:
    code = error.get("code") or error.get("type")
    if not code:
        request.problems.append(f"an error {status} without a code")
    request.end("error", f"{status} {code}")


def _take_completion(request: Request, body: Event, text: str) -> None:
    request.id, request.usage, request.text = body["id"], body["usage"], text
    request.end("ok")


def _take_response(request: Request, response: Event) -> None:
    """Note a response that has ended, as it was told."""
    request.id, request.usage = response["id"], response["usage"]
    said = [part["text"] for item in response["output"] for part in item.get("content") or ()]
    request.text = "".join(said)
    if response["status"] == "completed":
        request.end("ok")
    elif response["status"] == "cancelled":
        request.end("left", "cancelled")
    else:
        error = response["error"] or {"code": response["status"]}
        request.end("error", error["code"])


def _take_events(request: Request, events: list[Event], *, is_compacted: bool = False) -> None:
    """Note the events of a stream that has come to its end."""
    if request.outcome != "open":
        return
    if not events:
        request.problems.append("a stream without an event")
        request.end("error", "an empty stream")
    elif request.is_response:
        _take_response_events(request, events, is_compacted=is_compacted)
    else:
        _take_chunks(request, events)


def _take_chunks(request: Request, chunks: list[Event]) -> None:
    if "error" in chunks[-1]:
        _take_error(request, 200, chunks[-1]["error"])
        return
    pieces = [c["choices"][0]["delta"].get("content") for c in chunks if c.get("choices")]
    _take_completion(request, chunks[-1], "".join(piece or "" for piece in pieces))


def _take_response_events(request: Request, events: list[Event], *, is_compacted: bool) -> None:
    _check_numbers(request, events)
    last = events[-1]
    if "response" not in last:
        request.end("error", f"event {last.get('code') or last.get('type')}")
        return
    _take_response(request, last["response"])
    # Of a response that failed, what was made until then is lost if Redis lost its log.
    has_lost_all = last["response"]["status"] == "failed" and not request.text
    if _said(events) != request.text and not is_compacted and not has_lost_all:
        request.problems.append("the deltas are not the text of the last event")


def _is_terminal(event: Event) -> bool:
    return event.get("type") in _TERMINAL or "error" in event


def _check_numbers(request: Request, events: list[Event]) -> None:
    """A stream of a response has every number once."""
    if request.is_response:
        request.numbers = [event.get("sequence_number", -1) for event in events]
        request.problems += [f"no type: {event}" for event in events if "type" not in event]
        if request.numbers != list(range(len(events))):
            request.problems.append("numbers of events are missing or repeated")


def _said(events: list[Event]) -> str:
    """The deltas of a stream; those of an attempt that was begun anew do not count."""
    text = ""
    for event in events:
        if event.get("type") == "response.in_progress":
            text = ""
        elif event.get("type") == "response.output_text.delta":
            text += event["delta"]
    return text
