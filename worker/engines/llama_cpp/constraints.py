"""Constraints of an answer: the fields of llama.cpp's request, and a check while it generates.

llama.cpp has two engines for a JSON schema. Its own lets the model reason before the constrained
answer, but may end a string inside a character, on which its parser then fails, and it has no limit
of time; so the schemas for it are checked first. llguidance is faster and allows whole characters
only, but constrains the output from the first token on. The grammars of clients go to llguidance.

An ambiguous grammar can pass its trial and still become slower with each token of the answer, which
delays all answers of the server. So each byte of the text is also matched here, and the processor
time is measured: microseconds for a byte of an ordinary grammar.

When llguidance reaches one of its limits inside an answer, llama.cpp silently continues without the
constraint. So an answer that does not match its constraint is an error.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import orjson
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from inference_site.core.domain.errors import GenerationFailed, InvalidRequest
from inference_site.core.domain.request import Constraint
from worker.engines.base import Sink
from worker.engines.chat.tools import plain_schema, with_link_patterns
from worker.engines.grammars import (
    JSON_FORM,
    check_grammar,
    check_schemas,
    gbnf_as_lark,
    is_known_schema,
    lark_or_schema,
    lenient_schema,
    llguidance_grammar,
    regex_as_lark,
    unnamed_schema,
)

_LLGUIDANCE = "%llguidance {}\n"
TRIAL = f'{_LLGUIDANCE}start: "a"'
"""A grammar that a build without llguidance refuses."""

_ONCE_S, _EACH_BYTE_S = 0.05, 0.0002
"""Budget of processor time for an answer and for each of its bytes. Ordinary grammars take 2 µs a
byte, ambiguous ones soon milliseconds."""
_CACHED_MATCHERS = 64
_TOKEN = re.compile(r"<[^>\s]+>")
"""A token in a grammar; it may have no text."""
_TEXT_OR_REGEX = r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/'
_OTHER_IN_LLAMA_CPP = re.compile(rf"{_TEXT_OR_REGEX}|~\s*(\d+)(?:\s*\.\.\s*(\d+))?")
_INLINE_SCHEMA = re.compile(rf"{_TEXT_OR_REGEX}|%json\s*")
_TOKEN_LIMIT = re.compile(rf"{_TEXT_OR_REGEX}|(\bmax_tokens\s*=\s*)\d+")
_NO_LIMIT = 10**9
_DECODER = json.JSONDecoder()
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|.)")
_HALF_CHARACTER = "\ufffd"
_WHITE_SPACE = b" \t\n\r"


def fields_without_llguidance(constraint: Constraint | None) -> dict[str, Any]:
    """Return the fields for a build of llama.cpp without llguidance.

    Raise InvalidRequest for a kind of constraint that it lacks.
    """
    if constraint is None:
        return {}
    if constraint.kind in ("json_object", "json_schema"):
        return constraint_fields(constraint, from_start=False)
    if constraint.kind != "gbnf":
        raise InvalidRequest(
            "This model's build of llama.cpp knows no constraints of the type "
            f"'{constraint.kind}'.",
            constraint.param,
        )
    check_grammar(constraint)
    return {"grammar": constraint.source}


def constraint_fields(
    constraint: Constraint | None, *, from_start: bool, is_chat: bool = True
) -> dict[str, Any]:
    """Return the fields of llama.cpp's request for a constraint.

    ``from_start``: the answer begins with the constrained text, without reasoning or calls before.
    ``is_chat``: keywords of a schema that llguidance lacks may be ignored.
    Raise InvalidRequest for a grammar that is invalid or too complex, and for a llguidance grammar
    of more than one part.
    """
    if constraint is None:
        return {}
    source, param = constraint.source, constraint.param
    match constraint.kind:
        case "json_object":
            return schema_fields({"type": "object"}, param, from_start=from_start)
        case "json_schema":
            return schema_fields(
                orjson.loads(source), param, from_start=from_start, is_chat=is_chat
            )
        case "gbnf":
            return _lark_fields(gbnf_as_lark(constraint))
        case "lark":
            check_grammar(constraint)
            return _lark_fields(source)
        case "regex":
            check_grammar(constraint)
            return _lark_fields(regex_as_lark(source))
        case "llguidance":
            check_grammar(constraint)
            part = lark_or_schema(constraint)
            if isinstance(part, str):
                return _lark_fields(part)
            return schema_fields(part, param, from_start=from_start, is_chat=is_chat)


def _lark_fields(source: str) -> dict[str, Any]:
    """Return the fields for a grammar of Lark, in the words that llama.cpp's llguidance knows.

    It refuses ``\\x41`` in a text, ``~2..3`` after a part and some formats of schemas, and
    llama.cpp cuts a grammar at a NUL; the answer would then be bound to nothing.
    """
    plain = _OTHER_IN_LLAMA_CPP.sub(_in_its_words, _with_known_formats(source))
    return {"grammar": f"{_LLGUIDANCE}{plain}".replace("\0", "\\u0000")}


def _with_known_formats(source: str) -> str:
    """Return the grammar of Lark with ``with_link_patterns`` applied to its schemas."""
    pieces, position = [], 0
    for found in _INLINE_SCHEMA.finditer(source):
        if found[0].startswith("%json") and found.start() >= position:
            try:
                schema, end = _DECODER.raw_decode(source, found.end())
            except ValueError:  # In a comment.
                continue
            if isinstance(schema, dict) and (known := with_link_patterns(schema)) != schema:
                pieces += [source[position : found.end()], json.dumps(known)]
                position = end
    return "".join([*pieces, source[position:]])


def _in_its_words(found: re.Match[str]) -> str:
    if found[0].startswith("~"):
        return f"{{{found[1]},{found[2] or found[1]}}}"
    if not found[0].startswith('"'):
        return found[0]
    return _ESCAPE.sub(lambda one: f"\\u00{one[1]}" if one[1] else one[0], found[0])


def fields_of_tokens(ids: Sequence[int]) -> dict[str, Any]:
    """Return the fields for an answer of these tokens only.

    The grammar never ends: at its end llama.cpp would allow the end token, listed or not.
    """
    listed = ",".join(map(str, dict.fromkeys(ids)))
    return {"grammar": f"{_LLGUIDANCE}start: <[{listed}]> start"}


def schema_fields(
    schema: dict[str, Any], param: str, *, from_start: bool, is_chat: bool = True
) -> dict[str, Any]:
    """Return the fields for a JSON schema: llguidance's where it can be used.

    Keywords that it lacks are ignored, as llama.cpp's own engine ignores them; that one would also
    ignore others, such as the bounds of decimals. Raise InvalidRequest for a schema that is invalid
    or too complex.
    """
    unnamed = with_link_patterns(unnamed_schema(schema))
    text = orjson.dumps({"x-guidance": JSON_FORM, **unnamed}).decode()
    is_known = is_known_schema(text, param)
    if from_start and (is_known or is_chat):
        return {
            "grammar": f"{_LLGUIDANCE}start: %json {text if is_known else lenient_schema(text)}"
        }
    plain = plain_schema(schema)
    check_schemas(plain, param)
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": plain}}}


def measured(
    constraint: Constraint | None, sink: Sink, *, is_plain: bool = True, may_think: bool = False
) -> Sink:
    """Return a sink that checks the answer against the constraint, if there is one.

    Without ``is_plain``, the text has parts that the constraint lacks, so only time is measured.
    ``may_think``: the answer may begin with thoughts.
    """
    if constraint is None:
        return sink
    if constraint.kind in ("json_object", "json_schema"):
        return JsonCheck(sink) if is_plain else sink
    return GrammarMeter(sink, constraint, is_plain=is_plain, may_think=may_think)


class JsonCheck:
    """A sink that raises GenerationFailed if a finished choice is no valid JSON."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._texts: dict[int, list[str]] = {}
        self._others: set[int] = set()

    @property
    def cancelled(self) -> bool:
        """Whether the engine must stop now (see ``Sink``)."""
        return self._sink.cancelled

    def feed(self, delta: Delta) -> None:
        """Pass the delta on; check the text of a choice that ends."""
        match delta:
            case TextDelta(text, index):
                self._texts.setdefault(index, []).append(text)
            case ToolCallDelta():
                self._others.add(delta.index)
            case Finish("stop", index, None) if index not in self._others:
                try:
                    orjson.loads("".join(self._texts.get(index, ())))
                except orjson.JSONDecodeError as exc:
                    raise _constraint_lost() from exc
        self._sink.feed(delta)


