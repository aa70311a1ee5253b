"""Requests to a model's servers, retried on the same or another server until the first token."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import aiohttp
import httpx
import orjson
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from inference_site.core.domain.addresses import AllowedAddresses
from inference_site.core.domain.errors import (
    ConnectionLost,
    EngineError,
    GenerationFailed,
    ModelServerUnreachable,
)
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest
from worker.engines.base import Sink
from worker.engines.openai_upstream.errors import ErrorReader, retry_after_s
from worker.engines.openai_upstream.event_loop import Cancelled, Lost, Silent, Watch, event_loop
from worker.engines.openai_upstream.server import (
    CLOSE,
    Address,
    Addresses,
    Health,
    Server,
    body_within,
)

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0
_BACKOFFS_S = (0.05, 0.5)
"""Pauses before all servers are tried a second and a third time. The first is short: most failures
are kept-alive connections that the server was just closing."""
_KEEP_ALIVE_S = 4.0
"""Below the 5 seconds after which uvicorn and llama.cpp close an idle connection."""
_DNS_CACHE_S = 10
_TRY_ELSEWHERE = (429, 502, 503)
"""Statuses after which another server may take the request."""
_AVOIDED_S = 1
_DOWN = (502, 503, 504)
"""Statuses of a server, or of its proxy, that is down or busy."""
_SILENT_S = 5.0
"""How long a stream may bring nothing once its server is gone: a server that stops may finish its
streams after it has closed its port."""
_MAX_ERROR_BYTES = 65_536
_MAX_PAGE_LOGGED = 200
_EVENTS = (b"data:", b"event:", b"id:", b"retry:", b":")
"""Beginnings of a stream of events."""
MAX_ANSWER_BYTES = 32 * 2**20
"""Bytes of an answer that is no stream of tokens: a JSON object, a transcript or a speech."""

T = TypeVar("T")
Body = Mapping[str, Any] | Callable[[str], aiohttp.MultipartWriter]
"""The body of a request without the model's name: the fields of a JSON object, or what makes the
form for a model's name. Each attempt makes another form, because one can be sent only once."""


class AnswerReader(Protocol):
    """Takes the answer of one run as it comes, and feeds it to a sink."""

    request: GenerationRequest

    @property
    def cancelled(self) -> bool:
        """Whether to stop reading."""

    @property
    def begun(self) -> bool:
        """Whether the sink got a part of the answer; if so, the request cannot be retried."""

    @property
    def is_complete(self) -> bool:
        """Whether an end of the connection is the end of the answer."""

    @property
    def lacks_usage(self) -> bool:
        """Whether to warn the operator that the server reports no usage."""

    def restart(self) -> None:
        """Discard the state of a failed attempt, before the next one."""

    def feed(self, data: bytes) -> None:
        """Take a piece of the answer. Raise Cancelled or EngineError."""

    def whole(self, body: bytes) -> None:
        """Take an answer that is JSON, and no stream of events. Raise EngineError."""

    def end(self) -> None:
        """Take the end of the answer. Raise EngineError if it came too early."""

    def account(self) -> None:
        """Feed the usage to the sink, if there is any."""


class _NotHere(Exception):
    """This server does not take the request now; ``error`` is raised if no other server does."""

    def __init__(self, error: EngineError, status: int) -> None:
        self.error, self.status = error, status


class _Gone(Exception):
    """A health check found the server down while a run waited for it."""

    def __str__(self) -> str:
        return "it does not answer any more"


