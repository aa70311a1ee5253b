"""The least that a proxy in Python can do: Daphne and httpx pass a request and its answer on.

Run by ``daphne benchmarks.bare_proxy:application``; ``UPSTREAM`` is the base URL of the server.
"""

import os
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

_clients: list[httpx.AsyncClient] = []
"""The one client, made in the event loop."""


async def application(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Send a POST's body to the same path of the server, and its answer back as it comes."""
    if scope["type"] != "http":
        return
    if not _clients:
        # llama.cpp closes an idle connection after 5 s.
        _clients.append(httpx.AsyncClient(timeout=600, limits=httpx.Limits(keepalive_expiry=2)))
    body, has_more = b"", True
    while has_more:
        message = await receive()
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    if scope["method"] == "GET":  # It is up.
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        return
    url = os.environ["UPSTREAM"] + scope["path"].removeprefix("/v1")
    headers = {"content-type": "application/json"}
    async with _clients[0].stream("POST", url, content=body, headers=headers) as answer:
        head = {"type": "http.response.start", "status": answer.status_code}
        await send({**head, "headers": [(b"content-type", b"text/event-stream")]})
        async for data in answer.aiter_raw():
            await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
