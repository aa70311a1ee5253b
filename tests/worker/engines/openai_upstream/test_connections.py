"""Connections: kept, tried again, given up, and closed as soon as a run is cancelled."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from inference_site.core.domain.deltas import ToolCallDelta
from inference_site.core.domain.errors import (
    ConnectionLost,
    EngineUnavailable,
    GenerationFailed,
    ModelServerUnreachable,
)
from inference_site.core.domain.request import GenerationRequest, Message
from tests.certificates import write_certificate
from tests.ports import free_port
from tests.served_stack import ROOT
from tests.sinks import RecordingSink
from tests.upstream_server import (
    Answer,
    Talk,
    UpstreamServer,
    chunks,
    delta,
    finish,
    llama_server,
    streamed,
    text,
    usage,
)
from tests.waiting import wait_until
from tests.worker.engines.openai_upstream.conftest import Load
from worker.engines.base import Engine
from worker.engines.openai_upstream import client
from worker.engines.openai_upstream import server as servers

pytestmark = pytest.mark.slow  # Connections time out and are tried again.

HELLO = GenerationRequest("m", (Message("user", "Hello"),))


def hold(talk: Talk) -> None:
    """Answer nothing until the client hangs up."""
    talk.wait_for_hang_up()


EMBED = GenerationRequest("m", operation="embed", prompts=("a",))


def test_one_connection_serves_one_run_after_another(
    server: UpstreamServer, engine: Engine
) -> None:
    before = server.connections
    for _ in range(5):
        engine.run(HELLO, RecordingSink())
    assert server.connections <= before + 1


def test_streams_of_llama_cpp_have_a_connection_each(server: UpstreamServer, load: Load) -> None:
    """It closes the connection after a stream, though its head says that it keeps it."""
    server.name = "llama.cpp"
    engine = load()
    for _ in range(2):
        engine.run(HELLO, RecordingSink())
    assert [asked.headers.get("connection") for asked in server.asked] == ["close"] * 2


def test_llama_cpp_is_known_by_its_name_and_closes_after_a_stream() -> None:
    with llama_server() as url, httpx.Client() as http:
        assert http.get(f"{url}/models").headers["Server"] == "llama.cpp"
        asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "stream": True}
        with http.stream("POST", f"{url}/chat/completions", json=asked) as answer:
            assert answer.headers["Keep-Alive"]
            connection: socket.socket = answer.extensions["network_stream"].get_extra_info("socket")
            with connection.dup() as same:
                answer.read()
                same.settimeout(2)
                assert same.recv(1) == b""


def test_runs_at_once_have_connections_of_their_own(server: UpstreamServer, load: Load) -> None:
    together = threading.Barrier(4, timeout=60)

    def answer(talk: Talk) -> None:
        together.wait()
        streamed("a")(talk)

    server.answers = [answer]
    engine = load(slots=4, connections=1)
    sinks = [RecordingSink() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda sink: engine.run(HELLO, sink), sinks))
    assert [sink.text for sink in sinks] == ["a"] * 4


@contextmanager
def cancelled_soon(engine: Engine, server: UpstreamServer) -> Iterator[RecordingSink]:
    """Run a chat on another thread; cancel it when the block is left, and time its end."""
    sink = RecordingSink()
    thread = threading.Thread(target=engine.run, args=(HELLO, sink))
    thread.start()
    wait_until(lambda: server.asked)
    yield sink
    sink.cancelled = True
    started = time.monotonic()
    thread.join(60)
    assert time.monotonic() - started < 60
    assert sink.finishes == []


@pytest.mark.parametrize("begun", ["before the head", "after the head", "after a token"])
def test_a_cancelled_run_hangs_up_also_while_nothing_comes(
    server: UpstreamServer, engine: Engine, begun: str
) -> None:
    hung_up = threading.Event()

    def answer(talk: Talk) -> None:
        if begun != "before the head":
            talk.begin()
        if begun == "after a token":
            talk.event(text("a"))
        if talk.wait_for_hang_up():
            hung_up.set()

    server.answers = [answer]
    with cancelled_soon(engine, server) as sink:
        if begun == "after a token":
            wait_until(lambda: sink.pieces)
    assert hung_up.wait(60)
    if begun == "after a token":
        assert sink.usage.output_tokens == 1


def test_a_cancelled_run_hangs_up_while_tokens_drip(server: UpstreamServer, engine: Engine) -> None:
    gone = threading.Event()

    def answer(talk: Talk) -> None:
        talk.begin()
        try:
            for _ in range(1000):
                talk.event(text("a"))
                time.sleep(0.02)
        except OSError:
            gone.set()

    server.answers = [answer]
    with cancelled_soon(engine, server) as sink:
        wait_until(lambda: len(sink.pieces) > 3)
    assert gone.wait(60)


def test_an_embedding_is_cancelled_while_it_waits(server: UpstreamServer, load: Load) -> None:
    hung_up = threading.Event()

    def answer(talk: Talk) -> None:
        if talk.wait_for_hang_up():
            hung_up.set()

    server.answers = [answer]
    sink = RecordingSink()
    thread = threading.Thread(target=load().run, args=(EMBED, sink))
    thread.start()
    wait_until(lambda: server.asked)
    sink.cancelled = True
    thread.join(60)
    assert not thread.is_alive()
    assert hung_up.wait(60)
    assert sink.deltas == []


def test_silence_is_a_failure_after_the_timeout(server: UpstreamServer, load: Load) -> None:
    def answer(talk: Talk) -> None:
        talk.begin()
        talk.event(text("a"))
        talk.wait_for_hang_up()

    server.answers = [answer]
    engine = load(timeout_s=0.3)
    started = time.monotonic()
    with pytest.raises(GenerationFailed, match="sent nothing in time"):
        engine.run(HELLO, RecordingSink())
    assert time.monotonic() - started < 60


def test_silence_after_the_end_of_all_choices_is_an_end(server: UpstreamServer, load: Load) -> None:
    def answer(talk: Talk) -> None:
        talk.begin()
        for chunk in (text("a"), finish(), usage()):
            talk.event(chunk)
        talk.wait_for_hang_up()

    server.answers = [answer]
    sink = RecordingSink()
    load(timeout_s=0.3).run(HELLO, sink)
    assert (sink.text, sink.finishes, sink.usage.output_tokens) == ("a", ["stop"], 2)


@pytest.mark.parametrize("begun", [True, False])
def test_a_silent_stream_ends_once_its_server_is_gone(
    server: UpstreamServer, load: Load, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """vLLM stops its engine at a SIGTERM, closes its port, and keeps its connections."""
    monkeypatch.setattr(client, "_SILENT_S", 0.2)
    monkeypatch.setattr(servers, "_GONE_AFTER_S", 0.1)

    def answer(talk: Talk) -> None:
        talk.begin()
        if begun:
            talk.event(text("a"))
        server.stop_listening()
        talk.wait_for_hang_up()

    server.answers = [answer]
    engine, sink = load(check_every_s=0.1), RecordingSink()
    with pytest.raises(ConnectionLost if begun else ModelServerUnreachable):
        engine.run(HELLO, sink)
    assert sink.text == ("a" if begun else "")


def test_a_server_that_stops_ends_what_it_has_begun(
    server: UpstreamServer, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_SILENT_S", 1.0)
    monkeypatch.setattr(servers, "_GONE_AFTER_S", 0.1)

    def answer(talk: Talk) -> None:
        talk.begin()
        server.stop_listening()
        for _ in range(8):
            talk.event(text("a"))
            time.sleep(0.2)
        talk.event(finish())
        talk.end()

    server.answers = [answer]
    engine, sink = load(check_every_s=0.1), RecordingSink()
    engine.run(HELLO, sink)
    assert sink.text == "a" * 8
    assert engine.fault


@pytest.mark.parametrize("status", [200, 500])
def test_an_engine_that_has_ended_is_a_server_that_is_away(
    server: UpstreamServer, engine: Engine, status: int
) -> None:
    """In vLLM's words, while its port is open still."""
    error = {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
    says: Answer = lambda talk: talk.say(status, {"error": error})  # noqa: E731
    server.answers = [chunks({"error": error})] if status == 200 else [says]
    with pytest.raises(ModelServerUnreachable, match="cannot be reached") as caught:
        engine.run(HELLO, RecordingSink())
    assert caught.value.is_suspect
    assert "has ended" in engine.fault
    assert len(server.asked) == 1


@pytest.mark.parametrize("is_down", [True, False])
def test_a_503_of_a_server_that_is_down_is_its_absence(
    server: UpstreamServer, engine: Engine, is_down: bool
) -> None:
    def refuse(talk: Talk) -> None:
        talk.say(503, {"error": {"message": "Loading model"}})

    server.answers = [refuse]
    if is_down:
        server.list_models = refuse
    with pytest.raises(EngineUnavailable) as caught:
        engine.run(HELLO, RecordingSink())
    assert isinstance(caught.value, ModelServerUnreachable) == is_down
    assert bool(engine.fault) == is_down


def test_a_slow_stream_outlives_the_timeout_between_its_chunks(
    server: UpstreamServer, load: Load
) -> None:
    def answer(talk: Talk) -> None:
        talk.begin()
        for _ in range(6):
            talk.event(text("a"))
            time.sleep(0.5)
        talk.event(finish())
        talk.end()

    server.answers = [answer]
    sink = RecordingSink()
    load(timeout_s=2).run(HELLO, sink)
    assert sink.text == "aaaaaa"


def test_a_server_that_holds_the_stream_open_after_its_end_is_not_waited_for(
    server: UpstreamServer, engine: Engine
) -> None:
    def answer(talk: Talk) -> None:
        talk.begin()
        talk.event(text("a"))
        talk.event(finish())
        talk.send(b"data: [DONE]\n\n")
        talk.wait_for_hang_up()

    server.answers = [answer]
    sink = RecordingSink()
    started = time.monotonic()
    engine.run(HELLO, sink)
    assert time.monotonic() - started < 60
    assert sink.finishes == ["stop"]


@pytest.mark.parametrize(("failure", "failures"), [(Talk.cut, 1), (Talk.reset, 2)])
def test_a_connection_that_fails_before_the_first_token_is_tried_again(
    server: UpstreamServer,
    engine: Engine,
    failure: object,
    failures: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.answers = [*[failure] * failures, streamed("Hello")]  # type: ignore[list-item]  # Methods are answers.
    sink = RecordingSink()
    engine.run(HELLO, sink)
    assert (sink.text, sink.finishes) == ("Hello", ["stop"])
    assert len(server.asked) == failures + 1
    assert [record.levelname for record in caplog.records] == ["WARNING"] * failures


def test_the_head_of_an_answer_is_no_token(server: UpstreamServer, engine: Engine) -> None:
    def begin_and_cut(talk: Talk) -> None:
        talk.begin()
        talk.send(b": waiting\n\n")
        talk.cut()

    server.answers = [begin_and_cut, streamed("Hello")]
    sink = RecordingSink()
    engine.run(HELLO, sink)
    assert sink.text == "Hello"


def test_what_a_failed_attempt_sent_in_part_is_forgotten(
    server: UpstreamServer, engine: Engine
) -> None:
    def half_a_call(talk: Talk) -> None:
        talk.begin()
        talk.event(delta({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}))
        talk.send(b"data: {half a line")
        talk.cut()

    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    server.answers = [half_a_call, chunks(delta({"tool_calls": [call]}), finish())]
    sink = RecordingSink()
    engine.run(HELLO, sink)
    pieces = [piece for piece in sink.deltas if isinstance(piece, ToolCallDelta)]
    assert "".join(piece.arguments for piece in pieces) == "{}"


def test_it_is_given_up_after_the_third_attempt(server: UpstreamServer, engine: Engine) -> None:
    server.answers = [Talk.reset]
    with pytest.raises(EngineUnavailable, match="cannot be reached") as caught:
        engine.run(HELLO, RecordingSink())
    assert server.url not in str(caught.value)
    assert len(server.asked) == 3


@pytest.mark.parametrize("failure", [Talk.cut, Talk.reset])
def test_nothing_is_tried_again_after_the_first_token(
    server: UpstreamServer, engine: Engine, failure: object
) -> None:
    def answer(talk: Talk) -> None:
        talk.begin()
        talk.event(text("a"))
        time.sleep(0.05)
        failure(talk)  # type: ignore[operator]  # A method of Talk.

    server.answers = [answer]
    sink = RecordingSink()
    with pytest.raises(GenerationFailed, match="closed the connection"):
        engine.run(HELLO, sink)
    assert sink.text == "a"
    assert sink.usage.output_tokens == 1
    assert len(server.asked) == 1


def test_bytes_that_are_no_http_end_an_answer(server: UpstreamServer, engine: Engine) -> None:
    def answer(talk: Talk) -> None:
        talk.begin()
        talk.event(text("a"))
        time.sleep(0.1)
        talk.begin()  # Its head stands where the length of a chunk should.
        talk.wait_for_hang_up()

    server.answers = [answer]
    started = time.monotonic()
    with pytest.raises(GenerationFailed, match="closed the connection"):
        engine.run(HELLO, RecordingSink())
    assert time.monotonic() - started < 60


def test_a_connection_that_breaks_after_the_end_of_the_answer_is_no_failure(
    server: UpstreamServer, engine: Engine
) -> None:
    def answer(talk: Talk) -> None:
        talk.begin()
        talk.event(text("a"))
        talk.event(finish())
        talk.cut()

    server.answers = [answer]
    sink = RecordingSink()
    engine.run(HELLO, sink)
    assert sink.finishes == ["stop"]


def test_an_end_and_a_broken_connection_that_are_read_together_are_no_failure(
    server: UpstreamServer, load: Load
) -> None:
    """While another request waits, the loop reads its sockets between two ticks."""

    def answer(talk: Talk) -> None:
        talk.begin()
        talk.event(text("a"))
        wait_until(lambda: "a" in sink.text)
        talk.event(text("b"))
        talk.event(finish())
        talk.cut()

    engine = load(slots=2, connections=1)
    other, sink = RecordingSink(), RecordingSink()
    server.answers = [hold, answer]
    thread = threading.Thread(target=engine.run, args=(EMBED, other))
    thread.start()
    wait_until(lambda: server.asked)
    engine.run(HELLO, sink)
    other.cancelled = True
    thread.join(60)
    assert (sink.text, sink.finishes) == ("ab", ["stop"])


def test_a_kept_connection_that_the_server_has_closed_is_replaced(
    server: UpstreamServer, engine: Engine
) -> None:
    def answer_and_close(talk: Talk) -> None:
        streamed("a")(talk)
        talk.cut()

    server.answers = [answer_and_close]
    for _ in range(3):
        sink = RecordingSink()
        engine.run(HELLO, sink)
        assert sink.text == "a"


def test_a_connection_of_a_health_check_that_the_server_closes_is_not_used(
    server: UpstreamServer, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    listed = server.list_models

    def list_and_pause(talk: Talk) -> None:
        listed(talk)
        time.sleep(0.3)  # A connection that is to be closed is closed after that.

    server.list_models = list_and_pause
    load().run(HELLO, RecordingSink())
    assert len(server.asked) == 1
    assert "disconnected" not in caplog.text


def test_a_server_that_comes_back_is_found(load: Load) -> None:
    port = free_port()
    with UpstreamServer(port).running() as server:
        engine = load(base_url=server.url)
    begun = threading.Timer(0.2, lambda: None)
    with ThreadPoolExecutor(1) as pool:
        sink = RecordingSink()
        asked = pool.submit(engine.run, HELLO, sink)
        begun.start()
        begun.join()
        with UpstreamServer(port).running():
            asked.result(60)
    assert sink.text == "Hello there"


def test_a_server_that_a_run_finds_down_is_looked_at_soon(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_DOWN_S", 0.05)
    # The first attempt may still write to the connection that the server has closed.
    monkeypatch.setattr(client, "_BACKOFFS_S", (0.01,))
    port = free_port()
    with UpstreamServer(port).running() as server:
        engine = load(base_url=server.url, check_every_s=3600)
        engine.run(HELLO, RecordingSink())
    with pytest.raises(ModelServerUnreachable):
        engine.run(HELLO, RecordingSink())
    assert engine.fault
    with UpstreamServer(port).running():
        wait_until(lambda: not engine.fault)


@contextmanager
def slow_resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A resolver that says nothing before the end of the block."""
    over = threading.Event()

    def resolve(*_: object, **__: object) -> object:
        over.wait(30)
        raise socket.gaierror("no such host")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolve)
        try:
            yield
        finally:
            over.set()


def test_a_cancelled_run_does_not_wait_for_the_resolver(
    server: UpstreamServer, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_DNS_CACHE_S", 0)
    monkeypatch.setattr(client, "_KEEP_ALIVE_S", 0)  # It connects anew.
    engine, sink = load(base_url=server.url.replace("127.0.0.1", "localhost")), RecordingSink()
    with slow_resolver(monkeypatch):
        run = threading.Thread(target=engine.run, args=(HELLO, sink))
        run.start()
        time.sleep(0.2)
        assert run.is_alive()
        sink.cancelled = True
        run.join(60)
        assert not run.is_alive()
    assert sink.finishes == []


def test_a_resolver_that_does_not_answer_is_given_up(
    server: UpstreamServer, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_DNS_CACHE_S", 0)
    monkeypatch.setattr(client, "_KEEP_ALIVE_S", 0)
    engine = load(base_url=server.url.replace("127.0.0.1", "localhost"), timeout_s=0.3)
    with slow_resolver(monkeypatch), pytest.raises(EngineUnavailable):
        engine.run(HELLO, RecordingSink())


def test_a_server_that_is_down_is_unavailable_soon(load: Load) -> None:
    with UpstreamServer().running() as server:
        engine = load(base_url=server.url)
    started = time.monotonic()
    with pytest.raises(EngineUnavailable, match="cannot be reached"):
        engine.run(HELLO, RecordingSink())
    assert time.monotonic() - started < 60


def test_a_run_that_is_cancelled_while_it_is_tried_again_ends(load: Load) -> None:
    with UpstreamServer().running() as server:
        engine = load(base_url=server.url)
    sink = RecordingSink()
    thread = threading.Thread(target=engine.run, args=(HELLO, sink))
    thread.start()
    time.sleep(0.2)
    sink.cancelled = True
    thread.join(60)
    assert not thread.is_alive()
    assert sink.deltas == []


def test_connecting_is_given_up_after_the_timeout(load: Load) -> None:
    """A full backlog leaves connects unanswered."""
    with UpstreamServer().running() as server:
        engine = load(base_url=server.url, timeout_s=0.3)
        port = int(server.url.split(":")[2].split("/")[0])
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        started = time.monotonic()
        with pytest.raises((EngineUnavailable, GenerationFailed)):
            engine.run(HELLO, RecordingSink())
        assert time.monotonic() - started < 60


def test_a_cancelled_run_is_not_sent(server: UpstreamServer, engine: Engine) -> None:
    engine.run(HELLO, RecordingSink(cancel_after=0))
    assert server.asked == []


def test_a_sink_that_fails_closes_the_connection(server: UpstreamServer, engine: Engine) -> None:
    hung_up = threading.Event()

    def answer(talk: Talk) -> None:
        talk.begin()
        talk.event(text("a"))
        if talk.wait_for_hang_up():
            hung_up.set()

    def fail() -> None:
        raise ZeroDivisionError

    server.answers = [answer]
    with pytest.raises(ZeroDivisionError):
        engine.run(HELLO, RecordingSink(on_first=fail))
    assert hung_up.wait(60)


def test_tls_is_spoken_and_cancelled_too(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = write_certificate(tmp_path, "IP:127.0.0.1")
    with UpstreamServer(certificate=certificate).running() as server:
        assert "cannot be reached" in load(base_url=server.url).fault  # Nobody trusts it yet.
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        engine, sink = load(base_url=server.url), RecordingSink()
        engine.run(HELLO, sink)
        assert sink.text == "Hello there"

        server.answers = [hold]
        server.asked.clear()
        with cancelled_soon(engine, server):
            pass


def test_a_handshake_that_stalls_is_given_up(load: Load) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/v1"
        started = time.monotonic()
        assert "cannot be reached" in load(base_url=url, timeout_s=0.3).fault
        assert time.monotonic() - started < 60


BEGUN_AT_ONCE = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from worker.engines.openai_upstream.event_loop import event_loop

barrier = Barrier(16)
with ThreadPoolExecutor(16) as pool:
    found = list(pool.map(lambda _: (barrier.wait(), event_loop())[1], range(16)))
print(len(set(map(id, found))))
"""


def test_models_that_are_loaded_at_once_share_one_event_loop() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGUN_AT_ONCE], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "1"
