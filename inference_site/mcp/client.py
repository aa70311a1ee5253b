"""A client of MCP servers, by the official SDK. It lists the tools of a server and calls them.

A server may be slow, dead, huge or hostile, so each operation has a time limit, and its traffic is
bounded and checked (``transport``). The SDK follows redirects within the origin of the server's URL
and no others.

An operation runs in an event loop of its own, on the thread that asks for it. This module imports
the SDK (50 MB), so other modules import it inside functions. Errors:

    McpError
    ├── McpTimeout      no answer within the time limit; the call may have been made
    ├── McpCancelled    the caller gave up; the call may have been made
    ├── McpUnreachable  no connection, or no session: the call was not sent
    └── McpFailed       the server, or the protocol, answered with an error
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import httpx2
import mcp_types
import orjson
from anyio.abc import ObjectReceiveStream
from mcp.client.auth import OAuthFlowError
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.client.client import Client
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import OAuthToken
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types.methods import validate_server_result
from pydantic import ValidationError

from inference_site.core.json_schemas import schema_errors
from inference_site.core.storage.fields import replace_nul
from inference_site.mcp.access import LIST_TOOLS, Endpoint, OAuthClient, TransportName
from inference_site.mcp.transport import CheckedTransport, Traffic

T = TypeVar("T")

MAX_TOOLS = 256
"""The most tools of a server that are taken; the others are left out."""
MAX_LIST_BYTES = 256 * 1024
"""The most bytes of a list of tools as JSON; the tools that exceed it are left out."""
MAX_DESCRIPTION = 4_096
"""The most characters of a tool's description; longer ones are cut."""
MAX_SCHEMA_BYTES = 32 * 1024
"""The most bytes of a tool's input schema as JSON; a tool with a larger one is left out."""
_MAX_SCHEMA_DEPTH = 32
_MAX_NAME = 128
_MAX_ERROR = 1_000
_MAX_PAGES = 32
_CLOSE_S = 1.0
"""How long the end of a session may take once the result is there."""
_POLL_S = 0.1
_IDEMPOTENCY_KEY = "idempotencyKey"
"""The field of ``_meta`` with the key of a call. The protocol leaves the names of its
fields to clients and servers."""
_IS_SSE_SERVER = {400, 404, 405}
"""Statuses with which a server of the older transport answers (MCP, "Backwards compatibility")."""
_HEADER_MISMATCH = -32020


