"""Commands to workers: a list in Redis for each worker, and the thread that reads it.

A command is not a Celery task, because a worker must receive it while all its slots are busy. A
worker that is loading a model runs the command after the load. A command is delivered at most once.
Its result is visible in the worker's lease; the result of ``log`` is a key in Redis.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import orjson
import redis.exceptions

from inference_site.core.storage.redis import site_client

logger = logging.getLogger(__name__)

_COMMAND_TTL_S = 3600
"""Longer than any load takes."""
_WAIT_S = 1.0
_RETRY_S = 0.5
_LOG_TTL_S = 30
_LOG_LINES = 100


@dataclass(frozen=True, slots=True)
class Command:
    """Load, unload or reload a model, store the log of its server, drain the worker, or resume."""

    do: Literal["load", "unload", "reload", "log", "drain", "resume"]
    model: str = ""


def _key(worker: str) -> str:
    return f"worker:{worker}:commands"


def send(worker: str, command: Command) -> None:
    """Send a command to a worker. Raise redis' errors when Redis is down."""
    pipeline = site_client().pipeline(transaction=False)
    pipeline.lpush(_key(worker), orjson.dumps(asdict(command)))
    pipeline.expire(_key(worker), _COMMAND_TTL_S)
    pipeline.execute()


class CommandListener:
    """Receives the commands of one worker on its own thread, and runs them in order."""

    def __init__(self, worker: str, run: Callable[[Command], None]) -> None:
        self._key, self._run = _key(worker), run
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._main, name="commands", daemon=True)

    def start(self) -> None:
        """Start listening."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening after the current command."""
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
            if received is None or self._ended.is_set():
                continue
            message = received[1]
            try:
                command = Command(**orjson.loads(message))
                logger.info("command received: %s %s", command.do, command.model)
                self._run(command)
            except Exception:
                logger.exception("commands: %r failed", message)


def server_log(worker: str, model: str) -> list[str]:
    """Return the stored lines of a model's server, and ask its worker to store the latest ones.

    The lines may contain what clients sent, so only people who may change generations see them.
    """
    try:
        send(worker, Command("log", model))
        log = site_client().get(_log_key(worker, model))
    except redis.exceptions.RedisError:
        return []
    return log.decode(errors="replace").splitlines() if isinstance(log, bytes) else []


def store_server_log(worker: str, model: str, lines: Sequence[str]) -> None:
    """Store the last lines of a model's server for some seconds."""
    site_client().set(_log_key(worker, model), "\n".join(lines[-_LOG_LINES:]), ex=_LOG_TTL_S)


def _log_key(worker: str, model: str) -> str:
    return f"server-log:{worker}:{model}"
