"""Kill and freeze the parts of a running stack; clients are told, and the next request works."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import psycopg
import pytest
from celery import Celery
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.faults.freezing import frozen, frozen_postgres
from tests.served_stack import ServedStack, wait_until


def messages(*steps: dict[str, Any]) -> list[Any]:
    """A conversation that makes the scripted model play these steps."""
    return [{"role": "user", "content": json.dumps(steps)}]


def slow(words: int, delay_ms: int = 100) -> list[Any]:
    """A conversation whose answer takes ``words × delay_ms``."""
    return messages({"repeat": words, "steps": [{"text": "x "}, {"sleep_ms": delay_ms}]})


def works(stack: ServedStack) -> bool:
    """Whether a completion succeeds now."""
    try:
        stack.client().chat.completions.create(model="scripted", messages=messages({"text": "ok"}))
        return is_ready(stack)
    except (openai.APIError, httpx.HTTPError):
        return False


def is_ready(stack: ServedStack) -> bool:
    """Whether its health check says so."""
    return httpx.get(f"{stack.url}/health/ready", timeout=60).status_code == 200


def check_of_postgres(stack: ServedStack) -> str:
    """What the health check says of PostgreSQL; nothing when it has no time to look."""
    told = httpx.get(f"{stack.url}/health/ready", timeout=60).json()
    return str(told.get("checks", {}).get("postgres", ""))


def answers(stack: ServedStack, model: str) -> bool:
    """Whether a model answers now."""
    try:
        stack.client().chat.completions.create(model=model, messages=messages({"text": "ok"}))
    except openai.APIError:
        return False
    return True


class Reader:
    """Reads one streamed answer on a thread and keeps what came."""

    def __init__(self, stack: ServedStack, conversation: list[Any]) -> None:
        self.text, self.id = "", ""
        self.error: Exception | None = None
        self.ended_at = 0.0
        self._stack, self._conversation = stack, conversation
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        wait_until(lambda: self.text or self.error, 120, "the first word")

    def _read(self) -> None:
        try:
            with self._stack.client().chat.completions.create(
                model="scripted", messages=self._conversation, stream=True
            ) as stream:
                for chunk in stream:
                    self.id = chunk.id
                    self.text += chunk.choices[0].delta.content or ""
        except (openai.APIError, httpx.HTTPError) as exc:
            self.error = exc
        self.ended_at = time.monotonic()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the answer. Raise AssertionError when it hangs."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the stream hangs"


def test_killed_worker_fails_its_streams_and_comes_back(stack: ServedStack) -> None:
    reader = Reader(stack, slow(1000))
    killed_at = time.monotonic()
    os.kill(stack.pid_of("worker"), signal.SIGKILL)
    reader.wait(120)
    assert isinstance(reader.error, openai.APIError)
    assert "died" in str(reader.error)
    assert reader.ended_at - killed_at < 90  # It would have gone on for longer.
    row = stack.row(reader.id)
    assert (row["status"], row["error_code"]) == ("failed", "worker_lost")
    told: Any = reader.error.body
    [choice] = told["partial_response"]["choices"]
    assert choice["message"]["content"] == reader.text
    assert row["output_tokens"] == len(reader.text.split())
    restarting = "worker was killed by SIGKILL; restarting"
    wait_until(lambda: restarting in stack.text(), 120, "the supervisor")
    wait_until(lambda: works(stack), 120, "the next request")


def test_whole_answers_of_a_killed_worker_count_what_was_generated(stack: ServedStack) -> None:
    """As its lease said last; nothing of them is in an event log."""
    wait_until(lambda: works(stack), 120, "the worker")
    script = slow(1000)
    asked: list[Callable[[], object]] = [
        partial(stack.client().chat.completions.create, model="scripted", messages=script),
        partial(stack.client().responses.create, model="scripted", input=script),
    ]
    rows = "SELECT public_id, output_tokens FROM generations_generation WHERE "
    running = f"{rows} status = 'running' AND claimed_at < now() - interval '6 s'"
    lost = f"{rows} error_code = 'worker_lost' AND public_id = ANY(%s)"
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [pool.submit(ask) for ask in asked]
        wait_until(lambda: len(stack.sql(running)) == len(asked), 120, "some words")
        ids = [public_id for public_id, _ in stack.sql(running)]
        os.kill(stack.pid_of("worker"), signal.SIGKILL)
        for answer in answers:
            with pytest.raises(openai.APIError, match="died"):
                answer.result(120)
    counted: dict[str, int] = dict(stack.sql(lost, ids))
    assert len(counted) == len(asked)
    assert min(counted.values()) > 5
    [stored] = [id_ for id_ in counted if id_.startswith("resp_")]
    usage = stack.client().responses.retrieve(stored).usage
    assert usage is not None
    assert usage.output_tokens == counted[stored]
    wait_until(lambda: works(stack), 120, "the next request")


def test_a_server_that_stands_still_is_killed_and_its_model_comes_back(stack: ServedStack) -> None:
    wait_until(lambda: answers(stack, "demo"), 120, "the model to be loaded")
    worker, server = stack.pid_of("worker"), stack.server_of("demo")
    server.suspend()
    with pytest.raises(openai.APIError, match="ended before the answer"):
        stack.client().chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Hi"}], timeout=90
        )
    log = stack.data_dir / "log" / "worker.log"
    assert "it gave no sign of life for 5 s" in log.read_text()
    wait_until(lambda: answers(stack, "demo"), 120, "the next request")
    assert stack.server_of("demo") != server
    assert stack.pid_of("worker") == worker


def test_a_hook_that_stands_still_takes_the_worker_along(stack: ServedStack) -> None:
    """One thread reads all servers, and so calls the hooks of all of their models."""
    wait_until(lambda: answers(stack, "demo"), 120, "the model to be loaded")
    (stack.data_dir / "freeze").touch()
    with pytest.raises(openai.APIError, match="died"):
        stack.client().chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Hi"}], timeout=90
        )
    log = stack.data_dir / "log" / "worker.log"
    assert "the upstreams' loop stalled for 5 s; this process ends" in log.read_text()
    wait_until(lambda: answers(stack, "demo"), 120, "the next request")


def test_client_that_stands_still_is_dropped(stack: ServedStack) -> None:
    """There, after three seconds."""
    long = messages({"repeat": 1_500, "steps": [{"text": "abcdefgh" * 1280}]})
    body = json.dumps({"model": "scripted", "stream": True, "messages": long}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stack.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    log = stack.data_dir / "log" / "web.log"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", stack.port))
        connection.sendall(head.encode() + body)
        wait_until(lambda: "a client that reads nothing is dropped" in log.read_text(), 120, "it")
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(2**20):
                received += piece
    assert received.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in received


def test_frozen_redis_delays_a_stream_and_loses_nothing(stack: ServedStack) -> None:
    reader = Reader(stack, slow(60))
    with frozen(stack.pid_of("redis")):
        started = time.monotonic()
        response = httpx.post(
            f"{stack.url}/v1/chat/completions",
            headers={"Authorization": f"Bearer {stack.key}"},
            json={"model": "scripted", "messages": messages({"text": "x"})},
            timeout=60,  # It would wait for as long as Redis is frozen.
        )
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert response.json()["error"]["type"] == "server_error"
        time.sleep(max(0.0, 3 - (time.monotonic() - started)))
    reader.wait(120)
    assert reader.error is not None or reader.text == "x " * 60
    wait_until(lambda: works(stack), 120, "the next request")


def test_killed_redis_ends_or_continues_streams(stack: ServedStack) -> None:
    reader = Reader(stack, slow(60))
    os.kill(stack.pid_of("redis"), signal.SIGKILL)
    reader.wait(120)
    assert reader.error is not None or reader.text == "x " * 60
    wait_until(lambda: works(stack), 120, "the next request")
    ended = ("completed", "failed", "cancelled")
    wait_until(lambda: stack.row(reader.id)["status"] in ended, 120, "the end of the run")


def test_frozen_postgres_is_a_503_within_seconds(stack: ServedStack) -> None:
    wait_until(lambda: works(stack), 120, "what an earlier test has killed")
    with frozen_postgres(stack):
        with pytest.raises(openai.InternalServerError) as caught:
            stack.client().chat.completions.create(
                model="scripted",
                messages=messages({"text": "x"}),
                timeout=60,  # It would wait for as long as PostgreSQL is frozen.
            )
        assert caught.value.status_code == 503
        assert caught.value.response.headers["x-request-id"]
        ready = httpx.get(f"{stack.url}/health/ready", timeout=60)
        assert ready.status_code == 503
    wait_until(lambda: works(stack), 120, "the next request")


def test_a_socket_that_is_opened_while_postgres_is_frozen_gets_the_error(
    stack: ServedStack,
) -> None:
    """Its key cannot be checked. The handshake was a 500, and a traceback in the log."""
    wait_until(lambda: works(stack), 120, "what an earlier test has killed")
    url = f"{stack.url}/v1/responses".replace("http", "ws", 1)
    with (
        frozen_postgres(stack),
        connect(
            url,
            additional_headers={"Authorization": "Bearer sk-not-seen-before"},
            open_timeout=60,
            proxy=None,
        ) as opened,
    ):
        event = json.loads(opened.recv(60))
        assert (event["type"], event["status"]) == ("error", 503)
        assert event["error"]["code"] == "database_unavailable"
        with pytest.raises(ConnectionClosed):
            opened.recv(60)
    wait_until(lambda: works(stack), 120, "the next request")


def test_a_web_process_in_which_a_thread_hangs_ends_when_it_is_asked_to(
    stack: ServedStack,
) -> None:
    wait_until(lambda: works(stack), 120, "what an earlier test has killed")
    web = stack.pid_of("web")
    with frozen_postgres(stack):
        assert not works(stack)  # Its thread waits for PostgreSQL from now on.
        os.kill(web, signal.SIGTERM)
        wait_until(lambda: not psutil.pid_exists(web), 120, "the end of the web process")
    wait_until(lambda: works(stack), 60, "the next request")


def test_killed_postgres_comes_back_and_a_running_stream_is_recorded(stack: ServedStack) -> None:
    reader = Reader(stack, slow(20))
    os.kill(stack.postgres_pid(), signal.SIGQUIT)
    reader.wait(120)
    wait_until(lambda: works(stack), 120, "the next request")
    wait_until(lambda: stack.row(reader.id)["status"] == "completed", 120, "its record")
    assert reader.text == "x " * 20


def test_killed_web_process_comes_back(stack: ServedStack) -> None:
    reader = Reader(stack, slow(100))
    os.kill(stack.pid_of("web"), signal.SIGKILL)
    reader.wait(120)
    assert reader.error is not None
    wait_until(lambda: works(stack), 120, "the next request")
    wait_until(
        lambda: stack.row(reader.id)["status"] != "running", 120, "the run that nobody follows"
    )


def test_a_web_process_listens_to_streams_before_its_first_request(stack: ServedStack) -> None:
    with stack.redis() as client:
        known = set(client.pubsub_channels("*web.*"))
        os.kill(stack.pid_of("web"), signal.SIGKILL)
        wait_until(lambda: set(client.pubsub_channels("*web.*")) - known, 60, "its channel")


def test_a_wake_up_that_names_nothing_is_only_logged(stack: ServedStack) -> None:
    worker = stack.pid_of("worker")
    url = stack.services["REDIS_URL"].replace("unix://", "redis+socket://")
    with Celery(broker=url, set_as_current=False) as broker:
        for arguments in ((), (7,), (7, 8), ("scripted", "and more")):
            broker.send_task("worker.generate", args=arguments, queue="model.scripted")
    wait_until(lambda: works(stack), 30, "a completion after wake-ups that name nothing")
    assert stack.pid_of("worker") == worker


def test_killed_beat_comes_back(stack: ServedStack) -> None:
    beat = stack.pid_of("beat")
    os.kill(beat, signal.SIGKILL)

    def is_new() -> bool:
        try:
            return stack.pid_of("beat") != beat
        except AssertionError:
            return False

    wait_until(is_new, 120, "a new beat")


def test_frozen_worker_is_no_worker(stack: ServedStack) -> None:
    with frozen(stack.pid_of("worker")):
        wait_until(lambda: not is_ready(stack), 120, "the end of its lease")
        with pytest.raises(openai.InternalServerError) as caught:
            stack.client().chat.completions.create(
                model="scripted", messages=messages({"text": "x"})
            )
        assert caught.value.status_code == 503
        assert caught.value.code == "no_worker"
        assert caught.value.response.headers["retry-after"]
        ready = httpx.get(f"{stack.url}/health/ready", timeout=60)
        assert ready.status_code == 503
        assert "scripted" in ready.json()["checks"]["workers"]
    wait_until(lambda: works(stack), 120, "the next request")


def test_a_hundred_requests_during_an_outage_are_told_side_by_side(
    stack: ServedStack,
) -> None:
    with frozen(stack.pid_of("redis")):
        outcomes: list[tuple[int, float]] = []

        def ask() -> None:
            started = time.monotonic()
            response = httpx.post(
                f"{stack.url}/v1/chat/completions",
                headers={"Authorization": f"Bearer {stack.key}"},
                json={"model": "scripted", "messages": messages({"text": "x"})},
                timeout=120,
            )
            outcomes.append((response.status_code, time.monotonic() - started))

        threads = [threading.Thread(target=ask) for _ in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {status for status, _ in outcomes} == {503}
    # One alone is given 3 s; were they tried one after the other, the last would take minutes.
    assert max(seconds for _, seconds in outcomes) < 60
    wait_until(lambda: works(stack), 120, "the next request")


def test_health_answers_while_the_database_hangs(stack: ServedStack) -> None:
    with frozen_postgres(stack):
        threads = [threading.Thread(target=works, args=(stack,)) for _ in range(20)]
        for thread in threads:
            thread.start()
        assert httpx.get(f"{stack.url}/health", timeout=60).status_code == 200
        wait_until(lambda: check_of_postgres(stack) not in ("", "ok"), 120, "what is wrong")
        for thread in threads:
            thread.join()
    wait_until(lambda: works(stack), 120, "the next request")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_client_that_comes_while_the_web_process_restarts_is_served(
    stack: ServedStack, number: signal.Signals
) -> None:
    web = stack.pid_of("web")
    os.kill(web, number)
    wait_until(lambda: _is_dead(web), 120, "the end of the process")
    answer = stack.client().chat.completions.create(
        model="scripted", messages=messages({"text": "ok"})
    )
    assert answer.choices[0].message.content == "ok"


def _is_dead(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_web_process_killed_while_it_stores_files_leaves_nothing_behind(
    stack: ServedStack,
) -> None:
    """A file could be read before its upload was completed: the next try made another one. Large
    files stayed among the temporary files."""
    client = stack.client()
    upload = client.uploads.create(
        bytes=3, filename="killed.txt", mime_type="text/plain", purpose="user_data"
    )
    part = client.uploads.parts.create(upload.id, data=b"abc")

    def complete() -> Any:
        return client.uploads.complete(upload.id, part_ids=[part.id])

    with ThreadPoolExecutor() as pool, psycopg.connect(stack.services["DATABASE_URL"]) as held:
        projects = "SELECT project_id FROM files_upload WHERE public_id = %s"
        quota = (0x66696C65, stack.sql(projects, upload.id)[0][0])
        held.execute("SELECT pg_advisory_lock(%s, %s)", quota)
        asked = pool.submit(complete)
        large: Any = {"file": (f"a.{upload.id}", bytes(3 * 2**20)), "purpose": "user_data"}
        pool.submit(client.files.create, **large)
        waiting = "SELECT pid, query FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        wait_until(lambda: len(stack.sql(waiting)) == 2, 30, "two counts of files")
        assert list(Path(tempfile.gettempdir()).glob(f"*.upload.{upload.id}")) == []
        held.execute("SELECT FROM files_upload WHERE public_id = %s FOR UPDATE", [upload.id])
        held.execute("SELECT pg_advisory_unlock(%s, %s)", quota)

        def ending() -> list[int]:
            return [pid for pid, query in stack.sql(waiting) if "files_upload" in query]

        wait_until(ending, 30, "the end of the upload")
        os.kill(stack.pid_of("web"), signal.SIGKILL)
        stack.sql("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS pid", ending())
        with pytest.raises(openai.APIConnectionError):
            asked.result()
    wait_until(lambda: works(stack), 60, "answers")
    stack.sql("UPDATE files_upload SET completing_since = now() - interval '11 minutes'")
    file = complete().file
    assert file is not None
    assert client.files.content(file.id).content == b"abc"
    found = [one.id for one in client.files.list() if one.filename == "killed.txt"]
    assert found == [file.id]
