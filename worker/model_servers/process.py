"""Server processes as the worker sees them: start by a guardian, stop, clean-up, and metrics."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from inference_site.core.process_lifecycle import signal_name
from worker.model_servers import nvml

logger = logging.getLogger(__name__)

_GUARDIAN = Path(__file__).with_name("guardian.py")
_MARK = "INFERENCE_SITE_MODEL_SERVER"
"""A variable in the environment of all processes of a server; its value is in the pid file."""
_LOG_BYTES = 4 * 2**20
_KILL_AFTER_S = 10.0
_SAME_START_S = 1.5
"""The system rounds the time of the boot to a second."""
_LONGEST_NAME = 100
_INHERITED = (
    *("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH"),
    *("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCM_PATH"),
    *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "GOMP_SPINCOUNT"),
)
"""The variables that a server gets of the worker's environment, which has secrets."""
MEASURES = {
    "requests_running": ("llamacpp:requests_processing", "vllm:num_requests_running"),
    "requests_waiting": ("llamacpp:requests_deferred", "vllm:num_requests_waiting"),
    "kv_cache_used_ratio": (
        *("llamacpp:kv_cache_usage_ratio", "vllm:kv_cache_usage_perc"),
        "vllm:gpu_cache_usage_perc",
    ),
    "prompt_tokens_total": ("llamacpp:prompt_tokens_total", "vllm:prompt_tokens_total"),
    "prompt_tokens_cached_total": (
        *("llamacpp:prompt_tokens_cached_total", "vllm:prefix_cache_hits_total"),
    ),
    "tokens_total": ("llamacpp:tokens_predicted_total", "vllm:generation_tokens_total"),
    "draft_tokens_total": (
        *("llamacpp:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    ),
    "draft_tokens_accepted_total": (
        "llamacpp:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    ),
}
"""Our names, and the servers' names for the same; the first that a page has is used."""


@dataclass
class ServerSettings:
    """Settings of all model servers of a worker.

    ``files`` is the folder of their logs and pid files, ``models`` the value of ``{models_dir}``,
    ``llama_server`` the command of a build of llama.cpp's server; empty: the one in the wheel.
    """

    files: Path = Path(tempfile.gettempdir()) / "inference-site-model-servers"
    models: Path = Path()
    llama_server: str = ""
    stall_s: float = 120.0
    """Seconds without a sign of life after which a server is killed; 0: never."""

    def file_of(self, model: str, ending: str) -> Path:
        """Return the file of a model with this ending.

        An id that is long, or has other characters than these, gets a digest: no two models may
        have one file.
        """
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", model)[:_LONGEST_NAME]
        if name != model:
            name += f"-{hashlib.sha256(model.encode()).hexdigest()[:8]}"
        return self.files / f"{name}{ending}"


server_settings = ServerSettings()
"""The worker sets these before it loads engines."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to start: a name for its files, a command, and additional environment variables.

    ``stop_s`` is how long it may take to end after SIGTERM. ``stop_command`` is run before that, or
    after a signal has ended it, for a server in another process tree, such as a container.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    stop_s: float = 10.0
    stop_command: Sequence[str] = ()


class ServerProcess:
    """The processes of one server. ``ended`` is set when all have ended.

    ``folder`` is for its log and its pid file. Raise OSError if the guardian cannot be started.
    """

    def __init__(self, order: Order, folder: Path) -> None:
        self._stop_s, self._stop_command = order.stop_s, order.stop_command
        self._is_suspect = False
        self.ended = threading.Event()
        self.pid = 0
        self.status: int | None = None
        self.error = ""
        self.tail: list[str] = []
        """The last lines of its output, for operators."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.log = folder / f"{order.name}.log"
        self._mark = secrets.token_hex(8)
        self._pid_file = folder / f"{order.name}-{self._mark}.json"
        env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        env |= {**order.env, _MARK: self._mark}
        me = psutil.Process()
        worker = [me.pid, me.create_time(), _started_s(me)]
        facts = {"mark": self._mark, "worker": worker, "stop": [*order.stop_command]}
        self._pid_file.write_text(json.dumps(facts))
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARDIAN)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={},
            start_new_session=True,
        )
        self._send(
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
        """How it has ended, for clients: an exit status or a signal, nothing of its output."""
        if self.error:
            return f"its command could not be started ({self.error})"
        if self.status is None:
            return "its guardian was killed"
        if self.status < 0:
            return f"it was ended by {signal_name(-self.status)}"
        return f"it ended with exit status {self.status}"

    @property
    def was_killed(self) -> bool:
        """Whether it, or its guardian, was ended from outside."""
        if self._is_suspect:
            return False
        return self.status is None or self.status in (-signal.SIGKILL, -signal.SIGTERM)

    @property
    def has_ended_itself(self) -> bool:
        """Whether it was started, and nothing from outside has ended it."""
        return self.ended.is_set() and not (self.error or self.was_killed)

    @property
    def memory_bytes(self) -> int:
        """Memory of its processes; shared pages are counted once (PSS)."""
        total = 0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                memory = process.memory_full_info()
                total += getattr(memory, "pss", memory.uss)
        return total

    @property
    def gpu_bytes(self) -> dict[int, int]:
        """Memory that its processes use of each GPU, by the GPU's number."""
        return nvml.gpu_bytes({process.pid for process in self._processes})

    @property
    def _processes(self) -> list[psutil.Process]:
        try:
            server = psutil.Process(self.pid)
            return [server, *server.children(recursive=True)]
        except psutil.Error:
            return []

    def stop(self) -> None:
        """Stop it, and kill it if it takes too long; return when it has ended."""
        self._send("stop")
        if not self.ended.wait(self._stop_s + _KILL_AFTER_S):
            self.kill()

    def kill(self, *, is_suspect: bool = False) -> None:
        """Kill all its processes; ``is_suspect``: because of a fault of the server."""
        self._is_suspect = is_suspect
        _kill_marked(self._mark)
        self.ended.wait(_KILL_AFTER_S)

    def _send(self, line: object) -> None:
        assert self._guardian.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._guardian.stdin.write(json.dumps(line).encode() + b"\n")
            self._guardian.stdin.flush()

    def _watch(self) -> None:
        assert self._guardian.stdin is not None
        assert self._guardian.stdout is not None
        with self._guardian.stdout as lines:
            for line in lines:
                report: dict[str, Any] = json.loads(line)
                self.pid = report.get("pid", self.pid)
                if "status" in report:
                    self.status, self.tail = report["status"], report["tail"]
                    self.error = report.get("error", "")
        self._guardian.wait()
        with contextlib.suppress(OSError, ValueError):
            self._guardian.stdin.close()
        if self.status is None:  # The guardian was killed, and its child processes may still run.
            _end_left(self._mark, self._stop_command)
        self._pid_file.unlink(missing_ok=True)
        self.ended.set()


def sweep(folder: Path) -> None:
    """Kill the servers of dead workers, found by the pid files in the folder."""
    for path in folder.glob("*.json"):
        try:
            left = json.loads(path.read_text())
            worker, mark, stop = left["worker"], left["mark"], left["stop"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if _runs(worker):
            continue
        killed = _end_left(mark, stop)
        logger.warning("%s: %d processes of a dead worker were ended", path.stem, killed)
        path.unlink(missing_ok=True)


def _end_left(mark: str, stop_command: Sequence[str]) -> int:
    """End what a killed guardian has left; return the number of processes with its mark."""
    killed = _kill_marked(mark)
    if stop_command:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                stop_command, check=False, timeout=_KILL_AFTER_S, stdin=subprocess.DEVNULL
            )
    return killed


def _runs(identity: Sequence[float]) -> bool:
    """Whether the process with this id and start runs; ids are reused.

    ``identity`` is the id, the time of the start, and after release 0.1 its seconds after the boot.
    """
    try:
        process = psutil.Process(int(identity[0]))
        if len(identity) > 2:
            return abs(_started_s(process) - identity[2]) < _SAME_START_S
        return abs(process.create_time() - identity[1]) < 1
    except psutil.Error:
        return False


def _started_s(process: psutil.Process) -> float:
    """Return how many seconds after the host's boot a process started. Raise psutil's errors.

    The system computes both times from its clock as it is now, so their difference stays the same
    when the clock is set. The time of the start alone does not.
    """
    return process.create_time() - psutil.boot_time()


def _kill_marked(mark: str) -> int:
    """Kill the processes with this mark in their environment; return their number."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark:
                found.append(process)
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return len(found)


def read_metrics(page: str) -> dict[str, float]:
    """Return the values of a page of metrics, by our names; none if it cannot be parsed."""
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    except ValueError:
        return {}
    values: dict[str, float] = {}
    for name, theirs in MEASURES.items():
        if (first := next((one for one in theirs if one in found), None)) is not None:
            values[name] = found[first]
    return values
