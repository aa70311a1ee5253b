"""Maps the errors of a model's server to errors of the engine.

| the server answers | the engine raises |
|---|---|
| 400, 413, 422 | InvalidRequest; ContextLengthExceeded when it names both numbers of tokens |
| the same, about max_tokens | AnswerTooLong |
| 401, 403, 404 | EngineUnavailable: the operator must fix it, so the details go to the log |
| 429 | RateLimited, with its Retry-After |
| 503 | EngineUnavailable, with its Retry-After |
| 500 to tokens without a text (llama.cpp: ``vector::_M_range_check``) | InvalidRequest |
| other, the message says that the engine has ended | ModelServerUnreachable |
| other | GenerationFailed |

Clients get the message of a 400 without addresses and paths. Of all other errors the message goes
to the log, and clients get a general one.
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

from inference_site.core.domain.errors import (
    AnswerTooLong,
    ContextLengthExceeded,
    EngineError,
    EngineUnavailable,
    GenerationFailed,
    InvalidRequest,
    ModelServerUnreachable,
    RateLimited,
)
from inference_site.core.domain.request import GenerationRequest
from worker.engines.openai_upstream.server import Server

logger = logging.getLogger(__name__)

UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What the code that reads an answer raises for one of another form."""
_MAX_SHOWN = 1000
_CLIENT_ERRORS = (400, 413, 422)
_MAX_RETRY_AFTER_S = 3600
_OWN_FIELDS = (
    "input",
    "messages",
    "prompt",
    "response_format",
    "tokens",
    "tools",
    "top_logprobs",
)

_ENDED = re.compile("EngineCore encountered an issue|EngineDeadError|engine is dead", re.I)
"""vLLM's messages once its engine process has ended; the server ends some seconds later."""

_CONSTRAINTS = re.compile("grammar|schema|regex|structur|choices into|lark", re.I)
"""Words in messages about a constraint that name no field."""

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
        r"context length is (?P<context>\d+) tokens.*?resulted in (?:an estimated )?(?P<input>\d+) "
        r"tokens",
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
        # Anthropic, xAI, Gemini, Mistral
        r"prompt is too long: (?P<input>\d+) tokens > (?P<context>\d+) maximum",
        r"maximum prompt length is (?P<context>\d+) but the request contains (?P<input>\d+) tokens",
        r"input token count \(?(?P<input>\d+)\)? exceeds the maximum number of tokens allowed "
        r"\(?(?P<context>\d+)",
        r"Prompt contains (?P<input>\d+) tokens.*?too large for model with "
        r"(?P<context>\d+) maximum",
    )
)
"""Messages about a prompt that is too long; the first match counts.

vLLM may name a lower bound of the tokens, only characters, or only the rest for the answer.
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
        """Return the error for an answer with this status.

        A body without an error object may come from a service that is no model server.
        """
        try:
            error = _error_of(orjson.loads(body))
        except orjson.JSONDecodeError:
            error = {}
        if status not in _CLIENT_ERRORS or not error.get("message"):
            self._log(status, body.decode(errors="replace"), base_url)
        return self._mapped(status, error, headers, request)

    def in_stream(self, error: Any, request: GenerationRequest) -> EngineError:
        """Return the error for an error object in a stream, or in a whole answer of status 200."""
        details = _error_of({"error": error})
        code = str(details.get("code", details.get("status")))
        status = int(code) if code.isdecimal() else 500
        if status not in _CLIENT_ERRORS:
            self._log(status, str(details.get("message", error)), "inside an answer, the server")
        return self._mapped(status, details, {}, request)

    def _log(self, status: int, message: str, sender: str) -> None:
        message = self._server.without_key(message)[:_MAX_SHOWN]
        logger.error("model %s: %s answers %d: %r", self._id, sender, status, message)

    def _mapped(
        self,
        status: int,
        error: dict[str, Any],
        headers: Mapping[str, str],
        request: GenerationRequest,
    ) -> EngineError:
        message = error.get("message")
        if not isinstance(message, str) or not message:
            message = f"The model's server refused the request (status {status})."
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
            case 500 if request.operation == "detokenize" and "range" in message:
                return InvalidRequest("It holds an id that is no token of this model.", "tokens")
            case _ if _ENDED.search(message):
                return ModelServerUnreachable(
                    f"The server of the model '{self._id}' cannot be reached.", is_suspect=True
                )
            case _:
                return GenerationFailed(f"The model's server failed (status {status}).")

    def _refused(
        self, message: str, error: dict[str, Any], request: GenerationRequest
    ) -> InvalidRequest:
        message = message.removesuffix(" + stream")  # Of llama.cpp; all requests are streamed.
        overflow = _overflow(message, error, self._context_length)
        if overflow is None or (overflow.from_rest and request.max_output_tokens == 0):
            param = self._param(error, request)
            is_length = param == "max_tokens"
            return AnswerTooLong(message) if is_length else InvalidRequest(message, param)
        if overflow.tokens >= overflow.context or request.truncate:
            return ContextLengthExceeded(
                overflow.context,
                overflow.tokens,
                request.subject,
                is_estimated=overflow.is_estimated,
                message=message if overflow.is_unknown else "",
            )
        left = overflow.context - overflow.tokens
        return AnswerTooLong(message, None if overflow.is_estimated else left)

    def _param(self, error: dict[str, Any], request: GenerationRequest) -> str | None:
        """Return the request's name of the field that the server's error names, if it names one."""
        param, constraint = error.get("param"), request.constraint
        if not isinstance(param, str) or not param:
            is_about_it = constraint is not None and _CONSTRAINTS.search(str(error.get("message")))
            return constraint.param if constraint is not None and is_about_it else None
        param = param.removeprefix("body.")  # From vLLM's validation.
        field = re.split(r"[.\[]", param)[0]
        ours = self._ours.get(field)
        if field in request.fields or (field == "file" and request.audio is not None):
            ours = field  # Of a sound: these fields were sent as the client has them.
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


def for_clients(message: str, server: Server) -> str:
    """Return a message of a server without its key, and without addresses and paths."""
    message = _PLACES.sub("…", server.without_key(message)[:_MAX_SHOWN])
    for url in server.base_urls:
        if host := urlsplit(url).hostname:
            message = re.sub(rf"\b{re.escape(host)}\b(?::\d+)?", "…", message)
    return message


def _error_of(body: Any) -> dict[str, Any]:
    """Return the error object of a body in any of the servers' formats; empty if it has none."""
    if isinstance(body, list) and body:  # Gemini.
        [body, *_] = body
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


