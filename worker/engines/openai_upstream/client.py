"""Requests to a model's servers: another server or attempt before the first token, and no later."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import aiohttp
import httpx
import orjson
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from inference_site.domain.addresses import AllowedAddresses
from inference_site.domain.errors import (
    ConnectionLost,
    EngineError,
    GenerationFailed,
    ModelServerUnreachable,
)
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from worker.engines.base import Sink
from worker.engines.openai_upstream.chunks import ChunkReader
from worker.engines.openai_upstream.errors import ErrorReader, retry_after_s
from worker.engines.openai_upstream.event_loop import Cancelled, Lost, Silent, Watch, event_loop
from worker.engines.openai_upstream.health import Address, Addresses, Health
from worker.engines.openai_upstream.server import Server

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0
_BACKOFFS_S = (0.05, 0.5)
"""Pauses before all servers are tried a second and a third time. The first is short: what fails
most often is a kept connection that the server was just closing."""
_KEEP_ALIVE_S = 4.0
"""Below the 5 seconds after which uvicorn and llama.cpp close an idle connection."""
_DNS_CACHE_S = 10
_ELSEWHERE = (429, 502, 503)
"""What one server answers with while another may take the request."""
_AVOIDED_S = 1
_DOWN = (502, 503, 504)
"""What is answered for a server that is down, by itself or by a proxy, and by one that is busy."""
_SILENT_S = 5.0
"""How long a stream may bring nothing once its server is gone: a server that stops may end what it
has begun, after it has closed its port."""
_MOST_ERROR_BYTES = 65_536

T = TypeVar("T")


class _NotHere(Exception):
    """This server takes the request not now; ``error`` is what that means if no other does."""

    def __init__(self, error: EngineError, status: int) -> None:
        self.error, self.status = error, status


class _Gone(Exception):
    """The server was found to be down while it was waited for."""

    def __str__(self) -> str:
        return "it does not answer any more"


_FAILED = (aiohttp.ClientError, OSError, Lost, Silent, ModelServerUnreachable, _Gone, _NotHere)
"""How an attempt fails that may be made elsewhere, or again."""


class Upstream:
    """The servers of one model. All coroutines are for the event loop of ``event_loop()``."""

    def __init__(
        self, spec: ModelSpec, server: Server, errors: type[ErrorReader] = ErrorReader
    ) -> None:
        self._id, self._server = spec.id, server
        self.addresses = Addresses(server.base_urls)
        self.errors = errors(spec.id, server, spec.context_length)
        self._has_warned = False
        self._loop = event_loop()
        self._session = self._loop.run(self._connect())
        self.health = Health(spec.id, server, self.addresses, self._session)
        self._loop.run(self._begin())

    async def _connect(self) -> aiohttp.ClientSession:
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self._server.key:
            headers["Authorization"] = f"Bearer {self._server.key}"
        return aiohttp.ClientSession(
            connector=_connector(self._server),
            headers={**headers, **self._server.headers},
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=None, connect=min(self._server.timeout_s, _CONNECT_TIMEOUT_S)
            ),
        )

    async def _begin(self) -> None:
        await self.health.check()
        self._watch = asyncio.create_task(self.health.watch())

    async def stream(self, path: str, payload: Mapping[str, Any], reader: ChunkReader) -> None:
        """Run a request into the reader, to its end or until it is cancelled. Raise EngineError."""
        try:
            await self._attempt(lambda a: self._read(a, path, payload, reader), reader, reader)
        except Cancelled:
            pass
        finally:
            reader.account()
        if reader.begun and reader.usage.is_estimate:
            self._warn_once()

    async def post(
        self,
        url: Callable[[Address], str],
        payload: Mapping[str, Any],
        request: GenerationRequest,
        sink: Sink,
    ) -> dict[str, Any]:
        """Return the server's answer, an object. Raise Cancelled or EngineError."""

        async def ask(address: Address) -> dict[str, Any]:
            with self._watched(address, sink, None) as watch:
                async with self._asked(address, url(address), payload) as answer:
                    watch.is_lost = partial(_is_cut_off, answer)
                    await self._raise_for_status(address, answer, request)
                    body = await answer.read()
            try:
                found = orjson.loads(body)
            except orjson.JSONDecodeError as exc:
                raise GenerationFailed("The model's server sent no JSON.") from exc
            if not isinstance(found, dict):
                raise GenerationFailed("The model's server sent no JSON object.")
            return found

        return await self._attempt(ask, sink, None)

    def close(self) -> None:
        """Close the connections."""
        self._loop.run(self._close())

    async def _close(self) -> None:
        self._watch.cancel()
        await self._session.close()

    async def _attempt(
        self,
        run: Callable[[Address], Awaitable[T]],
        sink: Sink | ChunkReader,
        reader: ChunkReader | None,
    ) -> T:
        """Run it on the best server, and elsewhere or again while the sink was not fed."""
        tried: set[Address] = set()
        backoffs = list(_BACKOFFS_S)
        while True:
            address = self.addresses.best(tried)
            tried.add(address)
            try:
                with address.taken():
                    return await run(address)
            except _FAILED as exc:
                if isinstance(exc, _NotHere) and exc.status in _DOWN:
                    await self.health.look_at(address)
                error, may_repeat = self._meaning(address, exc, reader)
                if not self.addresses.has_another(tried):
                    if not (may_repeat and backoffs):
                        raise error from exc
                    await self._pause(backoffs.pop(0), sink)
                    tried.clear()
            if reader is not None:
                reader.restart()

    def _meaning(
        self, address: Address, exc: Exception, reader: ChunkReader | None
    ) -> tuple[EngineError, bool]:
        """Return what a failed attempt means if no other server is left, and whether to repeat it.

        Raise what it means if no other server may be asked, either.
        """
        said = str(exc) or type(exc).__name__
        if isinstance(exc, ModelServerUnreachable):  # It says so itself, and goes in a moment.
            self.health.note_end(address)
            if reader is None or not reader.begun:
                return exc, False
        if isinstance(exc, Silent):
            raise GenerationFailed(f"The model's server sent nothing in time: {exc}.") from exc
        if isinstance(exc, _NotHere):
            return self._not_here(address, exc.error), False
        logger.error("model %s: %s: %s", self._id, address.base_url, said)
        if reader is not None and reader.begun:
            raise ConnectionLost("The model's server closed the connection.") from exc
        is_timeout = isinstance(exc, aiohttp.ConnectionTimeoutError)
        if isinstance(exc, aiohttp.ClientConnectorError) or is_timeout:
            fault = f"Model '{self._id}': {address.base_url} cannot be reached: {said}"
            self.health.note(address, fault, is_silent=is_timeout)
            return ModelServerUnreachable(self._unreachable), not is_timeout
        return ModelServerUnreachable(self._unreachable, is_suspect=True), True

    def _not_here(self, address: Address, error: EngineError) -> EngineError:
        """Return what the refusal of a server means: it is busy, or it is down."""
        if address.is_up or isinstance(error, ModelServerUnreachable):
            return error
        return ModelServerUnreachable(self._unreachable)

    @property
    def _unreachable(self) -> str:
        return f"The server of the model '{self._id}' cannot be reached."

    async def _pause(self, seconds: float, sink: Sink | ChunkReader) -> None:
        with self._loop.watching(sink, seconds + _CONNECT_TIMEOUT_S):
            await asyncio.sleep(seconds)

    async def _read(
        self, address: Address, path: str, payload: Mapping[str, Any], reader: ChunkReader
    ) -> None:
        with self._watched(address, reader, reader) as watch:
            async with self._asked(address, f"{address.base_url}{path}", payload) as answer:
                watch.heard()
                watch.is_lost = partial(_is_cut_off, answer)
                await self._raise_for_status(address, answer, reader.request)
                if answer.headers.get("content-type", "").startswith("application/json"):
                    reader.whole(await answer.read())
                    return

                def take(data: bytes) -> None:
                    watch.heard()
                    address.heard()
                    reader.feed(data)

                try:
                    # The first piece goes on at once, not with the next tick.
                    take(await answer.content.readany())
                    await self._loop.read(answer.content, take)
                except (aiohttp.ClientError, Lost):
                    if not reader.is_complete:
                        raise
                reader.end()

    def _asked(
        self, address: Address, url: str, payload: Mapping[str, Any]
    ) -> Any:  # aiohttp's request, which is awaited or entered, has no public type.
        model = address.model or self._server.model or self._id
        body = orjson.dumps({**payload, "model": model})
        return self._session.post(url, data=body, allow_redirects=False)

    async def _raise_for_status(
        self, address: Address, answer: aiohttp.ClientResponse, request: GenerationRequest
    ) -> None:
        if answer.status == 200:
            return
        body = await _beginning(answer)
        error = self.errors.answered(answer.status, answer.headers, body, request, address.base_url)
        if answer.status in _ELSEWHERE:
            pause_s = retry_after_s(answer.headers)
            address.avoid(_AVOIDED_S if pause_s is None else pause_s)
            raise _NotHere(error, answer.status)
        raise error

    def _watched(
        self, address: Address, sink: Sink | ChunkReader, reader: ChunkReader | None
    ) -> AbstractContextManager[Watch]:
        def why_not(silent_s: float) -> Exception | None:
            """Return why this server is not waited for any longer: it will not answer, or another
            could."""
            may_go = reader is None or not reader.begun
            if not address.is_up and may_go and self.addresses.has_another({address}):
                return _Gone()
            return _Gone() if address.is_gone and silent_s > _SILENT_S else None

        return self._loop.watching(sink, self._server.timeout_s, why_not)

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "model %s: %s reports no usage; each piece of an answer is counted as a token",
                self._id,
                self._server.base_urls[0],
            )


