"""Positions in the queue by the order of claims, estimated waits, and the limits of the queue."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random

import pytest
from django.db import connection
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from pytest_django.fixtures import Settings

from inference_site.accounts.keys import create_key
from inference_site.accounts.models import ApiKey, Project
from inference_site.catalogue.fleet.leases import LiveView, LiveWorker, ModelReport
from inference_site.core.domain.errors import ProjectQueueFull, QueueFull
from inference_site.core.storage.redis import broker_client
from inference_site.runs import queue_position
from inference_site.runs.models import Generation, ServiceClass, Status
from inference_site.runs.queue import enqueue, new_id
from inference_site.runs.queue_position import (
    CachedQueueCounts,
    QueueCounts,
    QueuePosition,
    position_of,
    position_of_waiting,
)
from inference_site.runs.wake_ups import queue_name
from tests.generations.rows import create_generation
from tests.generations.test_queue import new_row
from tests.waiting import wait_until

Key = tuple[ApiKey, str]
NORMAL, LATE = int(ServiceClass.FOREGROUND), int(ServiceClass.BACKGROUND)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count each time anew."""
    monkeypatch.setattr(queue_position, "queue_counts", CachedQueueCounts())
    monkeypatch.setattr(queue_position, "_COUNT_EVERY_S", -1.0)


@pytest.fixture
def model() -> Iterator[str]:
    name = new_id("model-")
    yield name
    broker_client().delete(queue_name(name))


def served_by(monkeypatch: pytest.MonkeyPatch, *workers: tuple[int, float]) -> None:
    """Have workers with so many slots serve ``m``, whose runs take so long."""
    view = LiveView()
    live = [
        LiveWorker(f"w{n}", (ModelReport("m", slots, slots, run_s=run_s),))
        for n, (slots, run_s) in enumerate(workers)
    ]
    monkeypatch.setattr(view, "workers", lambda: live)
    monkeypatch.setattr(queue_position, "live_view", view)


def claims_until(counts: QueueCounts, project: int, ended: list[int]) -> int:
    """How many claims it takes to reach a new one of a project, as the database would order them.

    ``ended`` are the projects whose runs end, one before each claim.
    """
    waiting, running = Counter(counts.waiting), Counter(counts.running)
    own, served = waiting[project, NORMAL] + 1, dict[int, int]()
    waiting[project, NORMAL] += 1
    for claims, over in enumerate(ended, start=1):
        if running[over]:
            running[over] -= 1
        else:
            running[next(p for p in running if running[p])] -= 1
        here = [key for key, count in waiting.items() if count]
        chosen = min(
            here,
            key=lambda key: (key[1], running[key[0]], served.get(key[0], 0), key[0] == project),
        )
        served[chosen[0]] = claims
        waiting[chosen] -= 1
        running[chosen[0]] += 1
        own -= chosen == (project, NORMAL)
        if not own:
            return claims
    raise AssertionError("it was never claimed")


COUNTS = st.builds(
    QueueCounts,
    st.dictionaries(
        st.tuples(st.integers(1, 4), st.sampled_from([NORMAL, LATE])), st.integers(0, 8)
    ).map(Counter),
    st.dictionaries(st.integers(1, 4), st.integers(1, 5), min_size=1).map(Counter),
)


@limits(deadline=None)
@given(COUNTS, st.integers(1, 4), st.randoms())
def test_a_position_is_about_the_number_of_claims_until_its_own(
    counts: QueueCounts, project: int, chance: Random
) -> None:
    """Whose runs end next is not known, so it is off by what may run meanwhile."""
    ends = [chance.randint(1, 4) for _ in range(120)]
    position = counts.position(project, NORMAL)
    slack = 4 * counts.running.total() + 4
    assert abs(claims_until(counts, project, ends) - position) <= slack


@pytest.mark.parametrize(
    ("waiting", "running", "position"),
    [
        ({}, {}, 1),
        ({(1, NORMAL): 500}, {1: 4}, 1),
        ({(2, NORMAL): 7}, {1: 4}, 8),
        ({(1, NORMAL): 500, (2, NORMAL): 2}, {1: 2, 2: 2}, 6),
        ({(1, LATE): 500}, {}, 1),
        ({(1, int(ServiceClass.URGENT)): 3}, {2: 1}, 4),
    ],
)
def test_who_starts_first(
    waiting: dict[tuple[int, int], int], running: dict[int, int], position: int
) -> None:
    assert QueueCounts(Counter(waiting), Counter(running)).position(2, NORMAL) == position


@pytest.mark.django_db
def test_a_wait_is_the_position_by_how_fast_runs_end(
    monkeypatch: pytest.MonkeyPatch, api_key: Key
) -> None:
    served_by(monkeypatch, (2, 4.0), (1, 2.0))  # One start a second.
    rows = [create_generation(api_key[0]) for _ in range(3)]
    for _ in range(3):
        create_generation(api_key[0], status=Status.RUNNING)
    assert position_of("m", api_key[0].project_id, NORMAL) == QueuePosition(4, 4.0)
    found = [position_of_waiting(row.public_id) for row in rows]
    assert found == [QueuePosition(1, 1.0), QueuePosition(2, 2.0), QueuePosition(3, 3.0)]
    assert found[0] is not None
    assert found[0].headers == {"x-queue-position": "1", "x-queue-estimated-wait": "1"}
    served_by(monkeypatch, (2, 0.0))  # Nothing has run yet.
    assert position_of("m", api_key[0].project_id, NORMAL).headers == {"x-queue-position": "4"}


