"""Celery's Redis transport, without the bookkeeping of unacknowledged messages for bells.

Kombu notes every message it delivers in two Redis structures and takes it out again when the task
starts, so that the message survives a consumer that dies in between. A bell need not survive: the
generation it speaks of waits in PostgreSQL, and upkeep rings again. The bookkeeping was the largest
part of what a worker spent on a request outside its engine.
"""

from __future__ import annotations

from typing import Any

from kombu.transport import TRANSPORT_ALIASES, redis

QUEUE_PREFIX = "model."
"""Queues whose messages are bells; all others keep Celery's usual guarantees."""


class QoS(redis.QoS):
    """Keeps no account of bells."""

    def append(self, message: Any, delivery_tag: str) -> None:
        """Note a message that was delivered, unless it is a bell."""
        if not message.delivery_info["routing_key"].startswith(QUEUE_PREFIX):
            super().append(message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        """Take a message off the account, if it is there."""
        if self._delivered is not None and delivery_tag in self._delivered:
            super().ack(delivery_tag)


class Channel(redis.Channel):
    """A channel with our account."""

    QoS = QoS


class Transport(redis.Transport):
    """Kombu's Redis transport with our channel."""

    Channel = Channel


def install() -> None:
    """Have ``redis://`` and ``redis+socket://`` brokers use this transport."""
    TRANSPORT_ALIASES["redis"] = f"{__name__}:Transport"
