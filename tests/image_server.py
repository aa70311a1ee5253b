"""A web server for what is fetched: images, pages. It notes what it is asked, and can misbehave."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Answer = Callable[[BaseHTTPRequestHandler], None]


class ImageServer:
    """Answers each path as it was told to; with a certificate, over TLS.

    ``asked`` holds the paths, ``hosts`` the Host headers and ``headers`` all of them, in order. A
    path with a query that has no answer of its own is answered like the path alone.
    """

    def __init__(self, certificate: Path | None = None) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[str] = []
        self.hosts: list[str | None] = []
        self.headers: list[Message] = []
        self.poured = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(self.path)
                site.hosts.append(self.headers.get("Host"))
                site.headers.append(self.headers)
                with suppress(OSError):  # The client may hang up.
                    path = self.path
                    site.answers[path if path in site.answers else path.split("?")[0]](self)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        return Handler

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def give(self, path: str, content: bytes, *, with_length: bool = True, kind: str = "") -> str:
        """Answer the path with this content of this media type; return its URL."""

        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            if kind:
                handler.send_header("Content-Type", kind)
            if with_length:
                handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)

        self.answers[path] = answer
        return self.url(path)

    def pour(self, path: str, size_bytes: int, kind: str) -> str:
        """Answer the path with so much content, while the client reads; return its URL.

        ``poured`` counts the bytes that were sent.
        """

        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("Content-Type", kind)
            handler.end_headers()
            for _ in range(size_bytes // len(_PIECE)):
                handler.wfile.write(_PIECE)
                self.poured += len(_PIECE)

        self.answers[path] = answer
        return self.url(path)

    def say(self, path: str, answer: bytes) -> str:
        """Answer the path with just these bytes; return its URL."""

        def write(handler: BaseHTTPRequestHandler) -> None:
            handler.wfile.write(answer)

        self.answers[path] = write
        return self.url(path)

    def redirect(self, path: str, location: str, status: int = 302) -> str:
        """Answer the path with a redirect; return its URL."""

        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(status)
            handler.send_header("Location", location)
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        self.answers[path] = answer
        return self.url(path)

    def drip(self, path: str, *, headers_too: bool) -> str:
        """Answer the path with a byte now and then, for ever; return its URL."""
        hung_up = threading.Event()

        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Header: " if headers_too else _HEAD)
            while not hung_up.wait(0.05):
                handler.wfile.write(b"x")

        self.answers[path] = answer
        return self.url(path)

    @contextmanager
    def running(self) -> Iterator[ImageServer]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield self
        self._server.shutdown()
        self._server.server_close()
        thread.join()


_PIECE = b"<p>It is a long page.</p>" * 2**12
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
