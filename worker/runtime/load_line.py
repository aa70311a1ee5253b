"""The models of a worker that wait to be loaded, in turn, and when each should be ready.

How long a model's load takes is learnt: the latest load on this host is kept in Redis.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import redis.exceptions

from inference_site.domain.model_spec import ModelSpec
from inference_site.storage.redis import site_client

_KEPT_S = 30 * 86_400


class Loadable(Protocol):
    """A model that is to be loaded, as it is seen from here."""

    spec: ModelSpec


T = TypeVar("T", bound=Loadable)


class LoadLine(Generic[T]):
    """The models that wait to be loaded, the longest waiting first, and those that are loaded now.

    For any thread.
    """

    def __init__(self) -> None:
        self._waiting: list[T] = []
        self._begun: dict[T, float] = {}
        self._known: dict[str, float] = {}
        self._changed = threading.Condition()

    def put(self, model: T) -> None:
        """Have a model wait for its turn."""
        with self._changed:
            self._waiting.append(model)
            self._changed.notify()

    def first(self, is_alone: Callable[[T], bool]) -> T:
        """Return the model whose turn it is, which stays in the line; wait for one.

        Of those that load alone the turn of one comes when no other of them is being loaded.
        """

        def found() -> T | None:
            is_taken = any(map(is_alone, self._begun))
            return next((m for m in self._waiting if not (is_taken and is_alone(m))), None)

        with self._changed:
            self._changed.wait_for(lambda: found() is not None)
            model = found()
            assert model is not None
            return model

    def begin(self, model: T) -> None:
        """Note that the load of a model begins."""
        with self._changed:
            self._begun.setdefault(model, time.monotonic())

    def leave(self, model: T) -> None:
        """Take a model out of the line, which is being loaded or will never be."""
        with self._changed, contextlib.suppress(ValueError):
            self._waiting.remove(model)

    def end(self, model: T, *, is_loaded: bool) -> None:
        """Note that the load of a model has ended; learn from it if it was good."""
        with self._changed:
            began = self._begun.pop(model, None)
            self._changed.notify()
        if began is None or not is_loaded:
            return
        seconds = self._known[model.spec.id] = time.monotonic() - began
        with contextlib.suppress(redis.exceptions.RedisError):
            pipeline = site_client().pipeline(transaction=False)
            pipeline.hset(_key(), model.spec.id, round(seconds, 3))
            pipeline.expire(_key(), _KEPT_S)
            pipeline.execute()

    def read(self) -> None:
        """Take up what this host has learnt before."""
        with contextlib.suppress(redis.exceptions.RedisError):
            learnt: Any = site_client().hgetall(_key())
            known = {id_.decode(): float(seconds) for id_, seconds in learnt.items()}
            self._known = {**known, **self._known}

    def expected_s(self, model: T, loading_s: float, stay_s: float | None) -> float | None:
        """Return in how many seconds a model should be ready; None if unknown.

        ``loading_s`` is for how long it has been loading if it is not in the line: its server is
        started again. ``stay_s`` is for how long whoever makes room for the first of the line
        stays, None if it needs none. Then each model before this one stays, too, as its entry says.
        """
        with self._changed:
            began, waiting = self._begun.get(model), list(self._waiting)
        own_s = self._known.get(model.spec.id)
        if own_s is None:
            return None
        if began is not None:
            return max(0.0, own_s - (time.monotonic() - began))
        if model not in waiting:
            return max(0.0, own_s - loading_s)
        before = waiting[: waiting.index(model)]
        loads = [s for other in before if (s := self._known.get(other.spec.id)) is not None]
        if len(loads) < len(before):
            return None
        stays_s = 0.0
        if stay_s is not None:
            stays_s = stay_s + sum(other.spec.min_resident_s for other in before)
        return own_s + stays_s + sum(loads)


def _key() -> str:
    return f"load-seconds:{socket.gethostname()}"
