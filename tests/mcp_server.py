"""A real MCP server as a process: the SDK's own server, and paths that misbehave.

``/mcp`` is streamable HTTP, ``/sse`` the older transport; both have the same tools. The other paths
are servers that lie, never answer or answer too much. ``calls`` of a running server are the calls
that it has executed, which it appends to a file before it does anything else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from tests.ports import free_port
from tests.waiting import pauses

KEY = "idempotencyKey"
LONG = "x" * 20_000
CLIENT, TOKEN = b"site:client-secret", "granted-token"
"""The one client of the authorization server, with its secret, and the token that it gets."""
_RESOURCE = "/.well-known/oauth-protected-resource/guarded"


@dataclass(frozen=True)
class RunningServer:
    """A server that answers; ``log`` has a line for each call."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls so far: name, arguments and idempotency key, and the secret it was sent."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line) for line in lines]


@contextmanager
def running_mcp_server(directory: Path) -> Iterator[RunningServer]:
    """Start a server; end it afterwards."""
    port, log = free_port(), directory / "mcp-calls.jsonl"
    command = [sys.executable, "-m", "tests.mcp_server", str(port), str(log)]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        for pause_s in pauses():
            with suppress(httpx.TransportError):
                httpx.get(f"{url}/ready", timeout=2)
                break
            assert process.poll() is None, "the MCP server did not start"
            time.sleep(pause_s)
        yield RunningServer(url, log, process)
    finally:
        process.kill()
        process.wait()


def main(port: int, log: Path) -> None:
    """Serve until the process is killed."""
    server = MCPServer("test", log_level="CRITICAL")
    add_tools(server, log)
    modern, older = server.streamable_http_app(), server.sse_app()
    routes: list[BaseRoute] = [*modern.routes, *older.routes]
    for path in (_RESOURCE, "/.well-known/oauth-authorization-server", "/token"):
        routes.append(Route(path, authorize, methods=["GET", "POST"]))
    routes.append(Route("/{how}", misbehave, methods=["GET", "POST"]))
    app = Starlette(routes=routes, lifespan=modern.router.lifespan_context)
    app.state.log = log
    uvicorn.run(Guard(app), host="127.0.0.1", port=port, log_level="error")


def add_tools(server: MCPServer[Any], log: Path) -> None:
    """Add the tools, which record their calls."""

    def record(name: str, context: Context[Any, Any], **arguments: Any) -> None:
        meta = context.request_context.meta or {}
        request = context.request_context.request
        secret = request.headers.get("authorization") if request is not None else None
        line = {"name": name, "arguments": arguments, "key": dict(meta).get(KEY), "secret": secret}
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @server.tool(description="Adds two integers.")
    def add(a: int, b: int, context: Context[Any, Any]) -> str:
        record("add", context, a=a, b=b)
        return str(a + b)

    @server.tool(description="Raises an error.")
    def fail(context: Context[Any, Any]) -> str:
        record("fail", context)
        raise ToolError("the disk is full")

    @server.tool(description="Sleeps, then answers.")
    async def sleep(seconds: float, context: Context[Any, Any]) -> str:
        record("sleep", context, seconds=seconds)
        await anyio.sleep(seconds)
        return "slept"

    @server.tool(description="Answers with many bytes.")
    def huge(size: int, context: Context[Any, Any]) -> str:
        record("huge", context, size=size)
        return "h" * size

    @server.tool(description="Kills the server.")
    def die(context: Context[Any, Any]) -> str:
        record("die", context)
        os._exit(1)

    @server.tool(description=LONG)
    def wordy() -> str:
        return "wordy"