_FAILED = (aiohttp.ClientError, OSError, Lost, Silent, ModelServerUnreachable, _Gone, _NotHere)
"""Failures after which the request may be tried elsewhere, or again."""


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
        self._loop.run(self._start_health())

    async def _connect(self) -> aiohttp.ClientSession:
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self._server.key:
            headers["Authorization"] = f"Bearer {self._server.key}"
        # No limit of connections: the slots bound the runs.
        connector: aiohttp.BaseConnector
        if self._server.socket:
            connector = aiohttp.UnixConnector(
                self._server.socket, limit=0, keepalive_timeout=_KEEP_ALIVE_S
            )
        else:
            allowed = self._server.allowed_addresses
            connector = aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=_KEEP_ALIVE_S,
                ttl_dns_cache=_DNS_CACHE_S,
                resolver=None if allowed is None else _CheckedResolver(allowed),
                ssl=httpx.create_ssl_context(),  # Trusts certifi's authorities and SSL_CERT_FILE.
            )
        return aiohttp.ClientSession(
            connector=connector,
            headers={**headers, **self._server.headers},
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=None, connect=min(self._server.timeout_s, _CONNECT_TIMEOUT_S)
            ),
        )

    async def _start_health(self) -> None:
        await self.health.check()
        self._watch = asyncio.create_task(self.health.watch())

    async def stream(self, path: str, payload: Body, reader: AnswerReader) -> None:
        """Run a request into the reader, to its end or until it is cancelled. Raise EngineError."""
        try:
            await self._attempt(lambda a: self._read(a, path, payload, reader), reader, reader)
        except Cancelled:
            pass
        finally:
            reader.account()
        if reader.lacks_usage and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "model %s: %s reports no usage; each piece of an answer is counted as a token",
                self._id,
                self._server.base_urls[0],
            )

    async def post(
        self,
        path: str,
        payload: Mapping[str, Any],
        request: GenerationRequest,
        sink: Sink,
        *,
        at_root: bool = False,
    ) -> dict[str, Any]:
        """Return the server's answer, an object. Raise Cancelled or EngineError.

        ``at_root``: the path is one of the server's own endpoints, beside ``/v1``.
        """

        async def ask(address: Address) -> dict[str, Any]:
            url = f"{address.root_url if at_root else address.base_url}{path}"
            with self._watched(address, sink, None) as watch:
                async with self._request(address, url, payload, {}) as answer:
                    watch.is_lost = partial(_is_cut_off, answer)
                    await self._raise_for_status(address, answer, request)
                    body = await _whole_body(answer)
            try:
                content = orjson.loads(body)
            except orjson.JSONDecodeError as exc:
                raise GenerationFailed("The model's server sent no JSON.") from exc
            if not isinstance(content, dict):
                raise GenerationFailed("The model's server sent no JSON object.")
            if error := content.get("error"):
                raise self.errors.in_stream(error, request)
            return content

        return await self._attempt(ask, sink, None)

    def close(self) -> None:
        """Close the connections."""

        async def close() -> None:
            self._watch.cancel()
            await self._session.close()

        self._loop.run(close())

    async def _attempt(
        self,
        run: Callable[[Address], Awaitable[T]],
        sink: Sink | AnswerReader,
        reader: AnswerReader | None,
    ) -> T:
        """Run it on the best server; retry elsewhere or again until the sink is fed."""
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
                error, may_repeat = self._failure(address, exc, reader)
                if not self.addresses.has_another(tried):
                    if not (may_repeat and backoffs):
                        raise error from exc
                    pause_s = backoffs.pop(0)
                    with self._loop.watching(sink, pause_s + _CONNECT_TIMEOUT_S):
                        await asyncio.sleep(pause_s)
                    tried.clear()
            if reader is not None:
                reader.restart()

    def _failure(
        self, address: Address, exc: Exception, reader: AnswerReader | None
    ) -> tuple[EngineError, bool]:
        """Return the error to raise if no other server is up, and whether to retry then.

        Raise the error of an attempt that must not be repeated anywhere.
        """
        reason = str(exc) or type(exc).__name__
        if isinstance(exc, ModelServerUnreachable):  # The server says that its engine has ended.
            self.health.note_end(address)
            if reader is None or not reader.begun:
                return exc, False
        if isinstance(exc, Silent):
            raise GenerationFailed(f"The model's server sent nothing in time: {exc}.") from exc
        if isinstance(exc, _NotHere):
            is_busy = address.is_up or isinstance(exc.error, ModelServerUnreachable)
            return exc.error if is_busy else ModelServerUnreachable(self._unreachable), False
        has_begun = reader is not None and reader.begun
        level = logging.ERROR if has_begun else logging.WARNING  # Most are tried again at once.
        logger.log(level, "model %s: %s: %s", self._id, address.base_url, reason)
        if has_begun:
            raise ConnectionLost("The model's server closed the connection.") from exc
        is_timeout = isinstance(exc, aiohttp.ConnectionTimeoutError)
        if isinstance(exc, aiohttp.ClientConnectorError) or is_timeout:
            fault = f"Model '{self._id}': {address.base_url} cannot be reached: {reason}"
            self.health.note(address, fault, is_silent=is_timeout)
            return ModelServerUnreachable(self._unreachable), not is_timeout
        return ModelServerUnreachable(self._unreachable, is_suspect=True), True

    @property
    def _unreachable(self) -> str:
        return f"The server of the model '{self._id}' cannot be reached."

    async def _read(self, address: Address, path: str, payload: Body, reader: AnswerReader) -> None:
        try:
            with self._watched(address, reader, reader) as watch:
                url = f"{address.base_url}{path}"
                # On a kept connection, the next request would find it closed.
                headers = CLOSE if address.is_llama_cpp else {}
                async with self._request(address, url, payload, headers) as answer:
                    watch.heard()
                    watch.is_lost = partial(_is_cut_off, answer)
                    await self._raise_for_status(address, answer, reader.request)

                    def take(data: bytes) -> None:
                        watch.heard()
                        address.heard()
                        reader.feed(data)

                    data = await answer.content.readany()
                    self._check_is_no_page(address, answer, data)
                    if _is_json(answer.content_type, data):
                        reader.whole(data + await _whole_body(answer))
                        return
                    # The first token is taken at once, not at the next tick.
                    while data:
                        take(data)
                        data = b"" if reader.begun else await answer.content.readany()
                    await self._loop.read(answer.content, take)
                    reader.end()
        except (aiohttp.ClientError, Lost, Silent, _Gone):
            if not reader.is_complete:
                raise
            reader.end()

    def _request(
        self, address: Address, url: str, payload: Body, headers: Mapping[str, str]
    ) -> Any:  # aiohttp's request context manager has no public type.
        model = address.model or self._server.model or self._id
        body: bytes | aiohttp.MultipartWriter
        if callable(payload):
            body = payload(model)
            headers = {**headers, "Content-Type": body.content_type}
        else:
            body = orjson.dumps({**payload, "model": model})
        return self._session.post(url, data=body, headers=headers, allow_redirects=False)

    async def _raise_for_status(
        self, address: Address, answer: aiohttp.ClientResponse, request: GenerationRequest
    ) -> None:
        if answer.status == 200:
            return
        body = b""
        with suppress(aiohttp.ClientError):  # Cut off: the status says enough.
            while len(body) < _MAX_ERROR_BYTES and (data := await answer.content.readany()):
                body += data
        error = self.errors.answered(answer.status, answer.headers, body, request, address.base_url)
        if answer.status in _TRY_ELSEWHERE:
            pause_s = retry_after_s(answer.headers)
            address.avoid(_AVOIDED_S if pause_s is None else pause_s)
            raise _NotHere(error, answer.status)
        raise error

    def _check_is_no_page(
        self, address: Address, answer: aiohttp.ClientResponse, data: bytes
    ) -> None:
        """Raise GenerationFailed for a page, such as the login of a proxy.

        Some servers send speech and events under its content type.
        """
        if answer.content_type == "text/html" and data.lstrip().startswith(b"<"):
            page = self._server.without_key(data[:_MAX_PAGE_LOGGED].decode(errors="replace"))
            logger.error("model %s: %s sends a page: %r", self._id, address.base_url, page)
            raise GenerationFailed("The model's server sent a page of HTML.")

    def _watched(
        self, address: Address, sink: Sink | AnswerReader, reader: AnswerReader | None
    ) -> AbstractContextManager[Watch]:
        def why_not(silent_s: float) -> Exception | None:
            """Return why to stop waiting: this server is gone, or another one can take the run."""
            may_go = reader is None or not reader.begun
            if not address.is_up and may_go and self.addresses.has_another({address}):
                return _Gone()
            return _Gone() if address.is_gone and silent_s > _SILENT_S else None

        return self._loop.watching(sink, self._server.timeout_s, why_not)


