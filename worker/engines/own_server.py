"""OwnServer: a model whose server is a process of this worker.

A thread starts the server, waits until it is ready, checks every few seconds that it is alive, and
restarts it when it ends. The server listens on the loopback address. Its port and its key are new
for each start, so that no other process on the host can bypass the queue.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import httpx

from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.core.domain.deltas import Delta
from inference_site.core.domain.errors import (
    EngineError,
    EngineLoadError,
    EngineUnavailable,
    InvalidRequest,
    ModelServerLost,
    ModelServerUnreachable,
)
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest, Message
from inference_site.core.host import free_port, is_taken
from inference_site.core.process_lifecycle import RestartDelay
from worker.engines.base import Engine, OnEnd, ServerFacts, Sink, start_and_report
from worker.engines.openai_upstream.server import Endpoint
from worker.model_servers.memory import MemoryMeter
from worker.model_servers.process import Order, ServerProcess, read_metrics, server_settings

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
METRICS = "/metrics"
_POLL_S = 0.05
_LOOK_S = 1.0
_ASK_S = 5.0
"""Interval of the checks that a server is alive, and how long it may take to answer one."""
_CLOSES_S = 5.0
"""How long the connections of an ended server stay open, so that their runs notice the end."""
_ENDS_S = 2.0
"""How long to wait for the end of a process once its connections are closed."""
_TAIL_LOGGED = 8
_UNWANTED = "it is not wanted any more"
_DROPS_WEIGHTS = 2
"""vLLM's sleep level that drops the weights, so that they must be loaded again.

