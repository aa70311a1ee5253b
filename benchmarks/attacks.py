"""The cost of one project's attack to another project: ``make attacks``.

A bystander asks for short streamed answers, one after the other, and reads one stream that runs:
first alone, then during the attack. The attackers have the lowest priority on this host, which a
real one would not share; what they take of its processors makes the ratio an upper bound.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from urllib.parse import urlsplit

import httpx
from websockets.sync.client import connect

from benchmarks.figures import Figures, add_write_option, keep
from benchmarks.load import percentile
from benchmarks.machine import describe_machine
from benchmarks.processes import end_on_sigterm
from benchmarks.targets import Endpoint, platform_with
from benchmarks.waiters import client, key_of_another_project
from inference_site.catalogue.catalogue import DEMO_FILE

MIB = 2**20
_MODELS = {
    "demo": {"engine": "llama_cpp", "file": str(DEMO_FILE), "slots": 4, "threads": 1},
    "scripted": {"engine": "scripted", "slots": 16, "context_length": 1_000_000},
    "short": {
        "engine": "scripted",
        "slots": 3,
        "context_length": 1_000_000,
        "script": [{"text": "x"}],
    },
}
_ATTACKERS = 3
_LIMIT = 20 * MIB
_RUNNING = [{"repeat": 100_000, "steps": [{"text": "x "}, {"sleep_ms": 50}]}]
_LONG = [{"repeat": 400, "steps": [{"text": "abcdefgh" * 1280}]}]


@dataclass
class Bystander:
    """Another project: the outcomes of its requests and its stream so far."""

    endpoint: Endpoint
    key: str
    ttft_ms: list[float] = field(default_factory=list)
    longest_gap_ms: float = 0.0
    failures: int = 0
    is_over: threading.Event = field(default_factory=threading.Event)

    def look(self, duration_s: float) -> dict[str, float]:
        """Send requests and read answers for this long; return all outcomes so far."""
        self.is_over.clear()
        threads = [threading.Thread(target=self._read), threading.Thread(target=self._ask)]
        for thread in threads:
            thread.start()
        time.sleep(duration_s)
        self.is_over.set()
        for thread in threads:
            thread.join()
        return self.figures()

    def figures(self) -> dict[str, float]:
        """Return the outcomes of the requests and of the stream; times are milliseconds."""
        in_order = sorted(self.ttft_ms) or [float("nan")]
        return {
            "requests": len(in_order),
            "failures": self.failures,
            "ttft_p50_ms": round(percentile(in_order, 50), 1),
            "ttft_p99_ms": round(percentile(in_order, 99), 1),
            "longest_gap_ms": round(self.longest_gap_ms, 1),
        }

    def _ask(self) -> None:
        body = {"model": "demo", "max_tokens": 4, "stream": True, "messages": _user("Hello")}
        with client(self.endpoint, self.key) as http:
            while not self.is_over.is_set():
                began = time.perf_counter()
                try:
                    with http.stream("POST", "chat/completions", json=body) as answer:
                        pieces = (p for p in answer.iter_text() if '"content":"' in p)
                        if next(pieces, None) is None:
                            self.failures += 1
                        else:
                            self.ttft_ms.append((time.perf_counter() - began) * 1000)
                            for _ in pieces:
                                pass
                except httpx.HTTPError:  # No answer within the client's time limit, or none whole.
                    self.failures += 1

    def _read(self) -> None:
        body = {"model": "scripted", "stream": True, "messages": _user(json.dumps(_RUNNING))}
        with (
            client(self.endpoint, self.key) as http,
            http.stream("POST", "chat/completions", json=body) as answer,
        ):
            at = time.perf_counter()
            for _ in answer.iter_raw():
                now = time.perf_counter()
                self.longest_gap_ms = max(self.longest_gap_ms, (now - at) * 1000)
                at = now
                if self.is_over.is_set():
                    return
            self.failures += 1


@dataclass
class Attacker:
    """A project that attacks. ``other`` is a key of another project."""

    url: str
    key: str
    http: httpx.Client
    other: str
    long_id: str = ""
    conversation_id: str = ""
    signed_thoughts: bytes = b""

    def post(self, path: str, body: object, key: str = "") -> httpx.Response:
        """Send the request, with its own key or this one; return the answer with any status."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        return self.http.post(path, content=content, headers=headers)

    @contextlib.contextmanager
    def sockets(self, count: int, head: str, content: bytes = b"") -> Iterator[None]:
        """Open connections, send this on each, unless the head is empty, and read nothing."""
        url = urlsplit(self.url)
        with contextlib.ExitStack() as opened:
            for _ in range(count):
                connection = opened.enter_context(socket.socket())
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.settimeout(5)
                with contextlib.suppress(OSError):
                    connection.connect((url.hostname, url.port))
                    if head:
                        lines = head.replace("\n", "\r\n").encode()
                        connection.sendall(lines + b"\r\n\r\n" + content)
            yield


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _head(length: int, key: str = "") -> str:
    given = f"\nAuthorization: Bearer {key}" if key else ""
    return (
        f"POST /v1/chat/completions HTTP/1.1\nHost: x{given}\n"
        f"Content-Type: application/json\nContent-Length: {length}"
    )


