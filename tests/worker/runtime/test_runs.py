"""Runs of an engine that goes on by itself: they hold slots, and no threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from pytest_django.fixtures import Settings

from inference_site.core.domain.deltas import MAX_TOKENS
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.runs.models import Generation, Status
from inference_site.runs.usage.accounting import account
from tests.upstream_server import Talk, UpstreamServer, chunks, finish, streamed, text, usage
from tests.waiting import wait_until
from tests.worker.runtime.test_runtime import Key, busy, started, waiting
from worker.runtime.runtime import Runtime

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

SLOTS = 20


@pytest.fixture
def server() -> Iterator[UpstreamServer]:
    with UpstreamServer().running() as running:
        yield running


@pytest.fixture
def runtime(server: UpstreamServer) -> Iterator[Runtime]:
    """A worker whose model is on the server."""
    options = {"base_url": server.url, "check_every_s": 0.2}
    with started([ModelSpec("m", "openai_upstream", slots=SLOTS, options=options)]) as worker:
        yield worker


@pytest.fixture
def let_go(server: UpstreamServer) -> Iterator[Callable[[], None]]:
    """The server answers nothing until this is called."""
    go = threading.Event()

    def answer(talk: Talk) -> None:
        go.wait(60)
        streamed("Hello")(talk)

    server.answers = [answer]
    yield go.set
    go.set()


def statuses() -> dict[str, int]:
    found = list(Generation.objects.values_list("status", flat=True))
    return {status: found.count(status) for status in set(found)}


def test_a_run_holds_a_slot_and_no_thread(
    runtime: Runtime, server: UpstreamServer, let_go: Callable[[], None], api_key: Key
) -> None:
    for _ in range(SLOTS + 5):
        waiting(api_key, [])
        runtime.serve("m")  # It returns, whatever runs.
    wait_until(lambda: len(server.asked) == SLOTS)
    assert busy(runtime) == SLOTS
    assert statuses() == {Status.RUNNING: SLOTS, Status.QUEUED: 5}
    let_go()
    # At the end of each, what waits takes its slot.
    wait_until(lambda: statuses() == {Status.COMPLETED: SLOTS + 5})
    wait_until(lambda: busy(runtime) == 0)


def test_a_server_that_goes_down_closes_its_model_and_what_waits_runs_when_it_is_back(
    runtime: Runtime, server: UpstreamServer, api_key: Key
) -> None:
    changes: list[list[str]] = []
    runtime.on_change = lambda: changes.append(runtime.open_models())
    list_models, server.list_models = server.list_models, lambda talk: talk.say(500, b"It burns.")
    wait_until(lambda: [] in changes)
    report = runtime.described().models[0]
    assert (report.state, report.free) == ("failed", 0)
    assert report.reason.endswith("answers with status 500.")  # Its words are not shown.
    waiting(api_key, [])
    runtime.serve("m")
    assert statuses() == {Status.QUEUED: 1}
    server.list_models = list_models
    wait_until(lambda: ["m"] in changes)
    runtime.serve("m")
    wait_until(lambda: statuses() == {Status.COMPLETED: 1})


def test_a_drain_ends_what_runs_by_itself(
    server: UpstreamServer, let_go: Callable[[], None], api_key: Key, settings: Settings
) -> None:
    settings.DRAIN_TIMEOUT_S = 0.1
    options = {"base_url": server.url}
    with started([ModelSpec("m", "openai_upstream", slots=2, options=options)]) as worker:
        for _ in range(3):
            waiting(api_key, [])
            worker.serve("m")
        wait_until(lambda: len(server.asked) == 2)
        worker.drain()
    assert statuses() == {Status.FAILED: 2, Status.QUEUED: 1}
    failed = Generation.objects.filter(status=Status.FAILED)
    assert {row.error_code for row in failed} == {"worker_unavailable"}


@pytest.mark.parametrize("counted", [-1, 2_000_000_000, 2**70])
def test_what_a_server_counts_fits_the_row(
    runtime: Runtime, server: UpstreamServer, api_key: Key, counted: int
) -> None:
    server.answers = [chunks(text("Hello"), finish(), usage(prompt=counted, completion=counted))]
    waiting(api_key, [])
    runtime.serve("m")
    wait_until(lambda: statuses() == {Status.COMPLETED: 1})
    assert account()  # Counters hold the sum.
    row = Generation.objects.get()
    # An answer with text has a token, whatever its server reports.
    expected = (0, 1) if counted < 0 else (MAX_TOKENS, MAX_TOKENS)
    assert (row.input_tokens, row.output_tokens) == expected
    wait_until(lambda: busy(runtime) == 0)