Source: https://docs.vllm.ai/en/stable/features/sleep_mode/.
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a model's server and to connect to it.

    ``order`` returns the process to start for an endpoint. ``connect`` returns the engine for the
    server there, once its path ``ready`` answers with status 200. ``pulse`` is a path that answers
    with 200 only while the server makes progress; without it, the engine's ``fault`` counts.
    ``has_metrics``: the server has ``METRICS``. ``why_not_loaded`` returns the reason of a process
    that ended before it was ready; with it such a process is not started again, unless
    ``may_retry`` returns true: the next start leaves out the request that has crashed it.
    ``sleep_level``: the level of vLLM's ``/sleep`` when the model must free its memory; 0: the
    server ends instead. ``on_socket``: the server listens on a unix socket.
    """

    order: Callable[[Endpoint], Order]
    connect: Callable[[Endpoint], Engine]
    ready: str
    pulse: str = ""
    has_metrics: bool = False
    why_not_loaded: Callable[[ServerProcess], str] | None = None
    may_retry: Callable[[], bool] = lambda: False
    start_timeout_s: float = 3600.0
    sleep_level: int = 0
    on_socket: bool = False


class OwnServer(Engine):
    """A model of a server that this process runs (see ``worker.engines.base.Engine``)."""

    blocks = False

    def __init__(self, spec: ModelSpec, launch: Launch) -> None:
        self._spec, self._launch = spec, launch
        self._engine: Engine | None = None
        self._process: ServerProcess | None = None
        self._starting, self._fault = "Its server is starting.", ""
        self._on_change: Callable[[], None] = lambda: None
        self._delay = RestartDelay()
        self._memory = MemoryMeter(spec)
        self._telemetry: dict[str, float] = {}
        self._was_ready = self._lost_its_port = self._is_asleep = False
        self._endpoint: Endpoint | None = None
        if launch.on_socket:  # A temporary folder is private, and its path is short enough.
            self._socket_folder = tempfile.TemporaryDirectory(prefix="model-")
        self._began, self._is_closed = threading.Event(), threading.Event()
        self._threads = ThreadPoolExecutor(spec.slots + 1, thread_name_prefix=f"own-{spec.id}")
        self._keeper = threading.Thread(target=self._keep, name=f"keep-{spec.id}", daemon=True)
        self._keeper.start()

    def loaded(self) -> OwnServer:
        """Wait until the model can be run; return this engine. Raise EngineLoadError."""
        self._began.wait()
        if self._fault:
            self.close()
            process = self._process
            raise EngineLoadError(
                f"Model '{self._spec.id}': {self._fault}",
                by_process=process is not None and process.has_ended_itself,
            )
        return self

    def start(self, request: GenerationRequest, sink: Sink, ended: OnEnd) -> bool:
        """Begin the request on the server (see ``Engine.start``)."""
        engine, process = self._running, self._process

        def on_end(error: Exception | None) -> None:
            if error is None or process is None or not _may_be_a_loss(error):
                ended(error)
                return
            try:  # On a thread: the caller's thread must not wait for the process.
                self._threads.submit(lambda: ended(self._cause(process, error)))
            except RuntimeError:  # The model was closed.
                ended(error)

        try:
            if not engine.blocks:
                return engine.start(request, sink, on_end)
            self._threads.submit(start_and_report, partial(engine.run, request, sink), on_end)
        except RuntimeError as exc:  # Its threads have ended with its server.
            raise ModelServerUnreachable(f"Model '{self._spec.id}': it was stopped.") from exc
        return True

    @property
    def starting(self) -> str:
        """Why the server cannot run requests yet (see ``Engine.starting``)."""
        return self._starting

    @property
    def fault(self) -> str:
        """Why the server cannot run requests now (see ``Engine.fault``)."""
        return self._fault or ("" if self._engine is None else self._engine.fault)

    @property
    def shows_tools(self) -> bool:
        """Whether the model's template renders tools (see ``Engine.shows_tools``)."""
        return self._engine is None or self._engine.shows_tools

    @property
    def server(self) -> ServerFacts:
        """Memory, metrics and log of the process (see ``Engine.server``)."""
        process = self._process
        if process is None or process.ended.is_set():
            return ServerFacts(log=process.log if process else None)
        return ServerFacts(self._memory.host_bytes, self._telemetry, process.log)

    @property
    def context_length(self) -> int | None:
        """The context length that the server reports (see ``Engine.context_length``)."""
        return None if self._engine is None else self._engine.context_length

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call ``on_change`` when ``starting`` or ``fault`` changes (see ``Engine.watch``)."""
        self._on_change = on_change

    def sleep(self) -> bool:
        """Put the server to sleep; return False without a sleep level, or if it refuses."""
        if not (level := self._launch.sleep_level) or self._engine is None:
            return False
        self._is_asleep = True  # A server that ends now is not started again.
        return self._post(f"/sleep?level={level}")

    def wake(self) -> bool:
        """Wake the server; return whether it has generated a first token."""
        calls: list[tuple[str, dict[str, str] | None]] = [("/wake_up", None)]
        if self._launch.sleep_level == _DROPS_WEIGHTS:
            calls += [("/collective_rpc", {"method": "reload_weights"})]
            calls += [("/reset_prefix_cache", None)]
        if not all(self._post(path, body) for path, body in calls):
            return False
        try:
            _try_out(self._running, self._spec)
        except EngineError as exc:
            logger.warning("model %s: it gave no token when it was woken: %s", self._spec.id, exc)
            return False
        self._is_asleep = False
        return True

    def _post(self, path: str, body: dict[str, str] | None = None) -> bool:
        """Post to the server; return whether it succeeded."""
        if self._endpoint is None or self._process is None or self._process.ended.is_set():
            return False  # Another process may have the port now.
        try:
            with self._endpoint.client(self._launch.start_timeout_s) as http:
                answer = http.post(path, json=body)
        except httpx.HTTPError as exc:
            logger.warning("model %s: %s: %s", self._spec.id, path, type(exc).__name__)
            return False
        if not answer.is_success:
            logger.warning("model %s: %s: status %d", self._spec.id, path, answer.status_code)
        return answer.is_success

    def close(self) -> None:
        """End the server."""
        self._is_closed.set()
        if process := self._process:
            process.stop()
        self._keeper.join(_CLOSES_S)
        if self._launch.on_socket:
            self._socket_folder.cleanup()
        self._threads.shutdown(wait=False)

    @property
    def _running(self) -> Engine:
        if (engine := self._engine) is None:  # Its server has ended since the run was claimed.
            why = self._starting or self._fault
            raise ModelServerUnreachable(f"Model '{self._spec.id}': {why}")
        return engine

    def run(self, request: GenerationRequest, sink: Sink) -> None:
        """Run the request on the server (see ``Engine.run``)."""
        engine, process = self._running, self._process
        try:
            engine.run(request, sink)
        except EngineError as exc:
            if process is None or not _may_be_a_loss(exc):
                raise
            raise self._cause(process, exc) from exc

    def _cause(self, process: ServerProcess, error: Exception) -> Exception:
        """Return ModelServerLost if the process has ended, else the error of the run."""
        if not process.ended.wait(_ENDS_S):
            return error
        return ModelServerLost(is_suspect=not process.was_killed)

    def _keep(self) -> None:
        """Keep a server running until the engine is closed."""
        while not self._is_closed.is_set():
            begun = time.monotonic()
            try:
                was_ready, reason = self._run_server()
            except Exception as exc:  # This thread must go on: nothing else restarts the server.
                logger.exception("model %s: its server could not be run", self._spec.id)
                was_ready, reason = False, f"it could not be started ({type(exc).__name__})"
            engine, self._engine = self._engine, None
            if engine is not None and self._is_closed.is_set():
                engine.close()
            elif engine is not None:
                timer = threading.Timer(_CLOSES_S, engine.close)
                timer.daemon = True
                timer.start()
            if self._is_closed.is_set():
                self._began.set()
                return
            if self._is_asleep:
                self._note(fault=f"Its server has ended while it slept: {reason}.")
                return
            delay_s = self._delay.after(time.monotonic() - begun)
            if was_ready or self._launch.may_retry():
                self._note(starting=f"Its server is started again: {reason}.")
            elif self._launch.why_not_loaded and not self._was_ready and not self._lost_its_port:
                process = self._process
                self._note(fault=self._launch.why_not_loaded(process) if process else reason)
                self._began.set()
                return
            else:
                self._note(fault=f"Its server did not start: {reason}.")
            self._is_closed.wait(delay_s)
            self._note(starting=self._starting or f"Its server is started again: {reason}.")

    def _run_server(self) -> tuple[bool, str]:
        """Run the server once; return whether it was ready, and why it has ended."""
        at = Endpoint(f"http://{HOST}:{(port := free_port())}", port, secrets.token_urlsafe(24))
        if self._launch.on_socket:
            path = f"{self._socket_folder.name}/{secrets.token_hex(4)}.sock"
            at = replace(at, root="http://localhost", socket=path)
        self._endpoint = at
        self._lost_its_port = False
        process = ServerProcess(self._launch.order(at), server_settings.files)
        self._process = process
        if self._is_closed.is_set():  # ``close`` may have run before ``_process`` was set.
            process.stop()
        with at.client(_ASK_S) as http:
            reason = self._await_ready(process, http, at)
            self._lost_its_port = process.ended.is_set() and is_taken(at.port)
            was_ready = not reason and not self._is_closed.is_set()
            if was_ready:
                logger.info("model %s: its server is ready, process %d", self._spec.id, process.pid)
                self._was_ready = True
                self._note()
                self._began.set()
                reason = self._await_end(process, http)
        if not process.ended.is_set():
            process.stop()
        reason = reason or process.reason
        if not self._is_closed.is_set():
            tail = "\n".join(process.tail[-_TAIL_LOGGED:])
            logger.error("model %s: its server has ended: %s; %s", self._spec.id, reason, tail)
        return was_ready, reason

    def _await_ready(self, process: ServerProcess, http: httpx.Client, at: Endpoint) -> str:
        """Wait for the server's first token; return why there is none, empty if there is one."""
        until = time.monotonic() + self._launch.start_timeout_s
        while not _answers(http, self._launch.ready):
            if process.ended.wait(_POLL_S):
                return process.reason
            if self._is_closed.is_set():
                return _UNWANTED
            if time.monotonic() > until:
                return f"it was not ready within {self._launch.start_timeout_s:g} s"
        try:
            engine = self._launch.connect(at)
        except (EngineError, httpx.HTTPError) as exc:
            logger.error("model %s: the API of its server does not work: %s", self._spec.id, exc)
            return process.reason if process.ended.wait(_ENDS_S) else "its API does not work"
        engine.watch(self._changed)
        try:
            self._await_token(engine, process, until)
        except EngineError as exc:
            engine.close()
            logger.error("model %s: its server gave no first token: %s", self._spec.id, exc)
            return process.reason if process.ended.wait(_ENDS_S) else "it gave no first token"
        self._engine = engine
        return ""

    def _await_token(self, engine: Engine, process: ServerProcess, until: float) -> None:
        """Wait for the first token, also of a server that still loads. Raise EngineError."""
        pause_s = _POLL_S
        while True:
            try:
                return _try_out(engine, self._spec)
            except EngineUnavailable as exc:
                if time.monotonic() > until or process.ended.wait(pause_s):
                    raise
                pause_s = min(2 * pause_s, _ASK_S)
                if (reason := f"Its server gives no token yet: {exc}") != self._starting:
                    self._note(starting=reason)

    def _await_end(self, process: ServerProcess, http: httpx.Client) -> str:
        """Wait for the end of the server; return why it was ended, empty if it ended itself."""
        pulse = _Pulse(http, self._launch, lambda: self._engine)
        while not process.ended.wait(_LOOK_S):
            self._memory.measure(process, keeps=not self._is_asleep)
            self._telemetry = pulse.telemetry
            if self._is_closed.is_set():
                return _UNWANTED
            if server_settings.stall_s and pulse.silent_s() > server_settings.stall_s:
                process.kill(is_suspect=True)
                return f"it gave no sign of life for {server_settings.stall_s:g} s"
        return ""

    def _note(self, starting: str = "", fault: str = "") -> None:
        self._starting, self._fault = starting, fault
        self._changed()

    def _changed(self) -> None:
        self._on_change()


