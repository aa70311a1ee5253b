"""Clients that open connections and send nothing: the others are served meanwhile.

The web process of these tests has few descriptors, so that few connections use them up.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.e2e.keys import MadeKey, make_key
from tests.ports import free_port
from tests.served_stack import ROOT, ServedStack, wait_until

FILES = 320
ROOM = FILES - FILES // 4
HEAD_S = 3
SOCKETS = 5
CHAT = {"model": "scripted", "messages": "x"}


class SmallWeb:
    """A web process beside that of the stack, with few descriptors and short times."""

    def __init__(self, stack: ServedStack) -> None:
        self.stack, self.port = stack, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = stack.data_dir / "small-web.log"
        env = {
            **stack.env,
            "HEAD_TIMEOUT_S": str(HEAD_S),
            "WEBSOCKETS_PER_PROJECT": str(SOCKETS),
            "CONNECTIONS_PER_PROJECT": "12",
        }
        with self.log.open("wb") as log:
            limits = f"ulimit -Sn {FILES // 2} && ulimit -Hn {FILES}"
            serve = shlex.join([sys.executable, "manage.py", "web", "--port", str(self.port)])
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", f"{limits} && exec {serve}"],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(self.answers, 120, "the web process")

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self.url}/health", timeout=5).is_success
        except httpx.TransportError:
            return False

    def connections(self) -> float:
        """How many connections it says are open."""
        page = httpx.get(f"{self.url}/metrics", timeout=30).text
        lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[:1] != "#")
        return float(lines["inference_http_connections"])

    def open(self, address: str = "127.0.0.1", sent: bytes = b"") -> socket.socket:
        """A connection from an address of this host, on which this has been sent."""
        connection = socket.socket()
        connection.settimeout(30)
        connection.bind((address, 0))
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(sent)
        return connection

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


@pytest.fixture(scope="module")
def web(stack: ServedStack) -> Iterator[SmallWeb]:
    running = SmallWeb(stack)
    yield running
    running.stop()


def is_closed(connection: socket.socket, within_s: float = 0.0) -> bool:
    """Whether the server has closed a connection that it has sent nothing on."""
    connection.settimeout(within_s or 0.001)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@contextlib.contextmanager
def flood(web: SmallWeb, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(web.open("127.0.0.9", sent)) for _ in range(count)]


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one(
    web: SmallWeb, stack: ServedStack
) -> None:
    assert psutil.Process(web.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (FILES, FILES)
    for name in ("web", "worker"):
        soft, hard = psutil.Process(stack.pid_of(name)).rlimit(psutil.RLIMIT_NOFILE)
        assert soft == hard, name


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX-"])
def test_silent_connections_keep_nobody_out(web: SmallWeb, stack: ServedStack, sent: bytes) -> None:
    key = make_key(stack)
    processor = psutil.Process(web.process.pid).cpu_times
    with flood(web, 2 * FILES, sent):
        before, began = processor().user + processor().system, time.monotonic()
        for _ in range(5):
            assert httpx.get(f"{web.url}/health", timeout=10).status_code == 200
            with httpx.Client(headers={"Authorization": f"Bearer {key.secret}"}) as http:
                answer = http.post(f"{web.url}/v1/chat/completions", json=CHAT, timeout=30)
            assert answer.status_code == 200, answer.text
        used_s = processor().user + processor().system - before
        assert used_s < 2 + 0.5 * (time.monotonic() - began)  # It accepts in no busy loop.
        assert psutil.Process(web.process.pid).num_fds() < FILES - 8
    assert "Traceback" not in web.log.read_text()


def test_one_address_has_half_of_the_connections_and_others_have_room(web: SmallWeb) -> None:
    with web.open("127.0.0.5") as other, flood(web, ROOM // 2 + 20) as silent:
        wait_until(lambda: is_closed(silent[0]), 2, "the oldest is closed")
        assert not is_closed(silent[-1])
        assert not is_closed(other)
        assert web.connections() <= ROOM // 2 + 5


def test_an_address_whose_connections_are_all_in_use_is_told_so(
    web: SmallWeb, stack: ServedStack
) -> None:
    # Bodies of another project each, that do not come.
    keys = [make_key(stack) for _ in range(ROOM // 2 // 10 + 1)]
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        "Content-Type: application/json\r\nContent-Length: 10\r\n\r\n"
    )
    with contextlib.ExitStack() as opened:
        for number in range(ROOM // 2):
            sent = head.format(key=keys[number // 10].secret).encode()
            opened.enter_context(web.open("127.0.0.9", sent))
        wait_until(lambda: web.connections() > ROOM // 2, 60, "the connections")
        one_more = opened.enter_context(web.open("127.0.0.9"))
        answer = one_more.recv(10_000)
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"Retry-After" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]
        for _ in range(200):  # They are not many at a time, whoever keeps them open.
            opened.enter_context(web.open("127.0.0.9"))
        assert httpx.get(f"{web.url}/health", timeout=10).status_code == 200
        assert psutil.Process(web.process.pid).num_fds() < FILES
    wait_until(lambda: web.connections() < 20, 60, "the end of all of them")


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_must_come_in_time_however_slowly_it_is_sent(web: SmallWeb, sent: bytes) -> None:
    began = time.monotonic()
    with web.open(sent=sent) as connection:
        while not is_closed(connection, 0.2):
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"a" if sent else b"")
            assert time.monotonic() - began < HEAD_S + 20
    assert time.monotonic() - began > HEAD_S - 1


def test_a_further_head_must_come_in_time_but_a_connection_may_wait(web: SmallWeb) -> None:
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with web.open(sent=whole) as connection:
        assert connection.recv(10_000).startswith(b"HTTP/1.1 200")
        time.sleep(HEAD_S + 1)  # Longer than for a head: it is kept alive.
        connection.settimeout(30)
        connection.sendall(whole)
        assert connection.recv(10_000).startswith(b"HTTP/1.1 200")
        connection.sendall(whole[:10])
        assert is_closed(connection, HEAD_S + 20)


def _socket(web: SmallWeb, key: MadeKey) -> ClientConnection:
    headers = {"Authorization": f"Bearer {key.secret}"}
    url = f"ws://127.0.0.1:{web.port}/v1/responses"
    return connect(url, additional_headers=headers, proxy=None, open_timeout=60)


def test_a_project_has_so_many_websockets(web: SmallWeb, stack: ServedStack) -> None:
    key, other = make_key(stack), make_key(stack)
    with contextlib.ExitStack() as opened:
        held = [opened.enter_context(_socket(web, key)) for _ in range(SOCKETS)]
        with pytest.raises(InvalidStatus) as refused:
            _socket(web, key)
        assert refused.value.response.status_code == 429
        assert f"{SOCKETS} WebSockets" in refused.value.response.reason_phrase
        opened.enter_context(_socket(web, other)).send('{"type":"response.cancel"}')
        held[0].close()

        def has_room() -> bool:
            with contextlib.suppress(InvalidStatus), _socket(web, key) as again:
                again.send('{"type":"none"}')
                return bool(json.loads(again.recv(30))["status"] == 400)
            return False

        wait_until(has_room, 30, "room for another")
    assert "Traceback" not in web.log.read_text()


def test_sockets_that_are_opened_at_once_are_no_more(web: SmallWeb, stack: ServedStack) -> None:
    key = make_key(stack)  # Nobody knows yet whose it is.
    head = (
        f"GET /v1/responses HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key.secret}\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    ).encode()

    def answer(connection: socket.socket) -> str:
        """What came of it: it stays open, its handshake is refused, or it is told and closed."""
        received = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while part := connection.recv(10_000):
                received += part
                connection.settimeout(2)
        if b"rate_limit_exceeded" in received or received.startswith(b"HTTP/1.1 429"):
            return "refused"
        return "open" if received.startswith(b"HTTP/1.1 101") else ascii(received)

    with contextlib.ExitStack() as opened, ThreadPoolExecutor(40) as threads:
        made = [opened.enter_context(web.open(sent=head)) for _ in range(40)]
        told = list(threads.map(answer, made))
    assert (told.count("open"), told.count("refused")) == (SOCKETS, 40 - SOCKETS), told
    assert "Traceback" not in web.log.read_text()


def test_a_project_has_so_many_requests_open(web: SmallWeb, stack: ServedStack) -> None:
    key, other = make_key(stack), make_key(stack)
    body = b'{"model":"scripted","messages":"x"}'
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {key.secret}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )

    def status(asked: MadeKey) -> int:
        headers = {"Authorization": f"Bearer {asked.secret}"}
        return httpx.get(f"{web.url}/v1/models", headers=headers, timeout=30).status_code

    assert status(key) == 200
    with contextlib.ExitStack() as opened:
        waiting = [opened.enter_context(web.open(sent=head.encode())) for _ in range(12)]
        wait_until(lambda: status(key) == 429, 30, "the refusal")
        assert status(other) == 200
        with ThreadPoolExecutor(12) as threads:
            for connection in waiting:
                connection.sendall(body)
            answers = list(threads.map(lambda c: c.recv(100), waiting))
        assert {answer.split()[1] for answer in answers} == {b"200"}
    wait_until(lambda: status(key) == 200, 30, "room for another")
