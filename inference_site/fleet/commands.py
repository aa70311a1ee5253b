"""Commands to workers: one list in Redis for each worker, and the thread that reads it.

A command is not a Celery task, because a worker must receive it while all its slots are busy. A
worker that is loading a model runs the command after the load. A command is delivered at most once;
its result is visible in the state that the worker announces in its lease.
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

from inference_site.storage.redis import site_client

logger = logging.getLogger(__name__)

_LIVES_S = 3600
"""Commands expire after this time, which is longer than any load takes."""
_WAIT_S = 1.0
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Command:
    """A command: load, unload or reload a model, tell its log, drain the worker, or resume it."""

    do: Literal["load", "unload", "reload", "log", "drain", "resume"]
    model: str = ""


def _key(worker: str) -> str:
    return f"worker:{worker}:commands"


def send(worker: str, command: Command) -> None:
    """Send a command to a worker. Raise redis' errors when Redis is down."""
    pipeline = site_client().pipeline(transaction=False)
    pipeline.lpush(_key(worker), orjson.dumps(asdict(command)))
    pipeline.expire(_key(worker), _LIVES_S)
    pipeline.execute()


class Listener:
    """Receives the commands of one worker on its own thread, and runs them in order."""

    def __init__(self, worker: str, run: Callable[[Command], None]) -> None:
        self._key, self._run = _key(worker), run
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._main, name="commands", daemon=True)

    def start(self) -> None:
        """Start listening."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening after the command that is running now."""
        self._ended.set()
        if not self._thread.is_alive():
            return
        with contextlib.suppress(redis.exceptions.RedisError):
            site_client().lpush(self._key, b"")  # Ends the blocking read.
        self._thread.join(_WAIT_S)
        with contextlib.suppress(redis.exceptions.RedisError):
            site_client().delete(self._key)

    def _main(self) -> None:
        while not self._ended.is_set():
            try:
                received: Any = site_client().brpop([self._key], timeout=_WAIT_S)
            except redis.exceptions.RedisError as exc:
                logger.warning("commands: %s", exc)
                self._ended.wait(_RETRY_S)
                continue
            if received is not None and not self._ended.is_set():
                self._handle(received[1])

    def _handle(self, message: bytes) -> None:
        try:
            command = Command(**orjson.loads(message))
            logger.info("command received: %s %s", command.do, command.model)
            self._run(command)
        except Exception:
            logger.exception("commands: %r failed", message)
