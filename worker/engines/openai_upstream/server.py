"""The servers of a model: how to connect to them, their health checks, and the choice of one."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import httpx
import orjson

from inference_site.catalogue.engines.openai_upstream import (
    FLAVORS,
    Flavor,
    UpstreamOptions,
    fits_header,
)
from inference_site.core.domain.addresses import AllowedAddresses
from inference_site.core.domain.errors import EngineLoadError
from inference_site.core.domain.model_spec import ModelSpec

logger = logging.getLogger(__name__)

NOT_ASKED = "It has not been asked yet."
PATIENCE_S = 10.0
_DOWN_S = 1.0
"""Interval of the health checks while a server is down."""
_GONE_AFTER_S = 2.0
"""Twice that interval: a server that is down for longer counts as gone."""
_ENDS_S = 5.0
"""How long a server may take to end after its engine."""
_MAX_LIST_BYTES = 16 * 2**20
_MAX_NAMES_LOGGED = 50
_MAX_BODY_LOGGED = 200
_ALIVE = (429,)
"""Status of a server that limits requests: it is up."""
CLOSE = {"Connection": "close"}
"""For requests to a worker's own server that come every few seconds: llama.cpp looks at each idle
connection 100 times a second, which costs more than to connect again."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server of this worker listens: at a port, or on the unix socket of this path."""

    root: str
    port: int
    key: str = field(repr=False)
    socket: str = ""

    def client(self, timeout_s: float) -> httpx.Client:
        """Return a client that sends the key, and keeps no connection open."""
        return httpx.Client(
            base_url=self.root,
            headers={"Authorization": f"Bearer {self.key}", **CLOSE},
            timeout=timeout_s,
            transport=httpx.HTTPTransport(uds=self.socket or None, trust_env=False),
            trust_env=False,
        )


@dataclass(frozen=True, slots=True)
class Server:
    """The servers of one model, all of one kind, and the settings of their API.

    ``model`` is the model's name there; None: see ``Health``. ``template_vars`` are default
    variables of the chat template. ``timeout_s`` bounds the wait for a connection and for each
    piece of data; ``check_every_s`` is the interval of the health checks. ``allowed_addresses`` are
    the only ones to connect to; None: any. ``socket`` is the path of a unix socket to connect to
    instead. ``is_own``: this worker has started it.
    """

    base_urls: tuple[str, ...]
    model: str | None
    flavor: Flavor
    fields: Mapping[str, str]
    template_vars: Mapping[str, Any]
    timeout_s: float
    check_every_s: float
    key: str | None = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    allowed_addresses: AllowedAddresses | None = None
    socket: str = ""
    is_own: bool = False

    def without_key(self, text: str) -> str:
        """Return a text of the server with the key replaced by asterisks."""
        return text.replace(self.key, "***") if self.key else text


def server_of(spec: ModelSpec) -> Server:
    """Return the server of a model. Raise EngineLoadError naming the model and the key."""
    options = UpstreamOptions.of(spec)
    flavor = FLAVORS[options.flavor]
    allowed = spec.allowed_addresses
    if allowed and not all(allowed.may_name(url.host or "") for url in options.addresses):
        raise EngineLoadError(f"Model '{spec.id}': an address of its servers is not allowed.")
    return Server(
        base_urls=tuple(dict.fromkeys(str(url).rstrip("/") for url in options.addresses)),
        model=options.model,
        flavor=flavor,
        fields={k: v for k, v in {**flavor.fields, **options.fields}.items() if v is not None},
        template_vars=options.chat_template_kwargs,
        timeout_s=options.timeout_s,
        check_every_s=options.check_every_s,
        key=_key(spec, options),
        headers={name: value.get_secret_value() for name, value in options.headers.items()},
        allowed_addresses=allowed,
    )


def own_server(
    spec: ModelSpec,
    flavor: Flavor,
    at: Endpoint,
    template_vars: Mapping[str, Any] = MappingProxyType({}),
) -> Server:
    """Return the server of a model that this worker has started."""
    return Server(
        base_urls=(f"{at.root}/v1",),
        model=spec.id,
        flavor=flavor,
        fields=flavor.fields,
        template_vars=template_vars,
        timeout_s=1e6,  # ``OwnServer`` checks that the server is alive; a prompt may take long.
        check_every_s=5.0,
        key=at.key,
        headers={},
        socket=at.socket,
        is_own=True,
    )


def _key(spec: ModelSpec, options: UpstreamOptions) -> str | None:
    """Return the server's key from the option that names its source; None without one.

    Raise EngineLoadError naming the option.
    """
    option = ""
    try:
        if options.api_key:
            option = "api_key"
            return fits_header(options.api_key.get_secret_value())
        if variable := options.api_key_env:
            option = "api_key_env"
            value = os.environ.get(variable)
            if not value:
                raise ValueError(f"names {variable}, which is not set")
            return fits_header(value)
        if file := options.api_key_file:
            option = "api_key_file"
            try:
                return fits_header(Path(file).read_text(encoding="utf-8").strip())
            except (OSError, UnicodeDecodeError) as exc:
                raise ValueError(f"cannot be read: {exc}") from exc
    except ValueError as exc:
        raise EngineLoadError(f"Model '{spec.id}': '{option}' {exc}.") from exc
    return None


