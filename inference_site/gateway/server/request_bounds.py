"""A bound on the body that Daphne takes in before the application sees it.

Daphne collects the whole body, in memory or in a file, before it runs the application; without a
bound a client could fill both. It has no setting for that (https://github.com/django/daphne/issues/483):
once it has, or reads a body while the application runs, this module can go.
"""

from __future__ import annotations

from typing import Any

from daphne.http_protocol import HTTPFactory, WebRequest
from daphne.server import Server
from django.conf import settings

_GIVE_UP_AT = 8
"""A body this many times over the limit is not read to its end; the connection is closed."""


class BoundedRequest(WebRequest):  # type: ignore[misc]  # Daphne has no types.
    """Keeps one byte more of a body than is allowed, so that the relay can refuse it.

    The rest is read and dropped, so that the client is answered.
    """

    _kept = _received = 0

    def gotLength(self, length: int | None) -> None:  # Twisted's name.
        """Prepare for a body of this length."""
        super().gotLength(None if length is None else min(length, settings.MAX_BODY_BYTES + 1))

    def handleContentChunk(self, data: bytes) -> None:  # Twisted's name.
        """Keep what fits."""
        kept = data[: settings.MAX_BODY_BYTES + 1 - self._kept]
        self._kept += len(kept)
        self._received += len(data)
        if kept:
            super().handleContentChunk(kept)
        if self._received > _GIVE_UP_AT * settings.MAX_BODY_BYTES:
            self.channel.forceAbortClient()


class _BoundedFactory(HTTPFactory):  # type: ignore[misc]  # As above.
    def buildProtocol(self, addr: Any) -> Any:  # Twisted's name.
        protocol = super().buildProtocol(addr)
        protocol.requestFactory = BoundedRequest
        return protocol


class BoundedServer(Server):  # type: ignore[misc]  # As above.
    """Daphne's server, with bounded requests on all its ports."""

    @property
    def http_factory(self) -> HTTPFactory:
        """The factory of connections. ``run`` sets Daphne's own just before it listens."""
        return self._http_factory

    @http_factory.setter
    def http_factory(self, _: HTTPFactory) -> None:
        self._http_factory = _BoundedFactory(self)
