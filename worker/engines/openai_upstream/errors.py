"""The server's errors, as errors of the engine.

| the server says | the engine raises |
|---|---|
| 400, 413, 422 | InvalidRequest; ContextLengthExceeded when it names both numbers of tokens |
| 401, 403, 404 | EngineUnavailable: the operator's to mend, so the details go to the log |
| 429 | RateLimited, with its Retry-After |
| 503 | EngineUnavailable, with its Retry-After |
| 5xx: the engine has ended | ModelServerUnreachable |
| other | GenerationFailed |

Of a 400 clients get the words, without addresses and paths. Of anything else they get what it is,
and the log has the words.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import orjson

from inference_site.domain.errors import (
    ContextLengthExceeded,
    EngineError,
    EngineUnavailable,
    GenerationFailed,
    InvalidRequest,
    ModelServerUnreachable,
    RateLimited,
)
from inference_site.domain.request import GenerationRequest
from worker.engines.openai_upstream.server import Server

logger = logging.getLogger(__name__)

_SHOWN = 1000
_CLIENTS_MATTER = (400, 413, 422)
_LONGEST_RETRY_AFTER_S = 3600
_OWN_FIELDS = ("input", "messages", "prompt", "response_format", "tools", "top_logprobs")

_ENDED = re.compile("EngineCore encountered an issue|EngineDeadError|engine is dead", re.I)
"""How vLLM says that its engine's process has ended; its server follows some seconds later."""

_CONSTRAINTS = re.compile("grammar|schema|regex|structur|choices into|lark", re.I)
"""Words of servers about a constraint, where they name no field."""

_OVERFLOWS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        # vLLM and OpenAI
        r"context length is (?P<context>\d+) tokens.*?at least (?P<input>\d+) input tokens",
        r"context length is (?P<context>\d+) tokens.*?contains (?P<characters>\d+) characters "
        r"\(more than (?P<most>\d+)",
        r"max_tokens must be at least 1, got (?P<left>-?\d+)",
        r"context length is (?P<context>\d+) tokens.*?\((?P<input>\d+) in the (?:messages|prompt)",
        r"context length is (?P<context>\d+) tokens.*?(?:has|passed) (?P<input>\d+) input tokens",
        r"context length is (?P<context>\d+) tokens.*?resulted in (?P<input>\d+) tokens",
        r"passed (?P<input>\d+) input tokens.*?context length is only (?P<context>\d+)",
        r"\(length (?P<input>\d+)\) is longer than the maximum model length of (?P<context>\d+)",
        # SGLang
        r"input \((?P<input>\d+) tokens\).*?context length \((?P<context>\d+) tokens",
        r"context length of (?P<context>\d+) tokens.*?(?P<input>\d+) tokens from the input",
        # llama.cpp
        r"request \((?P<input>\d+) tokens\).*?context size \((?P<context>\d+) tokens",
        # TGI
        r"must be <= (?P<context>\d+). Given: (?P<input>\d+) `inputs` tokens",
        r"less than (?P<context>\d+) tokens. Given: (?P<input>\d+)",
        r"context length is (?P<context>\d+) tokens.*?requested (?P<input>\d+) tokens",
    )
)
"""How servers say that a prompt is too long; the first that fits counts.

vLLM counts no further than it has to, or only characters, or what is left for the answer.
"""