class Address:
    """One server of the model. ``fault`` says why it cannot be used; empty while it can.

    ``model`` is the model's name there, once it is known; ``contexts`` are the context lengths of
    its models by name. ``is_silent``: the fault is a timeout, which may mean that it is busy.
    ``is_llama_cpp``: it closes its connection after each stream, and does not say so.
    """

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.model: str | None = None
        self.contexts: dict[str, int | None] = {}
        self.fault = NOT_ASKED
        self.busy = 0
        self.is_silent = True
        self.is_llama_cpp = False
        self._down_at = 0.0
        self._heard_at = self._avoided_until = self._doubted_until = -math.inf

    @property
    def root_url(self) -> str:
        """The address without ``/v1``: some servers have their own endpoints there."""
        return self.base_url.removesuffix("/v1")

    @property
    def is_up(self) -> bool:
        """Whether it can be used."""
        return not self.fault

    def note(self, fault: str, *, is_silent: bool) -> None:
        """Set the fault; empty: the server is up."""
        if not self.fault:
            self._down_at = time.monotonic()
        self.fault, self.is_silent, self._doubted_until = fault, is_silent, -math.inf

    def doubt(self) -> None:
        """Ignore good health checks for a while: the engine has ended, the port is still open."""
        self._doubted_until = time.monotonic() + _ENDS_S

    @property
    def is_doubted(self) -> bool:
        """Whether good health checks are ignored."""
        return time.monotonic() < self._doubted_until

    @property
    def is_gone(self) -> bool:
        """Whether it has been down for some time, not only silent."""
        is_long = time.monotonic() - self._down_at > _GONE_AFTER_S
        return bool(self.fault) and not self.is_silent and is_long

    @property
    def is_avoided(self) -> bool:
        """Whether a pause that it has asked for is not over."""
        return time.monotonic() < self._avoided_until

    def avoid(self, seconds: float) -> None:
        """Prefer other servers during this time."""
        self._avoided_until = time.monotonic() + seconds

    def heard(self) -> None:
        """Note that it has sent data of a run."""
        self._heard_at = time.monotonic()

    def was_heard_within(self, seconds: float) -> bool:
        """Whether it has sent data of a run within this time."""
        return time.monotonic() - self._heard_at < seconds

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Count a run on it during the ``with`` block."""
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1


class Addresses:
    """The servers of one model, all alike. For the event loop; ``fault`` is for any thread."""

    def __init__(self, base_urls: Collection[str]) -> None:
        self.all = [Address(url) for url in base_urls]

    @property
    def fault(self) -> str:
        """Why nothing can be run; empty while one of them is up."""
        if any(address.is_up for address in self.all):
            return ""
        return "\n".join(address.fault for address in self.all)

    def best(self, tried: Collection[Address] = ()) -> Address:
        """Return the server that is up and has the fewest runs, an untried one if there is any."""
        untried = [address for address in self.all if address not in tried] or self.all
        # Random among equals, so that the workers of a site do not all begin with the same server.
        return min(untried, key=lambda a: (not a.is_up, a.is_avoided, a.busy, random.random()))  # noqa: S311  # No secret.

    def has_another(self, tried: Collection[Address]) -> bool:
        """Whether an untried server is up."""
        return any(address.is_up and address not in tried for address in self.all)


class Fault(Exception):
    """Why a server cannot be used; names its address.

    The console shows it to people who may have chosen the address. So it quotes nothing of the
    server's answer: they could read any service of the network that way. ``is_silent``: a timeout.
    """

    def __init__(self, message: str, *, is_silent: bool = False) -> None:
        super().__init__(message)
        self.is_silent = is_silent


class Health:
    """Finds the model on each of its servers, and updates their faults."""

    def __init__(
        self, model_id: str, server: Server, addresses: Addresses, session: aiohttp.ClientSession
    ) -> None:
        self._id, self._server = model_id, server
        self._addresses, self._session = addresses, session
        self._patience_s = min(server.timeout_s, PATIENCE_S)
        self.on_change: Callable[[], None] = lambda: None
        """Called when the first server is up, and when the last one goes down."""
        self._is_down = asyncio.Event()  # Set when a server goes down.

    async def watch(self) -> None:
        """Check the servers for ever."""
        while True:
            await self._pause()
            try:
                await self.check()
            except Exception:  # The loop must go on: nothing else notices a server that is back.
                logger.exception("model %s: its servers could not be checked", self._id)

    async def _pause(self) -> None:
        """Wait for the next check; it is soon once a server is down, also if a run finds it so."""
        is_whole = all(address.is_up for address in self._addresses.all)
        self._is_down.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._server.check_every_s if is_whole else _DOWN_S):
                await self._is_down.wait()
                await asyncio.sleep(_DOWN_S)

    async def check(self) -> None:
        """Check each server that is down, or has sent no data of a run since the last check."""
        every_s = self._server.check_every_s
        due = (a for a in self._addresses.all if not (a.is_up and a.was_heard_within(every_s)))
        await asyncio.gather(*map(self.look_at, due))

    async def look_at(self, address: Address) -> None:
        """Check one server now."""
        try:
            address.model = await self._model_name(address)
        except Fault as exc:
            # A busy server may be slow to answer this; data of a run shows that it is up.
            patience_s = self._patience_s + self._server.check_every_s
            if not exc.is_silent or not address.was_heard_within(patience_s):
                self.note(address, str(exc), is_silent=exc.is_silent)
        else:
            self.note(address, "")

    def note_end(self, address: Address) -> None:
        """Note that a server's engine has ended, though its port may still be open."""
        self.note(address, f"Model '{self._id}': the engine of {address.base_url} has ended.")
        address.doubt()

    def note(self, address: Address, fault: str, *, is_silent: bool = False) -> None:
        """Set the fault of a server, empty if it is up; log the change."""
        if not fault and address.is_doubted:
            return
        before, could_run = address.fault, not self._addresses.fault
        address.note(fault, is_silent=is_silent)
        if fault and not before:
            self._is_down.set()
        if fault and fault != before:
            logger.error("%s", fault)
        elif before and not fault:
            logger.info("model %s: %s can be used", self._id, address.base_url)
        if could_run != (not self._addresses.fault):
            self.on_change()

    async def _model_name(self, address: Address) -> str:
        """Return the model's name there: the option, else the id, else the only model's.

        Raise Fault naming the address and the reason.
        """
        url = f"{address.base_url}/models"
        listed = await self._listed(address, url)
        if listed is None:
            return address.model or self._server.model or self._id
        wanted = self._server.model or self._id
        for name in (wanted, f"{wanted}:latest"):  # Ollama's default tag.
            if name in listed:
                return wanted
        if self._server.model is None and len(set(listed.values())) == 1:
            return next(iter(listed.values()))
        if not listed and self._server.model is not None:  # Some servers list cached models only.
            return wanted
        names = sorted(set(listed.values()))
        self._log(address, f"it lists {', '.join(names[:_MAX_NAMES_LOGGED]) or 'no model'}")
        raise Fault(
            f"Model '{self._id}': {url} lists no model '{wanted}', but {len(names)} others; the "
            "log of the worker names them."
        )

    def _log(self, address: Address, answer: str) -> None:
        """Log a server's answer, unless the server was down before."""
        if not address.fault or address.fault == NOT_ASKED:
            answer = self._server.without_key(answer)
            logger.warning("model %s: %s: %r", self._id, address.base_url, answer)

    async def _listed(self, address: Address, url: str) -> dict[str, str] | None:
        """Return the server's models: their ids by name and alias; None if it limits requests."""
        # A server that closes the connection without saying so would close it under the next
        # request: aiohttp keeps it until then.
        headers = CLOSE if self._server.is_own else None
        try:
            async with asyncio.timeout(self._patience_s):
                async with self._session.get(url, allow_redirects=False, headers=headers) as answer:
                    body, status = await body_within(answer, _MAX_LIST_BYTES), answer.status
                    address.is_llama_cpp = answer.headers.get("Server") == "llama.cpp"
        except (aiohttp.ClientError, OSError) as exc:
            reason = str(exc) or type(exc).__name__
            fault = f"Model '{self._id}': {url} cannot be reached: {reason}"
            raise Fault(fault, is_silent=isinstance(exc, TimeoutError)) from exc
        if body is None:
            raise Fault(f"Model '{self._id}': {url} is too long.")
        if status in _ALIVE:
            return None
        if status != 200:
            beginning = body[:_MAX_BODY_LOGGED].decode(errors="replace")
            self._log(address, f"status {status}: {beginning}")
            raise Fault(f"Model '{self._id}': {url} answers with status {status}.")
        try:
            listed = orjson.loads(body)
            entries = listed if isinstance(listed, list) else listed["data"]  # Together AI.
            names = {str(entry["id"]): str(entry["id"]) for entry in entries}
            aliases = {str(a): str(e["id"]) for e in entries for a in e.get("aliases") or ()}
            contexts = {str(entry["id"]): _context_of(entry) for entry in entries}
        except (AttributeError, LookupError, TypeError, ValueError) as exc:
            raise Fault(f"Model '{self._id}': {url} is no list of models.") from exc
        address.contexts = contexts
        return aliases | names


def _context_of(entry: dict[str, Any]) -> int | None:
    """Return the context length that vLLM, SGLang and other inference sites list."""
    length = entry.get("max_model_len") or entry.get("context_length")
    return length if isinstance(length, int) and length > 0 else None


async def body_within(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes | None:
    """Return the body of an answer; None once more bytes have come."""
    body = bytearray()
    async for data in answer.content.iter_any():
        body += data
        if len(body) > most_bytes:
            return None
    return bytes(body)
