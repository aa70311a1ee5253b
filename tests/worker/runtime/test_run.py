"""One attempt of one generation, from the claim to the end, with the scripted engine."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest
import redis
import redis.exceptions
from django.db import DataError, InterfaceError, OperationalError, transaction
from django.utils import timezone
from pytest_django.fixtures import Settings

from inference_site.accounts.models import ApiKey
from inference_site.catalogue.catalogue import Catalogue
from inference_site.core.domain.deltas import TextDelta, Usage
from inference_site.core.domain.errors import EngineUnavailable
from inference_site.core.domain.model_spec import ModelSpec, Price
from inference_site.core.domain.request import GenerationRequest, Sampling
from inference_site.core.observability.logs import AddLogFields
from inference_site.core.storage import postgresql
from inference_site.core.storage.redis import client_for
from inference_site.runs import maintenance
from inference_site.runs.maintenance import end_orphans
from inference_site.runs.models import Claim, Generation, GenerationQuerySet, Status
from inference_site.runs.streams import request_documents
from inference_site.runs.streams.batches import Ending
from inference_site.runs.streams.event_log import cancel_key, document_key
from inference_site.runs.streams.request_documents import save_document
from inference_site.runs.tool_calls.models import SavedTurns, ToolCall
from tests.generations.rows import chat_document, create_generation
from tests.upstream_server import Talk, UpstreamServer, text, usage
from worker.engines.base import OnEnd, Sink, load_engine
from worker.engines.scripted import ScriptedEngine
from worker.runtime import run
from worker.runtime.publisher import StopReason, Stream
from worker.runtime.run import Run

Key = tuple[ApiKey, str]
SCRIPT = [{"reasoning": "Hm"}, {"text": "Hello"}, {"text": " you"}]


class LocalStream(Stream):
    """A stream without a publisher: its frames stay here, and it can be stopped at a text."""

    def __init__(
        self,
        generation_id: str,
        stop_at: str | None = None,
        reason: StopReason = StopReason.REQUESTED,
    ) -> None:
        super().__init__(generation_id, cast(Any, self))
        self._stop_at, self._reason = stop_at, reason
        self.row_when_ended: Generation | None = None

    is_due = False
    """Of the publisher's shard, for which this stands in, as is ``wake``."""

    def wake(self) -> None:
        """Do nothing."""

    def append(self, frames: Sequence[bytes]) -> None:
        super().append(frames)
        if self._stop_at is not None and self._stop_at.encode() in b"".join(frames):
            self.stop(self._reason)

    def close(self, ending: Ending) -> None:
        super().close(ending)
        self.row_when_ended = Generation.objects.get(public_id=self.id)

    @property
    def ending(self) -> Ending:
        batch = self.take()
        assert batch is not None
        assert batch.ending is not None
        return batch.ending

    @property
    def ending_or_none(self) -> Ending | None:
        batch = self.take()
        return None if batch is None else batch.ending

    @property
    def text(self) -> str:
        """Everything that went out."""
        batch = self.take()
        return b"".join(batch.frames).decode() if batch is not None else ""


class Attempt:
    """A claimed generation whose request is a script."""

    def __init__(self, api_key: ApiKey, script: list[dict[str, Any]], stream: bool) -> None:
        self.id = create_generation(api_key).public_id
        save_document(self.id, chat_document(self.id, json.dumps(script), stream=stream), "web.one")
        claim = Generation.objects.claim("m", "w")
        assert claim is not None
        self.claim: Claim = claim
        self.stream = LocalStream(self.id)
        self.engine: Any = ScriptedEngine(ModelSpec("m", "scripted"))

    def drive(self) -> Generation:
        assert not Run(self.claim, self.stream).start(self.engine, lambda _: None)
        return self.row

    def stop_at(self, text: str, reason: StopReason = StopReason.REQUESTED) -> None:
        """Have the publisher stop it once this text has gone out."""
        self.stream = LocalStream(self.id, text, reason)

    @property
    def row(self) -> Generation:
        return Generation.objects.get(public_id=self.id)


Start = Callable[..., Attempt]


@pytest.fixture
def start(api_key: Key) -> Start:
    def make(script: list[dict[str, Any]] = SCRIPT, *, stream: bool = True) -> Attempt:
        return Attempt(api_key[0], script, stream)

    return make


