"""How beat works on batches while a part of the site is away."""

from __future__ import annotations

import datetime as dt
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from django.test import Client
from django.utils import timezone

from inference_site.accounts.keys import revoke_key
from inference_site.accounts.models import ApiKey, Budget, ModelLimit
from inference_site.batches import feeding
from inference_site.batches.feeding import Feeder
from inference_site.batches.models import (
    ANTHROPIC,
    Batch,
    BatchLine,
    BatchQuerySet,
    BatchStatus,
    LineState,
)
from inference_site.batches.requests import new_line
from inference_site.catalogue.fleet.leases import (
    Lease,
    LiveWorker,
    ModelReport,
    ModelState,
    live_view,
    prune,
)
from inference_site.core.storage.redis import broker_client, site_client
from inference_site.files import storage
from inference_site.files.models import StoredFile
from inference_site.runs.queue import new_id
from inference_site.runs.wake_ups import queue_name
from tests.generations.rows import create_generation

pytestmark = [pytest.mark.django_db, pytest.mark.redis]

Key = tuple[ApiKey, str]


@pytest.fixture(autouse=True)
def no_worker(folder: Path) -> None:
    """A site whose workers are all away, with a folder for the files."""
    live_view.forget()


@pytest.fixture
def worker() -> Iterator[str]:
    name = new_id("host:")
    yield name
    site_client().delete(f"worker:{name}", f"worker:{name}:unsent")
    broker_client().delete(queue_name("demo-memory"))
    prune()
    live_view.forget()


def new_batch(key: ApiKey) -> Batch:
    """Return a batch that was accepted, with one line."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    url = "/v1/chat/completions"
    line = orjson.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body})
    file = StoredFile(
        public_id="file-1", project_id=key.project_id, filename="a", size_bytes=len(line)
    )
    storage.store(file, io.BytesIO(line))
    return Batch.objects.create(
        public_id="batch_1",
        project_id=key.project_id,
        api_key=key,
        endpoint=url,
        input_file_id=file.public_id,
        window_s=60,
        expires_at=timezone.now() + dt.timedelta(hours=1),
        status=BatchStatus.VALIDATING,
    )


def test_a_batch_whose_model_no_worker_serves_waits_with_a_line_in_the_log(
    api_key: Key, caplog: pytest.LogCaptureFixture
) -> None:
    """Twice a second there was a traceback, for as long as the workers were away."""
    batch, feeder = new_batch(api_key[0]), Feeder()
    for _ in range(3):
        feeder.prepare()
    batch.refresh_from_db()
    assert batch.status == BatchStatus.VALIDATING
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.exc_info is None
    assert "No worker serves the model `demo`" in record.getMessage()


def test_a_batch_whose_input_file_has_lost_its_content_fails(api_key: Key, folder: Path) -> None:
    """It was ``validating`` until it expired, with a traceback in the log every 15 s."""
    batch = new_batch(api_key[0])
    next(iter(folder.rglob(batch.input_file_id))).unlink()
    Feeder().prepare()
    batch.refresh_from_db()
    assert batch.status == BatchStatus.FAILED
    [error] = batch.errors
    assert (error["code"], error["param"]) == ("input_file_not_found", "input_file_id")
    assert batch.input_file_id in error["message"]


def batch_of_messages(key: ApiKey, *models: str) -> Batch:
    """Return a batch in progress with a line for each of these models."""
    batch = Batch.objects.create(
        public_id="msgbatch_1",
        project_id=key.project_id,
        api_key=key,
        dialect=ANTHROPIC,
        endpoint="/v1/messages",
        model=models[0],
        window_s=60,
        expires_at=timezone.now() + dt.timedelta(hours=1),
        status=BatchStatus.IN_PROGRESS,
        total=len(models),
    )
    said = [{"role": "user", "content": "Hi"}]
    for number, model in enumerate(models, 1):
        body = {"model": model, "max_tokens": 5, "messages": said}
        new_line(batch, key.project_id, number, f"{number}", body).save()
    return batch


def serve(worker: str, slots: int, *others: ModelReport) -> None:
    """Have a worker serve the model ``demo-memory``, and report others."""
    served = ModelReport("demo-memory", slots, 0, ModelState.READY)
    Lease(worker, lambda: LiveWorker(worker, (served, *others))).renew()
    live_view.forget()


def test_a_pass_that_takes_long_is_ended_so_that_new_batches_are_seen(
    api_key: Key, worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy host, a batch of another project waited for half a minute, and the lines of a key
    that was revoked went on to be put into the queue.
    """
    monkeypatch.setattr(feeding, "_PASS_S", 0.0)
    batch = batch_of_messages(api_key[0], *["demo-memory"] * 3)
    feeder = Feeder()
    for running in (1, 2):
        serve(worker, slots=8)
        feeder.feed()
        assert batch.lines.filter(state="running").count() == running


