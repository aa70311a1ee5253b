"""The servers of a model: their addresses, and which of them can be asked."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import orjson

from worker.engines.openai_upstream.server import Server

NOT_ASKED = "It has not been asked yet."
_SURE_S = 2.0
"""As long as two looks at a server that is down."""
_ENDS_S = 5.0
"""How long a server may take to end after its engine."""


class Address:
    """One server of the model. ``fault`` says why it cannot be used; empty while it can.

    ``model`` is the model's name there, once it is known; ``contexts`` are the tokens that it
    lists for each of its models. It ``is_silent`` when its fault is that it says nothing, which one
    that is busy may do, too.
    """

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.model: str | None = None
        self.contexts: dict[str, int | None] = {}
        self.fault = NOT_ASKED
        self.busy = 0
        self.is_silent = True
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
        """Note what is wrong with it; nothing: an empty text."""
        if not self.fault:
            self._down_at = time.monotonic()
        self.fault, self.is_silent, self._doubted_until = fault, is_silent, -math.inf

    def doubt(self) -> None:
        """Do not believe for a while that it is up: its engine has ended, and its port has not."""
        self._doubted_until = time.monotonic() + _ENDS_S

    @property
    def is_doubted(self) -> bool:
        """Whether it is not believed to be up."""
        return time.monotonic() < self._doubted_until

    @property
    def is_gone(self) -> bool:
        """Whether it has been down for some time, and not only silent."""
        is_sure = time.monotonic() - self._down_at > _SURE_S
        return bool(self.fault) and not self.is_silent and is_sure

    @property
    def is_avoided(self) -> bool:
        """Whether it has asked for a pause that is not over."""
        return time.monotonic() < self._avoided_until

    def avoid(self, seconds: float) -> None:
        """Prefer others for so long."""
        self._avoided_until = time.monotonic() + seconds

    def heard(self) -> None:
        """Note that it has answered a run."""
        self._heard_at = time.monotonic()

    def was_heard_within(self, seconds: float) -> bool:
        """Whether it has answered a run in the last so many seconds."""
        return time.monotonic() - self._heard_at < seconds

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Count a run of this process on it."""
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
        """Return the one that is up and has the fewest runs, if there is one not tried yet."""
        left = [address for address in self.all if address not in tried] or self.all
        # Equals are drawn, so that the workers of a site do not all begin with the same one.
        return min(left, key=lambda a: (not a.is_up, a.is_avoided, a.busy, random.random()))  # noqa: S311  # No secret.

    def has_another(self, tried: Collection[Address]) -> bool:
        """Whether one is up that was not tried."""
        return any(address.is_up and address not in tried for address in self.all)


logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
_DOWN_S = 1.0
"""How often servers are asked while one of them is down."""
_NAMES_LOGGED = 50
_BODY_LOGGED = 200
_ALIVE = (429,)
"""A server that limits requests answers, and has the model that it had."""


class Fault(Exception):
    """Why a server cannot be used; names its address.

    Pages show it to people who may have chosen the address, so it repeats nothing of the server's
    answer: they could read any service of the network that way. ``is_silent``: it says nothing.
    """

    def __init__(self, said: str, *, is_silent: bool = False) -> None:
        super().__init__(said)
        self.is_silent = is_silent