def _constraint_lost() -> GenerationFailed:
    return GenerationFailed("The answer does not fit its constraint, which became too complex.")


class GrammarMeter:
    """A sink that matches the text with a grammar and measures the time.

    Raise InvalidRequest when the grammar is slow, GenerationFailed when the text does not match.
    """

    def __init__(
        self,
        sink: Sink,
        constraint: Constraint,
        *,
        is_plain: bool = True,
        may_think: bool = False,
    ) -> None:
        self._sink, self._param = sink, constraint.param
        unlimited = _without_token_limits(constraint)
        self._matcher = _matcher(unlimited)
        self._matchers: dict[int, LLMatcher] = {}
        self._budget_s = _ONCE_S
        # The text need not match where llama.cpp removes parts of it, or cannot decode a token.
        # Where it looks for thoughts, it removes white space before the text.
        is_cut = may_think and any(
            self._matcher.deep_copy().consume_token(byte) for byte in _WHITE_SPACE
        )
        is_limited = unlimited is not constraint  # A limit may cut the text of a rule.
        has_token = bool(_TOKEN.search(constraint.source))
        self._is_other = not is_plain or is_cut or is_limited or has_token
        self._incomplete: set[int] = set()

    @property
    def cancelled(self) -> bool:
        """Whether the engine must stop now (see ``Sink``)."""
        return self._sink.cancelled

    def feed(self, delta: Delta) -> None:
        """Match the text of the delta, and pass it on."""
        if isinstance(delta, TextDelta):
            if _HALF_CHARACTER in delta.text:
                self._incomplete.add(delta.index)
            self._measure(delta.index, delta.text.encode())
        elif isinstance(delta, ReasoningDelta):
            self._incomplete.add(delta.index)
        elif isinstance(delta, ToolCallDelta):
            self._incomplete.add(delta.index)
            if delta.is_custom:
                self._measure(delta.index, delta.arguments.encode())
        self._sink.feed(delta)

    def _measure(self, choice: int, text: bytes) -> None:
        if (matcher := self._matchers.get(choice)) is None:
            matcher = self._matchers[choice] = self._matcher.deep_copy()
        started = time.thread_time()
        fits = matcher.is_stopped() or all(map(matcher.consume_token, text))
        self._budget_s += _EACH_BYTE_S * len(text) - (time.thread_time() - started)
        if self._budget_s < 0:
            raise InvalidRequest(
                "Invalid grammar: it matches this answer in too many ways.", self._param
            )
        if not fits and not self._is_other and choice not in self._incomplete:
            raise _constraint_lost()


class _Bytes:
    """A vocabulary with a token for each byte."""

    bos_token_id = None
    tokens = (*(bytes([code]) for code in range(256)), b"<end>")
    eos_token_id = 256
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _without_token_limits(constraint: Constraint) -> Constraint:
    """Return a grammar of Lark without limits of tokens: a matcher of bytes would count bytes.

    The same constraint is returned if it has none.
    """
    if constraint.kind not in ("lark", "llguidance"):
        return constraint
    is_lark = constraint.kind == "lark"
    lark = constraint.source if is_lark else lark_or_schema(constraint)
    if not isinstance(lark, str):
        return constraint
    unlimited = _TOKEN_LIMIT.sub(lambda f: f"{f[1]}{_NO_LIMIT}" if f[1] else f[0], lark)
    return constraint if unlimited == lark else Constraint("lark", unlimited, constraint.param)


@lru_cache(_CACHED_MATCHERS)
def _matcher(constraint: Constraint) -> LLMatcher:
    """Return a matcher to copy: building one takes milliseconds."""
    return LLMatcher(_byte_tokenizer(), llguidance_grammar(constraint), log_level=0)


@cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257)
