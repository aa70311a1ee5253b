"""The pool of views: what it runs, and what it refuses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from django.http import HttpResponse

from inference_site.core.errors.api_errors import UnavailableError
from inference_site.gateway import handler
from inference_site.gateway.handler import QueueKey, ViewPool


def answer(status: int = 200) -> Callable[[], HttpResponse]:
    return lambda: HttpResponse(status=status)


class Stuck:
    """A view that hangs until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.ran = 0

    def __call__(self) -> HttpResponse:
        self.ran += 1
        self.let_go.wait(60)
        return HttpResponse()


async def _until(condition: Callable[[], bool]) -> None:
    """Return once threads of the pool have made it so."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def ignore() -> None:
    """Nothing was abandoned that matters."""


def test_a_view_answers() -> None:
    response = asyncio.run(ViewPool(1).run(answer(201), ignore))
    assert response.status_code == 201


def test_a_client_that_leaves_while_its_view_runs_is_told_of_its_end() -> None:
    stuck, told = Stuck(), threading.Event()

    async def main() -> None:
        task = asyncio.create_task(ViewPool(1).run(stuck, told.set))
        await _until(lambda: stuck.ran == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stuck.let_go.set()

    asyncio.run(main())
    assert told.wait(60)


def test_a_project_has_at_most_half_of_the_threads() -> None:
    stuck = Stuck()

    async def main() -> None:
        pool = ViewPool(4)
        busy = [asyncio.create_task(pool.run(stuck, ignore, QueueKey(1))) for _ in range(20)]
        await _until(lambda: stuck.ran == 2)
        await asyncio.sleep(0.05)
        assert stuck.ran == 2
        assert (await pool.run(answer(), ignore, QueueKey(2))).status_code == 200
        stuck.let_go.set()
        assert len(await asyncio.gather(*busy)) == 20

    asyncio.run(main())


def test_large_bodies_of_a_project_are_one_after_the_other() -> None:
    stuck = Stuck()

    async def main() -> None:
        pool = ViewPool(4)
        large = QueueKey(1, is_large=True)
        busy = [asyncio.create_task(pool.run(stuck, ignore, large)) for _ in range(3)]
        await _until(lambda: stuck.ran == 1)
        await asyncio.sleep(0.05)
        assert stuck.ran == 1
        assert (await pool.run(answer(), ignore, QueueKey(1))).status_code == 200
        stuck.let_go.set()
        assert len(await asyncio.gather(*busy)) == 3

    asyncio.run(main())


def test_a_project_rests_after_a_large_body_while_others_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handler, "_REST", 1e6)
    own = QueueKey(1, is_large=True)

    async def main() -> None:
        pool, next_one = ViewPool(1), Stuck()
        next_one.let_go.set()
        assert (await pool.run(answer(), ignore, own)).status_code == 200
        waiting = asyncio.create_task(pool.run(next_one, ignore, own))
        for project in (2, 1):  # With its small ones it goes on.
            assert (await pool.run(answer(201), ignore, QueueKey(project))).status_code == 201
        assert next_one.ran == 0
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(main())


def test_a_project_that_is_alone_need_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "_REST", 1e6)
    monkeypatch.setattr(handler, "_ALONE_S", -1.0)
    own = QueueKey(1, is_large=True)

    async def main() -> None:
        pool = ViewPool(1)
        for _ in range(3):
            assert (await pool.run(answer(), ignore, own)).status_code == 200

    asyncio.run(main())


def test_a_thread_goes_to_the_project_that_has_the_fewest() -> None:
    order: list[int] = []

    def view(project: int) -> Callable[[], HttpResponse]:
        return lambda: order.append(project) or HttpResponse()  # type: ignore[func-returns-value]

    async def main() -> None:
        pool, stuck = ViewPool(1), Stuck()
        first = asyncio.create_task(pool.run(stuck, ignore, QueueKey(1)))
        await asyncio.sleep(0.05)
        rest = [pool.run(view(1), ignore, QueueKey(1)) for _ in range(50)]
        rest += [pool.run(view(project), ignore, QueueKey(project)) for project in (2, 3)]
        tasks = [asyncio.create_task(coroutine) for coroutine in rest]
        await asyncio.sleep(0.05)
        stuck.let_go.set()
        await asyncio.gather(first, *tasks)

    asyncio.run(main())
    assert {2, 3} <= set(order[:4])
    assert len(order) == 52


def test_a_full_line_is_full_for_who_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "_MOST_WAITING", 10)

    async def main() -> None:
        pool, stuck = ViewPool(1), Stuck()
        flood = [asyncio.create_task(pool.run(stuck, ignore, QueueKey(1))) for _ in range(30)]
        await asyncio.sleep(0.05)
        assert sum(task.done() for task in flood) == 19
        other = asyncio.create_task(pool.run(answer(), ignore, QueueKey(2)))
        await asyncio.sleep(0.05)
        stuck.let_go.set()
        assert (await other).status_code == 200
        await asyncio.gather(*flood, return_exceptions=True)

    asyncio.run(main())


def test_nobody_waits_longer_for_a_thread_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "_LONGEST_WAIT_S", 0.1)

    async def main() -> None:
        pool, stuck, never = ViewPool(1), Stuck(), Stuck()
        first = asyncio.create_task(pool.run(stuck, ignore))
        await asyncio.sleep(0.05)
        late = [asyncio.create_task(pool.run(never, ignore, QueueKey(n % 3))) for n in range(9)]
        outcomes = await asyncio.gather(*late, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {UnavailableError}
        stuck.let_go.set()
        assert (await first).status_code == 200
        assert (await pool.run(answer(), ignore)).status_code == 200
        assert never.ran == 0

    asyncio.run(main())


def test_who_leaves_the_line_keeps_no_thread() -> None:
    async def main() -> None:
        pool, stuck = ViewPool(1), Stuck()
        first = asyncio.create_task(pool.run(stuck, ignore))
        await asyncio.sleep(0.05)
        leaving = [asyncio.create_task(pool.run(answer(), ignore)) for _ in range(3)]
        await asyncio.sleep(0.05)
        stuck.let_go.set()
        while not first.done():
            await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert (await pool.run(answer(), ignore)).status_code == 200

    asyncio.run(main())