class _Pulse:
    """Checks that a server is alive."""

    def __init__(
        self, http: httpx.Client, launch: Launch, engine: Callable[[], Engine | None]
    ) -> None:
        self._http, self._launch, self._engine = http, launch, engine
        self.telemetry: dict[str, float] = {}
        """The server's last metrics."""
        self._alive_at = time.monotonic()
        self._next_at = 0.0

    def silent_s(self) -> float:
        """Check the server every few seconds; return the time since its last sign of life."""
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + _ASK_S
            if self._is_alive():
                self._alive_at = time.monotonic()
        return time.monotonic() - self._alive_at

    def _is_alive(self) -> bool:
        has_answered = False
        if self._launch.has_metrics:
            with contextlib.suppress(httpx.HTTPError):
                page = self._http.get(METRICS)
                has_answered = page.status_code == httpx.codes.OK
                if has_answered:
                    self.telemetry = read_metrics(page.text)
        if self._launch.pulse == METRICS:
            return has_answered
        if self._launch.pulse:
            return _answers(self._http, self._launch.pulse)
        engine = self._engine()
        return engine is None or not engine.fault


class _FirstToken:
    """A sink that drops the deltas of a trial request."""

    cancelled = False

    def feed(self, delta: Delta) -> None:
        """Do nothing."""


def _try_out(engine: Engine, spec: ModelSpec) -> None:
    """Send the server a minimal request. Raise EngineError if it fails."""
    can = model_capabilities(spec)
    text = GenerationRequest(spec.id, prompts=("Hello",), max_output_tokens=1)
    if "chat" in can:
        asked = replace(text, prompts=(), messages=(Message("user", "Hello"),))
    elif "completions" in can:
        asked = replace(text, operation="complete")
    elif "embeddings" in can:
        asked = replace(text, operation="embed")
    elif "rerank" in can:
        asked = replace(text, operation="rank", queries=("Hello",))
    else:
        return
    with contextlib.suppress(InvalidRequest):
        engine.run(asked, _FirstToken())


def _may_be_a_loss(error: Exception) -> bool:
    """Whether the end of the server may have caused this error of a run."""
    return isinstance(error, EngineError) and not isinstance(error, InvalidRequest)


def _answers(http: httpx.Client, path: str) -> bool:
    try:
        return http.get(path).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