def counts(row: Generation) -> tuple[int, int, int, int]:
    return row.input_tokens, row.cached_tokens, row.output_tokens, row.reasoning_tokens


@pytest.mark.parametrize(("stream", "unsent"), [(False, 3), (True, 0)])
def test_a_run_knows_how_many_tokens_it_has_of_which_nothing_was_sent(
    start: Start, stream: bool, unsent: int
) -> None:
    attempt = start(stream=stream)
    run = Run(attempt.claim, attempt.stream)
    assert run.unsent_tokens == 0
    run.start(attempt.engine, lambda _: None)
    assert run.unsent_tokens == unsent


def test_a_generation_cancelled_before_its_start_never_reaches_the_engine(start: Start) -> None:
    attempt = start()
    client_for(attempt.id).set(cancel_key(attempt.id), 1, ex=60)
    attempt.engine = None  # Would fail if it were asked.
    row = attempt.drive()
    assert (row.status, row.finish_reason, counts(row)) == (Status.CANCELLED, "", (0, 0, 0, 0))
    assert row.first_token_at is None
    assert attempt.stream.text == "data: [DONE]\n\n"


class BrokenEngine(ScriptedEngine):
    """Raises what no engine should."""

    def __init__(self, error: Exception) -> None:
        super().__init__(ModelSpec("m", "scripted"))
        self._error = error

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        sink.feed(TextDelta("Hello"))
        raise self._error


