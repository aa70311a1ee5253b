"""llama.cpp, the default engine: a server process for each model, with one continuous batch.

The server comes from the wheel ``xllamacpp``, or is a build of ``llama-server`` that the operator
names. Before the start, the files of the model are checked. The package ``openai_upstream`` sends
the requests. This package adds what is possible because the worker knows the model's file and
entry.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import httpx

from inference_site.catalogue.engines.llama_cpp import PREFILL_BATCH, LlamaCppOptions
from inference_site.catalogue.engines.openai_upstream import FLAVORS
from inference_site.catalogue.gguf_files import is_gguf
from inference_site.catalogue.memory import ModelMemory
from inference_site.core.domain.errors import EngineError, EngineLoadError, InvalidRequest
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest
from worker.engines.base import Engine, OnEnd, Sink, start_and_report
from worker.engines.chat.adapter import ChatAdapter
from worker.engines.chat.configuration import Vocabulary, check_prompt_templates, named_template
from worker.engines.chat.template import stop_texts_of, takes_tools
from worker.engines.chat.tools import with_tools_in_text
from worker.engines.llama_cpp.chat import (
    TemplateTrial,
    needs_own_chat,
    own_chat,
)
from worker.engines.llama_cpp.constraints import TRIAL, measured
from worker.engines.llama_cpp.payload import BANNED, LlamaCppPayloads
from worker.engines.llama_cpp.tokens import (
    Ask,
    PromptEcho,
    UncachedUsageSink,
    detokenize,
    embed,
    fits,
    is_long,
    rank,
    render,
    tokenize,
    tokens_of_words,
    with_short_prompts,
    with_text,
)
from worker.engines.openai_upstream.chunks import ChunkReader
from worker.engines.openai_upstream.client import Upstream
from worker.engines.openai_upstream.errors import ErrorReader
from worker.engines.openai_upstream.event_loop import Cancelled, event_loop
from worker.engines.openai_upstream.server import Endpoint, Server, own_server
from worker.engines.own_server import HOST, METRICS, Launch, OwnServer
from worker.model_servers import llama_server
from worker.model_servers.process import Order, server_settings

_ASK_S = 30.0
_THOUGHTS = ("think", "reasoning", "channel")
"""Words in the chat templates of reasoning models."""
_OWN_FAULT = re.compile(rb"[Cc]ompute error|decode|input batch|memory|Context size")
"""Messages of status 500 that mean a failure of the server. All others of this status are about the
request, for example from a chat template that refuses the messages."""
_SCHEMA_FAULT = re.compile(
    r"Unable to generate parser.*?generation failed:\s*(?=JSON schema)", re.DOTALL
)
"""A prefix of llama.cpp's errors about schemas that blames the chat template."""
_SPARE_THREADS = 4
"""HTTP threads of the server beside one for each slot: for health checks and tokenization."""
_PROGRAM = Path(str(llama_server.__file__))


def load(spec: ModelSpec) -> Engine:
    """Load a GGUF file. Raise EngineLoadError naming the file and the reason."""
    options = LlamaCppOptions.of(spec)
    arguments = checked(spec)
    trial = TemplateTrial(spec, options)
    extras = [str(path) for path in (options.mmproj, options.draft_model) if path]
    with_ = f" with {' and '.join(extras)}" if extras else ""
    template = ", or a chat template that is not valid" if options.chat_template else ""
    build = _Build(options.llama_server or server_settings.llama_server)
    return OwnServer(
        spec,
        Launch(
            order=partial(order, spec, arguments),
            connect=partial(_connected, spec, trial, build),
            may_retry=build.may_retry,
            ready=FLAVORS["llama_cpp"].ready,
            pulse=METRICS,  # The server's main loop answers this path.
            has_metrics=True,
            why_not_loaded=lambda process: (
                f"llama.cpp could not load {spec.file}{with_} (unsupported architecture, damaged "
                f"file, or not enough memory{template}); {process.reason}."
            ),
        ),
    ).loaded()


