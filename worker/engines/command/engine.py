"""A model whose server is a process of the worker: any server with an OpenAI-compatible API.

The server is started, asked until it is ready, spoken to as ``openai_upstream`` speaks to servers,
and started again when it ends. It listens on the loopback address, at a port and with a key that
are chosen anew each time.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from inference_site.catalogue.engines.command import CommandOptions, words_of
from inference_site.catalogue.engines.openai_upstream import ServerOptions
from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.catalogue.engines.upstream_flavors import FLAVORS
from inference_site.domain.deltas import Delta
from inference_site.domain.errors import EngineError, EngineUnavailable, InvalidRequest
from inference_site.domain.messages import Message
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from inference_site.host import free_port
from inference_site.restart_delay import RestartDelay
from worker.engines.base import Engine, Sink
from worker.engines.openai_upstream.engine import UpstreamEngine
from worker.engines.openai_upstream.engine import load as load_upstream
from worker.model_servers.process import Order, ServerProcess

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
_POLL_S = 0.2
_ASK_S = 5.0
_SILENT_S = 60.0
"""Seconds without an answer to a run or a health check after which a server is killed."""
_CLOSES_S = 5.0
"""How long the connections of a server that has ended stay, for runs that have yet to see it."""
_TAIL_LOGGED = 8


@dataclass
class Folders:
    """Where logs and pid files of servers are, and what ``{models_dir}`` stands for."""

    files: Path = Path(tempfile.gettempdir()) / "inference-site-model-servers"
    models: Path = Path()


folders = Folders()
"""The worker names its own: engines are loaded by their spec alone."""


def load(spec: ModelSpec) -> CommandEngine:
    """Begin to start the server, and return; the engine tells when it is ready."""
    return CommandEngine(spec)


class CommandEngine(Engine):
    """A model of a server that this process runs (see ``worker.engines.base.Engine``)."""

    blocks = False

    def __init__(self, spec: ModelSpec) -> None:
        self._spec, self._options = spec, CommandOptions.of(spec)
        self._upstream: UpstreamEngine | None = None
        self._process: ServerProcess | None = None
        self._starting, self._fault = "Its server is starting.", ""
        self._on_change: Callable[[], None] = lambda: None
        self._delay = RestartDelay()
        self._is_closed = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name=f"keep-{spec.id}", daemon=True)
        self._keeper.start()

    def start(
        self,
        request: GenerationRequest,
        sink: Sink,
        ended: Callable[[Exception | None], None],
    ) -> bool:
        """Begin the request on the server (see ``Engine.start``)."""
        return self._running.start(request, sink, ended)

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        """Generate the answers into the sink (see ``Engine.chat``)."""
        self._running.chat(request, sink)

    def complete(self, request: GenerationRequest, sink: Sink) -> None:
        """Continue the prompts into the sink (see ``Engine.complete``)."""
        self._running.complete(request, sink)

    @property
    def starting(self) -> str:
        """Why nothing can be run yet (see ``Engine.starting``)."""
        return self._starting

    @property
    def fault(self) -> str:
        """Why nothing can be run now (see ``Engine.fault``)."""
        return self._fault or ("" if self._upstream is None else self._upstream.fault)

    def watch(self, on_change: Callable[[], None]) -> None:
        """Have it called when ``starting`` or ``fault`` changes (see ``Engine.watch``)."""
        self._on_change = on_change

    def close(self) -> None:
        """End the server."""
        self._is_closed.set()
        if process := self._process:
            process.stop()
        self._keeper.join(_CLOSES_S)
        self._drop()

    @property
    def _running(self) -> UpstreamEngine:
        if (upstream := self._upstream) is None:
            raise EngineUnavailable(f"Model '{self._spec.id}': {self._starting or self._fault}")
        return upstream

    def _keep(self) -> None:
        """Keep a server running until the engine is closed."""
        while not self._is_closed.is_set():
            begun = time.monotonic()
            try:
                was_ready, reason = self._live()
            except Exception as exc:  # The model must not stay without its keeper.
                logger.exception("model %s: its server could not be kept", self._spec.id)
                was_ready, reason = False, f"it could not be started ({type(exc).__name__})"
            self._drop()
            if self._is_closed.is_set():
                return
            delay_s = self._delay.after(time.monotonic() - begun)
            if was_ready:
                self._note(starting=f"Its server is started again: {reason}.")
            else:
                self._note(fault=f"Its server did not start: {reason}.")
            self._is_closed.wait(delay_s)
            self._note(starting=self._starting or f"Its server is started again: {reason}.")

    def _live(self) -> tuple[bool, str]:
        """Run the server once; return whether it was ready, and how it has ended."""
        key, port = secrets.token_urlsafe(24), free_port()
        process = self._process = ServerProcess(self._order(key, port), folders.files)
        if self._is_closed.is_set():  # ``close`` may have missed it.
            process.stop()
        reason = self._await_ready(process, key, port)
        was_ready = not reason and not self._is_closed.is_set()
        if was_ready:
            logger.info("model %s: its server is ready, process %d", self._spec.id, process.pid)
            self._note()
            reason = self._await_end(process)
        if not process.ended.is_set():
            process.stop()
        reason = reason or process.reason
        if not self._is_closed.is_set():
            said = "\n".join(process.tail[-_TAIL_LOGGED:])
            logger.error("model %s: its server has ended: %s; %s", self._spec.id, reason, said)
        return was_ready, reason

    def _order(self, key: str, port: int) -> Order:
        options, spec = self._options, self._spec
        gpus = ",".join(map(str, options.gpus or ()))
        values = {
            "api_key": key,
            "file": str(spec.file or ""),
            "gpus": gpus,
            "host": HOST,
            "id": spec.id,
            "models_dir": str(folders.models),
            "port": str(port),
        }
        seen = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if options.gpus is not None else ()
        return Order(
            name="".join(c if c.isalnum() or c in "-_." else "_" for c in spec.id),
            command=words_of(options.command, values),
            env={**dict.fromkeys(seen, gpus), **options.env},
            stop_s=options.stop_timeout_s,
            stop_command=words_of(options.stop_command, values) if options.stop_command else (),
        )

    def _await_ready(self, process: ServerProcess, key: str, port: int) -> str:
        """Return when the server has given a first token; else why it has not."""
        path = self._options.ready or FLAVORS[self._options.flavor].ready
        until = time.monotonic() + self._options.start_timeout_s
        headers = {"Authorization": f"Bearer {key}"}
        root = f"http://{HOST}:{port}"
        with httpx.Client(base_url=root, headers=headers, timeout=_ASK_S) as http:
            while not _answers(http, path):
                if process.ended.wait(_POLL_S):
                    return process.reason
                if self._is_closed.is_set():
                    return "it is not wanted any more"
                if time.monotonic() > until:
                    return f"it was not ready within {self._options.start_timeout_s:g} s"
        spoken = {name: self._spec.options[name] for name in _spoken(self._spec)}
        address = {"base_url": f"{root}/v1", "api_key": key}
        inner = replace(self._spec, engine="openai_upstream", options={**spoken, **address})
        upstream = load_upstream(inner)
        upstream.watch(self._tell_change)
        try:
            _try_out(upstream, self._spec)
        except EngineError as exc:
            upstream.close()
            logger.error("model %s: its server gave no first token: %s", self._spec.id, exc)
            return "it gave no first token"
        self._upstream = upstream
        return ""

    def _await_end(self, process: ServerProcess) -> str:
        """Return when the server has ended, or is to be ended because it is silent: why, then."""
        silent_since: float | None = None
        while not process.ended.wait(1.0):
            if self._is_closed.is_set():
                return "it is not wanted any more"
            if self._upstream is None or not self._upstream.fault:
                silent_since = None
                continue
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > _SILENT_S:
                process.kill()
                return f"it was silent for {_SILENT_S:g} s"
        return ""

    def _note(self, starting: str = "", fault: str = "") -> None:
        self._starting, self._fault = starting, fault
        self._tell_change()

    def _tell_change(self) -> None:
        self._on_change()

    def _drop(self) -> None:
        """Take nothing more for a server that has ended."""
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            timer = threading.Timer(_CLOSES_S, upstream.close)
            timer.daemon = True
            timer.start()

    def embed(self, request: GenerationRequest, sink: Sink) -> None:
        """Embed the prompts (see ``Engine.embed``)."""
        self._running.embed(request, sink)

    def tokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn texts into tokens (see ``Engine.tokenize``)."""
        self._running.tokenize(request, sink)

    def detokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn tokens into texts (see ``Engine.detokenize``)."""
        self._running.detokenize(request, sink)

    def render(self, request: GenerationRequest, sink: Sink) -> None:
        """Feed the prompt of a chat (see ``Engine.render``)."""
        self._running.render(request, sink)


class _Dropped:
    """A sink for what nobody reads."""

    cancelled = False

    def feed(self, delta: Delta) -> None:
        """Drop it."""


def _try_out(engine: UpstreamEngine, spec: ModelSpec) -> None:
    """Have the model give a first token. Raise EngineError if it gives none.

    That it refuses the request is an answer, too.
    """
    can, sink = model_capabilities(spec), _Dropped()
    try:
        if "chat" in can:
            hello = (Message("user", "Hello"),)
            engine.chat(GenerationRequest(spec.id, messages=hello, max_output_tokens=1), sink)
        elif "completions" in can:
            asked = GenerationRequest(spec.id, prompts=("Hello",), max_output_tokens=1)
            engine.complete(replace(asked, operation="complete"), sink)
        elif "embeddings" in can:
            asked = GenerationRequest(spec.id, prompts=("Hello",), operation="embed")
            engine.embed(asked, sink)
    except InvalidRequest:
        return


def _answers(http: httpx.Client, path: str) -> bool:
    try:
        return http.get(path).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _spoken(spec: ModelSpec) -> Iterator[str]:
    """Yield the options of the model that say how its server is spoken to."""
    return (name for name in spec.options if name in ServerOptions.model_fields)
