"""ChildWorkers: worker processes that this one starts for models loaded at run time.

A model that is loaded beside others gets a process of its own: libraries hold Python's lock while
they load, for seconds with a large file, which would stall every answer of the process and let its
lease end; and what a process held is given back when it ends, all of it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

from django.conf import settings

logger = logging.getLogger(__name__)

_STOP_S = 5.0


class ChildWorkers:
    """The child processes of one worker, by model.

    ``on_failure`` is called with the model and the reason when one has ended by itself.
    """

    def __init__(self, parent: str, on_failure: Callable[[str, str], None]) -> None:
        self._parent, self._on_failure = parent, on_failure
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def metrics_ports(self) -> dict[str, int]:
        """The ports of their metrics on this host, by model."""
        with self._lock:
            return {model: port for model, port in self._ports.items() if port}

    @property
    def models(self) -> frozenset[str]:
        """The models that have a process."""
        return frozenset(self._processes)

    def start(self, model: str) -> None:
        """Start a worker for this model, unless it has one."""
        with self._lock:
            if model in self._processes:
                return
            # The port of this process is taken; it serves the metrics of its child workers too.
            port = _free_port() if settings.METRICS_PORT else 0
            # Its end of the pipe is closed when this process ends, however that happens.
            process = subprocess.Popen(
                _command(model, self._parent),
                stdin=subprocess.PIPE,
                env={**os.environ, "METRICS_PORT": str(port), "METRICS_HOST": "127.0.0.1"},
            )
            self._processes[model], self._ports[model] = process, port
        threading.Thread(target=self._watch, args=(model, process), daemon=True).start()

    def terminate(self) -> None:
        """Have all of them drain and end."""
        for process in list(self._processes.values()):
            process.terminate()

    def wait(self, timeout_s: float) -> None:
        """Wait for their ends, which were asked for; kill those that take much longer."""
        for process in list(self._processes.values()):
            try:
                process.wait(timeout_s + _STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def _watch(self, model: str, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        assert process.stdin is not None
        process.stdin.close()
        with self._lock:
            self._processes.pop(model, None)
            self._ports.pop(model, None)
        logger.info("the worker of %s has ended (%s)", model, _reason(status))
        if status not in (0, -signal.SIGTERM):
            self._on_failure(model, f"Its process was ended: {_reason(status)}.")


def _command(model: str, parent: str) -> list[str]:
    return [sys.executable, sys.argv[0], "worker", "--models", model, "--parent", parent]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _reason(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def end_with_parent(stop: Callable[[], None]) -> None:
    """Call ``stop`` when the process that started this one as a child worker is gone."""

    def wait() -> None:
        os.read(0, 1)  # Not through sys.stdin, whose lock a thread must not hold at the exit.
        stop()

    threading.Thread(target=wait, name="parent", daemon=True).start()