class _CheckedResolver(AbstractResolver):
    """Resolves names to allowed addresses only.

    The connector connects to the addresses that this returns, so DNS rebinding gains nothing. It
    does not resolve numeric addresses: ``server_of`` checks these.
    """

    def __init__(self, allowed: AllowedAddresses) -> None:
        self._allowed, self._inner = allowed, ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host. Raise OSError unless all are allowed."""
        results = await self._inner.resolve(host, port, family)
        if not all(self._allowed.has(host, result["host"]) for result in results):
            raise OSError(
                errno.EACCES,  # aiohttp shows the message of an error with a number only.
                "the host has an address that is not public; the site's owner may allow it in "
                "UPSTREAM_ALLOWED_HOSTS",
            )
        return results

    async def close(self) -> None:
        """Do nothing."""


async def _whole_body(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body. Raise GenerationFailed for one of more than ``MAX_ANSWER_BYTES``."""
    body = await body_within(answer, MAX_ANSWER_BYTES)
    if body is None:
        raise GenerationFailed(
            f"The model's server sent an answer of more than {MAX_ANSWER_BYTES} bytes."
        )
    return body


def _is_json(content_type: str, beginning: bytes) -> bool:
    """Whether an answer is JSON, and not events under its content type."""
    is_labelled = content_type == "application/json" or content_type.endswith("+json")
    return is_labelled and not beginning.lstrip().startswith(_EVENTS)


def _is_cut_off(answer: aiohttp.ClientResponse) -> bool:
    """Whether the connection was closed before the end of the answer."""
    connection = answer.connection
    if connection is None:
        return False
    return connection.transport is None or connection.transport.is_closing()
