"""Servers behind the upstream engine: llama.cpp's own, and one that does whatever it is told."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email import policy
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from inference_site.catalogue.catalogue import DEMO_FILE

Answer = Callable[["Talk"], None]


@contextmanager
def llama_server(
    slots: int = 2, context_length: int = 256, file: Path = DEMO_FILE
) -> Iterator[str]:
    """Run llama.cpp's own HTTP server, by default with the demo; yield its address to ``/v1``."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_parallel, params.n_ctx = slots, slots * context_length
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_threads_http = slots + 4
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.default_template_kwargs = {"enable_thinking": "false"}
    params.verbosity = -1
    server = xllamacpp.Server(params)
    # A server that is dropped before its first request can hang.
    server.handle_completions(b'{"prompt": "a", "n_predict": 1}', lambda _: False)
    yield f"{server.listening_address}/v1"
    del server


@dataclass(frozen=True)
class Asked:
    """One request, as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class Talk:
    """What an answer is made with."""

    def __init__(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        self._handler, self.body = handler, body

    def say(self, status: int, content: bytes | dict[str, Any], **headers: str) -> None:
        """Answer with a whole body."""
        encoded = content if isinstance(content, bytes) else json.dumps(content).encode()
        self._handler.send_response(status)
        for name, value in headers.items():
            self._handler.send_header(name.replace("_", "-"), value)
        if "Content_Type" not in headers:
            self._handler.send_header("Content-Type", "application/json")
        self._handler.send_header("Content-Length", str(len(encoded)))
        self._handler.end_headers()
        self._handler.wfile.write(encoded)

    def begin(self, content_type: str = "text/event-stream", status: int = 200) -> None:
        """Begin a stream."""
        self._handler.send_response(status)
        self._handler.send_header("Content-Type", content_type)
        self._handler.send_header("Transfer-Encoding", "chunked")
        self._handler.end_headers()

    def send(self, data: bytes) -> None:
        """Send a piece of the stream as it is."""
        self._handler.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self._handler.wfile.flush()

    def event(self, chunk: Any) -> None:
        """Send a chunk."""
        self.send(b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n")

    def end(self) -> None:
        """End the stream, and keep the connection."""
        self._handler.wfile.write(b"0\r\n\r\n")

    def cut(self) -> None:
        """Close the connection."""
        self._handler.close_connection = True

    def reset(self) -> None:
        """Close the connection as a crash does."""
        linger = struct.pack("ii", 1, 0)
        self._handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._handler.connection.close()
        self._handler.close_connection = True

    def wait_for_hang_up(self, timeout_s: float = 90.0) -> bool:
        """Return whether the client closed the connection in time."""
        self._handler.connection.settimeout(timeout_s)
        try:
            return not self._handler.connection.recv(1)
        except TimeoutError:
            return False
        except OSError:
            return True


class UpstreamServer:
    """Answers each POST with the next of ``answers``; the last one stays. TLS with a certificate.

    ``asked`` holds the requests, ``connections`` counts what was accepted. ``name`` is its header
    ``Server``.
    """

    def __init__(self, port: int = 0, certificate: Path | None = None) -> None:
        self.name = "scripted"
        self.models = ["m"]
        self.context_length: int | None = None
        self.answers: list[Answer] = [streamed("Hello", " there")]
        self.list_models: Answer = self._list
        self.asked: list[Asked] = []
        self.connections = 0
        self._open: list[socket.socket] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        scheme = "http"
        if certificate is not None:
            scheme, context = "https", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}/v1"

    def stop_listening(self) -> None:
        """Close the port, and keep what is connected."""
        self._server.socket.close()

    @property
    def body(self) -> dict[str, Any]:
        """What it was asked last."""
        return self.asked[-1].body

    def _list(self, talk: Talk) -> None:
        told = {} if self.context_length is None else {"max_model_len": self.context_length}
        listed = [{"id": name, "object": "model", **told} for name in self.models]
        talk.say(200, {"object": "list", "data": listed})

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                site.connections += 1
                site._open.append(self.request)
                super().setup()

            def version_string(self) -> str:
                return site.name

            def do_GET(self) -> None:
                site.list_models(Talk(self, {}))

            def do_POST(self) -> None:
                sent, kind = self._read(), self.headers["Content-Type"]
                body = form_of(kind, sent) if kind.startswith("multipart/") else json.loads(sent)
                headers = {name.lower(): value for name, value in self.headers.items()}
                site.asked.append(Asked(self.path, headers, body))
                answer = site.answers.pop(0) if len(site.answers) > 1 else site.answers[0]
                with suppress(OSError):  # The client may hang up.
                    answer(Talk(self, body))

            def _read(self) -> bytes:
                if "Content-Length" in self.headers:
                    return self.rfile.read(int(self.headers["Content-Length"]))
                chunks = []
                while size := int(self.rfile.readline(), 16):
                    chunks.append(self.rfile.read(size + 2)[:-2])
                self.rfile.readline()
                return b"".join(chunks)

            def handle(self) -> None:
                with suppress(OSError, ValueError):
                    super().handle()

            def finish(self) -> None:
                with suppress(OSError, ValueError):
                    super().finish()

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        return Handler

    @contextmanager
    def running(self) -> Iterator[UpstreamServer]:
        """Serve."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield self
        self._server.shutdown()
        self._server.server_close()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join()


def form_of(content_type: str, body: bytes) -> dict[str, Any]:
    """The fields of a form: text, or the name and the content of a file; ``name[]`` is a list."""
    head = f"Content-Type: {content_type}\r\n\r\n".encode()
    message: Any = BytesParser(policy=policy.HTTP).parsebytes(head + body)
    fields: dict[str, Any] = {}
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        content, file = part.get_payload(decode=True), part.get_filename()
        value = content.decode() if file is None else (file, content)
        fields[name] = [*fields.get(name, []), value] if name.endswith("[]") else value
    return fields


def text(content: str, index: int = 0, **fields: Any) -> dict[str, Any]:
    """A chunk with a piece of text."""
    return delta({"content": content}, index, **fields)


def delta(delta: dict[str, Any], index: int = 0, **fields: Any) -> dict[str, Any]:
    """A chunk with a delta."""
    choice = {"index": index, "delta": delta, "finish_reason": None, **fields}
    return {"object": "chat.completion.chunk", "choices": [choice]}


def finish(reason: str = "stop", index: int = 0, **fields: Any) -> dict[str, Any]:
    """The last chunk of a choice."""
    return delta({}, index, finish_reason=reason, **fields)


def usage(prompt: int = 7, completion: int = 2, **fields: Any) -> dict[str, Any]:
    """The chunk with the usage."""
    told = {"prompt_tokens": prompt, "completion_tokens": completion, **fields}
    return {"object": "chat.completion.chunk", "choices": [], "usage": told}


def chunks(*sent: Any, done: bool = True) -> Answer:
    """Answer with a stream of these chunks, or bytes as they are."""

    def answer(talk: Talk) -> None:
        talk.begin()
        for chunk in sent:
            if isinstance(chunk, bytes):
                talk.send(chunk)
            else:
                talk.event(chunk)
        if done:
            talk.send(b"data: [DONE]\n\n")
        talk.end()

    return answer


def streamed(*texts: str) -> Answer:
    """Answer with these pieces of text, as a good server does."""
    first = delta({"role": "assistant", "content": ""})
    return chunks(first, *map(text, texts), finish(), usage(completion=len(texts)))
