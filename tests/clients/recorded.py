"""The requests of agents as they send them: a proxy before the site that keeps their bodies.

They are written short and the same on every machine: long texts are cut, ids and paths replaced.
tests/e2e/test_recorded_requests.py sends them to a site again.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from tests.served_stack import ROOT

BODIES = ROOT / "tests" / "e2e" / "bodies"
_TURNS, _LONGEST_TEXT, _TIMEOUT_S = 2, 60, 1800
_PATHS = ("/v1/responses", "/v1/messages", "/v1/chat/completions")
_HEADERS = re.compile(r"accept|content-type|user-agent|x-app|originator|anthropic-.*")
_TEXTS = frozenset({"content", "description", "instructions", "output", "system", "text"})
_ID = re.compile(r"(?<![0-9a-f])(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32,})")
_OF_ONE_CONNECTION = ("connection", "content-length", "host", "keep-alive", "transfer-encoding")

Request = dict[str, Any]


class Recorder:
    """Forwards every request to the site, and keeps those that ask a model for an answer."""

    def __init__(self, site: str) -> None:
        self.sent: list[Request] = []
        self._site = site
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[Recorder]:
        """Serve."""
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        yield self
        self._server.shutdown()
        self._server.server_close()

    def write(self, client: str, version: str, paths: Mapping[str, str]) -> None:
        """Write the first turns of this version, unless they were written before."""
        file = BODIES / f"{client.replace('-', '_')}_{version}.json"
        turns = [sent for sent in self.sent if sent["body"].get("tools")] or self.sent
        if turns and not file.exists():
            short = shortened(turns[:_TURNS], paths)
            file.write_text(json.dumps(short, indent=1, ensure_ascii=False) + "\n", "utf-8")

    def _keep(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        if path.partition("?")[0] in _PATHS:
            named = {name.lower(): value for name, value in headers.items()}
            kept = {name: value for name, value in named.items() if _HEADERS.fullmatch(name)}
            self.sent.append({"path": path, "headers": kept, "body": json.loads(body)})

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                recorder._keep(self.path, dict(self.headers.items()), body)
                self._forward(body)

            def do_GET(self) -> None:
                self._forward(b"")

            do_HEAD = do_GET

            def _forward(self, body: bytes) -> None:
                headers = {n: v for n, v in self.headers.items() if _is_forwarded(n)}
                url, self.close_connection = recorder._site + self.path, True
                with (
                    suppress(OSError, httpx.HTTPError),  # Either side may hang up.
                    httpx.stream(
                        self.command, url, headers=headers, content=body, timeout=_TIMEOUT_S
                    ) as answer,
                ):
                    self.send_response_only(answer.status_code)
                    for name, value in answer.headers.multi_items():
                        if _is_forwarded(name):
                            self.send_header(name, value)
                    self.send_header("Connection", "close")
                    self.end_headers()
                    for piece in answer.iter_raw():
                        self.wfile.write(piece)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        return Handler


def shortened(sent: list[Request], paths: Mapping[str, str]) -> list[Request]:
    """Return the requests with these paths and all ids replaced, and long texts cut."""
    text = json.dumps(sent)
    for path, name in paths.items():
        text = text.replace(path, name)
    numbers: dict[str, int] = {}

    def numbered(found: re.Match[str]) -> str:
        number = f"{numbers.setdefault(found[0], len(numbers) + 1):x}"
        zeros = re.sub(r"\w", "0", found[0])
        return zeros[: -len(number)] + number

    cut: list[Request] = _cut(json.loads(_ID.sub(numbered, text)))
    return cut


def _cut(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _cut(part, key) for key, part in value.items()}
    if isinstance(value, list):
        return [_cut(part, name) for part in value]
    if isinstance(value, str) and name in _TEXTS and len(value) > _LONGEST_TEXT:
        return f"{value[:_LONGEST_TEXT]} ..."
    return value


def _is_forwarded(header: str) -> bool:
    return header.lower() not in _OF_ONE_CONNECTION