class McpError(Exception):
    """An operation has no result. ``error`` is the ``error`` of an ``mcp_call`` item."""

    def __init__(self, message: str, error: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        default = {"type": "mcp_protocol_error", "code": -32000, "message": message}
        self.error = dict(error or default)


class McpTimeout(McpError):
    """The server did not answer in time. The call may have been made."""


class McpCancelled(McpError):
    """The caller gave up. The call may have been made."""


class McpUnreachable(McpError):
    """There is no session with the server: the call was not sent."""


class McpFailed(McpError):
    """The server answered with an error, or broke the protocol or a limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one operation; ``max_bytes`` is for all that the server sends."""

    timeout_s: float
    max_bytes: int
    is_cancelled: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call as text for the model."""

    text: str
    is_error: bool = False


def list_tools(endpoint: Endpoint, limits: Limits) -> list[dict[str, Any]]:
    """Return the tools of a server as an ``mcp_list_tools`` item shows them. Raise McpError.

    What exceeds a bound of this module is cut or left out, as is a tool that breaks the protocol.
    The texts are those of the server.
    """

    async def use(client: Client, _traffic: Traffic) -> list[dict[str, Any]]:
        found, size, cursor = dict[str, dict[str, Any]](), 0, None
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                entry = _listed_tool(tool)
                if entry is None or tool.name in found:
                    continue
                size += len(json.dumps(entry))
                if size > MAX_LIST_BYTES or len(found) == MAX_TOOLS:
                    return list(found.values())
                found[tool.name] = entry
            cursor = page.next_cursor
            if not cursor:
                break
        return list(found.values())

    tools = asyncio.run(_operate(endpoint, limits, use))
    errors = schema_errors([tool["input_schema"] for tool in tools])  # Engines make grammars of it.
    if errors is None:
        raise McpFailed("The schemas of the server's tools need too much time or memory.")
    return [tool for tool, error in zip(tools, errors, strict=True) if not error]


def call_tool(
    endpoint: Endpoint, name: str, arguments: Mapping[str, Any], key: str, limits: Limits
) -> CallResult:
    """Call a tool and return its result. Raise McpError.

    ``key`` is sent along, for servers that ignore a repeated call. The call is sent once: the SDK's
    own method would list the tools after each call, and repeat some calls.
    """
    params = mcp_types.CallToolRequestParams(
        name=name, arguments=dict(arguments), _meta={_IDEMPOTENCY_KEY: key}
    )
    request = mcp_types.CallToolRequest(params=params)

    async def use(client: Client, traffic: Traffic) -> CallResult:
        traffic.is_sent = True
        try:
            result = await client.session.send_request(request, mcp_types.CallToolResult)
        except MCPError as exc:
            if exc.code != _HEADER_MISMATCH:
                raise
            # The server refused the call: it wants arguments in headers, which its list names.
            await client.list_tools()
            result = await client.session.send_request(request, mcp_types.CallToolResult)
        return CallResult(_to_text(result), bool(result.is_error))

    return asyncio.run(_operate(endpoint, limits, use))


_Use = Callable[[Client, Traffic], Awaitable[T]]


async def _operate(endpoint: Endpoint, limits: Limits, use: _Use[T]) -> T:
    """Open a session, use it, and close it, within the limits. Raise McpError."""
    transports: list[TransportName] = [endpoint.transport]
    if endpoint.transport == "auto":
        path = httpx2.URL(endpoint.url).path.rstrip("/")
        transports = ["sse"] if path.endswith("/sse") else ["streamable_http", "sse"]
    results = list[T]()
    failure: BaseException | None = None
    with anyio.move_on_after(limits.timeout_s) as scope:
        traffic = Traffic(limits.max_bytes, scope)
        for transport in transports:
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_watch, limits.is_cancelled, tasks.cancel_scope)
                    streams = _open(endpoint, transport, traffic)
                    async with Client(streams, cache=None) as client:
                        traffic.version = client.protocol_version
                        results.append(await use(client, traffic))
                        scope.deadline = min(scope.deadline, anyio.current_time() + _CLOSE_S)
                    tasks.cancel_scope.cancel()
            except (Exception, BaseExceptionGroup) as exc:  # noqa: BLE001  # Raised below.
                failure = exc
                while isinstance(failure, BaseExceptionGroup):  # Task groups raise nested groups.
                    failure = failure.exceptions[0]
            if results or traffic.is_sent or traffic.status not in _IS_SSE_SERVER:
                break
    if results:  # Whatever the end of the session did.
        return results[0]
    raise _error(failure, traffic, limits) from failure


async def _watch(is_cancelled: Callable[[], bool], scope: anyio.CancelScope) -> None:
    while not is_cancelled():
        await anyio.sleep(_POLL_S)
    scope.cancel()


@asynccontextmanager
async def _open(
    endpoint: Endpoint, transport: TransportName, traffic: Traffic
) -> AsyncIterator[Any]:
    """Yield the streams of a connection, for the SDK's client."""
    auth: httpx2.Auth | None = None
    if (oauth := endpoint.oauth) is not None:
        # It gets a new token when the server refuses one, through the checked transport too.
        auth = ClientCredentialsOAuthProvider(
            endpoint.url,
            _Tokens(oauth, endpoint.url),
            oauth.client_id,
            oauth.client_secret,
            scope=oauth.scope or None,
            issuer=oauth.issuer,
        )
    http_client = httpx2.AsyncClient(
        transport=CheckedTransport(endpoint.allowed, traffic),
        headers={
            "User-Agent": "inference-site",
            **endpoint.headers,
            "Accept-Encoding": "identity",  # The limit counts received bytes.
        },
        auth=auth,
        timeout=None,
        trust_env=False,
    )

    def given_client(*_: object, **__: object) -> httpx2.AsyncClient:
        return http_client

    if transport == "sse":
        connection = sse_client(endpoint.url, httpx_client_factory=given_client)
    else:
        connection = streamable_http_client(
            endpoint.url, http_client=http_client, max_sse_event_size=traffic.limit
        )
    try:
        async with connection as (received, sent):
            yield _ValidTools(received, traffic), sent
    finally:
        await http_client.aclose()


class _ValidTools(ObjectReceiveStream[SessionMessage | Exception]):
    """What a server sends, without the tools of a list that break the protocol.

    The SDK refuses a list with one such tool as a whole.
    """

    def __init__(self, received: Any, traffic: Traffic) -> None:  # The SDK exports no type of it.
        self._received, self._traffic = received, traffic

    async def receive(self) -> SessionMessage | Exception:
        """Return the next message."""
        received: SessionMessage | Exception = await self._received.receive()
        match received:
            case SessionMessage(mcp_types.JSONRPCResponse(result={"tools": list(tools)} as result)):
                valid = [tool for tool in tools if self._is_valid({**result, "tools": [tool]})]
                result["tools"] = valid
        return received

    def _is_valid(self, result: dict[str, Any]) -> bool:
        try:
            validate_server_result("tools/list", self._traffic.version, result)
        except ValueError:
            return False
        return True

    async def aclose(self) -> None:
        """Close the connection."""
        await self._received.aclose()


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The token of a client of OAuth, which this process keeps until the server refuses it."""

    client: OAuthClient
    url: str

    async def get_tokens(self) -> OAuthToken | None:
        return _tokens.get((self.url, self.client))

    async def set_tokens(self, tokens: OAuthToken) -> None:
        _tokens[self.url, self.client] = tokens

    async def get_client_info(self) -> None:
        """Return None: the client is registered, and its secret known."""

    async def set_client_info(self, client_info: object) -> None:
        """Do nothing."""


_tokens: dict[tuple[str, OAuthClient], OAuthToken] = {}


def _error(failure: BaseException | None, traffic: Traffic, limits: Limits) -> McpError:
    """Return the error of an operation that has no result."""
    if limits.is_cancelled():
        return McpCancelled("The call was cancelled.")
    if traffic.is_exceeded:
        return McpFailed(f"The server's answers have more than {traffic.limit} bytes.")
    kind = McpFailed if traffic.is_sent else McpUnreachable
    match failure:
        case None:
            return McpTimeout(f"The server did not answer within {limits.timeout_s:g} s.")
        case _ if traffic.is_refused:  # One message, so that nobody learns which names exist.
            return kind("The server's host has no address that may be connected to.")
        case httpx2.ConnectError() | TimeoutError():
            return kind("The server's host does not answer.")
        case MCPError() if traffic.status >= 300:
            return kind(*_http_error(traffic.status))
        case httpx2.HTTPStatusError(response=response):
            return kind(*_http_error(response.status_code))
        case MCPError() as exc if exc.code == mcp_types.CONNECTION_CLOSED:
            return kind("The server closed the connection before it answered.")
        case MCPError() as exc:
            message = replace_nul(exc.message.partition("\n")[0][:_MAX_ERROR])
            error = {"type": "mcp_protocol_error", "code": exc.code, "message": message}
            return kind(message, error)
        case OAuthFlowError():
            return kind("The authorization server gave the site no token.")
        case ValidationError():
            return kind("The server's answer does not follow the protocol.")
        case _:
            return kind("The connection to the server failed.")


def _http_error(status: int) -> tuple[str, dict[str, Any]]:
    message = f"The server answered with the HTTP status {status}."
    return message, {"type": "http_error", "code": status, "message": message}


def _listed_tool(tool: mcp_types.Tool) -> dict[str, Any] | None:
    """Return a tool as an ``mcp_list_tools`` item shows it; None if it cannot be offered."""
    schema = tool.input_schema
    try:
        encoded = orjson.dumps(schema)
    except orjson.JSONEncodeError:  # It is too deep, or has an integer of more than 64 bits.
        return None
    is_too_large = len(encoded) > MAX_SCHEMA_BYTES or _depth(schema) > _MAX_SCHEMA_DEPTH
    is_name = 0 < len(tool.name) <= _MAX_NAME and tool.name.isprintable()
    if is_too_large or not is_name or tool.name == LIST_TOOLS:
        return None
    description = tool.description
    if description is not None and len(description) > MAX_DESCRIPTION:
        description = description[: MAX_DESCRIPTION - 1] + "…"
    hints = tool.annotations or mcp_types.ToolAnnotations()
    described = {} if description is None else {"description": description}
    return {
        "name": tool.name,
        **described,
        "input_schema": schema,
        "annotations": {"read_only": bool(hints.read_only_hint)},
    }


def _depth(value: Any) -> int:
    """Return how deeply a JSON value is nested."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return depth


def _to_text(result: mcp_types.CallToolResult) -> str:
    """Return what a call returned as text; for media only its type, since models get text."""
    parts = list[str]()
    for content in result.content:
        match content:
            case mcp_types.TextContent(text=text):
                parts.append(text)
            case mcp_types.ImageContent(mime_type=kind) | mcp_types.AudioContent(mime_type=kind):
                parts.append(f"({content.type}, {kind})")
            case mcp_types.ResourceLink(uri=uri, name=name):
                parts.append(f"{name}: {uri}")
            case mcp_types.EmbeddedResource(resource=mcp_types.TextResourceContents(text=text)):
                parts.append(text)
            case _:
                parts.append(f"({content.type})")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)