def test_a_batch_of_a_revoked_key_is_cancelled_though_all_of_its_lines_are_in_the_queue(
    api_key: Key,
) -> None:
    """They all ran."""
    batch = batch_of_messages(api_key[0], *["demo-memory"] * 3)
    for line in batch.lines.all():
        generation = create_generation(api_key[0], background=True)
        line.state, line.generation_id = LineState.RUNNING, generation.public_id
        line.save()
    revoke_key(api_key[0])
    feeder = Feeder()
    feeder.feed()
    for _ in range(2):
        feeder.prepare()
    batch.refresh_from_db()
    assert (batch.status, batch.skipped) == (BatchStatus.CANCELLED, 3)


def test_usage_of_a_batch_counts_generations_past_their_retention(api_key: Key) -> None:
    """Only the rows that were there at the end were counted."""
    batch = new_batch(api_key[0])
    input_details, output_details = {"cached_tokens": 1}, {"reasoning_tokens": 2}
    answers: list[dict[str, Any]] = [
        {
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "prompt_tokens_details": input_details,
            "completion_tokens_details": output_details,
        },
        {"input_tokens": 10, "output_tokens": 20, "output_tokens_details": output_details},
        {
            "input_tokens": 5,
            "cache_read_input_tokens": 6,
            "cache_creation_input_tokens": 7,
            "output_tokens": 8,
        },
        {},
        {"prompt_tokens": 1_000_000},
    ]
    for number, usage in enumerate(answers, start=1):
        BatchLine.objects.create(
            batch=batch,
            number=number,
            state=LineState.ENDED,
            status_code=200,
            generation_id=f"chatcmpl-{number}",
            answer=orjson.dumps({"usage": usage}).decode(),
        )
    create_generation(api_key[0], public_id="chatcmpl-5", input_tokens=100, output_tokens=200)
    Batch.objects.update(status=BatchStatus.FINALIZING, total=len(answers))
    Feeder().prepare()
    batch.refresh_from_db()
    assert batch.usage == {
        "input_tokens": 4 + 10 + 18 + 100,
        "cached_tokens": 1 + 6,
        "output_tokens": 3 + 20 + 8 + 200,
        "reasoning_tokens": 2 + 2,
    }


def test_a_model_that_no_worker_serves_holds_up_no_line_with_another(
    api_key: Key, worker: str
) -> None:
    """A batch of Anthropic's API waited, with all lines behind that one, until it expired."""
    batch = batch_of_messages(api_key[0], "demo", "demo-memory", "demo-memory")
    serve(worker, slots=1)
    feeder = Feeder()
    for _ in range(2):
        feeder.feed()
    lines = batch.lines.order_by("number")
    assert [line.state for line in lines] == ["pending", "running", "pending"]
    assert lines[0].resume_at is not None


def test_a_model_that_no_worker_serves_leaves_the_slots_of_another_to_its_lines(
    api_key: Key, worker: str
) -> None:
    """One line ran at a time, and none if many lines of the other model came before it."""
    batch = batch_of_messages(api_key[0], "demo", "demo", *["demo-memory"] * 4)
    serve(worker, slots=4)
    feeder, states = Feeder(), batch.lines.order_by("number").values_list("state", flat=True)
    for running in (0, 0, 1, 4):
        feeder.feed()
        begun = ["running"] * running + ["pending"] * (4 - running)
        assert [*states.all()] == ["pending"] * 2 + begun
        batch.lines.exclude(resume_at=None).update(resume_at=timezone.now())
    batch.refresh_from_db()
    assert batch.model == "demo-memory"


