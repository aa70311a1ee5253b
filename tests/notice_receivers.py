"""Who is told of alarms, in tests: a mail server, and a receiver of webhooks."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from aiosmtpd.controller import Controller


class Mailbox:
    """What a mail server was sent."""

    def __init__(self) -> None:
        self.mails: list[Any] = []

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.mails.append(envelope)
        return "250 OK"


@contextmanager
def mail_server(port: int) -> Iterator[Mailbox]:
    """Run a mail server at this port."""
    box = Mailbox()
    server = Controller(box, hostname="127.0.0.1", port=port)
    server.start()
    try:
        yield box
    finally:
        server.stop()


class Hook:
    """What a receiver was posted, and the statuses that it answers with before 204."""

    def __init__(self) -> None:
        self.url = ""
        self.posted: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []


@contextmanager
def receiver(certificate: Path | None = None) -> Iterator[Hook]:
    """Run a receiver, with a certificate for https."""
    hook = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            hook.posted.append((dict(self.headers.items()), body))
            self.send_response(hook.answers.pop(0) if hook.answers else 204)
            self.send_header("location", "http://127.0.0.1:1/")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    class Server(HTTPServer):
        def handle_error(self, *_: Any) -> None:
            pass  # Who does not trust the certificate hangs up.

    with Server(("127.0.0.1", 0), Handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "http" if certificate is None else "https"
        hook.url = f"{scheme}://127.0.0.1:{server.server_port}/hook?a=b"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield hook
        finally:
            server.shutdown()
            thread.join()


def signature(secret: str, headers: dict[str, str], body: bytes) -> str:
    """The signature that Standard Webhooks asks for."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    return f"v1,{base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()}"
