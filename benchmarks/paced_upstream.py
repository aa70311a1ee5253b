"""An OpenAI-compatible server that costs next to nothing: each stream gets its tokens on time.

``python -m benchmarks.paced_upstream --port 9000 --tokens-per-s 100``. It stands for a GPU engine:
the streams do not slow each other down, so what is slower behind a gateway is the gateway's own
cost. Chat completions only, streamed or whole; a whole answer comes at once.
"""

import argparse
import asyncio
import contextlib
import json
from collections.abc import Iterator

MODEL = "paced"
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n"
_DEFAULT_TOKENS = 16


def answer(content_type: bytes, body: bytes) -> bytes:
    """Return a whole answer."""
    return _HEAD % content_type + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def event(fields: dict[str, object]) -> bytes:
    """Return an event of a stream, as a chunk of HTTP."""
    shared = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    data = b"data: %b\n\n" % json.dumps({**shared, **fields}).encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def choice(delta: dict[str, object], reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}


# LiteLLM ends a stream in which one piece comes a hundred times in a row.
TOKENS = [event(choice({"content": f" token{number}"})) for number in range(10)]
FIRST = event(choice({"role": "assistant", "content": " token"}))


def end(tokens: int) -> bytes:
    used = event({"choices": [], "usage": usage(tokens)})
    return event(choice({}, "stop")) + used + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One client; its requests come one after the other."""

    def __init__(self, period_s: float) -> None:
        self._period_s, self._buffer = period_s, b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        length = next(content_lengths(head), 0)
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        if head.startswith(b"GET"):
            listed = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
            self._transport.write(answer(b"application/json", json.dumps(listed).encode()))
        else:
            self._complete(json.loads(rest[:length]))

    def _complete(self, request: dict[str, object]) -> None:
        limit = request.get("max_tokens") or request.get("max_completion_tokens")
        tokens = limit if isinstance(limit, int) else _DEFAULT_TOKENS
        if request.get("stream"):
            head = _HEAD % b"text/event-stream" + b"Transfer-Encoding: chunked\r\n\r\n"
            self._transport.write(head + FIRST)
            self._next(tokens, 1, asyncio.get_running_loop().time())
            return
        message = {"role": "assistant", "content": " token" * tokens}
        whole = {"id": "c", "object": "chat.completion", "created": 1, "model": MODEL}
        whole["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
        whole["usage"] = usage(tokens)
        self._transport.write(answer(b"application/json", json.dumps(whole).encode()))

    def _next(self, tokens: int, sent: int, at: float) -> None:
        """Wait for the time of the next token; one that is late does not make the others late."""
        if sent >= tokens:
            self._transport.write(end(tokens))
            return
        at += self._period_s
        self._timer = asyncio.get_running_loop().call_at(at, self._send, tokens, sent, at)

    def _send(self, tokens: int, sent: int, at: float) -> None:
        self._transport.write(TOKENS[sent % len(TOKENS)])
        self._next(tokens, sent + 1, at)


def content_lengths(head: bytes) -> Iterator[int]:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            yield int(value)


async def serve(port: int, tokens_per_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(1 / tokens_per_s), "127.0.0.1", port, backlog=1024
    )
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens-per-s", type=float, default=100.0)
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(options.port, options.tokens_per_s))


if __name__ == "__main__":
    main()
