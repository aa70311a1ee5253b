"""A stand-in of a Hugging Face hub: it answers for files as the real one does."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


class Hub:
    """The repository ``org/repo`` with these files; ``tags`` has other checksums than the true.

    ``cut_after`` is after how many bytes the next answer with a file is cut off, ``cut_next`` the
    same for those after it. ``pause_after`` is after how many bytes of a file the hub waits until
    ``goes_on`` is set. With a ``token``, requests without it are refused.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.tags = files, dict[str, str]()
        self.ranges: list[str] = []
        self.token = ""
        self.cut_after: int | None = None
        self.cut_next: int | None = None
        self.pause_after: int | None = None
        self.goes_on = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())

    @property
    def url(self) -> str:
        """Its address, for ``HF_ENDPOINT``."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[Hub]:
        """Answer until the block is left."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def listing(self) -> bytes:
        """What it says of its files."""
        items = [
            {
                "type": "file",
                "path": path,
                "size": len(content),
                "lfs": {"oid": self.tags.get(path, hashlib.sha256(content).hexdigest())},
            }
            for path, content in self.files.items()
        ]
        return json.dumps([{"type": "directory", "path": "docs", "size": 0}, *items]).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = unquote(self.path.partition("?")[0])
                if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                    self._send(401, b"{}")
                    return
                if path == "/api/models/org/repo/tree/main":
                    self._send(200, hub.listing())
                    return
                content = hub.files.get(path.removeprefix("/org/repo/resolve/main/"))
                if content is None:
                    self._send(404, b"{}")
                    return
                asked = self.headers.get("Range")
                first = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
                if asked:
                    hub.ranges.append(asked)
                if asked and first >= len(content):
                    self._send(416, b"")
                    return
                self._send(206 if asked else 200, content[first:])

            def _send(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                cut = hub.cut_after if "resolve" in self.path else None
                if cut is not None:
                    hub.cut_after, self.close_connection = hub.cut_next, True
                if "resolve" in self.path and (paused := hub.pause_after):
                    self.wfile.write(body[:paused])
                    hub.goes_on.wait(60)
                    body = body[paused:]
                self.wfile.write(body[:cut])

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        return Handler