class _CheckedResolver(AbstractResolver):
    """Resolves names to allowed addresses only.

    The connector connects to the very addresses that are returned, so a name that resolves to
    something else a moment later gains nothing. It does not ask for numbers: ``server_of`` checks
    these.
    """

    def __init__(self, allowed: AllowedAddresses) -> None:
        self._allowed, self._inner = allowed, ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host. Raise OSError unless all are allowed."""
        found = await self._inner.resolve(host, port, family)
        if not all(self._allowed.has(host, result["host"]) for result in found):
            raise OSError(
                errno.EACCES,  # With a number its words are those of the error of the connection.
                "the host has an address that is not public; the site's owner may allow it in "
                "UPSTREAM_ALLOWED_HOSTS",
            )
        return found

    async def close(self) -> None:
        """Nothing is open."""


def _connector(server: Server) -> aiohttp.BaseConnector:
    """Return what connects to the server, as often as there are runs: the slots bound them."""
    if server.socket:
        return aiohttp.UnixConnector(server.socket, limit=0, keepalive_timeout=_KEEP_ALIVE_S)
    return aiohttp.TCPConnector(
        limit=0,
        keepalive_timeout=_KEEP_ALIVE_S,
        ttl_dns_cache=_DNS_CACHE_S,
        resolver=_resolver(server),
        ssl=httpx.create_ssl_context(),  # Knows certifi's authorities and SSL_CERT_FILE.
    )


def _resolver(server: Server) -> AbstractResolver | None:
    allowed = server.allowed_addresses
    return None if allowed is None else _CheckedResolver(allowed)


async def _beginning(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body, or the beginning of a long one."""
    body = b""
    while len(body) < _MOST_ERROR_BYTES and (data := await answer.content.readany()):
        body += data
    return body


def _is_cut_off(answer: aiohttp.ClientResponse) -> bool:
    """Whether the connection of an answer that has not ended is closed."""
    connection = answer.connection
    if connection is None:
        return False
    return connection.transport is None or connection.transport.is_closing()
