"""A call of a tool, made by the site and by a client: ``python -m benchmarks.tool_calls``.

A model's server answers at once: with calls of an MCP tool, and with a text once it has their
results. The reference is a client that runs the loop itself: it asks that server, calls the tool
with the SDK's client, and asks again. The table has the milliseconds of a whole loop, and what the
site adds to it: queue, rows before and after each call, items and events.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web
from mcp import Client
from mcp.server.mcpserver import MCPServer

from benchmarks.processes import free_port, running, wait_for_ok
from benchmarks.targets import Endpoint, platform_with

_READY_S = 60
_TOOL = "test__add"
Loop = Callable[[aiohttp.ClientSession, int], Coroutine[Any, Any, None]]


async def _answer(request: web.Request) -> web.StreamResponse:
    """Stream the calls that the last message of the user asks for, or a text after them."""
    body = await request.json()
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    messages = body["messages"]
    delta: dict[str, Any] = {"content": "42"}
    reason = "stop"
    if messages[-1]["role"] == "user":
        count, reason = int(messages[-1]["content"]), "tool_calls"
        function = {"name": _TOOL, "arguments": '{"a": 40, "b": 2}'}
        calls = [{"index": n, "id": f"call_{n}", "type": "function"} for n in range(count)]
        delta = {"tool_calls": [{**call, "function": function} for call in calls]}
    for choice in (
        {"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": reason},
    ):
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        await answer.write(b"data: %b\n\n" % json.dumps({**chunk, "choices": [choice]}).encode())
    await answer.write(b"data: [DONE]\n\n")
    return answer


def _serve(port: int, mcp_port: int) -> None:
    """Serve the model and the tool, each on its port, until the process is killed."""
    server = MCPServer("test", log_level="CRITICAL")

    @server.tool()
    def add(a: int, b: int) -> str:
        """Add two integers."""
        return str(a + b)

    async def both() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", _answer)
        app.router.add_get("/v1/models", lambda _: _models())
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        config = uvicorn.Config(
            server.streamable_http_app(), host="127.0.0.1", port=mcp_port, log_level="error"
        )
        await uvicorn.Server(config).serve()

    asyncio.run(both())


async def _models() -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "player", "object": "model"}]})


def _by_client(model_url: str, mcp_url: str) -> Loop:
    """Return the loop of a client that runs the tool itself."""

    async def loop(http: aiohttp.ClientSession, calls: int) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": str(calls)}]
        body = {"model": "player", "messages": messages, "stream": True}
        async with http.post(f"{model_url}/chat/completions", json=body) as answer:
            await answer.read()
        async with Client(mcp_url) as client:
            await client.list_tools()
            arguments = {"a": 40, "b": 2}
            await asyncio.gather(*(client.call_tool("add", arguments) for _ in range(calls)))
        messages.append({"role": "tool", "tool_call_id": "call_0", "content": "42"})
        async with http.post(f"{model_url}/chat/completions", json=body) as answer:
            await answer.read()

    return loop


def _by_site(site: Endpoint, mcp_url: str) -> Loop:
    """Return the loop that the site runs in one response."""

    async def loop(http: aiohttp.ClientSession, calls: int) -> None:
        tool = {"type": "mcp", "server_label": "test", "server_url": mcp_url}
        body = {
            "model": "player",
            "input": str(calls),
            "tools": [{**tool, "require_approval": "never"}],
        }
        headers = {"Authorization": f"Bearer {site.key}"}
        async with http.post(f"{site.url}/responses", json=body, headers=headers) as answer:
            found = await answer.json()
        made = [item for item in found["output"] if item["type"] == "mcp_call"]
        if len(made) != calls or any(item["error"] for item in made):
            raise SystemExit(f"The calls were not made: {found}")

    return loop


async def _milliseconds(loop: Loop, calls: int, at_once: int, count: int) -> list[float]:
    """Return how long each of ``count`` loops took, with ``at_once`` of them at a time."""
    took: list[float] = []
    left = iter(range(count))

    async with aiohttp.ClientSession() as http:

        async def work() -> None:
            for _ in left:
                began = time.monotonic()
                await loop(http, calls)
                took.append((time.monotonic() - began) * 1000)

        await asyncio.gather(*(work() for _ in range(at_once)))
    return took


def _measure(site: Endpoint, model_url: str, mcp_url: str, rounds: int, count: int) -> None:
    loops = {"client": _by_client(model_url, mcp_url), "site": _by_site(site, mcp_url)}
    print("| calls in a turn | loops at once | client, ms | site, ms | added, ms |")
    print("|---|---|---|---|---|")
    for calls, at_once in ((1, 1), (8, 1), (1, 16)):
        found: dict[str, list[float]] = {name: [] for name in loops}
        for turn in range(rounds + 1):
            for name, loop in loops.items():
                took = asyncio.run(_milliseconds(loop, calls, at_once, count))
                if turn:  # The first turn warms up.
                    found[name] += took
        client, site_ms = (statistics.median(found[name]) for name in loops)
        print(f"| {calls} | {at_once} | {client:.1f} | {site_ms:.1f} | {site_ms - client:.1f} |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("benchmarks.tool_calls", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--serve", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _serve(*options.serve)
        return
    port, mcp_port = free_port(), free_port()
    model_url, mcp_url = f"http://127.0.0.1:{port}/v1", f"http://127.0.0.1:{mcp_port}/mcp"
    command = [sys.executable, "-m", "benchmarks.tool_calls", "--serve", str(port), str(mcp_port)]
    entry = {
        "engine": "openai_upstream",
        "base_url": model_url,
        "flavor": "vllm",
        "context_length": 65536,
        "slots": 16,
    }
    allowed = {"MCP_ALLOWED_HOSTS": "127.0.0.1", "MCP_ALLOWED_NETWORKS": "127.0.0.0/8"}
    with running("model and tool", command, {}) as process:
        wait_for_ok("model and tool", f"{model_url}/models", process, _READY_S)
        with platform_with({"player": entry}, allowed) as site:
            _measure(site, model_url, mcp_url, options.rounds, options.count)


if __name__ == "__main__":
    main()
