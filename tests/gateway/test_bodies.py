"""Bodies: how much of memory they may take, and how long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pytest_django.fixtures import Settings

from inference_site.core.errors.api_errors import (
    InvalidRequestError,
    PayloadTooLargeError,
    RequestTimeoutError,
    UnavailableError,
)
from inference_site.gateway.bodies import (
    BodyMemory,
    FormDigest,
    boundary_of,
    bounded_forms,
    read_body,
)
from inference_site.gateway.head import length_of_body, read_head
from tests.gateway.asgi import FakeClient, scope


@pytest.fixture(autouse=True)
def _small(settings: Settings) -> None:
    settings.MAX_BODIES_BYTES = 80
    settings.MAX_BODY_BYTES = 30
    settings.BODY_TIMEOUT_S = 5


class Holder:
    """Reserves memory until ``end``."""

    def __init__(self, memory: BodyMemory, project_id: int, size: int) -> None:
        self.has_memory, self.done = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._hold(memory, project_id, size))

    async def _hold(self, memory: BodyMemory, project_id: int, size: int) -> None:
        async with memory.reserved(project_id, size):
            self.has_memory.set()
            await self.done.wait()

    async def end(self) -> None:
        self.done.set()
        await self.task


async def _settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_project_holds_a_quarter_and_others_get_the_rest() -> None:
    async def main() -> None:
        memory = BodyMemory("MAX_BODIES_BYTES")
        first, second, third = (Holder(memory, 1, 10) for _ in range(3))
        other = Holder(memory, 2, 20)
        await _settled()
        held = [holder.has_memory.is_set() for holder in (first, second, third, other)]
        assert held == [True, True, False, True]
        await first.end()
        await _settled()
        assert third.has_memory.is_set()
        for holder in (second, third, other):
            await holder.end()
        await Holder(memory, 3, 30).end()

    asyncio.run(main())


def test_one_body_has_memory_however_large_it_may_be() -> None:
    async def main() -> None:
        memory = BodyMemory("MAX_BODIES_BYTES")
        await asyncio.wait_for(Holder(memory, 1, 30).end(), 1)
        await asyncio.wait_for(Holder(memory, 1, 500).end(), 1)

    asyncio.run(main())


def test_a_body_without_memory_in_time_is_refused_and_keeps_none(settings: Settings) -> None:
    settings.BODY_TIMEOUT_S = 0.05

    async def main() -> None:
        memory = BodyMemory("MAX_BODIES_BYTES")
        first = Holder(memory, 1, 20)
        await _settled()
        with pytest.raises(UnavailableError):
            await Holder(memory, 1, 20).task
        await first.end()
        again = Holder(memory, 1, 20)
        await _settled()
        assert again.has_memory.is_set()
        await again.end()

    asyncio.run(main())


def test_bodies_of_one_project_that_wait_are_bounded_and_others_go_on() -> None:
    async def main() -> None:
        memory = BodyMemory("MAX_BODIES_BYTES")
        holders = [Holder(memory, 1, 20) for _ in range(1001)]
        await _settled()
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(Holder(memory, 1, 20).task, 1)
        await asyncio.wait_for(Holder(memory, 2, 20).end(), 1)
        for holder in holders:
            await asyncio.wait_for(holder.end(), 1)

    asyncio.run(main())


def test_giving_memory_back_tries_few_of_the_bodies_that_wait() -> None:
    class Counting(BodyMemory):
        tries = 0

        def try_reserve(self, project_id: int | None, size: int) -> bool:
            self.tries += 1
            return super().try_reserve(project_id, size)

    async def main() -> None:
        memory = Counting("MAX_BODIES_BYTES")
        holders = [Holder(memory, project, 20) for _ in range(300) for project in (1, 2)]
        await _settled()
        for holder in holders:
            holder.done.set()
        await asyncio.gather(*(holder.task for holder in holders))
        assert memory.tries < 10 * len(holders)

    asyncio.run(main())


def test_a_waiter_that_leaves_keeps_no_memory() -> None:
    async def main() -> None:
        memory = BodyMemory("MAX_BODIES_BYTES")
        first, leaving = Holder(memory, 1, 20), Holder(memory, 1, 20)
        await _settled()
        leaving.task.cancel()
        await _settled()
        await first.end()
        last = Holder(memory, 1, 20)
        await _settled()
        assert last.has_memory.is_set()
        await last.end()

    asyncio.run(main())


def test_a_body_that_does_not_come_in_time_is_refused(settings: Settings) -> None:
    settings.BODY_TIMEOUT_S = 0.05
    client = FakeClient(b"{")
    client._requests[-1]["more_body"] = True
    with pytest.raises(RequestTimeoutError):
        asyncio.run(read_body(client.receive))


@pytest.mark.parametrize(
    ("headers", "length"),
    [({}, 0), ({"content-length": "30"}, 30), ({"transfer-encoding": "chunked"}, 30)],
)
def test_the_head_says_how_much_may_come(headers: dict[str, str], length: int) -> None:
    assert length_of_body(scope("POST", "/v1/x", headers)) == length


def test_a_length_past_the_limit_is_refused() -> None:
    given: Any = scope("POST", "/v1/x", {"content-length": "31"})
    with pytest.raises(PayloadTooLargeError):
        length_of_body(given)


UNREADABLE = ["a/b; charset*=none'x'y", "multipart/form-data; boundary=x; charset*=idna'x'y"]
FORM = "application/x-www-form-urlencoded"
OTHER_CHARSETS = [f"{FORM}; charset={name}" for name in ("utf-16", "utf8", "latin-1")]


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        *((one, 400) for one in (*UNREADABLE, *OTHER_CHARSETS)),
        ("multipart/form-data; boundary=x; charset=base64", 400),
        (FORM, 204),
        (f"{FORM}; charset=UTF-8", 204),
    ],
)
def test_a_form_that_django_cannot_read_does_not_reach_a_page(
    content_type: str, status: int
) -> None:
    async def page(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})

    async def ask() -> int:
        client = FakeClient(b"a=b")
        form = scope("POST", "/admin/login/", {"content-type": content_type})
        await bounded_forms(page)(form, client.receive, client.send)
        return client.status

    assert asyncio.run(ask()) == status


@pytest.mark.parametrize("content_type", UNREADABLE)
def test_a_content_type_that_django_cannot_read_is_an_error_of_the_api(content_type: str) -> None:
    with pytest.raises(InvalidRequestError, match="Content-Type"):
        read_head(scope("GET", "/v1/models", {"content-type": content_type}))


def digest_of(boundary: str, *parts: str, cut: int = 1_000) -> str:
    """The digest of a form with these parts, which comes in pieces of ``cut`` bytes."""
    digest = FormDigest(boundary)
    sent = "".join(f"--{boundary}\r\n\r\n{part}\r\n" for part in parts) + f"--{boundary}--\r\n"
    for start in range(0, len(sent), cut):
        digest.update(sent[start : start + cut].encode())
    return digest.hexdigest()


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 50])
def test_the_digest_of_a_form_is_that_of_its_parts(cut: int) -> None:
    parts = ("one\r\n--", "\r\n--x", "", "two")
    assert digest_of("abc", *parts, cut=cut) == digest_of("another-boundary", *parts)
    for other in (parts[1:], (*parts, ""), ("one\r\n--\r\n", *parts[1:])):
        assert digest_of("abc", *other, cut=cut) != digest_of("abc", *parts)
    assert digest_of("abc", "one", "two") != digest_of("abc", "onetwo")


def test_the_boundary_is_in_the_content_type() -> None:
    assert boundary_of('multipart/form-data; charset=utf-8; boundary="a b"') == "a b"
    assert boundary_of("application/json") == boundary_of("") == ""
