"""Celery's Redis transport, as bells need it.

Kombu notes every message it delivers in two Redis structures and takes it out again when the task
starts, so that the message survives a consumer that dies in between. A bell need not survive: the
generation it speaks of waits in PostgreSQL, and upkeep rings again. The bookkeeping was the largest
part of what a worker spent on a request outside its engine.

A worker listens for the bells of a model only while it could answer one: a bell that nobody here
can answer stays in Redis, where another worker hears it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from kombu.asynchronous import get_event_loop
from kombu.transport import TRANSPORT_ALIASES, redis
from kombu.utils.scheduling import round_robin_cycle

QUEUE_PREFIX = "model."
"""Queues whose messages are bells; all others keep Celery's usual guarantees."""
_OWN_PREFIX = f"{QUEUE_PREFIX}@"


def queue_name(model: str) -> str:
    """Return the Celery queue of this model's bells."""
    return f"{QUEUE_PREFIX}{model}"


def own_queue(worker: str) -> str:
    """Return the Celery queue of bells for one worker: for generations that prefer it."""
    return f"{_OWN_PREFIX}{worker}"


def own_queue_keys(worker: str) -> tuple[str, ...]:
    """Return what Redis holds of this queue: the bells, and Kombu's notes that it exists."""
    queue = own_queue(worker)
    return queue, f"_kombu.binding.{queue}", f"_kombu.binding_permanent.{queue}"


class Ears:
    """Which bells this process listens for. Everything is heard until a worker says otherwise."""

    def __init__(self) -> None:
        self._is_open: Callable[[str], bool] = lambda _: True
        self._ring_own: Callable[[str], None] = lambda _: None
        self._listening: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def attach(self, is_open: Callable[[str], bool], ring_own: Callable[[str], None]) -> None:
        """Ask this worker which models could take a generation now.

        ``ring_own`` rings for a model in the worker's own queue.
        """
        self._is_open, self._ring_own = is_open, ring_own

    def listen(self, queues: Iterable[str]) -> list[str]:
        """Return those of a consumer's queues from which it shall take the next message.

        The worker's own comes first; it is for all models, so it is heard while any is open.
        """
        with self._lock:
            chosen = [queue for queue in queues if self._wants(queue)]
            own = [queue for queue in queues if queue.startswith(_OWN_PREFIX)]
            self._listening = frozenset(chosen)
        return [*own, *chosen] if chosen else []

    def _wants(self, queue: str) -> bool:
        if queue.startswith(_OWN_PREFIX):
            return False
        is_bell = queue.startswith(QUEUE_PREFIX)
        return not is_bell or self._is_open(queue.removeprefix(QUEUE_PREFIX))

    def opened(self, model: str) -> None:
        """Listen for this model again, if the consumer does not; it has just got a free slot.

        The consumer is waiting on the queues it has: what wakes it is a bell in its own queue, or,
        when it waits on none, its event loop.
        """
        with self._lock:
            if queue_name(model) in self._listening:
                return
            is_deaf = not self._listening
            self._listening |= {queue_name(model)}
        if not is_deaf:
            self._ring_own(model)
        elif (hub := get_event_loop()) is not None:
            hub.call_soon(lambda: None)


ears = Ears()


class OpenQueues(round_robin_cycle):  # type: ignore[type-arg]  # Generic in its stubs alone.
    """The order in which a consumer asks its queues: in turns, and only those that are wanted."""

    def consume(self, n: int) -> list[str]:  # type: ignore[override]  # Kombu wants a list.
        """Return the queues to wait on."""
        return ears.listen(super().consume(n))


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
    """A channel with our account and our order."""

    QoS = QoS
    queue_order_strategy = f"{__name__}:OpenQueues"


class Transport(redis.Transport):
    """Kombu's Redis transport with our channel."""

    Channel = Channel


def install() -> None:
    """Have ``redis://`` and ``redis+socket://`` brokers use this transport."""
    TRANSPORT_ALIASES["redis"] = f"{__name__}:Transport"