class ErrorReader:
    """Reads the errors of one model's server."""

    def __init__(self, model_id: str, server: Server, context_length: int) -> None:
        self._id, self._server, self._context_length = model_id, server, context_length
        self._ours = {theirs.split(".")[0]: ours for ours, theirs in server.fields.items()}
        self._ours |= {name: name for name in _OWN_FIELDS}

    def answered(
        self,
        status: int,
        headers: Mapping[str, str],
        body: bytes,
        request: GenerationRequest,
        base_url: str,
    ) -> EngineError:
        """Return what an answer of this server with this status means.

        A body without an error object may be that of a service that is no model server.
        """
        try:
            error = _error_of(orjson.loads(body))
        except orjson.JSONDecodeError:
            error = {}
        if status not in _CLIENTS_MATTER or not error.get("message"):
            self._log(status, body.decode(errors="replace"), base_url)
        return self._mapped(status, error, headers, request)

    def in_stream(self, error: Any, request: GenerationRequest) -> EngineError:
        """Return what an error inside a stream means."""
        found = _error_of({"error": error})
        code = str(found.get("code", found.get("status")))
        status = int(code) if code.isdecimal() else 500
        if status not in _CLIENTS_MATTER:
            self._log(status, str(found.get("message", error)), "in a stream, the server")
        return self._mapped(status, found, {}, request)

    def _log(self, status: int, said: str, who: str) -> None:
        said = self._server.without_key(said)[:_SHOWN]
        logger.error("model %s: %s answers %d: %r", self._id, who, status, said)

    def _mapped(
        self,
        status: int,
        error: dict[str, Any],
        headers: Mapping[str, str],
        request: GenerationRequest,
    ) -> EngineError:
        said = error.get("message")
        message = said if isinstance(said, str) and said else f"status {status}"
        match status:
            case 400 | 413 | 422:
                return self._refused(for_clients(message, self._server), error, request)
            case 401 | 403 | 404:
                return EngineUnavailable(
                    f"The server of the model '{self._id}' refused the platform's request "
                    f"(status {status})."
                )
            case 429:
                return RateLimited(
                    f"The server of the model '{self._id}' accepts no more requests now.",
                    retry_after_s(headers),
                )
            case 503:
                return EngineUnavailable(
                    f"The server of the model '{self._id}' is overloaded.",
                    retry_after_s(headers),
                )
            case _ if _ENDED.search(message):
                said = f"The server of the model '{self._id}' cannot be reached."
                return ModelServerUnreachable(said, is_suspect=True)
            case _:
                return GenerationFailed(f"The model's server failed (status {status}).")

    def _refused(
        self, message: str, error: dict[str, Any], request: GenerationRequest
    ) -> InvalidRequest:
        found = _overflow(message, error, self._context_length)
        if found is None or (found.says_left and request.max_output_tokens == 0):
            return InvalidRequest(message, self._param(error, request))
        if found.tokens >= found.context or request.truncate:
            return ContextLengthExceeded(
                found.context, found.tokens, request.subject, is_estimated=found.is_estimated
            )
        return InvalidRequest(message, "max_tokens")

    def _param(self, error: dict[str, Any], request: GenerationRequest) -> str | None:
        """Return our name of the field that the server's error names, if it names one."""
        param, constraint = error.get("param"), request.constraint
        if not isinstance(param, str) or not param:
            is_about_it = constraint is not None and _CONSTRAINTS.search(str(error.get("message")))
            return constraint.param if constraint is not None and is_about_it else None
        param = param.removeprefix("body.")  # vLLM's validation.
        field = re.split(r"[.\[]", param)[0]
        ours = self._ours.get(field)
        constraints = ("gbnf", "lark", "regex", "response_format", "structural_tag")
        if constraint is not None and ours in constraints:
            return constraint.param
        return param if ours == field else ours


_PLACES = re.compile(
    r"""\b[a-z][a-z0-9+.-]*://[^\s"'`<>)\]]+"""  # An address, an IPv4 and an IPv6 one,
    r"""|\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?|\[[0-9a-f:]*:[0-9a-f:.]*\](?::\d+)?|\blocalhost(?::\d+)?"""
    r"""|(?<![\w/.<#\\])(?:~|\.{1,2})?(?:/[\w.@+~-]+)+/?|\b[a-z]:\\[^\s"'`]+""",  # and paths.
    re.IGNORECASE | re.ASCII,
)


def for_clients(said: str, server: Server) -> str:
    """Return words of a server without its key, and without addresses and paths."""
    said = _PLACES.sub("…", server.without_key(said)[:_SHOWN])
    for url in server.base_urls:
        if host := urlsplit(url).hostname:
            said = re.sub(rf"\b{re.escape(host)}\b(?::\d+)?", "…", said)
    return said


def _error_of(body: Any) -> dict[str, Any]:
    """Return the error object of a body in one of the forms that servers use, else nothing."""
    if not isinstance(body, dict):
        return {}
    match body.get("error", body.get("detail")):
        case dict(error):
            return error
        case str(message):  # TGI, Ollama's own; FastAPI.
            return {**body, "message": message}
        case [{"msg": message, "loc": [*_, name]}, *_]:  # FastAPI's validation.
            return {"message": f"{name}: {message}", "param": name}
        case _:  # Older vLLM: the error is the body.
            return body


@dataclass(frozen=True, slots=True)
class _Overflow:
    """A prompt that is too long, in tokens. ``says_left``: only the rest of the context is told."""

    context: int
    tokens: int
    is_estimated: bool = False
    says_left: bool = False


def _overflow(message: str, error: Mapping[str, Any], known_context: int) -> _Overflow | None:
    """Return the context's length and the prompt's, if a prompt that is too long was refused."""
    context, tokens = error.get("n_ctx"), error.get("n_prompt_tokens")
    if isinstance(context, int) and isinstance(tokens, int):
        return _Overflow(context, tokens, bool(error.get("is_estimated")))
    found = next((match for p in _OVERFLOWS if (match := p.search(message))), None)
    if found is None:
        return None
    match {name: int(told) for name, told in found.groupdict().items()}:
        case {"context": length, "input": tokens}:
            return _Overflow(length, tokens, is_estimated="at least" in found[0])
        case {"context": length, "characters": characters, "most": most}:
            return _Overflow(length, length * characters // max(1, most), is_estimated=True)
        case {"left": left}:
            return _Overflow(known_context, known_context - left, True, says_left=True)
    return None


def retry_after_s(headers: Mapping[str, str]) -> int | None:
    """Return what a Retry-After header asks for, in whole seconds, within an hour."""
    value = headers.get("retry-after", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    if not math.isfinite(seconds):
        return None
    return min(max(math.ceil(seconds), 0), _LONGEST_RETRY_AFTER_S)
