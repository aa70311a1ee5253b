"""ChildWorkers: the processes of a worker's models, one for each that a library runs.

Libraries crash, and a crash takes the process with it. They also hold Python's lock while they
load, for seconds with a large file, which would stall every answer of the process and let its lease
end; and what a process held is given back when it ends, all of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from django.conf import settings

from inference_site.host import free_port
from inference_site.restart_delay import RestartDelay
from worker.runtime.children.fork_server import ChildOrder, ForkServer

logger = logging.getLogger(__name__)

_STOP_S = 5.0

Stage = Literal["announced", "loaded", "leaving", "failed"]


class Family(Protocol):
    """A runtime, as it is seen from here. Called from threads of this module."""

    def on_child_announced(self, model: str) -> None:
        """Leave it to the child's own lease to tell of the model."""

    def on_child_gone(self) -> None:
        """Tell which models may be loaded now."""

    def on_child_failed(self, model: str, reason: str) -> None:
        """Tell that the model could not be loaded."""

    def on_child_crashed(self, model: str, reason: str) -> None:
        """Tell that the model is being loaded again, after its process has crashed."""


@dataclass
class _Child:
    """One process: what it has said, and whether it was told to end."""

    model: str
    link: socket.socket
    port: int
    pid: int = 0
    stage: Stage | None = None
    reason: str = ""
    is_stopping: bool = False
    started_at: float = field(default_factory=time.monotonic)


