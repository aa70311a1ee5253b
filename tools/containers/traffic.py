"""Requests to the site through its proxy, as clients send them."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tools.containers.stack import Failed, Stack

_CERTIFICATE = "/data/caddy/pki/authorities/local/root.crt"


def client(stack: Stack) -> httpx.Client:
    """A client with the key of the site, which trusts the certificate that its Caddy made."""
    root = stack.compose("exec", "-T", "caddy", "cat", _CERTIFICATE)
    return httpx.Client(
        base_url=f"https://localhost:{stack.https_port}/v1",
        verify=ssl.create_default_context(cadata=root),
        headers={"Authorization": f"Bearer {stack.key}"},
        timeout=90,
    )


def chat(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    """The body of a request that takes a small part of a second."""
    messages = [{"role": "user", "content": text}]
    return {"model": "demo", "max_tokens": 8, "messages": messages, **fields}


def slow(words: int, delay_ms: int) -> str:
    """Script with which the model answers this number of words, one at a time."""
    return json.dumps([{"repeat": words, "steps": [{"text": "x "}, {"sleep_ms": delay_ms}]}])


def seconds_until_answered(http: httpx.Client, started: float, limit_s: float = 120) -> float:
    """Ask until a chat is answered; return the seconds since then. Raise Failed past the limit."""
    said = ""
    while time.monotonic() < started + limit_s:
        try:
            answer = http.post("/chat/completions", json=chat())
            if answer.status_code == 200:
                return time.monotonic() - started
            said = answer.text[:300]
        except httpx.HTTPError as exc:
            said = str(exc)
        time.sleep(0.1)
    raise Failed(f"no answer in {limit_s:.0f} s: {said}")


@dataclass
class Traffic:
    """The duration of each request, and the errors."""

    retries: int = 0
    durations_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def ask(self, http: httpx.Client) -> None:
        """Send a chat, repeat it after a failure like the official client; record the result."""
        started = time.monotonic()
        fault = _fault(http)
        for number in range(self.retries):
            if fault:
                time.sleep(0.5 * 2**number)
                fault = _fault(http)
        self.durations_s.append(time.monotonic() - started)
        self.errors += [fault] if fault else []

    def __str__(self) -> str:
        longest = max(self.durations_s, default=0)
        return f"{len(self.durations_s)} requests, longest {longest:.2f} s"


def _fault(http: httpx.Client) -> str:
    """Send a chat; return the fault of the answer."""
    try:
        answer = http.post("/chat/completions", json=chat())
    except httpx.HTTPError as exc:
        return repr(exc)
    return "" if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}"


@contextmanager
def traffic(stack: Stack, period_s: float = 0.5, retries: int = 0) -> Iterator[Traffic]:
    """Send a request each period until the block ends, whether or not the last one was answered."""
    seen, ended = Traffic(retries), threading.Event()
    threads: list[threading.Thread] = []

    def send() -> None:
        while not ended.wait(period_s):
            thread = threading.Thread(target=seen.ask, args=(http,))
            thread.start()
            threads.append(thread)

    with client(stack) as http:
        sender = threading.Thread(target=send)
        sender.start()
        try:
            yield seen
        finally:
            ended.set()
            sender.join()
            for thread in threads:
                thread.join()
