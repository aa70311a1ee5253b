"""A server's process as the worker sees it: started through its guardian, stopped, and swept up."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from worker.model_servers import nvml

logger = logging.getLogger(__name__)

_GUARDIAN = Path(__file__).with_name("guardian.py")
_MARK = "INFERENCE_SITE_MODEL_SERVER"
"""A variable in the environment of all processes of a server, whose value its pid file has."""
_LOG_BYTES = 4 * 2**20
_STOPS_S = 10.0
_KEPT = (
    *("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH"),
    *("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCM_PATH"),
    *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "GOMP_SPINCOUNT"),
)
"""All that a server gets of the worker's own environment, which holds secrets."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to start: a name for its files, a command, and the environment beside the usual.

    ``stop_s`` is how long it may take to end after it has been asked to; ``stop_command`` is run
    first, for a server that lives elsewhere, as a container does.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    stop_s: float = 10.0
    stop_command: Sequence[str] = ()


class ServerProcess:
    """One process of a server. ``ended`` is set when nothing of it is left.

    ``folder`` is where its log and its pid file are. Raise OSError when nothing can be started.
    """

    def __init__(self, order: Order, folder: Path) -> None:
        self._stop_s = order.stop_s
        self._is_suspect = False
        self.ended = threading.Event()
        self.pid = 0
        self.status: int | None = None
        self.error = ""
        self.tail: list[str] = []
        """The last lines that it has written, for operators."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.log = folder / f"{order.name}.log"
        self._mark = secrets.token_hex(8)
        self._pid_file = folder / f"{order.name}-{self._mark}.json"
        env = {name: os.environ[name] for name in _KEPT if name in os.environ}
        env |= {**order.env, _MARK: self._mark}
        self._pid_file.write_text(
            json.dumps({"mark": self._mark, "worker": _identity(), "stop": [*order.stop_command]})
        )
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARDIAN)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={},
            start_new_session=True,
        )
        self._say(
            {
                "command": [*order.command],
                "env": env,
                "folder": str(folder),
                "log": str(self.log),
                "log_bytes": _LOG_BYTES,
                "pid_file": str(self._pid_file),
                "stop_s": order.stop_s,
                "stop_command": [*order.stop_command],
            }
        )
        threading.Thread(target=self._watch, name=f"server-{order.name}", daemon=True).start()

    @property
    def reason(self) -> str:
        """How it has ended, for everybody: an exit status or a signal, nothing that it has said."""
        if self.error:
            return f"its command could not be started ({self.error})"
        if self.status is None:
            return "its guardian was killed"
        if self.status < 0:
            return f"it was ended by {signal.Signals(-self.status).name}"
        return f"it ended with exit status {self.status}"

    @property
    def was_killed(self) -> bool:
        """Whether it has ended for no reason of its own: somebody has ended it, or its guardian."""
        if self._is_suspect:
            return False
        return self.status is None or self.status in (-signal.SIGKILL, -signal.SIGTERM)

    @property
    def memory_bytes(self) -> int:
        """What its processes take; pages that they share are counted once (PSS)."""
        total = 0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                memory = process.memory_full_info()
                total += getattr(memory, "pss", memory.uss)
        return total

    @property
    def gpu_bytes(self) -> dict[int, int]:
        """What its processes take of each GPU, by its number."""
        return nvml.gpu_bytes({process.pid for process in self._processes})

    @property
    def _processes(self) -> list[psutil.Process]:
        try:
            server = psutil.Process(self.pid)
            return [server, *server.children(recursive=True)]
        except psutil.Error:
            return []

    def stop(self) -> None:
        """Have it end, by force after its time; return when it has."""
        self._say("stop")
        if not self.ended.wait(self._stop_s + _STOPS_S):
            self.kill()

    def kill(self, *, is_suspect: bool = False) -> None:
        """End all of its processes now; ``is_suspect``: because of what it did."""
        self._is_suspect = is_suspect
        _kill_marked(self._mark)
        self.ended.wait(_STOPS_S)

    def _say(self, line: object) -> None:
        assert self._guardian.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._guardian.stdin.write(json.dumps(line).encode() + b"\n")
            self._guardian.stdin.flush()

    def _watch(self) -> None:
        assert self._guardian.stdin is not None
        assert self._guardian.stdout is not None
        with self._guardian.stdout as lines:
            for line in lines:
                said: dict[str, Any] = json.loads(line)
                self.pid = said.get("pid", self.pid)
                if "status" in said:
                    self.status, self.tail = said["status"], said["tail"]
                    self.error = said.get("error", "")
        self._guardian.wait()
        with contextlib.suppress(OSError, ValueError):
            self._guardian.stdin.close()
        if self.status is None:  # What the server had forked has no guardian now.
            _kill_marked(self._mark)
        self._pid_file.unlink(missing_ok=True)
        self.ended.set()


def sweep(folder: Path) -> None:
    """End what workers that are gone have left of their servers, by the pid files in the folder."""
    for path in folder.glob("*.json"):
        try:
            left = json.loads(path.read_text())
            worker, mark, stop = left["worker"], left["mark"], left["stop"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if _runs(worker):
            continue
        killed = _kill_marked(mark)
        logger.warning("%s: %d processes of a worker that is gone were ended", path.stem, killed)
        if stop:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(stop, check=False, timeout=_STOPS_S, stdin=subprocess.DEVNULL)
        path.unlink(missing_ok=True)


def _identity() -> list[float]:
    me = psutil.Process()
    return [me.pid, me.create_time()]


def _runs(identity: Sequence[float]) -> bool:
    """Whether this very process runs, not another that got its number."""
    try:
        return abs(psutil.Process(int(identity[0])).create_time() - identity[1]) < 1
    except psutil.Error:
        return False


def _kill_marked(mark: str) -> int:
    """Kill the processes that have this mark in their environment; return how many there were."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark:
                found.append(process)
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return len(found)
