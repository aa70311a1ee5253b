"""The start of a model's ctransformers server, and the platform's requests to it."""

from __future__ import annotations

import sys
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson

from inference_site.catalogue.engines.ctransformers import (
    COMPLETION_CAPABILITIES,
    CtransformersOptions,
    has_chat,
)
from inference_site.catalogue.engines.openai_upstream import Flavor
from inference_site.catalogue.gguf_files import CHAT_TEMPLATE, TOKENS, fields
from inference_site.core.domain.errors import EngineLoadError, InvalidRequest
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest, Sampling
from worker.engines.base import Engine
from worker.engines.chat.adapter import ChatAdapter
from worker.engines.chat.configuration import (
    Vocabulary,
    check_prompt_templates,
    configure_chat,
    options_with,
)
from worker.engines.grammars import llguidance_grammar
from worker.engines.openai_upstream.engine import UpstreamEngine
from worker.engines.openai_upstream.payload import Payloads
from worker.engines.openai_upstream.server import Endpoint, own_server
from worker.engines.own_server import HOST, Launch, OwnServer
from worker.model_servers.llama_server import LOAD_FAILED
from worker.model_servers.process import Order, server_settings

_ROOT = Path(__file__).resolve().parent.parent.parent.parent
_NAMES = (
    *Sampling.__slots__,
    *("cache_prompt", "echo", "ignore_eos", "max_tokens", "n", "stop", "stop_token_ids"),
)
_BOS, _EOS = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"
FLAVOR = Flavor(
    {name: name for name in _NAMES},
    COMPLETION_CAPABILITIES,
    running_usage="timings_per_token",
    tokens="llama_cpp",
)


def load(spec: ModelSpec) -> Engine:
    """Load a GGML or early GGUF file. Raise EngineLoadError naming it and the fix."""
    if find_spec("ctransformers") is None:
        raise ImportError("No module named 'ctransformers'")
    if spec.file is None:
        raise EngineLoadError(f"Model '{spec.id}': the engine ctransformers needs a 'file'.")
    if not spec.file.is_file():
        raise EngineLoadError(f"Model '{spec.id}': cannot read {spec.file}: no such file.")
    options = CtransformersOptions.of(spec)
    check_prompt_templates(spec, options)
    if has_chat(spec):
        configure_chat(spec, options, chat_vocabulary(spec.file))  # It may have no template.
    launch = Launch(
        order=partial(_order, spec),
        connect=partial(_connected, spec, options),
        ready="/health",
        pulse="/pulse",
        why_not_loaded=lambda process: (
            process.tail[-1].removeprefix(f"Model '{spec.id}': ")
            if process.status == LOAD_FAILED and process.tail
            else f"ctransformers could not load {spec.file}: {process.reason}."
        ),
    )
    return OwnServer(spec, launch).loaded()


def chat_vocabulary(path: Path) -> Vocabulary:
    """Return the file's template and tokens for chats; empty if it is no GGUF, or missing."""
    found = fields(path, TOKENS, CHAT_TEMPLATE, _BOS, _EOS)
    tokens = found.get(TOKENS, [])

    def text(key: str) -> str:
        number = found.get(key)
        return tokens[number] if isinstance(number, int) and number < len(tokens) else ""

    return Vocabulary(chat_template=found.get(CHAT_TEMPLATE), bos=text(_BOS), eos=text(_EOS))


def _order(spec: ModelSpec, at: Endpoint) -> Order:
    entry = {
        "id": spec.id,
        "file": str(spec.file),
        "slots": spec.slots,
        "context_length": spec.context_length,
        "threads": spec.threads,
        "gpu_layers": spec.gpu_layers,
        "options": spec.options,
    }
    program = "worker.engines.ctransformers.server"
    return Order(
        name=server_settings.file_of(spec.id, "").name,
        command=[sys.executable, "-m", program, orjson.dumps(entry).decode()],
        env={
            "PYTHONPATH": str(_ROOT),
            "MODEL_SERVER_ADDRESS": f"{HOST}:{at.port}",
            "MODEL_SERVER_KEY": at.key,
        },
    )


def _connected(spec: ModelSpec, options: CtransformersOptions, at: Endpoint) -> Engine:
    """Return the engine of a server that is ready."""
    engine = UpstreamEngine(spec, own_server(spec, FLAVOR, at), _Payloads)
    if not has_chat(spec):
        return engine
    assert spec.file is not None
    vocabulary = chat_vocabulary(spec.file)

    @cache
    def with_template(name: str) -> ChatAdapter:
        chat = configure_chat(spec, options_with(options, name), vocabulary)
        return ChatAdapter(engine, chat, COMPLETION_CAPABILITIES)

    return ChatAdapter(
        engine, configure_chat(spec, options, vocabulary), COMPLETION_CAPABILITIES, with_template
    )


class _Payloads(Payloads):
    """Builds request bodies of completions, with constraints in llguidance's format."""

    def chat(self, request: GenerationRequest) -> dict[str, Any]:
        """Raise InvalidRequest: chats come as prompts, through the chat adapter."""
        raise InvalidRequest(f"The model `{request.model}` has no chat template.", "messages")

    def complete(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the payload of a completion."""
        payload = {**super().complete(request), "prompts": request.prompts}
        del payload["prompt"]
        return payload

    def _constraint(self, request: GenerationRequest) -> dict[str, Any]:
        if (constraint := request.constraint) is None:
            return {}
        return {"grammar": llguidance_grammar(constraint)}