class Guard:
    """ASGI: lets ``/guarded`` be ``/mcp`` for those with a token of the authorization server."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/guarded":
            headers = dict(scope["headers"])
            if headers.get(b"authorization") != f"Bearer {TOKEN}".encode():
                where = f"http://{headers[b'host'].decode()}{_RESOURCE}"
                challenge = {"www-authenticate": f'Bearer resource_metadata="{where}"'}
                await PlainTextResponse("no", 401, challenge)(scope, receive, send)
                return
            scope = {**scope, "path": "/mcp", "raw_path": b"/mcp"}
        await self._app(scope, receive, send)


async def authorize(request: Request) -> Response:
    """Describe the authorization server, or give the one client its token."""
    base = f"http://{request.headers['host']}"
    if request.url.path == _RESOURCE:
        found: Any = {"resource": f"{base}/guarded", "authorization_servers": [base]}
    elif request.url.path != "/token":
        found = {"issuer": base, "token_endpoint": f"{base}/token"}
        found |= {"authorization_endpoint": f"{base}/no", "response_types_supported": ["code"]}
    elif request.headers.get("authorization") != f"Basic {b64encode(CLIENT).decode()}":
        return Response('{"error": "invalid_client"}', 401, media_type="application/json")
    else:
        found = {"access_token": TOKEN, "token_type": "Bearer", "expires_in": 3600}
    return Response(json.dumps(found), media_type="application/json")


async def misbehave(request: Request) -> Response:
    """Answer as no server should."""
    headers = {"content-encoding": "gzip"}
    match request.path_params["how"]:
        case "endless":
            return StreamingResponse(endless(), media_type="application/json")
        case "endless-events":
            return StreamingResponse(endless(), media_type="text/event-stream")
        case "compressed":
            return Response(b"bomb", headers=headers, media_type="application/json")
        case "lying-tools" if request.method == "POST":
            url = f"http://{request.headers['host']}/fetched"
            return lie(await request.json(), useless_tools(url))
        case "branching-tools" if request.method == "POST":
            return lie(await request.json(), [("good", {}), ("branching", branching_schema(40))])
        case "fetched":
            with request.app.state.log.open("a") as file:
                file.write('{"name": "fetched"}\n')
        case "silent":
            await anyio.sleep(60)
        case "elsewhere":
            return RedirectResponse("http://169.254.169.254/latest/meta-data", 307)
        case "unauthorized":
            return PlainTextResponse("no", 401)
        case "garbage":
            return Response(b"{", media_type="application/json")
        case "nul" if request.method == "POST":
            failure = {"code": -32603, "message": "a\0b"}
            answer = {"jsonrpc": "2.0", "id": (await request.json())["id"], "error": failure}
            return Response(json.dumps(answer), media_type="application/json")
        case "liar":  # Its answer has the id of another request.
            answer = {"jsonrpc": "2.0", "id": 4711, "result": {"content": []}}
            return Response(json.dumps(answer), media_type="application/json")
    return PlainTextResponse("page")


def useless_tools(url: str) -> list[tuple[Any, dict[str, Any]]]:
    """Return one tool, ``good``, and others that nobody can use."""
    nested: dict[str, Any] = {}
    for _ in range(40):
        nested = {"properties": {"a": nested}}
    return [
        *(("good", {}), ("good", {"title": "another"})),
        *(("", {}), ("tools/list", {}), ("two\nlines", {}), ("n" * 200, {})),
        *(("deep", nested), ("wide", {"enum": ["x" * 40_000]})),
        *(("invalid", {"minProperties": "x"}), ("meta", {"$schema": url})),
        *(("elsewhere", {"$ref": url}), ("vast", {"default": 10**30})),
        *((None, {}), ("no-object", {"type": "string"}), ("no-schema", {"properties": {"a": []}})),
    ]


def branching_schema(depth: int) -> dict[str, Any]:
    """Return a schema whose compilation and use take two to the power of ``depth``."""
    named: dict[str, Any] = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(depth)
    }
    named[f"d{depth}"] = {"type": "object"}
    return {"$ref": "#/$defs/d0", "$defs": named, "unevaluatedProperties": False}


def lie(message: dict[str, Any], schemas: list[tuple[Any, dict[str, Any]]]) -> Response:
    """Answer as a server whose list never ends, of tools with these names and schemas."""
    match message["method"]:
        case "initialize":
            answer: Any = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            answer |= {"serverInfo": {"name": "liar", "version": "1"}}
        case "tools/list":
            tools = [
                {"name": name, "inputSchema": {"type": "object", **more}} for name, more in schemas
            ]
            answer = {"tools": tools, "nextCursor": "again"}
        case method if method.startswith("notifications/"):
            return Response(status_code=202)
        case _:
            error = {"code": -32601, "message": "Method not found"}
            text = json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error})
            return Response(text, media_type="application/json")
    text = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": answer})
    return Response(text, media_type="application/json")


async def endless() -> AsyncIterator[bytes]:
    """Yield the beginning of an answer that has no end."""
    yield b'{"jsonrpc": "2.0", "id": 1, "result": {"tools": ["'
    while True:
        yield b"x" * 65_536
        await anyio.sleep(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
