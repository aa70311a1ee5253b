"""Several servers of one model: the least busy is asked, and another where one fails."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from ipaddress import ip_network
from typing import Any

import pytest

from inference_site.core.domain.addresses import AllowedAddresses
from inference_site.core.domain.errors import (
    EngineLoadError,
    EngineUnavailable,
    GenerationFailed,
    InvalidRequest,
    RateLimited,
)
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest, Message
from tests.ports import free_port
from tests.sinks import RecordingSink
from tests.upstream_server import Answer, Talk, UpstreamServer, streamed, text
from tests.waiting import wait_until
from worker.engines.base import Engine, load_engine

HELLO = GenerationRequest("m", (Message("user", "Hello"),))
DEAD = "http://127.0.0.1:9/v1"


@pytest.fixture
def servers() -> Iterator[list[UpstreamServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(UpstreamServer().running()) for _ in range(2)]


@pytest.fixture
def engine(servers: list[UpstreamServer]) -> Iterator[Engine]:
    """An engine for both."""
    loaded = engine_for(*(server.url for server in servers))
    yield loaded
    loaded.close()


def engine_for(*urls: str, **options: object) -> Engine:
    options = {"base_urls": list(urls), "check_every_s": 0.2, **options}
    return load_engine(ModelSpec("m", "openai_upstream", slots=8, options=options))


def test_the_shortest_context_that_a_server_lists_is_told(servers: list[UpstreamServer]) -> None:
    for server, context in zip(servers, (4096, 1024), strict=True):
        listed = {"data": [{"id": "m", "max_model_len": context}, {"id": "n", "max_model_len": 1}]}
        server.list_models = lambda talk, listed=listed: talk.say(200, listed)  # type: ignore[misc]
    engine = engine_for(*(server.url for server in servers))
    assert engine.context_length == 1024
    engine.close()


def chat(engine: Engine) -> RecordingSink:
    sink = RecordingSink()
    engine.run(HELLO, sink)
    return sink


def say(status: int, **headers: str) -> Answer:
    return lambda talk: talk.say(status, {"error": "Not now."}, **headers)


def test_the_least_busy_server_is_asked(servers: list[UpstreamServer], engine: Engine) -> None:
    go = threading.Event()

    def answer(talk: Talk) -> None:
        go.wait(20)
        streamed("a")(talk)

    for server in servers:
        server.answers = [answer]
    with ThreadPoolExecutor(6) as pool:
        runs = [pool.submit(chat, engine) for _ in range(6)]
        wait_until(lambda: sum(len(server.asked) for server in servers) == 6)
        assert [len(server.asked) for server in servers] == [3, 3]
        go.set()
        for run in runs:
            run.result(60)


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_server_that_cannot_take_a_request_leaves_it_to_another(
    servers: list[UpstreamServer], engine: Engine, status: int
) -> None:
    servers[0].answers = [say(status, Retry_After="60")]
    assert [chat(engine).text for _ in range(6)] == ["Hello there"] * 6
    # It is not asked again for the time that it has asked for.
    assert len(servers[0].asked) <= 1
    assert not engine.fault


@pytest.mark.parametrize(("status", "error"), [(429, RateLimited), (503, EngineUnavailable)])
def test_when_all_refuse_the_last_refusal_is_told(
    servers: list[UpstreamServer], engine: Engine, status: int, error: type[EngineUnavailable]
) -> None:
    for server in servers:
        server.answers = [say(status, Retry_After="7")]
    with pytest.raises(error) as caught:
        chat(engine)
    assert caught.value.retry_after_s == 7
    assert [len(server.asked) for server in servers] == [1, 1]


@pytest.mark.parametrize("status", [400, 500])
def test_what_another_server_would_say_as_well_is_not_sent_to_it(
    servers: list[UpstreamServer], engine: Engine, status: int
) -> None:
    for server in servers:
        server.answers = [say(status)]
    with pytest.raises((InvalidRequest, GenerationFailed)):
        chat(engine)
    assert sum(len(server.asked) for server in servers) == 1


@pytest.mark.parametrize("failure", [Talk.cut, Talk.reset])
def test_a_connection_that_fails_before_the_first_token_is_tried_elsewhere(
    servers: list[UpstreamServer], engine: Engine, failure: Answer
) -> None:
    servers[0].answers = [failure]
    assert [chat(engine).text for _ in range(4)] == ["Hello there"] * 4


def test_nothing_is_sent_elsewhere_after_the_first_token(
    servers: list[UpstreamServer], engine: Engine
) -> None:
    def answer(talk: Talk) -> None:
        talk.begin()
        talk.event(text("a"))
        talk.cut()

    for server in servers:
        server.answers = [answer]
    with pytest.raises(GenerationFailed, match="closed the connection"):
        chat(engine)
    assert sum(len(server.asked) for server in servers) == 1


def test_a_server_that_is_down_is_not_missed_and_is_found_when_it_comes() -> None:
    port = free_port()
    with UpstreamServer().running() as up:
        engine = engine_for(f"http://127.0.0.1:{port}/v1", up.url)
        assert not engine.fault
        assert [chat(engine).text for _ in range(4)] == ["Hello there"] * 4
        with UpstreamServer(port).running() as late:
            wait_until(lambda: chat(engine).text == "Hello there" and late.asked)
        engine.close()


def test_a_model_whose_servers_are_all_down_has_a_fault_until_one_is_back() -> None:
    port = free_port()
    engine = engine_for(DEAD, f"http://127.0.0.1:{port}/v1")
    changes: list[str] = []
    engine.watch(lambda: changes.append(engine.fault))
    assert DEAD in engine.fault
    with UpstreamServer(port).running():
        wait_until(lambda: not engine.fault)
        assert chat(engine).text == "Hello there"
    wait_until(lambda: engine.fault)
    wait_until(lambda: len(changes) == 2)
    assert changes[0] == ""
    assert "cannot be reached" in changes[1]
    with UpstreamServer(port).running():
        wait_until(lambda: not engine.fault)
    engine.close()


def test_a_frozen_server_is_left_before_the_first_token(servers: list[UpstreamServer]) -> None:
    """It accepts connections and answers nothing, as a stopped process does."""
    freed = threading.Event()

    def freeze(talk: Talk) -> None:
        freed.wait(30)

    engine = engine_for(*(server.url for server in servers), timeout_s=20)
    servers[0].answers, servers[0].list_models = [freeze], freeze
    engine._upstream.health._patience_s = 0.3  # type: ignore[attr-defined]  # Not its ten seconds.
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(chat, engine) for _ in range(4)]
        assert [run.result(60).text for run in runs] == ["Hello there"] * 4
    assert servers[0].asked
    assert not engine.fault
    freed.set()
    engine.close()


def test_a_busy_server_that_is_slow_to_tell_its_models_is_not_down(
    servers: list[UpstreamServer],
) -> None:
    freed = threading.Event()
    engine = engine_for(servers[0].url)
    engine._upstream.health._patience_s = 1.0  # type: ignore[attr-defined]  # Not its ten seconds.
    asked = threading.Event()

    def hang(talk: Talk) -> None:
        asked.set()
        freed.wait(30)

    def drip(talk: Talk) -> None:
        talk.begin()
        while not freed.wait(0.05):
            talk.event(text("a"))

    servers[0].list_models, servers[0].answers = hang, [drip]
    sink = RecordingSink()
    run = threading.Thread(target=engine.run, args=(HELLO, sink))
    run.start()
    wait_until(lambda: len(sink.pieces) > 40)  # More than two seconds, so it was asked and waited.
    assert not engine.fault
    sink.cancelled = True
    freed.set()
    run.join(60)
    engine.close()


@contextmanager
def paced_process() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server in a process of its own, which sends each stream a token every 10 ms."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.paced_upstream", "--port", str(port)]
    with subprocess.Popen(command) as process:
        try:
            yield f"http://127.0.0.1:{port}/v1", process
        finally:
            process.kill()


@pytest.mark.parametrize("attack", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_freezes_takes_only_its_own_streams_along(attack: int) -> None:
    asked = GenerationRequest("m", HELLO.messages, max_output_tokens=1_000_000)
    with paced_process() as (first, doomed), paced_process() as (second, _):
        engine = engine_for(first, second, timeout_s=5)
        health = engine._upstream.health  # type: ignore[attr-defined]  # Asked below for both.
        wait_until(lambda: all(address.is_up for address in health._addresses.all))
        health._patience_s = 1.0  # Not ten seconds.
        sinks = [RecordingSink() for _ in range(20)]
        with ThreadPoolExecutor(40) as pool:
            runs = [pool.submit(engine.run, asked, sink) for sink in sinks]
            wait_until(lambda: all(sink.pieces for sink in sinks))
            doomed.send_signal(attack)
            after = [pool.submit(chat, engine) for _ in range(20)]
            wait_until(lambda: sum(run.done() for run in runs) == 10, 30)
            assert all(len(run.result(60).pieces) == 16 for run in after)
            left = [sink for run, sink in zip(runs, sinks, strict=True) if not run.done()]
            counts = [len(sink.pieces) for sink in left]
            wait_until(lambda: all(len(s.pieces) > n for s, n in zip(left, counts, strict=True)))
            for sink in left:
                sink.cancelled = True
            failures = [run.exception(30) for run in runs]
        assert sorted(type(failure).__name__ for failure in failures) == [
            *["ConnectionLost" if attack == signal.SIGKILL else "GenerationFailed"] * 10,
            *["NoneType"] * 10,
        ]
        assert all(sink.usage.output_tokens > 0 for sink in sinks)
        assert not engine.fault
        engine.close()


# --- Entries of the database: only allowed addresses ----------------------------------------------


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The addresses of names, for this process."""
    names: dict[str, str] = {}
    ask = socket.getaddrinfo

    def answer(host: Any, *arguments: Any, **options: Any) -> Any:
        return ask(names.get(host, host), *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return names


def restricted(url: str, **allowed: Any) -> Engine:
    return load_engine(
        ModelSpec(
            "m",
            "openai_upstream",
            options={"base_url": url, "check_every_s": 0.1},
            allowed_addresses=AllowedAddresses(**allowed),
        )
    )


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1", "localhost", "0"]
)
def test_a_number_that_is_not_allowed_is_never_connected_to(
    servers: list[UpstreamServer], host: str
) -> None:
    with pytest.raises(EngineLoadError, match="not allowed"):
        restricted(servers[0].url.replace("127.0.0.1", host))
    assert servers[0].connections == 0


