"""Health: each server of a model is asked for its models now and then, and so is found again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson

from worker.engines.openai_upstream.addresses import NOT_ASKED, Address, Addresses
from worker.engines.openai_upstream.server import Server

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