class ChildWorkers:
    """The child processes of one worker, by model; without a server there are none."""

    def __init__(self, parent: str, server: ForkServer | None, family: Family) -> None:
        self._parent, self._server, self._family = parent, server, family
        self._children: dict[str, _Child] = {}
        self._waiting: list[str] = []
        self._may_idle: dict[str, bool] = {}
        self._delays: defaultdict[str, RestartDelay] = defaultdict(RestartDelay)
        self._restarts: dict[str, threading.Timer] = {}
        self._is_stopping = False
        self._changed = threading.Condition(threading.RLock())
        if server is not None:
            server.watch(self._on_loss)

    @property
    def can_start(self) -> bool:
        """Whether there is what forks them."""
        return self._server is not None

    @property
    def metrics_ports(self) -> dict[str, int]:
        """The ports of their metrics on this host, by model."""
        with self._changed:
            return {model: child.port for model, child in self._children.items() if child.port}

    @property
    def loaded(self) -> frozenset[str]:
        """The models of which a process takes work, or did until it was idle."""
        with self._changed:
            children = tuple(self._children.items())
        return frozenset(id_ for id_, child in children if child.stage in ("loaded", "leaving"))

    @property
    def models(self) -> frozenset[str]:
        """The models that have a process, or will have one; not those that are leaving."""
        with self._changed:
            staying = [id_ for id_, child in self._children.items() if child.stage != "leaving"]
            return frozenset({*staying, *self._waiting, *self._restarts})

    def start(self, model: str, *, may_idle: bool = True) -> None:
        """Start a worker for this model, unless it has one, when no other is loading.

        ``may_idle``: the model is unloaded when it has been idle for long. What fits on a GPU
        depends on what is there already, so they load one after the other.
        """
        with self._changed:
            if model not in self.models:
                self._may_idle[model] = may_idle
                self._waiting.append(model)
        self._start_next()

    def wait_for_one(self) -> None:
        """Return when one has loaded its model, or none is left that might."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    not self.models
                    or any(child.stage == "loaded" for child in self._children.values())
                )
            )

    def stop(self, model: str) -> None:
        """Have the worker of this model drain and end, and start no other."""
        with self._changed:
            if model in self._waiting:
                self._waiting.remove(model)
            if timer := self._restarts.pop(model, None):
                timer.cancel()
            if child := self._children.get(model):
                child.is_stopping = True
                self._signal(child, signal.SIGTERM)

    def restart(self, model: str) -> None:
        """Have the worker of this model drain and end, and start another then."""
        with self._changed:
            self.stop(model)
            self._waiting.append(model)
        self._start_next()

    def terminate(self) -> None:
        """Have all of them drain and end."""
        with self._changed:
            self._is_stopping = True
            for model in {*self.models, *self._children}:
                self.stop(model)

    def interrupt(self) -> None:
        """Have those that drain end now."""
        with self._changed:
            for child in self._children.values():
                self._signal(child, signal.SIGINT)

    def wait(self, timeout_s: float) -> None:
        """Wait for their ends, which were asked for; kill those that take much longer."""
        deadline = time.monotonic() + timeout_s + _STOP_S
        for child in list(self._children.values()):
            if self._status(child, max(0.0, deadline - time.monotonic())) is None:
                self._signal(child, signal.SIGKILL)

    def _start_next(self) -> None:
        with self._changed:
            stages = [child.stage for child in self._children.values()]
            is_loading = None in stages or "announced" in stages
            ready = [model for model in self._waiting if model not in self._children]
            if is_loading or not ready or self._is_stopping:
                return
            model = ready[0]
            self._waiting.remove(model)
            child = self._children[model] = self._forked(model)
        threading.Thread(target=self._watch, args=(child,), daemon=True).start()

    def _forked(self, model: str) -> _Child:
        # The port of this process is taken; it serves the metrics of its child workers too.
        port = free_port() if settings.METRICS_PORT else 0
        ours, theirs = socket.socketpair()
        child = _Child(model, ours, port)
        with theirs:
            assert self._server is not None
            try:
                order = ChildOrder(model, self._parent, port, self._may_idle[model], theirs)
                child.pid = self._server.fork(order)
            except (OSError, queue.Empty) as exc:
                logger.critical("no process for %s: the fork server is silent: %s", model, exc)
        return child

    def _watch(self, child: _Child) -> None:
        """Read what a child tells until its end, and see to what comes after."""
        with contextlib.suppress(OSError, ValueError), child.link.makefile("r") as lines:
            for line in lines:
                child.stage, child.reason = json.loads(line)
                logger.debug("%s: %s", child.model, child.stage)
                self._note(child)
                self._start_next()
        child.link.close()
        status = self._status(child, _STOP_S)
        reason = _reason(status)
        logger.info("the worker of %s has ended (%s)", child.model, reason)
        was_asked = child.is_stopping or status in (0, -signal.SIGTERM) or self._is_stopping
        with self._changed:
            self._children.pop(child.model, None)
            has_crashed = child.stage in ("loaded", "leaving") and not was_asked
            if has_crashed:
                self._restart_later(child)
        if has_crashed:
            self._family.on_child_crashed(child.model, f"Its process was ended: {reason}.")
        elif not was_asked and child.stage != "failed":
            told = f"Its process was ended while it loaded: {reason}."
            self._family.on_child_failed(child.model, told)
        else:
            self._family.on_child_gone()
        with self._changed:
            self._changed.notify_all()
        self._start_next()

    def _note(self, child: _Child) -> None:
        with self._changed:
            stays = child.stage == "loaded" and not child.is_stopping
            if stays and child.model in self._waiting:  # It has not left.
                self._waiting.remove(child.model)
            self._changed.notify_all()
        if child.stage == "leaving":
            self._family.on_child_gone()
        elif child.stage == "failed":
            self._family.on_child_failed(child.model, child.reason)
            child.link.shutdown(socket.SHUT_WR)  # It may go.
        else:
            self._family.on_child_announced(child.model)

    def _restart_later(self, child: _Child) -> None:
        delay_s = self._delays[child.model].after(time.monotonic() - child.started_at)
        timer = threading.Timer(delay_s, self._restart, (child.model,))
        timer.daemon = True
        self._restarts[child.model] = timer
        timer.start()

    def _restart(self, model: str) -> None:
        with self._changed:
            if self._restarts.pop(model, None) is None:
                return
        self.start(model, may_idle=self._may_idle[model])

    def _status(self, child: _Child, timeout_s: float) -> int | None:
        return self._server.wait(child.pid, timeout_s) if self._server and child.pid else None

    def _signal(self, child: _Child, number: signal.Signals) -> None:
        if self._server and child.pid and not self._server.has_ended(child.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)

    def _on_loss(self) -> None:
        if not self._is_stopping:
            logger.critical("the fork server has ended; this worker ends, to be started anew")
            os.kill(os.getpid(), signal.SIGTERM)


class ParentLink:
    """A child worker's link to its parent. ``gone`` is set when it is, or lets the child go."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self.gone = threading.Event()

    def tell(self, stage: Stage, reason: str = "") -> None:
        """Tell the parent how far the model is."""
        with contextlib.suppress(OSError):  # It is gone, and so will this process be.
            self._link.sendall(json.dumps([stage, reason]).encode() + b"\n")

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Begin to look for the parent's end, however that happens."""

        def wait() -> None:
            with contextlib.suppress(OSError):
                self._link.recv(1)
            self.gone.set()
            on_loss()

        threading.Thread(target=wait, name="parent", daemon=True).start()


def _reason(status: int | None) -> str:
    if status is None:
        return "unknown"
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
