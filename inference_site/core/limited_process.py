"""A process with limits, for untrusted input: a grammar, a schema, a chat template, a web page.

Input that takes too much time, memory or stack ends that process, not its parent. The process
answers many questions, and is started again when it has ended. A question and an answer are a line
of JSON each.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from select import select
from typing import Any

from inference_site.core.domain.errors import GenerationFailed

_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ")
"""The variables that the process inherits; the environment of its parent has secrets."""
_ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60
"""Seconds to wait for an answer. The process limits its own processor time; this also bounds the
wait on a host that is too busy to give it any."""
LOAD_PATIENCE_S = 600
"""The same while a model is loaded: no client waits, and a starting host is busy."""
_TOO_LATE = "The request could not be checked in time."
_DEFAULT_STACK = 2 * 2**20
"""Stack of a thread where the system sets no limit."""


class LimitedProcess:
    """The parent's side. Thread-safe. The first question starts ``module`` as the process."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        atexit.register(self._end)

    def ask(self, *question: Any, patience_s: float = PATIENCE_S) -> Any:
        """Return the answer, which is never None; None if the question has ended the process.

        Raise GenerationFailed if there is no answer within ``patience_s`` seconds; questions are
        answered one after the other.
        """
        until = time.monotonic() + patience_s
        if not self._lock.acquire(timeout=max(0.0, patience_s)):
            raise GenerationFailed(_TOO_LATE)
        try:
            if self._process is not None and self._process.poll() is not None:
                self._end()  # It was killed, for example because the host had no memory left.
            self._process = process = self._process or self._started()
            line = json.dumps(question, default=str).encode() + b"\n"
            answer = self._answer(process, line, max(0.0, until - time.monotonic()))
            if not answer:
                self._end()
                self._process = self._started()  # So that the next question does not wait for it.
        finally:
            self._lock.release()
        return json.loads(answer) if answer else None

    def _answer(self, process: subprocess.Popen[bytes], line: bytes, patience_s: float) -> bytes:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            return b""
        if not select([process.stdout], [], [], patience_s)[0]:
            self._end()
            raise GenerationFailed(_TOO_LATE)
        return process.stdout.readline()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", self._module],
            cwd=_ROOT,
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # It has not read all of its last question.
                pipe.close()


def serve(answer: Callable[..., object], cpu_s: float, memory: int) -> None:
    """Answer questions as the limited process, each within ``cpu_s`` seconds of processor time.

    ``memory`` bounds the address space of the process, in bytes.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # Other systems have no such limit.
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    # Half of the stack of the worker's threads, so that what passes here fits there.
    threading.stack_size((_DEFAULT_STACK if limit == resource.RLIM_INFINITY else limit) // 2)

    def answer_all() -> None:
        for line in sys.stdin:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            encoded = json.dumps(answer(*json.loads(line)))
            signal.setitimer(signal.ITIMER_PROF, 0)
            sys.stdout.write(f"{encoded}\n")
            sys.stdout.flush()

    threading.Thread(target=answer_all).start()