class _Build:
    """Whether a build of llama.cpp has llguidance, remembered by the command of the build.

    A build without it may crash at the first grammar of llguidance, so it is tried only once.
    """

    _without_llguidance: ClassVar[set[str]] = set()

    def __init__(self, command: str) -> None:
        self._command = command
        self._has_crashed = False

    def takes_llguidance(self, http: httpx.Client) -> bool:
        """Whether the server takes llguidance's grammars. Raise httpx.HTTPError if it ends."""
        if self._command in self._without_llguidance:
            return False
        body = {"prompt": "a", "max_tokens": 1, "grammar": TRIAL}
        try:
            return http.post("/v1/completions", json=body).is_success
        except httpx.TransportError:
            self._without_llguidance.add(self._command)
            self._has_crashed = True
            raise

    def may_retry(self) -> bool:
        """Whether the grammar has crashed the server since the last call: it is not tried again."""
        has_crashed, self._has_crashed = self._has_crashed, False
        return has_crashed


def _connected(
    spec: ModelSpec, trial: TemplateTrial, build: _Build, at: Endpoint
) -> LlamaCppEngine:
    """Return the engine of a server that is ready."""
    with at.client(_ASK_S) as http:
        props: dict[str, Any] = http.get("/props").raise_for_status().json()
        empty = http.post("/tokenize", json={"content": "", "add_special": True})
        adds_bos = bool(empty.raise_for_status().json().get("tokens"))
        [listed] = http.get("/v1/models").raise_for_status().json()["data"]
        has_llguidance = "embedding" in spec.options or build.takes_llguidance(http)
    vocabulary = int((listed.get("meta") or {}).get("n_vocab") or 0)
    facts = BuildFacts(props, vocabulary, adds_bos=adds_bos, has_llguidance=has_llguidance)
    return LlamaCppEngine(spec, server_at(spec, at), trial, facts)


def server_at(spec: ModelSpec, at: Endpoint) -> Server:
    """Return the connection settings of a llama.cpp server that this worker has started."""
    variables = spec.options.get("chat_template_kwargs", {})
    return own_server(spec, FLAVORS["llama_cpp"], at, variables)


@dataclass(frozen=True, slots=True)
class BuildFacts:
    """The facts that a server reports once it is ready.

    ``props`` is its answer to ``/props``. ``vocabulary`` is the number of tokens of its model.
    ``adds_bos``: the tokenizer begins every prompt with the BOS token. ``has_llguidance``: the
    build takes llguidance's grammars.
    """

    props: Mapping[str, Any]
    vocabulary: int
    adds_bos: bool
    has_llguidance: bool