def _grammar(source: object) -> Callable[[Attacker], object]:
    body = {"model": "demo", "max_tokens": 200, "messages": _user("Hello"), "grammar": source}
    return lambda attacker: attacker.post("chat/completions", body)


def _body(content: object, path: str = "chat/completions") -> Callable[[Attacker], object]:
    encoded = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda attacker: attacker.post(path, encoded)


def _keyless(attacker: Attacker) -> None:
    with attacker.sockets(15, _head(_LIMIT), b" " * MIB):
        time.sleep(1)


def _slow(attacker: Attacker) -> None:
    with attacker.sockets(100, _head(_LIMIT, attacker.key), b"{"):
        time.sleep(5)


def _silent(attacker: Attacker) -> None:
    with attacker.sockets(400, ""):
        time.sleep(5)


def _idle_websockets(attacker: Attacker) -> None:
    head = (
        f"GET /v1/responses HTTP/1.1\nHost: x\nAuthorization: Bearer {attacker.key}\n"
        "Connection: Upgrade\nUpgrade: websocket\nSec-WebSocket-Version: 13\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    )
    with attacker.sockets(400, head):
        time.sleep(5)


def _generate(attacker: Attacker) -> str:
    answer = attacker.post("responses", {"model": "scripted", "input": json.dumps(_LONG)})
    response_id: str = answer.json().get("id", "")  # Some are refused: logs have a quota.
    return response_id


def _unread(attacker: Attacker) -> None:
    while not attacker.long_id:
        attacker.long_id = _generate(attacker)
    key = attacker.key
    head = f"GET /v1/responses/{attacker.long_id}?stream=true HTTP/1.1\nHost: x"
    with attacker.sockets(7, f"{head}\nAuthorization: Bearer {key}"):
        time.sleep(3)


def _websockets(attacker: Attacker) -> None:
    url = f"{attacker.url.replace('http', 'ws', 1)}/responses"
    headers = {"Authorization": f"Bearer {attacker.key}"}
    part = b"\x81\xff" + struct.pack("!QI", 15 * MIB, 0) + b" " * (7 * MIB)
    with contextlib.ExitStack() as opened:
        for _ in range(4):
            connection = connect(url, additional_headers=headers, proxy=None)
            opened.callback(connection.socket.close)
            with contextlib.suppress(OSError):
                connection.socket.sendall(part)
        time.sleep(1)


def _background(attacker: Attacker) -> None:
    """Fill the project's share of the queue of the bystander's model, and keep it full."""
    body = {"model": "demo", "input": "Hello", "background": True, "max_output_tokens": 16}
    for _ in range(200):
        if not attacker.post("responses", body).is_success:
            return


def _logins(attacker: Attacker) -> None:
    page = attacker.url.replace("/v1", "/admin/login/")
    with httpx.Client(timeout=60) as browser:
        token = re.search(r'csrfmiddlewaretoken" value="([^"]+)', browser.get(page).text)
        assert token
        for number in range(20):
            form = {"username": f"{time.time()}{number}", "password": "x"}
            browser.post(page, data={**form, "csrfmiddlewaretoken": token[1]})


def _left_chats(attacker: Attacker) -> None:
    """Send chats that take long to tokenize, and leave before their answers."""
    for body in _ACCENT_CHATS:
        with attacker.sockets(3, _head(len(body), attacker.key), body):
            time.sleep(0.5)


def _counts(attacker: Attacker) -> None:
    """Have long texts tokenized by each endpoint that only counts or lists tokens."""
    for text in _ACCENTS:
        pieces = {"model": "demo", "prompt": text, "return_token_strs": True}
        attacker.post("tokenize", pieces)
        attacker.post("responses/input_tokens", {"model": "demo", "input": text})
        attacker.post("chat/render", {"model": "demo", "messages": _user(text)})


def _long_conversation(attacker: Attacker) -> None:
    """Continue a conversation of 30,000 items on a model of 2,048 tokens, cut and uncut."""
    if not attacker.conversation_id:
        conversation_id = attacker.post("conversations", {}).json()["id"]
        items = [{"role": "user", "content": "x"}] * 2_000
        body = {"model": "short", "conversation": conversation_id, "input": items}
        for _ in range(15):
            attacker.post("responses", body).raise_for_status()
        attacker.conversation_id = conversation_id
    asked = {"model": "demo", "conversation": attacker.conversation_id, "max_output_tokens": 4}
    for truncation in ("auto", "disabled"):
        attacker.post("responses", {**asked, "input": "x", "truncation": truncation})


def _many_tools(attacker: Attacker) -> None:
    """Offer 500 tools in 40 namespaces to a model with room for them, and to one without."""
    for body in _TOOL_BODIES:
        attacker.post("responses", body)


def _patch_grammars(attacker: Attacker) -> None:
    """Force a patch of a grammar of 300 KB, and of one of the largest size that is read."""
    for body in _PATCH_BODIES:
        attacker.post("responses", body)


def _foreign_thoughts(attacker: Attacker) -> None:
    """Send back 200 thoughts of 20 KB; the signature of the last is of another project."""
    if not attacker.signed_thoughts:
        asked = {
            "model": "scripted",
            "max_tokens": 100_000,
            "thinking": {"type": "enabled", "budget_tokens": 50_000},
            "messages": _user(json.dumps([{"reasoning": "abcde " * 3_500}, {"text": "x"}])),
        }
        own, foreign = (
            attacker.post("messages", asked, key).raise_for_status().json()["content"]
            for key in (attacker.key, attacker.other)
        )
        turns = [turn for n in range(200) for turn in (
            *_user("x"), {"role": "assistant", "content": foreign if n == 199 else own},
        )]  # fmt: skip
        body = {**asked, "messages": [*turns, *_user("x")]}
        refused = attacker.post("messages", body)
        if refused.status_code != 400 or "signature" not in refused.text:
            raise RuntimeError(f"It was not refused: {refused.text[:300]}")
        attacker.signed_thoughts = json.dumps(body).encode()
    attacker.post("messages", attacker.signed_thoughts)


def _patch_body(size: int) -> bytes:
    """Return a request for a patch, of a grammar with one rule for each file, of this size."""
    rules = list[str]()
    while sum(map(len, rules)) < size * 15 // 16:
        n = len(rules)
        path = f"packages/accounting/models/invoices/of_customers/of_the_year/module_{n}.py"
        rules.append(f'\nf{n}: "*** Update File: src/{path}" /\\n/ line+')
    names = " | ".join(f"f{n}" for n in range(len(rules)))
    line = 'line: ("+" | "-" | " ") /[^\\n]*\\n/'
    definition = f"start: ({names})+\n{line}{''.join(rules)}"
    format_ = {"type": "grammar", "syntax": "lark", "definition": definition}
    tool = {"type": "custom", "name": "apply_patch", "format": format_}
    choice = {"type": "custom", "name": "apply_patch"}
    body = {"model": "demo", "input": "Hello", "tools": [tool], "tool_choice": choice}
    return json.dumps({**body, "max_output_tokens": 16}).encode()


_TOOL = {
    "type": "function",
    "description": "Find the customers whose name, city or number begins like this.",
    "parameters": {
        "type": "object",
        "properties": {
            name: {"type": "string", "description": f"The {name}."}
            for name in ("name", "city", "number")
        },
        "required": ["name"],
    },
}
_SPACES = [
    {
        "type": "namespace",
        "name": f"mcp__space_{n}",
        "description": "Customers",
        "tools": [{**_TOOL, "name": f"tool_{i}"} for i in range(13 if n < 20 else 12)],
    }
    for n in range(40)
]
_TOOL_BODIES = [
    json.dumps({"model": model, "input": "Hello", "tools": _SPACES}).encode()
    for model in ("scripted", "demo")
]
_PATCH_BODIES = [_patch_body(300_000), _patch_body(60_000)]
_LARGE_ITEM = {
    "type": "item_of_tomorrow",
    "data": " ".join(f"{n:07}" for n in range(10 * MIB // 8)),
}
_TRIGGERS = [*_user("Tell me a story."), *[{"type": "compaction_trigger"}] * 1_000]
_ACCENTS = ["e" + "\u0301" * (size // 2) for size in (900_000, 60_000)]
"""Characters that the demo's vocabulary does not have: far more than its context, and less than
is refused by its length alone."""
_ACCENT_CHATS = [
    json.dumps({"model": "demo", "messages": _user(text)}, ensure_ascii=False).encode()
    for text in _ACCENTS
]
_MANY = b"0," * MIB
_ENUM = {"name": "x", "schema": {"enum": [f"value-{n}" for n in range(300_000)]}}
ATTACKS: dict[str, Callable[[Attacker], object]] = {
    "ambiguous GBNF of 70 bytes": _grammar(
        "root ::= w w w\nw ::= [^\\x00] | [^\\x00] w | [^\\x00] w w | [^\\x00] w w w"
    ),
    "4,000 chained Lark rules": _grammar(
        {
            "type": "lark",
            "value": "start: r0\n"
            + "\n".join(f"r{n}: r{n + 1}" for n in range(4_000))
            + '\nr4000: "x"',
        }
    ),
    "enum of 300,000 values": _body(
        {
            "model": "demo",
            "messages": _user("Hello"),
            "response_format": {"type": "json_schema", "json_schema": _ENUM},
        }
    ),
    "body of a million errors": _body(b'{"model":"demo","messages":[%s0]}' % _MANY),
    "30,000 messages": _body(
        b'{"model":"demo","messages":[%s]}' % b",".join([b'{"role":"user","content":"x"}'] * 29_990)
    ),
    "10 MB of instructions": _body(
        {"model": "demo", "input": "x", "instructions": "a " * (5 * MIB)}, "responses"
    ),
    "15 bodies without a key": _keyless,
    "100 bodies that do not come": _slow,
    "answers of 4 MB": _generate,
    "readers that read nothing": _unread,
    "parts of WebSocket messages": _websockets,
    "logins of many names": _logins,
    "chats of accents, left at once": _left_chats,
    "counts of 900 KB of accents": _counts,
    "conversations of 30,000 items": _long_conversation,
    "500 tools in 40 namespaces": _many_tools,
    "patch grammars of 300 and 60 KB": _patch_grammars,
    "stored items of 10 MB": _body(
        {"model": "scripted", "input": [_LARGE_ITEM, *_user("x")]}, "responses"
    ),
    "1,000 compaction triggers": _body({"model": "demo", "input": _TRIGGERS}, "responses"),
    "thoughts that another project signed": _foreign_thoughts,
    "background responses": _background,
    "1,200 silent connections": _silent,
    "1,200 idle WebSockets": _idle_websockets,
}


def measure(endpoint: Endpoint, other: str, name: str, duration_s: float) -> dict[str, float]:
    """Return the bystander's outcomes during the attack."""
    # In processes of their own: they share the processors with the stack, but no lock of Python's.
    attackers = [_start(endpoint, other, name) for _ in range(_ATTACKERS)]
    attacked = Bystander(endpoint, other).look(duration_s)
    for process in attackers:
        process.kill()
        process.join()
    return attacked


def _start(endpoint: Endpoint, other: str, name: str) -> multiprocessing.Process:
    """Start an attacker; return after its first round, which may only prepare the attack."""
    has_begun = multiprocessing.Event()
    arguments = (endpoint.url, endpoint.key, other, name, has_begun)
    process = multiprocessing.Process(target=attack, args=arguments)
    process.start()
    while not has_begun.wait(1):
        if not process.is_alive():
            raise RuntimeError(f"The attacker of {name!r} has ended.")
    return process


def attack(url: str, key: str, other: str, name: str, has_begun: Event) -> None:
    """Attack until this process is killed."""
    os.nice(19)
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
        attacker = Attacker(url, key, http, other)
        while True:
            with contextlib.suppress(httpx.HTTPError, OSError):
                ATTACKS[name](attacker)
            has_begun.set()


def compare(
    endpoint: Endpoint, other: str, names: Sequence[str], duration_s: float
) -> Iterator[Figures]:
    """Yield the bystander's outcomes without an attack, before each attack and during it.

    All times without an attack are of the same state, and are counted together: there are few
    beyond the 99th percentile of one.
    """
    quiet, attacked = Bystander(endpoint, other), {}
    for name in names:
        quiet.look(duration_s)
        attacked[name] = measure(endpoint, other, name, duration_s)
        print(name, attacked[name], file=sys.stderr, flush=True)
    yield {"attack": "none", **quiet.figures()}
    yield from ({"attack": name, **figures} for name, figures in attacked.items())


def lines(rows: Sequence[Figures]) -> Iterator[str]:
    """Yield the lines of the table: times during each attack, and their ratio to those without."""
    for row in rows:
        cells = [
            f"{row[key]:.0f} ms ({row[key] / rows[0][key]:.1f} ×)"
            for key in ("ttft_p50_ms", "ttft_p99_ms")
        ]
        cells += [f"{row['longest_gap_ms']:.0f} ms", str(row["failures"])]
        yield f"| {row['attack']} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the attacks and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--part", default="attacks", help="of the figures; default: attacks")
    add_write_option(parser)
    options = parser.parse_args(arguments)
    end_on_sigterm()
    machine = describe_machine()
    with platform_with(_MODELS) as endpoint:
        other = key_of_another_project(endpoint)
        Bystander(endpoint, other).look(3)  # To warm up.
        rows = list(compare(endpoint, other, options.only, options.seconds))
    print("| attack | first token p50 | p99 | longest gap | failures |\n|---|---|---|---|---|")
    print("\n".join(lines(rows)))
    print(f"\n{machine['Processor']}, load average before: {machine['Load average before']}")
    if options.write:
        keep(options.part, {"rows": rows}, machine)


if __name__ == "__main__":
    main()
