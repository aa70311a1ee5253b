"""A server that sleeps as vLLM does: ``sleeping_server.py WHERE KEY LOG``.

``WHERE`` is a port or the path of a unix socket. Each answer is the number of the process; what it
is told to do is written to the log, a line each. It generates nothing while it sleeps.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

WHERE, KEY, LOG = sys.argv[1:]
COMMANDS = ("/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache")
asleep = threading.Event()


@web.middleware
async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Ask for the key, and write down what comes."""
    if request.headers.get("Authorization") != f"Bearer {KEY}":
        return web.Response(status=401)
    if request.path in COMMANDS:
        said = await request.text()
        with Path(LOG).open("a") as log:
            log.write(f"{os.getpid()} {request.path_qs} {said}".rstrip() + "\n")
    return await handler(request)


async def healthy(_: web.Request) -> web.Response:
    """Answer as long as it runs, asleep or not."""
    return web.json_response({"data": [{"id": "m"}]})


async def chat(_: web.Request) -> web.Response:
    """Answer with the number of the process."""
    if asleep.is_set():
        return web.json_response({"error": {"message": "asleep"}}, status=500)
    chunk = '{"choices": [{"index": 0, "delta": {"content": "%d"}, "finish_reason": "stop"}]}'
    body = f"data: {chunk % os.getpid()}\n\ndata: [DONE]\n\n"
    return web.Response(text=body, content_type="text/event-stream")


async def obey(request: web.Request) -> web.Response:
    """Sleep or wake."""
    if request.path == "/sleep":
        asleep.set()
    elif request.path == "/wake_up":
        asleep.clear()
    return web.Response()


def main() -> None:
    """Serve until it is ended."""
    app = web.Application(middlewares=[guarded])
    app.add_routes([web.get("/health", healthy), web.get("/v1/models", healthy)])
    app.add_routes([web.post("/v1/chat/completions", chat)])
    app.add_routes([web.post(path, obey) for path in COMMANDS])
    if WHERE.isdigit():
        web.run_app(app, host="127.0.0.1", port=int(WHERE), print=None)
    else:
        web.run_app(app, path=WHERE, print=None)


if __name__ == "__main__":
    main()