class LlamaCppEngine(Engine):
    """A model in a server of llama.cpp (see ``worker.engines.base.Engine``)."""

    blocks = False

    def __init__(
        self, spec: ModelSpec, server: Server, trial: TemplateTrial, facts: BuildFacts
    ) -> None:
        self._spec, self._server, self._trial = spec, server, trial
        self._upstream = Upstream(spec, server, LlamaCppErrors)
        props = facts.props
        template = str(props.get("chat_template", ""))
        may_think = any(mark in template for mark in _THOUGHTS)
        self._payloads = LlamaCppPayloads(
            spec,
            server,
            may_think=may_think,
            stop_texts=stop_texts_of(template),
            has_llguidance=facts.has_llguidance,
            vocabulary=facts.vocabulary,
        )
        self._vocabulary = vocabulary = Vocabulary(
            chat_template=props.get("chat_template_tool_use") or template or None,
            bos=str(props.get("bos_token", "")),
            eos=str(props.get("eos_token", "")),
            adds_bos=facts.adds_bos,
        )
        self._own_chat: Callable[[str], ChatAdapter] = cache(
            partial(own_chat, spec, vocabulary, self._complete, self.tokenize)
        )
        self._takes_tools = takes_tools(vocabulary.chat_template or "")
        self._threads = ThreadPoolExecutor(spec.slots, thread_name_prefix=f"model-{spec.id}")

    def start(self, request: GenerationRequest, sink: Sink, ended: OnEnd) -> bool:
        """Begin the request (see ``Engine.start``).

        A request that needs one call of the server runs on the event loop, any other on a thread.
        """
        if sink.cancelled:
            return False
        if BANNED in request.extensions:
            self._threads.submit(start_and_report, partial(self.run, request, sink), ended)
            return True
        chat = self._with_tools_in_text(request)
        if chat.operation == "chat" and not needs_own_chat(chat, self._spec):
            prompt = self._trial.check(chat)
            must_end = self._must_end_thoughts(chat, prompt)
            if not (is_long((prompt,)) or (must_end and not chat.has_parts)):
                event_loop().start(self._chat(chat, sink, must_end), ended)
                return True
        elif request.operation == "complete" and not (request.echo or request.names_prompt_tokens):
            request = self._payloads.with_whole_prompts(request)
            if not (is_long(request.prompts) or self._payloads.needs_text(request)):
                event_loop().start(self._completion(request, sink), ended)
                return True
        self._threads.submit(start_and_report, partial(self.run, request, sink), ended)
        return True

    def _must_end_thoughts(self, request: GenerationRequest, prompt: str) -> bool:
        """Whether the thoughts that the prompt has begun must be ended before the answer.

        A grammar would bind them, and llama.cpp would return all of the answer as thoughts. With a
        budget of 0, llama.cpp does not end them: it leaves out the first token of their end.
        The chat adapter ends them in the prompt. Beside images and sounds, which only llama.cpp's
        own chats take, ``_chat`` does for a grammar, and the payload for a budget of 0.
        """
        is_off = request.reasoning_budget == 0 and not request.has_parts
        is_bound = request.must_call or request.constraint is not None
        if not (is_off or is_bound):
            return False
        begins_thoughts = False
        with suppress(InvalidRequest):  # The template cannot be read here.
            begins_thoughts = self._own_chat("").begins_in_reasoning(prompt)
        return begins_thoughts and (is_off or self._payloads.has_grammar(request))

    def _with_tools_in_text(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request; a chat whose template has no tools has them in its messages."""
        if self._takes_tools or request.operation not in ("chat", "render"):
            return request
        return request if request.prompt_template else with_tools_in_text(request)

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        """Generate the answers into the sink (see ``Engine.chat``)."""
        request = self._with_banned_tokens(request, sink)
        adapter_request, request = request, self._with_tools_in_text(request)
        if needs_own_chat(request, self._spec):
            # The chat adapter puts the tools into its prompt itself.
            self._own_chat(request.prompt_template).chat(adapter_request, sink)
            return
        if sink.cancelled:
            return
        prompt = self._trial.check(request)
        must_end = self._must_end_thoughts(request, prompt)
        if must_end and not request.has_parts:
            self._own_chat("").chat(adapter_request, sink)
            return
        with suppress(Cancelled):
            if fits(self._ask(request, sink), self._spec, request, prompt, sink):
                event_loop().run(self._chat(request, sink, must_end))

    def complete(self, request: GenerationRequest, sink: Sink) -> None:
        """Continue the prompts into the sink (see ``Engine.complete``)."""
        request = self._with_banned_tokens(request, sink)
        if not request.echo:
            self._complete(request, sink)
            return
        if request.max_output_tokens != 0:
            self._payloads.complete(request)  # It may refuse: before the prompt is output.
        echo = PromptEcho(self._spec, self._payloads, self._ask(request, sink), request)
        with suppress(Cancelled):
            prompts = echo.feed(sink)
            if sink.cancelled:
                return
            if request.max_output_tokens == 0:
                if request.names_prompt_tokens:
                    echo.feed_tokens(sink)
                echo.end(prompts, sink)
                return
            target = UncachedUsageSink(sink) if request.scores_prompts else sink
            if not self._payloads.takes_one_text:
                request = replace(request, prompts=prompts)
            self._complete(request, target)

    def _complete(
        self, request: GenerationRequest, sink: Sink, shown: tuple[str, ...] = ()
    ) -> None:
        with suppress(Cancelled):
            ask = self._ask(request, sink)
            whole = self._payloads.with_whole_prompts(request)
            ready = with_short_prompts(ask, self._spec, whole, sink)
            if ready is not None and ready.names_prompt_tokens:
                prompts = PromptEcho(self._spec, self._payloads, ask, ready).feed_tokens(sink)
                ready, sink = replace(ready, prompts=prompts), UncachedUsageSink(sink)
            if ready is not None and self._payloads.needs_text(ready):
                ready = with_text(ask, replace(ready, prompts=whole.prompts))
            if ready is not None and not sink.cancelled:
                event_loop().run(self._completion(ready, sink, shown))

    def _chat(
        self, request: GenerationRequest, sink: Sink, must_end_thoughts: bool
    ) -> Coroutine[Any, Any, None]:
        """Return the coroutine of a chat; the calling thread makes its payload."""
        is_begun = request.response_prefix or request.messages[-1].role == "assistant"
        if must_end_thoughts and request.add_generation_prompt and not is_begun:
            # llama.cpp ends begun thoughts before the beginning of an answer.
            request = replace(request, response_prefix="\n")
        payload = self._payloads.chat(request)
        return self._stream("/chat/completions", payload, request, sink)

    def _completion(
        self, request: GenerationRequest, sink: Sink, shown: tuple[str, ...] = ()
    ) -> Coroutine[Any, Any, None]:
        """Return the coroutine of a completion; ``shown`` are special tokens to output as text."""
        if not self._vocabulary.adds_bos and not all(request.prompts):
            if not (bos := self._vocabulary.bos):
                raise InvalidRequest(
                    "The prompt is empty, and the model has no token that begins a text.", "prompt"
                )
            request = replace(request, prompts=tuple(prompt or bos for prompt in request.prompts))
        payload = self._payloads.complete(request, shown)
        return self._stream("/completions", payload, request, sink, is_plain=not shown)

    async def _stream(
        self,
        path: str,
        payload: dict[str, Any],
        request: GenerationRequest,
        sink: Sink,
        *,
        is_plain: bool = True,
    ) -> None:
        """Generate; without ``is_plain``, the text has tokens that the constraint lacks."""
        constraint = request.constraint or request.forced_grammar
        may_think = request.operation == "chat" and self._payloads.thinks(request)
        checked_sink = measured(constraint, sink, is_plain=is_plain, may_think=may_think)
        reader = ChunkReader(request, checked_sink, self._upstream.errors, self._server)
        await self._upstream.stream(path, payload, reader)

    def _with_banned_tokens(self, request: GenerationRequest, sink: Sink) -> GenerationRequest:
        """Return the request with the tokens of its banned words; none once it is cancelled."""
        if not (words := request.extensions.get(BANNED)):
            return request
        banned: tuple[int, ...] = ()
        with suppress(Cancelled):
            banned = tokens_of_words(self._ask(request, sink), words)
        return replace(request, extensions={**request.extensions, BANNED: banned})

    def _ask(self, request: GenerationRequest, sink: Sink) -> Ask:
        """Return a function that posts to the server, and raises Cancelled if the run is."""

        def ask(path: str, payload: dict[str, Any]) -> dict[str, Any]:
            return event_loop().run(self._upstream.post(path, payload, request, sink, at_root=True))

        return ask

    def embed(self, request: GenerationRequest, sink: Sink) -> None:
        """Embed the prompts (see ``Engine.embed``)."""
        with suppress(Cancelled):
            embed(self._ask(request, sink), self._spec, request, sink)

    def rank(self, request: GenerationRequest, sink: Sink) -> None:
        """Compare the prompts with their queries (see ``Engine.rank``)."""
        with suppress(Cancelled):
            rank(self._ask(request, sink), self._spec, request, sink)

    def tokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn texts into tokens (see ``Engine.tokenize``)."""
        with suppress(Cancelled):
            tokenize(self._ask(request, sink), self._spec, request, sink)

    def detokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn tokens into texts (see ``Engine.detokenize``)."""
        with suppress(Cancelled):
            detokenize(self._ask(request, sink), request, sink)

    def render(self, request: GenerationRequest, sink: Sink) -> None:
        """Apply the chat template (see ``Engine.render``)."""
        if needs_own_chat(request, self._spec):
            self._own_chat(request.prompt_template).render(request, sink)
            return
        adapter_request, request = request, self._with_tools_in_text(request)
        if sink.cancelled:
            return
        if self._must_end_thoughts(request, self._trial.check(request)):
            self._own_chat("").render(adapter_request, sink)
            return
        payload = self._payloads.chat(request)
        with suppress(Cancelled):
            render(self._ask(request, sink), self._spec, request, payload, sink)

    @property
    def fault(self) -> str:
        """Why the server cannot be used (see ``Engine.fault``)."""
        return self._upstream.addresses.fault

    @property
    def shows_tools(self) -> bool:
        """Whether the template does (see ``Engine.shows_tools``)."""
        return self._takes_tools

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call ``on_change`` when ``fault`` changes (see ``Engine.watch``)."""
        self._upstream.health.on_change = on_change

    def close(self) -> None:
        """Close the connections. ``OwnServer`` ends the server."""
        self._upstream.close()
        self._threads.shutdown(wait=False)


class LlamaCppErrors(ErrorReader):
    """Reads the errors of llama.cpp's server, which do not name the field that is wrong."""

    def answered(
        self,
        status: int,
        headers: Mapping[str, str],
        body: bytes,
        request: GenerationRequest,
        base_url: str,
    ) -> EngineError:
        """Return the error for an answer with this status (see ``ErrorReader``)."""
        if status == 500 and not _OWN_FAULT.search(body):
            status = 400
        return super().answered(status, headers, body, request, base_url)

    def _refused(
        self, message: str, error: dict[str, Any], request: GenerationRequest
    ) -> InvalidRequest:
        said = _SCHEMA_FAULT.sub("Invalid schema: ", message).strip()
        return super()._refused(said, error, request)

    def _param(self, error: dict[str, Any], request: GenerationRequest) -> str | None:
        """Return the field of the request that the message is about."""
        message = str(error.get("message"))
        if "invalid tokens" in message:
            return request.subject
        if request.tools and "JSON schema" in message:
            return request.tools_param
        return request.constraint.param if request.constraint else request.subject


def checked(spec: ModelSpec) -> list[str]:
    """Check the model's files and return the command of the server.

    Raise EngineLoadError naming the file and the reason, which llama.cpp does not give, and
    ImportError where the library is not installed.
    """
    options = LlamaCppOptions.of(spec)
    if build := options.llama_server or server_settings.llama_server:
        try:
            program = shlex.split(build)
        except ValueError as exc:
            name = "'llama_server'" if options.llama_server else "LLAMA_SERVER"
            raise EngineLoadError(f"Model '{spec.id}': {name} cannot be read: {exc}.") from exc
    elif find_spec("xllamacpp") is None:
        raise ImportError("No module named 'xllamacpp'")
    else:
        program = [sys.executable, "-I", str(_PROGRAM)]
    if spec.file is None:
        raise EngineLoadError(f"Model '{spec.id}': the engine llama_cpp needs a 'file'.")
    _check_gguf(spec, spec.file)
    for path in (options.mmproj, options.draft_model, *spec.lora_adapters.values()):
        if path is not None:
            _check_gguf(spec, Path(path))
    check_prompt_templates(spec, options)
    return [*program, *_arguments(spec, options)]


def order(spec: ModelSpec, arguments: list[str], at: Endpoint) -> Order:
    """Return the order to start the server at this endpoint; its requests need the key."""
    env = {
        "LLAMA_API_KEY": at.key,
        "LLAMA_ARG_CACHE_IDLE_SLOTS": "1" if _copies_idle_slots(spec) else "0",
    }
    # How often OpenMP's threads spin at barriers: a fixed number, but for the program of the wheel,
    # which adapts it (``llama_server.BarrierSpins``).
    if str(_PROGRAM) not in arguments and "GOMP_SPINCOUNT" not in os.environ:
        env["GOMP_SPINCOUNT"] = llama_server.FEW_SPINS
    command = [*arguments, "--host", HOST, "--port", str(at.port)]
    return Order(name=server_settings.file_of(spec.id, "").name, command=command, env=env)


def _copies_idle_slots(spec: ModelSpec) -> bool:
    """Whether a request first copies the prompts of idle slots, so that its slot finds them.

    In a prompt cache that does not hold all of them, each copy displaces another, and every request
    copies all of them again, which takes seconds with many slots on a GPU. A prompt that loses its
    slot is copied in any case.
    """
    try:
        return spec.file is not None and ModelMemory(spec, spec.file).holds_all_prompts
    except (OSError, ValueError):
        return False


def _check_gguf(spec: ModelSpec, path: Path) -> None:
    try:
        is_model = is_gguf(path)
    except OSError as exc:
        raise EngineLoadError(f"Model '{spec.id}': cannot read {path}: {exc.strerror}.") from exc
    if not is_model:
        raise EngineLoadError(f"Model '{spec.id}': {path} is not a GGUF file.")


def _arguments(spec: ModelSpec, options: LlamaCppOptions) -> Iterator[str]:
    """Yield the arguments of ``llama-server``."""
    batch, ubatch = max(options.n_batch or PREFILL_BATCH, spec.slots), options.n_ubatch
    if options.embedding is not None:  # An input must fit into one batch.
        batch = ubatch = max(spec.context_length, spec.slots)
    named = {
        "model": spec.file,
        "alias": spec.id,
        "mmproj": options.mmproj,
        "gpu-layers": spec.gpu_layers,
        "parallel": spec.slots,
        "ctx-size": spec.context_length * spec.slots,  # llama.cpp divides it by the slots.
        "threads": spec.threads,
        "threads-http": spec.slots + _SPARE_THREADS,
        "batch-size": batch,
        "ubatch-size": ubatch,
        "flash-attn": {True: "on", False: "off", "auto": "auto"}[options.flash_attn],
        "cache-type-k": options.cache_type_k,
        "cache-type-v": options.cache_type_v,
        "rope-scaling": options.rope_scaling,
        "rope-freq-base": options.rope_freq_base,
        "rope-freq-scale": options.rope_freq_scale,
        "yarn-orig-ctx": options.yarn_orig_ctx,
        "split-mode": options.split_mode,
        "main-gpu": options.main_gpu,
        "tensor-split": options.tensor_split and ",".join(map(str, options.tensor_split)),
        "numa": options.numa,
        "model-draft": options.draft_model,
        "draft-max": options.draft_max,
        "draft-min": options.draft_min,
        "draft-p-min": options.draft_p_min,
        "gpu-layers-draft": options.draft_gpu_layers,
        # A request without adapters would reuse a prompt that was read with them.
        "cache-ram": 0 if spec.lora_adapters else options.prompt_cache_mib,
        "pooling": options.embedding,
        "chat-template-file": _template_file(spec, options),
    }
    for name, value in named.items():
        if value is not None:
            yield from (f"--{name}", str(value))
    for path in spec.lora_adapters.values():
        yield from ("--lora", str(path))
    switches = {
        "metrics": True,
        "no-webui": True,
        "no-slots": True,
        "no-prefill-assistant": True,  # A last message of the assistant is an ordinary turn.
        "jinja": True,
        "mlock": options.mlock,
        "embedding": options.embedding is not None,
        "lora-init-without-apply": bool(spec.lora_adapters),  # Each request selects its adapters.
    }
    yield from (f"--{name}" for name, is_on in switches.items() if is_on)


def _template_file(spec: ModelSpec, options: LlamaCppOptions) -> Path | None:
    """Write the template that the entry names into a file for the server; return its path."""
    template = named_template(spec, options)
    if template is None:
        return None
    server_settings.files.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = server_settings.file_of(spec.id, ".jinja")
    path.write_text(template, encoding="utf-8")
    return path
