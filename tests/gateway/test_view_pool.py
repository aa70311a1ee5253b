"""The pool of views: what it runs, what it refuses, and what it gives up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from django.http import HttpResponse
from pytest_django.fixtures import Settings

from inference_site.errors.api_errors import UnavailableError
from inference_site.gateway.view_pool import ViewPool


def answer(status: int = 200) -> Callable[[], HttpResponse]:
    return lambda: HttpResponse(status=status)


class Stuck:
    """A view that hangs until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.ran = 0

    def __call__(self) -> HttpResponse:
        self.ran += 1
        self.let_go.wait(10)
        return HttpResponse()


def ignore() -> None:
    """Nothing was abandoned that matters."""


def test_a_view_answers() -> None:
    response = asyncio.run(ViewPool(1).run(answer(201), ignore))
    assert response.status_code == 201


def test_a_hanging_view_is_given_up_and_its_end_is_told(settings: Settings) -> None:
    settings.WEB_STALL_S = 0.3
    stuck, told = Stuck(), threading.Event()

    async def main() -> None:
        with pytest.raises(UnavailableError):
            await ViewPool(1).run(stuck, told.set)
        assert not told.is_set()
        stuck.let_go.set()

    asyncio.run(main())
    assert told.wait(2)


def test_what_was_refused_before_it_began_never_runs(settings: Settings) -> None:
    settings.WEB_STALL_S = 0.3
    first, second = Stuck(), Stuck()

    async def main() -> None:
        pool = ViewPool(1)
        outcomes = await asyncio.gather(
            pool.run(first, ignore), pool.run(second, ignore), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [UnavailableError] * 2
        first.let_go.set()
        second.let_go.set()
        await asyncio.sleep(0.1)

    asyncio.run(main())
    assert (first.ran, second.ran) == (1, 0)


def test_a_client_that_leaves_while_its_view_runs_is_told_of_its_end() -> None:
    stuck, told = Stuck(), threading.Event()

    async def main() -> None:
        task = asyncio.create_task(ViewPool(1).run(stuck, told.set))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stuck.let_go.set()

    asyncio.run(main())
    assert told.wait(2)


def test_after_a_slow_failure_requests_are_refused_for_a_while() -> None:
    def slow_failure() -> HttpResponse:
        time.sleep(1.05)
        return HttpResponse(status=503)

    async def main() -> None:
        pool = ViewPool(1)
        assert (await pool.run(slow_failure, ignore)).status_code == 503
        with pytest.raises(UnavailableError):
            await pool.run(answer(), ignore)
        await asyncio.sleep(1.05)
        assert (await pool.run(answer(), ignore)).status_code == 200

    asyncio.run(main())


def test_a_long_line_that_moves_is_no_stall(settings: Settings) -> None:
    settings.WEB_STALL_S = 0.3

    def brisk() -> HttpResponse:
        time.sleep(0.05)
        return HttpResponse()

    async def main() -> None:
        pool = ViewPool(1)
        responses = await asyncio.gather(*(pool.run(brisk, ignore) for _ in range(15)))
        assert [response.status_code for response in responses] == [200] * 15

    asyncio.run(main())