def test_a_name_is_looked_at_each_time_that_it_is_connected_to(
    servers: list[UpstreamServer], resolved: dict[str, str]
) -> None:
    [server, _] = servers
    resolved["inner.test"] = "127.0.0.1"
    url = server.url.replace("127.0.0.1", "inner.test")
    engine = restricted(url)
    try:
        assert "UPSTREAM_ALLOWED_HOSTS" in engine.fault
        with pytest.raises(EngineUnavailable):
            chat(engine)
    finally:
        engine.close()
    assert server.connections == 0

    for allowed in ({"hosts": (".test",)}, {"networks": (ip_network("127.0.0.0/8"),)}):
        engine = restricted(url, **allowed)
        try:
            assert engine.fault == ""
            assert chat(engine).text
        finally:
            engine.close()


def test_a_redirect_to_an_address_is_not_followed(servers: list[UpstreamServer]) -> None:
    [server, inner] = servers
    server.list_models = lambda talk: talk.say(302, b"", Location=f"{inner.url}/models")
    server.answers = [lambda talk: talk.say(307, b"", Location=f"{inner.url}/chat/completions")]
    engine = restricted(server.url, hosts=("127.0.0.1",))
    try:
        assert "status 302" in engine.fault
        with pytest.raises(GenerationFailed, match="status 307"):
            chat(engine)
    finally:
        engine.close()
    assert inner.connections == 0
