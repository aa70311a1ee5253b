"""Requests that wait for a generation's ending: how often their views run, and in which order."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from django.http import HttpResponse

from inference_site.accounts.keys import Caller
from inference_site.gateway import delivery, handoff, relay
from inference_site.gateway.bodies import SpooledBody
from inference_site.gateway.handler import ApiHandler
from inference_site.gateway.handoff import SCOPE_KEY, HandOff, Wait
from inference_site.gateway.head import Head
from inference_site.gateway.relay import Relay
from inference_site.runs.streams.batches import Batch, Ending
from tests.gateway.asgi import FakeClient, scope
from tests.gateway.exchange import QuietHub

END = Ending((), 200, b"{}", finish_reason="stop")


class EndingsHub(QuietHub):
    """A hub that knows which generations run, and what was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, asyncio.Event] = {}
        self.waited_for: list[str] = []

    async def wait_for_ending(self, generation_id: str, timeout_s: float) -> None:
        self.waited_for.append(generation_id)
        if ending := self.running.get(generation_id):
            try:
                await asyncio.wait_for(ending.wait(), timeout_s)
            except TimeoutError:
                return

    def end(self, generation_id: str) -> None:
        """End a generation, and with it the answer of its client."""
        self.running.pop(generation_id).set()
        for follower in self.readers(generation_id):
            follower.offer(Batch(0, (), END))


class OneConversation(ApiHandler):
    """The view of a conversation: one generation holds it, the others must wait."""

    def __init__(self, hub: EndingsHub, at_most_s: float) -> None:
        self._hub, self._at_most_s = hub, at_most_s
        self._ids = map("g{}".format, itertools.count(1))
        self._lock = threading.Lock()
        self.holder = "g0"
        hub.running["g0"] = asyncio.Event()
        self.served: list[bytes] = []
        self.calls = self.plain_calls = 0

    def respond(self, scope: dict[str, Any], body: bytes | SpooledBody) -> HttpResponse:
        assert isinstance(body, bytes)
        if body == b"plain":
            self.plain_calls += 1
            return HttpResponse(b"{}")
        with self._lock:
            self.calls += 1
            if self.holder in self._hub.running:
                wait = Wait(self.holder, "conv_1", self._at_most_s)
                scope[SCOPE_KEY].wait = wait
                return HttpResponse(b"locked", status=400)
            holder = next(self._ids)
            self._hub.running[holder] = asyncio.Event()
            scope[SCOPE_KEY].handoff = HandOff(self._hub.follow(holder), stream=False)
            self.served.append(body)
            self.holder = holder  # Last: the test looks for it from another thread.
            return HttpResponse()