_ABOUT = re.compile("at least|an estimated")
"""Words for a number of tokens that is not exact."""


@dataclass(frozen=True, slots=True)
class _Overflow:
    """Lengths of the context and of a prompt that is too long, in tokens.

    ``from_rest``: the message has only the tokens that are left for the answer. ``is_unknown``: it
    has no number, and both are guesses.
    """

    context: int
    tokens: int
    is_estimated: bool = False
    from_rest: bool = False
    is_unknown: bool = False


def _overflow(message: str, error: Mapping[str, Any], known_context: int) -> _Overflow | None:
    """Return the lengths if the error is about a prompt that is too long, else None."""
    context, tokens = error.get("n_ctx"), error.get("n_prompt_tokens")
    if isinstance(context, int) and isinstance(tokens, int):
        return _Overflow(context, tokens, bool(error.get("is_estimated")))
    matched = next((match for p in _OVERFLOWS if (match := p.search(message))), None)
    if matched is None and error.get("code") == "context_length_exceeded":  # OpenAI itself.
        return _Overflow(known_context, known_context, is_estimated=True, is_unknown=True)
    if matched is None:
        return None
    match {name: int(digits) for name, digits in matched.groupdict().items()}:
        case {"context": length, "input": tokens}:
            return _Overflow(length, tokens, is_estimated=bool(_ABOUT.search(matched[0])))
        case {"context": length, "characters": characters, "most": most}:
            return _Overflow(length, length * characters // max(1, most), is_estimated=True)
        case {"left": left}:
            return _Overflow(known_context, known_context - left, True, from_rest=True)
    return None


def retry_after_s(headers: Mapping[str, str]) -> int | None:
    """Return the seconds of a Retry-After header, at most an hour; None without a valid one."""
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
    return min(max(math.ceil(seconds), 0), _MAX_RETRY_AFTER_S)
