"""ASGI without a server: scopes, a client that sends and may leave, and what it received."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from django.http.response import HttpResponseBase

from inference_site.gateway.head import SCOPE_KEY, Head, resolve_cached

Message = dict[str, Any]


def scope(
    method: str, path: str, headers: dict[str, str] | None = None, query: bytes = b""
) -> dict[str, Any]:
    """Return an http scope as Daphne makes it."""
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query,
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 8000),
    }


def with_head(asked: dict[str, Any]) -> dict[str, Any]:
    """Return a scope as the relay passes it to the view of a sender that it does not know."""
    return {**asked, SCOPE_KEY: Head(route=resolve_cached(asked["path"].rstrip("/")))}


class FakeClient:
    """The other end of a connection. Its body arrives in these chunks; it stays until it leaves."""

    def __init__(self, *chunks: bytes) -> None:
        self.messages: list[Message] = []
        self.left = asyncio.Event()
        chunks = chunks or (b"",)
        self._requests: list[Message] = [
            {"type": "http.request", "body": chunk, "more_body": i < len(chunks) - 1}
            for i, chunk in enumerate(chunks)
        ]

    async def receive(self) -> Message:
        if self._requests:
            return self._requests.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    def leave_before_sending_all(self) -> None:
        """Close the connection in the middle of the request's body."""
        self._requests[-1]["more_body"] = True
        self.left.set()

    @property
    def status(self) -> int:
        """The status, of which there is exactly one, before everything else."""
        starts = [i for i, m in enumerate(self.messages) if m["type"] == "http.response.start"]
        assert starts == [0]
        status: int = self.messages[0]["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        pairs = self.messages[0]["headers"]
        decoded = {key.decode(): value.decode() for key, value in pairs}
        assert len(decoded) == len(pairs), "a header was sent twice"
        return decoded

    @property
    def writes(self) -> list[bytes]:
        """The bodies, one for each write that had any."""
        return [m["body"] for m in self.messages[1:] if m["body"]]

    @property
    def is_complete(self) -> bool:
        """Whether the server has said that nothing more comes."""
        return bool(self.messages) and not self.messages[-1].get("more_body", False)


def error_of(response: HttpResponseBase | bytes) -> dict[str, Any]:
    """Return what the envelope holds."""
    content = response if isinstance(response, bytes) else response.content  # type: ignore[attr-defined]  # Set on HttpResponse.
    envelope: dict[str, Any] = orjson.loads(content)
    assert envelope.keys() == {"error"}
    assert envelope["error"].keys() == {"message", "type", "param", "code"}
    told: dict[str, Any] = envelope["error"]
    return told