class Crowd:
    """Many requests on one conversation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_most_s: float) -> None:
        self.hub = EndingsHub()
        self.view = OneConversation(self.hub, at_most_s)
        self._relay = Relay(lambda _: Head(1, takes_body=True, user=Caller(1, 1)))
        self._relay._handler = self.view
        for module in (delivery, relay, handoff):
            monkeypatch.setattr(module, "hub", self.hub)

    def has_other_holder(self, before: str) -> bool:
        return self.view.holder != before

    def send(self, body: bytes) -> tuple[FakeClient, asyncio.Task[None]]:
        client = FakeClient(body)
        request: Any = self._relay(scope("POST", "/v1/x"), client.receive, client.send)
        return client, asyncio.create_task(request)


def with_crowd(
    monkeypatch: pytest.MonkeyPatch,
    scenario: Callable[[Crowd], Awaitable[None]],
    at_most_s: float = 20.0,
) -> None:
    async def main() -> None:
        await scenario(Crowd(monkeypatch, at_most_s))

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def test_waiters_run_no_view_until_the_holder_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(crowd: Crowd) -> None:
        waiters = [crowd.send(b"%d" % n) for n in range(200)]
        await until(lambda: crowd.view.calls == 200)
        for _ in range(50):  # Others are answered meanwhile.
            client, task = crowd.send(b"plain")
            await asyncio.wait_for(task, 10)
            assert client.status == 200
        assert (crowd.view.calls, crowd.view.plain_calls) == (200, 50)
        assert crowd.hub.waited_for == ["g0"]  # Only the first of the line follows it.
        for _, task in waiters:
            task.cancel()
        await asyncio.gather(*(task for _, task in waiters), return_exceptions=True)

    with_crowd(monkeypatch, scenario)


def test_waiters_are_served_one_at_a_time_in_the_order_they_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(crowd: Crowd) -> None:
        waiters = []
        for n in range(20):
            waiters.append(crowd.send(b"%d" % n))
            await until(lambda: crowd.view.calls == len(waiters))
        while len(crowd.view.served) < 20:
            ended = crowd.view.holder
            crowd.hub.end(ended)
            await until(functools.partial(crowd.has_other_holder, ended))
        crowd.hub.end(crowd.view.holder)
        await asyncio.gather(*(task for _, task in waiters))
        assert [client.status for client, _ in waiters] == [200] * 20
        assert crowd.view.served == [b"%d" % n for n in range(20)]
        assert crowd.view.calls == 40  # Each once in vain, and once when it was its turn.
        assert crowd.hub.waited_for == [f"g{n}" for n in range(20)]

    with_crowd(monkeypatch, scenario)


def test_who_loses_the_race_waits_for_the_new_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(crowd: Crowd) -> None:
        client, task = crowd.send(b"0")
        await until(lambda: crowd.view.calls == 1)
        crowd.hub.running["other"] = asyncio.Event()  # Of another web process.
        crowd.view.holder = "other"
        crowd.hub.end("g0")
        await until(lambda: crowd.hub.waited_for == ["g0", "other"])
        crowd.hub.end("other")
        await until(lambda: crowd.has_other_holder("other"))
        crowd.hub.end(crowd.view.holder)
        await task
        assert (client.status, crowd.view.calls) == (200, 3)

    with_crowd(monkeypatch, scenario)


def test_a_conversation_that_nobody_holds_any_more_is_tried_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(crowd: Crowd) -> None:
        client, task = crowd.send(b"0")
        await until(lambda: crowd.view.calls == 1)
        crowd.hub.running[""] = asyncio.Event()  # Locked, but by nobody who can be named.
        crowd.view.holder = ""
        crowd.hub.end("g0")
        await until(lambda: crowd.view.calls >= 3)
        crowd.hub.running.pop("")
        await until(lambda: crowd.has_other_holder(""))
        crowd.hub.end(crowd.view.holder)
        await task
        assert (client.status, crowd.hub.waited_for) == (200, ["g0"])

    with_crowd(monkeypatch, scenario)


def test_waiters_give_up_with_the_answer_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(crowd: Crowd) -> None:
        waiters = [crowd.send(b"%d" % n) for n in range(50)]
        await asyncio.gather(*(task for _, task in waiters))
        assert {client.status for client, _ in waiters} == {400}
        assert {client.writes[0] for client, _ in waiters} == {b"locked"}
        assert crowd.view.calls <= 50 + len(crowd.hub.waited_for)
        assert len(crowd.hub.waited_for) < 10

    with_crowd(monkeypatch, scenario, at_most_s=0.4)


def test_a_waiter_that_is_cut_off_leaves_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(crowd: Crowd) -> None:
        _, first = crowd.send(b"0")
        await until(lambda: crowd.hub.waited_for == ["g0"])
        second, task = crowd.send(b"1")
        await until(lambda: crowd.view.calls == 2)
        first.cancel()
        await until(lambda: crowd.hub.waited_for == ["g0", "g0"])
        crowd.hub.end("g0")
        await until(lambda: crowd.has_other_holder("g0"))
        crowd.hub.end(crowd.view.holder)
        await task
        assert (second.status, crowd.view.served) == (200, [b"1"])

    with_crowd(monkeypatch, scenario)


def test_a_stream_that_ends_before_its_row_is_not_asked_for_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(crowd: Crowd) -> None:
        async def at_once(_generation_id: str, _timeout_s: float) -> None:
            """The stream has ended."""

        monkeypatch.setattr(crowd.hub, "wait_for_ending", at_once)
        client, task = crowd.send(b"0")
        await task
        assert client.status == 400
        assert crowd.view.calls < 12

    with_crowd(monkeypatch, scenario, at_most_s=0.4)
