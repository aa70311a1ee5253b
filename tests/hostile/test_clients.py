"""Clients that send what costs much, or read nothing: the others are served meanwhile."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.e2e.keys import MadeKey, make_key
from tests.e2e.scripts import script
from tests.served_stack import ServedStack, wait_until

CHAT = "/v1/chat/completions"
MIB = 1024 * 1024
LIMIT = 20 * MIB
PING = b": ping\n\n"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def attacker(stack: ServedStack) -> MadeKey:
    return make_key(stack)


@contextlib.contextmanager
def bystander(stack: ServedStack, model: str = "scripted") -> Iterator[None]:
    """Another project that asks one thing after the other; each has to succeed."""
    key, done, seen = make_key(stack), threading.Event(), list[Any]()

    def ask() -> None:
        with key.http(stack) as http:
            while not done.is_set():
                answer = http.post(CHAT, json={"model": model, "messages": "x", "max_tokens": 4})
                seen.append(answer.status_code if answer.is_success else answer.text)
                done.wait(0.2)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        wait_until(lambda: seen, 120, "the bystander's first answer")
        yield
        before = len(seen)
        wait_until(lambda: len(seen) > before + 2, 120, "the bystander's last answers")
    finally:
        done.set()
        thread.join()
    assert set(seen) == {200}


class Web:
    """The web process, or another: what it has used since."""

    def __init__(self, stack: ServedStack, process: str = "web") -> None:
        self._process = psutil.Process(stack.pid_of(process))
        self._memory = self._process.memory_info().rss
        self._cpu = self._cpu_s()

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    @property
    def cpu_s(self) -> float:
        return self._cpu_s() - self._cpu

    @property
    def grown(self) -> int:
        """Bytes of memory."""
        return int(self._process.memory_info().rss - self._memory)


def raw(stack: ServedStack, head: str, *, small: bool = False) -> socket.socket:
    """A connection on which this head was sent."""
    connection = socket.socket()
    if small:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", stack.port))
    connection.settimeout(120)
    connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n")
    return connection


def post(key: str = "", length: int = LIMIT, more: str = "", path: str = CHAT) -> str:
    """The head of a request with a body of this length."""
    authorization = f"\nAuthorization: Bearer {key}" if key else ""
    content_type = "" if "Content-Type" in more else "\nContent-Type: application/json"
    return (
        f"POST {path} HTTP/1.1\nHost: x{authorization}{content_type}\nContent-Length: {length}"
        + more
    )


def status_of(connection: socket.socket) -> int:
    """The status of the next answer, which is read to its end."""
    with connection.makefile("rb") as lines:
        status = int(lines.readline().split()[1])
        length = 0
        while (line := lines.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        lines.read(length)
    return status


@pytest.mark.parametrize("body", ['{"messages":[%s0]}', '{"model":"demo","messages":[%s0]}'])
def test_a_body_of_a_million_errors_costs_little(
    stack: ServedStack, attacker: MadeKey, body: str
) -> None:
    content = body % ("0," * MIB)
    with bystander(stack), attacker.http(stack) as http:
        web = Web(stack)
        answers = [http.post(CHAT, content=content, headers=JSON) for _ in range(4)]
        used_s, grown = web.cpu_s, web.grown
    assert {answer.status_code for answer in answers} == {400}
    assert used_s < 4  # Before: 5 s for one, and a gigabyte.
    assert grown < 200 * MIB


@pytest.mark.parametrize(
    ("key", "more", "length", "status"),
    [
        ("", "", LIMIT, 401),
        ("sk-unknown", "", LIMIT, 401),
        ("good", "", LIMIT + 1, 413),
        ("good", "\nContent-Type: text/plain", LIMIT, 415),
    ],
)
def test_a_request_is_refused_by_its_head(
    stack: ServedStack, attacker: MadeKey, key: str, more: str, length: int, status: int
) -> None:
    secret = attacker.secret if key == "good" else key
    with raw(stack, post(secret, length, more)) as connection:
        assert status_of(connection) == status
        # The rest is dropped, and the connection goes on.
        connection.sendall(b" " * length)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status_of(connection) == 200


@pytest.mark.parametrize("length", [16_300, 16_390, 5 * MIB])
@pytest.mark.parametrize("is_url", [True, False])
def test_a_head_that_is_too_long_is_told_so(
    stack: ServedStack, attacker: MadeKey, length: int, is_url: bool
) -> None:
    key = f"Authorization: Bearer {attacker.secret}"
    head = f"GET /v1/models?x={'x' * length} HTTP/1.1\nHost: x\n{key}"
    if not is_url:
        head = f"GET /v1/models HTTP/1.1\nHost: x\n{key}\nX-Long: {'x' * length}"
    with raw(stack, head) as connection, connection.makefile("rb") as lines:
        status = int(lines.readline().split()[1])
        answer = lines.read()
    assert status == (414 if is_url and length > 16_384 else 431)
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], set(error)) == (
        "invalid_request_error",
        {"message", "type", "param", "code"},
    )
    assert b"connection: close" in answer.lower()


def test_a_head_that_is_too_long_comes_after_good_ones(stack: ServedStack) -> None:
    good = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with raw(stack, good.replace("\r\n", "\n").strip()) as connection:
        assert status_of(connection) == 200
        connection.sendall(good.encode())
        assert status_of(connection) == 200
        connection.sendall(f"GET /{'x' * 20_000} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert status_of(connection) == 414
        connection.sendall(good.encode())
        assert connection.recv(100) == b""


def test_a_body_is_asked_for_only_when_it_is_wanted(stack: ServedStack, attacker: MadeKey) -> None:
    body = json.dumps({"model": "scripted", "messages": "x"}).encode()
    expecting = "\nExpect: 100-continue"
    with raw(stack, post("sk-unknown", len(body), expecting)) as connection:
        assert status_of(connection) == 401
    with raw(stack, post(attacker.secret, len(body), expecting)) as connection:
        assert status_of(connection) == 100
        connection.sendall(body)
        assert status_of(connection) == 200


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (CHAT, "application/json"),
        (CHAT, "multipart/form-data"),
        ("/v1/nowhere", "application/json"),
        ("/admin/login/", "application/x-www-form-urlencoded"),
        ("/admin/login/", "multipart/form-data"),
        ("/metrics", "application/x-www-form-urlencoded"),
    ],
)
def test_who_has_no_key_has_no_memory(stack: ServedStack, path: str, kind: str) -> None:
    half = b"a=b&" * (LIMIT // 8)
    with bystander(stack), contextlib.ExitStack() as opened:
        web = Web(stack)
        for _ in range(8):
            more = f"\nContent-Type: {kind}; boundary=x"
            connection = raw(stack, post(more=more, path=path))
            opened.enter_context(connection)
            with contextlib.suppress(OSError):
                connection.sendall(half)
        assert web.grown < 50 * MIB


@pytest.mark.parametrize("count", [16, pytest.param(64, marks=pytest.mark.stress)])
def test_large_bodies_of_one_project_do_not_refuse_others(
    stack: ServedStack, attacker: MadeKey, count: int
) -> None:
    # Refused at a glance: three that wait for a worker are more than a project may keep in Redis.
    content = json.dumps({"model": "demo", "messages": "a " * (5 * MIB)})
    with bystander(stack), attacker.http(stack) as http, ThreadPoolExecutor(16) as threads:
        answers = list(
            threads.map(lambda _: http.post(CHAT, content=content, headers=JSON), range(count))
        )
    assert {answer.status_code for answer in answers} == {400}


@pytest.mark.parametrize("patient", [4, pytest.param(20, marks=pytest.mark.stress)])
def test_readers_that_do_not_read_cost_no_memory_and_lose_nothing(
    stack: ServedStack, attacker: MadeKey, patient: int
) -> None:
    """So many of them read all of it in the end."""
    text = "abcdefgh" * 1280
    with attacker.http(stack) as http:
        made = http.post(
            "/v1/responses",
            json={"model": "scripted", "input": script({"repeat": 400, "steps": [{"text": text}]})},
        ).json()
        assert len(made["output"][0]["content"][0]["text"]) == 400 * len(text)
        path = f"/v1/responses/{made['id']}?stream=true"
        whole = http.get(path).content.replace(PING, b"")
    head = f"GET {path} HTTP/1.0\nHost: x\nAuthorization: Bearer {attacker.secret}"
    with bystander(stack), contextlib.ExitStack() as opened:
        web = Web(stack)
        readers = [opened.enter_context(raw(stack, head, small=True)) for _ in range(20)]
        time.sleep(2)  # So that much could be written.
        grown = web.grown
        with ThreadPoolExecutor(patient) as threads:
            streams = list(threads.map(_read_all, readers[:patient]))
    assert grown < 100 * MIB  # They hold the same, and little of it: 20 times all of it is 400.
    bodies = [stream.partition(b"\r\n\r\n")[2].replace(PING, b"") for stream in streams]
    assert [len(body) for body in bodies] == [len(whole)] * patient
    assert set(bodies) == {whole}
    _check_readers_without_a_log(stack, made["id"], head)


def test_memory_that_large_answers_took_is_given_back(
    stack: ServedStack, attacker: MadeKey
) -> None:
    text = script({"repeat": 300, "steps": [{"text": "abcdefgh" * 1280}]})

    def ask_and_read(_: int) -> int:
        asked = {"model": "scripted", "input": text, "stream": True}
        length = len(http.post("/v1/responses", json=asked).content)
        for made in http.get("/v1/responses?limit=1").json()["data"]:
            length += len(http.get(f"/v1/responses/{made['id']}").content)
        return length

    with attacker.http(stack) as http, ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(ask_and_read, range(4))) > 10 * MIB
        # What a new process takes for its first ones it keeps.
        used = [Web(stack, process) for process in ("web", "worker")]
        assert sum(threads.map(ask_and_read, range(4))) > 10 * MIB
    wait_until(lambda: all(process.grown < 60 * MIB for process in used), 120, "little is kept")


def _check_readers_without_a_log(stack: ServedStack, response_id: str, head: str) -> None:
    """A stream that is made anew is held as a whole: so many at a time as bodies may be.

    The others are refused before theirs is made.
    """
    with stack.redis() as redis:
        redis.delete(f"{{{response_id}}}:log")
    with bystander(stack), contextlib.ExitStack() as opened:
        web = Web(stack)
        readers = [opened.enter_context(raw(stack, head, small=True)) for _ in range(16)]
        assert {reader.recv(12)[9:] for reader in readers} == {b"200", b"503"}
        assert web.grown < 200 * MIB
    wait_until(lambda: _status(stack, head) == b"200", 120, "room")


def _status(stack: ServedStack, head: str) -> bytes:
    with raw(stack, head, small=True) as reader:
        return reader.recv(12)[9:]


def _read_all(connection: socket.socket) -> bytes:
    received = []
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(MIB):
            received.append(piece)
    return b"".join(received)


def test_a_socket_takes_messages_as_large_as_a_body(stack: ServedStack, attacker: MadeKey) -> None:
    headers = {"Authorization": f"Bearer {attacker.secret}"}
    url = f"ws://127.0.0.1:{stack.port}/v1/responses"
    with (
        bystander(stack),
        connect(url, additional_headers=headers, proxy=None, open_timeout=60) as connection,
    ):
        connection.send(json.dumps({"type": "none", "input": "a " * (5 * MIB)}))
        error = json.loads(connection.recv(120))
        assert error["error"]["param"] == "type"
        connection.send(" " * (LIMIT + 1))
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(120)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009
    assert str(LIMIT) in closed.value.rcvd.reason


def hang_up(connection: socket.socket) -> None:
    """End it as a lost client does. What another thread reads from is not closed by ``close``."""
    connection.shutdown(socket.SHUT_RDWR)


def test_sockets_hold_no_more_than_bodies_may(stack: ServedStack, attacker: MadeKey) -> None:
    headers = {"Authorization": f"Bearer {attacker.secret}"}
    url = f"ws://127.0.0.1:{stack.port}/v1/responses"
    # A text of 15 MiB under a mask of zeros, of which a part comes.
    begun = b"\x81\xff" + struct.pack("!QI", 15 * MIB, 0) + b" " * MIB

    def is_refused() -> bool:
        with connect(
            url, additional_headers=headers, proxy=None, open_timeout=60, close_timeout=1
        ) as connection:
            connection.socket.sendall(begun[:14])
            try:
                connection.recv(1)
            except ConnectionClosed as closed:
                return closed.rcvd is not None and closed.rcvd.code == 1013
            except TimeoutError:
                hang_up(connection.socket)  # It will not send the rest.
            return False

    with bystander(stack):
        with contextlib.ExitStack() as opened:
            for _ in range(2):
                connection = connect(url, additional_headers=headers, proxy=None, open_timeout=60)
                opened.callback(hang_up, connection.socket)
                connection.socket.sendall(begun)
            wait_until(is_refused, 120, "a refusal")
        wait_until(lambda: not is_refused(), 120, "room")