@pytest.mark.django_db
def test_who_finds_a_free_slot_has_no_place(monkeypatch: pytest.MonkeyPatch, api_key: Key) -> None:
    served_by(monkeypatch, (2, 4.0))
    create_generation(api_key[0], status=Status.RUNNING)
    assert position_of("m", api_key[0].project_id, NORMAL) == QueuePosition(0, 0.0)
    ended = create_generation(api_key[0], status=Status.RUNNING)
    assert position_of_waiting(ended.public_id) is None


def accepted(key: ApiKey, model: str, tries: int, service_class: int = NORMAL) -> int:
    """Return how many of these generations a project gets accepted before the first refusal."""
    for number in range(tries):
        row, document = new_row(key, model)
        row.service_class = service_class
        try:
            enqueue(row, document, "web.one")
        except (QueueFull, ProjectQueueFull):
            return number
    return tries


def keys_of_projects(count: int) -> list[ApiKey]:
    return [create_key(Project.objects.create(name=f"p{n}"), "test")[0] for n in range(count)]


@pytest.mark.django_db(transaction=True)
def test_however_many_come_at_once_no_more_wait_than_may(
    api_key: Key, model: str, settings: Settings
) -> None:
    settings.QUEUE_LIMIT = 40
    began = threading.Barrier(4)

    def come(_: int) -> int:
        began.wait()
        try:
            return accepted(api_key[0], model, 12)
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(come, range(4))) == 20  # As many as are free then.
    assert Generation.objects.filter(model=model).count() == 20
    Generation.objects.claim(model, "w")
    queue_position.queue_counts._refusals.clear()  # A moment later.
    assert accepted(api_key[0], model, 5) == 1


@pytest.mark.django_db
@pytest.mark.parametrize(("service_class", "shares"), [(NORMAL, [50, 25, 13]), (LATE, [25, 13, 6])])
def test_a_project_takes_no_more_places_than_it_leaves_free(
    model: str, settings: Settings, service_class: int, shares: list[int]
) -> None:
    settings.QUEUE_LIMIT = 100
    keys = keys_of_projects(4)
    assert [accepted(key, model, 100, service_class) for key in keys[:3]] == shares
    assert accepted(keys[3], model, 1, service_class) == 1
    # What a project has in the background counts against its own share of the whole queue only.
    assert accepted(keys[3], model, 5) == 5


@pytest.mark.django_db
def test_the_background_never_takes_the_places_of_the_foreground(
    model: str, settings: Settings
) -> None:
    settings.QUEUE_LIMIT = 40
    keys = keys_of_projects(41)
    assert sum(accepted(key, model, 40, LATE) for key in keys[:40]) == 20
    row, document = new_row(keys[40], model)
    row.service_class = LATE
    with pytest.raises(QueueFull):
        enqueue(row, document, "web.one")
    assert accepted(keys[40], model, 5) == 5


@pytest.mark.django_db
def test_a_refusal_of_one_project_is_none_of_another(
    api_key: Key, model: str, settings: Settings
) -> None:
    settings.QUEUE_LIMIT = 20
    (other,) = keys_of_projects(1)
    assert accepted(api_key[0], model, 20, LATE) == 5
    refusal = partial(queue_position.queue_counts.refusal, model)
    error = refusal(api_key[0].project_id, is_background=True)
    assert isinstance(error, ProjectQueueFull)
    assert refusal(api_key[0].project_id, is_background=False) is None
    assert refusal(other.project_id, is_background=True) is None
    assert accepted(api_key[0], model, 1) == 1


def test_no_request_waits_while_another_counts_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent PostgreSQL answered the requests for a busy model one after the other."""
    counts, counted = CachedQueueCounts(), threading.Event()
    begun: list[str] = []

    def read(model: str) -> QueueCounts:
        begun.append(model)
        if len(begun) > 1:
            assert counted.wait(30)
        return QueueCounts(counted_at=time.monotonic())

    monkeypatch.setattr(QueueCounts, "read", read)
    first = counts.of("m")
    with ThreadPoolExecutor(3) as threads:
        slow = threads.submit(counts.of, "m")
        wait_until(lambda: len(begun) == 2)
        assert threads.submit(counts.of, "m").result(5) is first
        counts.add("other", 1, NORMAL)
        monkeypatch.setattr(queue_position, "_OLDEST_S", -1.0)
        others = [threads.submit(counts.of, "m") for _ in range(2)]
        wait_until(lambda: len(begun) == 4)  # They count at the same time.
        counted.set()
        assert all(one.result(30) is not first for one in [slow, *others])