@pytest.mark.parametrize("is_budget", [False, True])
def test_a_model_whose_limit_or_budget_is_used_up_holds_up_no_line_with_another(
    api_key: Key, worker: str, is_budget: bool
) -> None:
    """A batch of Anthropic's API rested, with all lines behind that one."""
    key = api_key[0]
    of_demo: dict[str, Any] = {"project": key.project, "model": "demo"}
    if is_budget:
        Budget.objects.create(**of_demo, unit="tokens", every="day", amount=1)
    else:
        ModelLimit.objects.create(**of_demo, concurrent_runs=1)
    batch = batch_of_messages(key, *["demo"] * 3, *["demo-memory"] * 2)
    serve(worker, 4, ModelReport("demo", 4, 0, ModelState.READY))
    feeder = Feeder()
    for _ in range(3):
        feeder.feed()
    states = [line.state for line in batch.lines.order_by("number")]
    assert states == ["running", "pending", "pending", "running", "running"]
    assert batch.lines.filter(state="pending", resume_at=None).count() == 0


def test_lines_that_wait_for_the_limit_of_a_model_are_tried_again_every_two_seconds(
    api_key: Key, worker: str
) -> None:
    """Up to 512 of them were read and postponed in each pass, ten times in a second."""
    key = api_key[0]
    ModelLimit.objects.create(project=key.project, model="demo", concurrent_runs=1)
    batch = batch_of_messages(key, *["demo"] * 4)
    serve(worker, 4, ModelReport("demo", 4, 0, ModelState.READY))
    feeder, waiting = Feeder(), batch.lines.filter(state=LineState.PENDING)
    for _ in range(2):
        feeder.feed()
    assert waiting.filter(resume_at__gt=timezone.now()).count() == 3
    postponed = []
    for _ in range(2):
        waiting.update(resume_at=timezone.now() - dt.timedelta(seconds=1))
        feeder.feed()
        postponed.append(waiting.filter(resume_at__gt=timezone.now()).count())
    assert postponed == [3, 0]


def test_lines_that_were_tried_last_are_tried_again_last(api_key: Key, worker: str) -> None:
    """Many lines of a model that no worker serves were due again before a line was tried again."""
    batch = batch_of_messages(api_key[0], "demo", "demo", "demo-memory")
    batch.lines.update(resume_at=timezone.now() - dt.timedelta(seconds=1))
    batch.lines.filter(number=3).update(resume_at=timezone.now() - dt.timedelta(seconds=2))
    serve(worker, slots=1)
    Feeder().feed()
    assert [line.state for line in batch.lines.order_by("number")] == ["pending"] * 2 + ["running"]


def test_a_model_whose_server_is_away_holds_up_no_line_with_another(
    api_key: Key, worker: str
) -> None:
    """Its line waited in the queue, and no other line ran until the server was back."""
    batch = batch_of_messages(api_key[0], "demo", "demo-memory")
    away = ModelReport("demo", 4, 0, ModelState.FAILED, away_since=time.time())
    serve(worker, 4, away)
    feeder = Feeder()
    for _ in range(2):
        feeder.feed()
    lines = batch.lines.order_by("number")
    assert [line.state for line in lines] == ["pending", "running"]


def test_a_batch_that_ends_and_is_deleted_while_it_is_cancelled_is_not_found(
    api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a 500."""
    batch = batch_of_messages(api_key[0], "demo")

    def end_meanwhile(*_: Any, **__: Any) -> bool:
        batch.delete()
        return False

    monkeypatch.setattr(BatchQuerySet, "move", end_meanwhile)
    client = Client(headers={"x-api-key": api_key[1]})
    answer = client.post(f"/v1/messages/batches/{batch}/cancel")
    assert answer.status_code == 404, answer.content
    assert answer.json()["error"]["type"] == "not_found_error"


def test_a_batch_whose_first_request_names_no_model_is_not_run_one_request_at_a_time(
    api_key: Key, worker: str
) -> None:
    """A request ran a second, however many slots the model of the others had."""
    said = [{"role": "user", "content": "Hi"}]
    requests = [
        {"custom_id": id_, "params": {"model": name, "max_tokens": 5, "messages": said}}
        for id_, name in [("a", "missing"), ("b", None), *((c, "demo-memory") for c in "cdef")]
    ]
    client = Client(headers={"x-api-key": api_key[1]})
    url = "/v1/messages/batches"
    answer = client.post(url, {"requests": requests}, content_type="application/json")
    assert answer.status_code == 200, answer.content
    serve(worker, slots=4)
    Feeder().feed()
    states = BatchLine.objects.order_by("number").values_list("state", flat=True)
    assert [*states] == ["ended"] * 2 + ["running"] * 4