class Health:
    """Finds the model on each of its servers, and keeps their faults true."""

    def __init__(
        self, model_id: str, server: Server, addresses: Addresses, session: aiohttp.ClientSession
    ) -> None:
        self._id, self._server = model_id, server
        self._addresses, self._session = addresses, session
        self._patience_s = min(server.timeout_s, PATIENCE_S)
        self.on_change: Callable[[], None] = lambda: None
        """Called when the model can be run again, or cannot any more."""

    async def watch(self) -> None:
        """Ask for ever."""
        while True:
            is_whole = all(address.is_up for address in self._addresses.all)
            await asyncio.sleep(self._server.check_every_s if is_whole else _DOWN_S)
            try:
                await self.check()
            except Exception:  # The watch must go on: nothing else finds a server again.
                logger.exception("model %s: its servers could not be checked", self._id)

    async def check(self) -> None:
        """Ask each once."""
        await asyncio.gather(*map(self._check, self._addresses.all))

    async def _check(self, address: Address) -> None:
        if address.is_up and address.was_heard_within(self._server.check_every_s):
            return
        await self.look_at(address)

    async def look_at(self, address: Address) -> None:
        """Ask one now."""
        try:
            address.model = await self._found(address)
        except Fault as exc:
            # One that is busy may be slow to answer this; what it sends to runs counts for more.
            patience_s = self._patience_s + self._server.check_every_s
            if not exc.is_silent or not address.was_heard_within(patience_s):
                self.note(address, str(exc), is_silent=exc.is_silent)
        else:
            self.note(address, "")

    def note_end(self, address: Address) -> None:
        """Note that what generates on a server has ended, though its port may be open still."""
        self.note(address, f"Model '{self._id}': the engine of {address.base_url} has ended.")
        address.doubt()

    def note(self, address: Address, fault: str, *, is_silent: bool = False) -> None:
        """Note what is wrong with a server, or that nothing is."""
        if not fault and address.is_doubted:
            return
        before, could_run = address.fault, not self._addresses.fault
        address.note(fault, is_silent=is_silent)
        if fault and fault != before:
            logger.error("%s", fault)
        elif before and not fault:
            logger.info("model %s: %s can be used", self._id, address.base_url)
        if could_run != (not self._addresses.fault):
            self.on_change()

    async def _found(self, address: Address) -> str:
        """Return the model's name there: the option, else the id, else the only one there is.

        Raise Fault naming the address and the reason.
        """
        url = f"{address.base_url}/models"
        listed = await self._listed(address, url)
        if listed is None:
            return address.model or self._server.model or self._id
        wanted = self._server.model or self._id
        for name in (wanted, f"{wanted}:latest"):  # The tag that Ollama lets one leave out.
            if name in listed:
                return wanted
        if self._server.model is None and len(set(listed.values())) == 1:
            return next(iter(listed.values()))
        if not listed and self._server.model is not None:  # It may list a cache, and run a folder.
            return wanted
        names = sorted(set(listed.values()))
        self._log(address, f"it lists {', '.join(names[:_NAMES_LOGGED]) or 'no model'}")
        raise Fault(
            f"Model '{self._id}': {url} lists no model '{wanted}', but {len(names)} others; the "
            "log of the worker names them."
        )

    def _log(self, address: Address, said: str) -> None:
        """Log what a server has answered, once for each time that it is down."""
        if not address.fault or address.fault == NOT_ASKED:
            shown = self._server.without_key(said)
            logger.warning("model %s: %s: %r", self._id, address.base_url, shown)

    async def _listed(self, address: Address, url: str) -> dict[str, str] | None:
        """Return the names of the server's models, aliases included, and whose they are."""
        try:
            async with asyncio.timeout(self._patience_s):
                async with self._session.get(url, allow_redirects=False) as answer:
                    body, status = await answer.read(), answer.status
        except (aiohttp.ClientError, OSError) as exc:
            said = str(exc) or type(exc).__name__
            fault = f"Model '{self._id}': {url} cannot be reached: {said}"
            raise Fault(fault, is_silent=isinstance(exc, TimeoutError)) from exc
        if status in _ALIVE:
            return None
        if status != 200:
            self._log(address, f"status {status}: {body[:_BODY_LOGGED].decode(errors='replace')}")
            raise Fault(f"Model '{self._id}': {url} answers with status {status}.")
        try:
            entries = orjson.loads(body)["data"]
            names = {str(entry["id"]): str(entry["id"]) for entry in entries}
            aliases = {str(a): str(e["id"]) for e in entries for a in e.get("aliases") or ()}
            contexts = {str(entry["id"]): _context_of(entry) for entry in entries}
        except (AttributeError, LookupError, TypeError, ValueError) as exc:
            raise Fault(f"Model '{self._id}': {url} is no list of models.") from exc
        address.contexts = contexts
        return aliases | names


def _context_of(entry: dict[str, Any]) -> int | None:
    """Return the tokens of a context, as vLLM, SGLang and other sites of this kind list them."""
    told = entry.get("max_model_len") or entry.get("context_length")
    return told if isinstance(told, int) and told > 0 else None
