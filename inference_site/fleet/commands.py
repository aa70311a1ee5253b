"""What an operator tells a worker: a list in Redis for each, and the thread that reads it.

A command is no task: it must be heard by a worker all of whose slots are busy. One that is loading
hears it when it has loaded. It is heard at most once; the state that the worker announces says what
came of it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import orjson
import redis.exceptions

from inference_site.storage.redis_clients import site_client

logger = logging.getLogger(__name__)

_LIVES_S = 3600
"""A command that nobody has heard for so long is dropped: longer than any worker loads. No worker
hears that of another, whose id it would need."""
_WAIT_S = 1.0
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Command:
    """Load or unload a model; take no new work, or take it again.

    ``failed`` is what a child worker tells its parent: that a model could not be loaded, and why.
    """

    do: Literal["load", "unload", "failed", "drain", "resume"]
    model: str = ""
    reason: str = ""


def _key(worker: str) -> str:
    return f"worker:{worker}:commands"


def send(worker: str, command: Command) -> None:
    """Tell a worker. Raise redis' errors when Redis is down."""
    pipeline = site_client().pipeline(transaction=False)
    pipeline.lpush(_key(worker), orjson.dumps(asdict(command)))
    pipeline.expire(_key(worker), _LIVES_S)
    pipeline.execute()


class Listener:
    """Hears the commands of one worker on a thread of its own, and has them obeyed in order."""

    def __init__(self, worker: str, obey: Callable[[Command], None]) -> None:
        self._key, self._obey = _key(worker), obey
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._main, name="commands", daemon=True)

    def start(self) -> None:
        """Start listening."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; the command that is being obeyed is the last."""
        self._ended.set()
        if not self._thread.is_alive():
            return
        with contextlib.suppress(redis.exceptions.RedisError):
            site_client().lpush(self._key, b"")  # Wakes it.
        self._thread.join(_WAIT_S)
        with contextlib.suppress(redis.exceptions.RedisError):
            site_client().delete(self._key)

    def _main(self) -> None:
        while not self._ended.is_set():
            try:
                heard: Any = site_client().brpop([self._key], timeout=_WAIT_S)
            except redis.exceptions.RedisError as exc:
                logger.warning("commands: %s", exc)
                self._ended.wait(_RETRY_S)
                continue
            if heard is not None and not self._ended.is_set():
                self._take(heard[1])

    def _take(self, message: bytes) -> None:
        try:
            command = Command(**orjson.loads(message))
            logger.info("told to %s %s", command.do, command.model)
            self._obey(command)
        except Exception:
            logger.exception("commands: %r was not obeyed", message)
