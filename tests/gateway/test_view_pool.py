"""The pool of views: what it runs, what it refuses, and what it gives up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from django.http import HttpResponse
from pytest_django.fixtures import Settings

from inference_site.core.errors.api_errors import UnavailableError
from inference_site.gateway import view_pool
from inference_site.gateway.handler import error_response
from inference_site.gateway.view_pool import QueueKey, ThreadQueues, ViewPool


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


def test_a_hanging_view_is_given_up_and_its_end_is_told(settings: Settings) -> None:
    settings.WEB_STALL_S = 0.3
    stuck, told = Stuck(), threading.Event()

    async def main() -> None:
        with pytest.raises(UnavailableError):
            await ViewPool(1).run(stuck, told.set)
        assert not told.is_set()
        stuck.let_go.set()

    asyncio.run(main())
    assert told.wait(60)


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
        await _until(lambda: stuck.ran == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stuck.let_go.set()

    asyncio.run(main())
    assert told.wait(60)


def test_threads_of_views_that_hang_are_replaced_but_not_without_end(settings: Settings) -> None:
    settings.WEB_STALL_S = 60
    stuck = Stuck()

    async def main() -> None:
        pool = ViewPool(2)
        hanging = [asyncio.create_task(pool.run(stuck, ignore, QueueKey(n))) for n in (1, 2)]
        await asyncio.sleep(0.1)
        response = await pool.run(answer(), ignore, QueueKey(3))
        assert (response.status_code, stuck.ran) == (200, 2)
        hanging += [asyncio.create_task(pool.run(stuck, ignore, QueueKey(n))) for n in (4, 5, 6)]
        await asyncio.sleep(3)
        assert stuck.ran == 4
        stuck.let_go.set()
        await asyncio.gather(*hanging)
        assert stuck.ran == 5

    asyncio.run(main())


def test_a_slow_failure_of_storage_refuses_nobody_where_others_get_on() -> None:
    def slow_failure() -> HttpResponse:
        time.sleep(1.05)
        return error_response(UnavailableError(code="database_unavailable"))

    async def main() -> None:
        pool = ViewPool(2)
        failing = asyncio.create_task(pool.run(slow_failure, ignore, QueueKey(1)))
        await asyncio.sleep(0.1)
        assert (await pool.run(answer(), ignore, QueueKey(2))).status_code == 200
        assert (await failing).status_code == 503
        assert (await pool.run(answer(), ignore)).status_code == 200

    asyncio.run(main())


def test_after_a_slow_failure_of_storage_requests_are_refused_for_a_while() -> None:
    def slow_failure() -> HttpResponse:
        time.sleep(1.05)
        return error_response(UnavailableError(code="database_unavailable"))

    async def main() -> None:
        pool = ViewPool(1)
        assert (await pool.run(slow_failure, ignore)).status_code == 503
        with pytest.raises(UnavailableError):
            await pool.run(answer(), ignore)
        await asyncio.sleep(1.05)
        assert (await pool.run(answer(), ignore)).status_code == 200

    asyncio.run(main())


def test_another_slow_503_closes_the_door_to_nobody() -> None:
    def slow_refusal() -> HttpResponse:
        time.sleep(1.05)
        return error_response(UnavailableError(code="queue_full"))

    async def main() -> None:
        pool = ViewPool(1)
        assert (await pool.run(slow_refusal, ignore)).status_code == 503
        assert (await pool.run(answer(), ignore)).status_code == 200

    asyncio.run(main())


def test_views_that_compute_are_no_stall(settings: Settings) -> None:
    settings.WEB_STALL_S = 0.3
    done = threading.Event()

    def compute() -> HttpResponse:
        until = time.thread_time() + 2
        while time.thread_time() < until and not done.is_set():
            sum(range(1000))
        return HttpResponse(status=201)

    async def main() -> None:
        pool = ViewPool(2)
        computing = asyncio.create_task(pool.run(compute, ignore, QueueKey(1)))
        waiting = asyncio.create_task(pool.run(answer(), ignore, QueueKey(1)))
        await asyncio.sleep(1.2)
        assert not computing.done()
        done.set()
        assert [(await task).status_code for task in (computing, waiting)] == [201, 200]

    asyncio.run(main())


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
    monkeypatch.setattr(view_pool, "_REST", 1e6)
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
    monkeypatch.setattr(view_pool, "_REST", 1e6)
    monkeypatch.setattr(view_pool, "_ALONE_S", -1.0)
    own = QueueKey(1, is_large=True)

    async def main() -> None:
        pool = ViewPool(1)
        for _ in range(3):
            assert (await pool.run(answer(), ignore, own)).status_code == 200

    asyncio.run(main())


def test_the_pace_of_large_bodies_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_pool, "_NEWEST_WEIGHT", 1.0)

    async def main() -> None:
        queues, large = ThreadQueues(2, 1), QueueKey(1, is_large=True)
        assert queues.take(large) is None
        waiting = [queues.take(large) for _ in range(5)]
        for _ in range(2):
            await asyncio.sleep(0.05)
            queues.give_back(large)
        monkeypatch.setattr(view_pool, "_LONGEST_WAIT_S", 0.0)
        monkeypatch.setattr(view_pool, "_LONGEST_LARGE_WAIT_S", 0.0)
        with pytest.raises(UnavailableError):
            queues.require_room(large)
        assert queues.take(QueueKey(2)) is None
        assert queues.take(QueueKey(2)) is not None
        queues.require_room(QueueKey(2))
        assert len(waiting) == 5

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
    monkeypatch.setattr(view_pool, "_MOST_WAITING", 10)

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
    monkeypatch.setattr(view_pool, "_LONGEST_WAIT_S", 0.1)

    async def main() -> None:
        pool, stuck = ViewPool(1), Stuck()
        first = asyncio.create_task(pool.run(stuck, ignore))
        await asyncio.sleep(0.05)
        late = [asyncio.create_task(pool.run(answer(), ignore, QueueKey(n % 3))) for n in range(9)]
        outcomes = await asyncio.gather(*late, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {UnavailableError}
        stuck.let_go.set()
        assert (await first).status_code == 200
        assert (await pool.run(answer(), ignore)).status_code == 200

    asyncio.run(main())


def test_who_would_wait_too_long_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_pool, "_NEWEST_WEIGHT", 1.0)

    async def main() -> None:
        queues, own, other = ThreadQueues(1, 1), QueueKey(1), QueueKey(2)
        assert queues.take(own) is None
        waiting = [queues.take(own) for _ in range(20)]
        for _ in range(2):  # Between two threads lies a time.
            await asyncio.sleep(0.05)
            queues.give_back(own)
        monkeypatch.setattr(view_pool, "_LONGEST_WAIT_S", 0.5)
        with pytest.raises(UnavailableError):
            queues.take(own)
        assert queues.take(other) is not None
        assert sum(turn is not None and turn.done() for turn in waiting) == 2

    asyncio.run(main())


def test_until_the_pace_is_known_few_of_a_project_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_pool, "_MOST_AT_FIRST", 5)

    async def main() -> None:
        pool, stuck, own = ViewPool(1), Stuck(), QueueKey(1)
        flood = [asyncio.create_task(pool.run(stuck, ignore, own)) for _ in range(20)]
        await asyncio.sleep(0.05)
        assert sum(task.done() for task in flood) == 14
        with pytest.raises(UnavailableError):
            pool.require_room(own)
        pool.require_room(QueueKey(2))
        stuck.let_go.set()
        await asyncio.gather(*flood, return_exceptions=True)
        pool.require_room(own)

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


def test_a_long_line_that_moves_is_no_stall(settings: Settings) -> None:
    settings.WEB_STALL_S = 1.0

    def brisk() -> HttpResponse:
        time.sleep(0.1)
        return HttpResponse()

    async def main() -> None:
        pool = ViewPool(1)
        responses = await asyncio.gather(*(pool.run(brisk, ignore) for _ in range(15)))
        assert [response.status_code for response in responses] == [200] * 15

    asyncio.run(main())