def test_what_nobody_foresaw_is_logged_and_not_told(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = start()
    attempt.engine = BrokenEngine(ZeroDivisionError("secret detail"))
    row = attempt.drive()
    assert (row.status, row.error_code) == (Status.FAILED, "server_error")
    assert "secret detail" in caplog.text
    assert "secret detail" not in attempt.stream.text


def test_each_line_of_a_run_names_its_model_and_project(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = start()
    attempt.engine = BrokenEngine(ZeroDivisionError("secret detail"))
    caplog.handler.addFilter(shown := AddLogFields())
    row = attempt.drive()
    caplog.handler.removeFilter(shown)
    named = {(vars(line).get("model"), vars(line).get("project")) for line in caplog.records}
    assert named == {(row.model, row.project_id)}


def test_an_engine_that_is_unavailable_is_retryable_and_logged_without_a_traceback(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = start()
    attempt.engine = BrokenEngine(EngineUnavailable("out of memory"))
    row = attempt.drive()
    assert (row.error_code, attempt.stream.ending.status) == ("engine_unavailable", 503)
    assert "out of memory" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("in_background", [True, False])
def test_a_database_that_goes_away_before_a_file_is_read_costs_no_background_run(
    start: Start, in_background: bool
) -> None:
    attempt = start()
    Generation.objects.update(background=in_background)
    attempt.claim = replace(attempt.claim, background=in_background)
    attempt.engine = BrokenEngine(OperationalError("the database restarts"))
    row = attempt.drive()
    if in_background:
        assert (row.status, row.spared) == (Status.QUEUED, 1)
        assert attempt.stream.ending_or_none is None
    else:
        assert (row.status, row.error_code) == (Status.FAILED, "database_unavailable")


def test_a_prompt_that_is_too_long_is_the_clients_fault_and_not_logged(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = start()
    attempt.engine = ScriptedEngine(ModelSpec("m", "scripted", context_length=3))
    row = attempt.drive()
    assert (row.status, row.error_code) == (Status.FAILED, "context_length_exceeded")
    assert attempt.stream.ending.status == 400
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_kind_that_this_worker_does_not_know_ends_all_the_same(start: Start) -> None:
    attempt = start()
    attempt.claim = replace(attempt.claim, kind="of the future")
    row = attempt.drive()
    assert (row.status, row.error_code) == (Status.FAILED, "server_error")
    assert attempt.stream.ending.status == 500


def test_a_lost_document_fails_the_generation_as_retryable(start: Start) -> None:
    attempt = start()
    client_for(attempt.id).delete(document_key(attempt.id))
    row = attempt.drive()
    assert (row.status, row.error_code) == (Status.FAILED, "worker_unavailable")
    assert attempt.stream.ending.status == 503


def test_a_failure_of_a_response_is_told_while_the_database_is_away(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise OperationalError("down")

    attempt = start()
    client_for(attempt.id).delete(document_key(attempt.id))
    attempt.claim = replace(attempt.claim, kind="response")
    monkeypatch.setattr(run, "recovered", away)
    row = attempt.drive()
    assert (row.status, row.error_code) == (Status.FAILED, "worker_unavailable")
    ending = attempt.stream.ending
    assert ending.status == 503
    assert json.loads(ending.body)["error"]["code"] == "worker_unavailable"


@pytest.mark.parametrize("stays_away", [False, True])
def test_a_document_out_of_reach_is_waited_for_and_then_counts_as_lost(
    start: Start, monkeypatch: pytest.MonkeyPatch, settings: Settings, stays_away: bool
) -> None:
    settings.EVENT_LOG_PATIENCE_S = 1 if stays_away else 60
    looks = 0

    def down(generation_id: str) -> redis.Redis:
        nonlocal looks
        looks += 1
        if stays_away or looks < 3:
            raise redis.exceptions.ConnectionError("down")
        return client_for(generation_id)

    attempt = start()
    monkeypatch.setattr(run, "_RETRY_S", 0.01)
    monkeypatch.setattr(request_documents, "client_for", down)
    row = attempt.drive()
    assert row.error_code == ("worker_unavailable" if stays_away else "")
    assert looks >= 3


def test_what_was_given_to_another_attempt_is_not_ended_by_the_first(start: Start) -> None:
    attempt = start()
    other = Generation.objects.filter(public_id=attempt.id)
    other.update(attempt=2)  # By the same worker, that was frozen meanwhile.
    row = attempt.drive()
    assert (row.status, row.attempt, row.output_tokens) == (Status.RUNNING, 2, 0)
    assert attempt.stream.row_when_ended is None
    other.update(status=Status.FAILED, attempt=1, finished_at=timezone.now())


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (StopReason.SHUTDOWN, "stopped before the answer was complete"),
        (StopReason.LOST, "lost with the server that carries it"),
    ],
)
def test_what_is_cut_off_without_being_asked_for_fails_as_retryable(
    start: Start, reason: StopReason, told: str
) -> None:
    attempt = start([{"text": "one "}, {"repeat": 50, "steps": [{"text": "x"}]}])
    attempt.stop_at("one ", reason)
    row = attempt.drive()
    assert (row.status, row.error_code) == (Status.FAILED, "worker_unavailable")
    assert row.output_tokens == 1
    assert told in attempt.stream.text


@pytest.mark.parametrize("counted", [(), (1, 2), (0, 0), (4, 5)])
def test_equal_choices_that_were_computed_once_are_counted_once(
    start: Start, counted: Sequence[int]
) -> None:
    """Until they are cancelled; ``counted`` are the server's counts with each of two pieces."""

    def answer(talk: Talk) -> None:
        talk.begin()
        for number, piece in enumerate(("one ", "two ")):
            told = usage(7, counted[number]) if counted else {}
            talk.event({**text(piece), **{k: v for k, v in told.items() if k == "usage"}})
        talk.wait_for_hang_up()

    attempt = start([])
    document = chat_document(attempt.id, "Count.")
    request = replace(document.request, choices=3, sampling=Sampling(temperature=0))
    assembly = replace(document.assembly, choices=3)
    document = replace(document, request=request, assembly=assembly)
    save_document(attempt.id, document, "web.one")
    attempt.stop_at('"index":2,"delta":{"content":"two ')
    ended: Future[Exception | None] = Future()
    with UpstreamServer().running() as server:
        server.answers = [answer]
        options = {"base_url": server.url, "flavor": "vllm"}
        engine = load_engine(ModelSpec("m", "openai_upstream", options=options))
        run = Run(attempt.claim, attempt.stream)
        assert run.start(engine, ended.set_result)
        run.end(ended.result(30))
        engine.close()
    assert attempt.row.status == Status.CANCELLED
    assert attempt.row.output_tokens == max(2, *counted, 0)


def test_an_attempt_whose_request_is_lost_costs_what_the_saved_turns_have_used(
    api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has lost its data between two attempts; what the tools had answered is deleted."""
    models = Catalogue([ModelSpec("m", "scripted", price=Price(input=1_000_000))])
    monkeypatch.setattr(run, "catalogue", lambda: models)
    id_ = create_generation(api_key[0], attempt=1, background=True).public_id
    SavedTurns.objects.create(
        generation_id=id_, state={}, usage={"input_tokens": 9, "output_tokens": 5}
    )
    ToolCall.objects.create(
        generation_id=id_, number=0, type="mcp", cost=2, result={"output": "seen"}
    )
    claim = Generation.objects.claim("m", "w")
    assert claim is not None
    engine = ScriptedEngine(ModelSpec("m", "scripted"))
    assert not Run(claim, LocalStream(id_)).start(engine, lambda _: None)
    row = Generation.objects.get(public_id=id_)
    assert row.status == Status.FAILED
    assert (*counts(row), int(row.cost)) == (9, 0, 5, 0, 9 + 2)
    assert not SavedTurns.objects.exists()
    assert ToolCall.objects.get().result is None


def test_reasoning_is_counted_by_its_pieces_if_the_engine_fails(start: Start) -> None:
    row = start([{"reasoning": "Hm. "}, {"text": "one"}, {"fail": "boom"}]).drive()
    assert row.status == Status.FAILED
    assert counts(row)[2:] == (2, 1)


def test_a_later_turn_that_is_cancelled_is_counted_by_its_pieces(start: Start) -> None:
    """The first turn has more tokens than pieces; of the second one nothing is counted yet."""
    attempt = start()
    run = Run(attempt.claim, attempt.stream)

    def first_turn(request: GenerationRequest, sink: Sink, ended: OnEnd) -> bool:
        sink.feed(TextDelta("one"))
        sink.feed(Usage(7, 0, 50))
        return True

    def second_turn(request: GenerationRequest, sink: Sink, ended: OnEnd) -> bool:
        for _ in range(10):
            sink.feed(TextDelta("x"))
        attempt.stream.stop(StopReason.REQUESTED)
        return False

    attempt.engine.start = first_turn
    assert run.start(attempt.engine, lambda _: None)
    attempt.engine.start = second_turn
    assert not run.resume(attempt.engine, lambda _: None)
    assert attempt.row.status == Status.CANCELLED
    assert counts(attempt.row) == (7, 0, 60, 0)


@pytest.mark.parametrize("reason", list(StopReason))
def test_what_was_complete_when_it_was_stopped_is_completed(
    start: Start, reason: StopReason
) -> None:
    attempt = start()
    attempt.stop_at('"finish_reason":"stop"', reason)
    row = attempt.drive()
    assert (row.status, row.finish_reason) == (Status.COMPLETED, "stop")


def test_a_run_whose_model_is_removed_costs_what_it_did_at_the_beginning(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Catalogue([])
    models.update([ModelSpec("m", "scripted", price=Price(output=1_000_000))])
    monkeypatch.setattr(run, "catalogue", lambda: models)
    attempt = start()
    play = attempt.engine.chat

    def chat(request: GenerationRequest, sink: Sink) -> None:
        models.update([])
        play(request, sink)

    attempt.engine.chat = chat
    row = attempt.drive()
    assert (row.status, row.output_tokens, int(row.cost)) == (Status.COMPLETED, 3, 3)


def test_a_generation_that_was_given_up_keeps_its_state(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = start()
    Generation.objects.fail_running(attempt.id, "w", 1, "worker_lost")
    row = attempt.drive()
    assert (row.status, row.error_code, row.output_tokens) == (Status.FAILED, "worker_lost", 0)
    assert "another process moved its row" in caplog.text


def test_the_end_waits_for_a_database_that_is_down(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, failures = (
        GenerationQuerySet.finish,
        [InterfaceError("closed"), OperationalError("down")],
    )

    def flaky(self: GenerationQuerySet, *args: Any, **kwargs: Any) -> bool:
        if failures:
            raise failures.pop()
        return finish(self, *args, **kwargs)

    attempt = start()
    monkeypatch.setattr(run, "_RETRY_S", 0.01)
    monkeypatch.setattr(GenerationQuerySet, "finish", flaky)
    assert attempt.drive().status == Status.COMPLETED
    assert not failures


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("is_freed", [True, False])
def test_the_end_waits_for_a_locked_row_but_not_for_ever(
    start: Start, monkeypatch: pytest.MonkeyPatch, is_freed: bool
) -> None:
    monkeypatch.setattr(postgresql, "_LOCK_TIMEOUT_MS", 20)
    monkeypatch.setattr(run, "_RETRY_S", 0.01)
    monkeypatch.setattr(run, "_LOCKED_S", 60 if is_freed else 0.1)
    attempt = start()

    def drive() -> str:
        with postgresql.release_connection_after():
            return attempt.drive().status

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            assert Generation.objects.select_for_update().get(public_id=attempt.id)
            driven = pool.submit(drive)
            if is_freed:
                with pytest.raises(TimeoutError):
                    driven.result(timeout=0.3)
            else:  # Its slot is free, and its stream has no end that is not stored.
                assert driven.result(timeout=60) == Status.RUNNING
                assert attempt.stream.ending_or_none is None
        driven.result(timeout=60)
    if not is_freed:
        monkeypatch.setattr(maintenance, "_ORPHAN_S", 0)
        end_orphans("w", lambda: ())
    expected = (Status.COMPLETED, "") if is_freed else (Status.FAILED, "worker_lost")
    assert (attempt.row.status, attempt.row.error_code) == expected


@pytest.mark.parametrize("error", [DataError("no such number"), ValueError("no such text")])
@pytest.mark.parametrize("refused", [1, 2])
def test_an_end_that_is_refused_becomes_a_failure_and_is_left_if_that_is_refused_too(
    start: Start, monkeypatch: pytest.MonkeyPatch, error: Exception, refused: int
) -> None:
    finish, refusals = GenerationQuerySet.finish, [error] * refused

    def refuse(self: GenerationQuerySet, *args: Any, **kwargs: Any) -> bool:
        if refusals:
            raise refusals.pop()
        return finish(self, *args, **kwargs)

    attempt = start()
    monkeypatch.setattr(GenerationQuerySet, "finish", refuse)
    row = attempt.drive()  # It raises nothing, so its slot is free.
    if refused == 1:
        assert (row.status, row.error_code) == (Status.FAILED, "model_error")
        assert attempt.stream.ending.error_code == "model_error"
        return
    assert row.status == Status.RUNNING
    assert attempt.stream.ending_or_none is None
    attempt.stream.acknowledge()
    assert attempt.stream.is_drained  # The publisher forgets it.
    monkeypatch.setattr(maintenance, "_ORPHAN_S", 0)
    end_orphans("w", lambda: ())
    assert (attempt.row.status, attempt.row.error_code) == (Status.FAILED, "worker_lost")


@pytest.mark.django_db(transaction=True)
def test_what_cannot_be_given_back_is_left_to_who_looks_for_orphans(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "_LOCK_TIMEOUT_MS", 20)
    monkeypatch.setattr(maintenance, "_ORPHAN_S", 0)
    attempt = start()
    Generation.objects.update(background=True)
    attempt.claim = replace(attempt.claim, background=True)
    attempt.stop_at("Hello", StopReason.SHUTDOWN)

    def drive() -> str:
        with postgresql.release_connection_after():
            return attempt.drive().status

    with ThreadPoolExecutor(1) as pool, transaction.atomic():
        assert Generation.objects.select_for_update().get(public_id=attempt.id)
        assert pool.submit(drive).result(timeout=60) == Status.RUNNING
    end_orphans("w", lambda: ())
    assert attempt.row.status == Status.QUEUED


def test_of_many_that_end_at_once_a_few_are_written_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others would take connections, and processor time, that the lease needs."""
    counted, now, most = threading.Lock(), 0, 0

    def commit(self: Run, status: Status, ending: Ending) -> bool:
        nonlocal now, most
        with counted:
            now += 1
            most = max(most, now)
        time.sleep(0.005)
        with counted:
            now -= 1
        return True

    monkeypatch.setattr(Run, "_commit", commit)
    claims = [Claim(f"chatcmpl-{n}", "chat.completion", 1, "w") for n in range(100)]
    runs = [Run(claim, LocalStream(claim.public_id)) for claim in claims]
    ending = Ending((), 200, b"")
    with ThreadPoolExecutor(100) as pool:
        done = list(pool.map(lambda one: one._committed(Status.CANCELLED, ending), runs))
    assert done == [True] * 100
    assert 1 < most <= 8
