"""Checks an answer against its constraint while llama.cpp generates it.

An ambiguous grammar can pass its trial and still become slower with each token of the answer, which
delays all answers of the server. So each byte of the text is also matched here, and the processor
time is measured: microseconds for a byte of an ordinary grammar.

When llguidance reaches one of its limits inside an answer, llama.cpp silently continues without the
constraint. So an answer that does not match its constraint is an error.
"""

from __future__ import annotations

import re
import time
from functools import cache, lru_cache

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
from worker.engines.grammars import llguidance_grammar

_ONCE_S, _EACH_BYTE_S = 0.05, 0.0002
"""Budget of processor time for an answer and for each of its bytes. Ordinary grammars take 2 µs a
byte, ambiguous ones soon milliseconds."""

_CACHED_MATCHERS = 64
_TOKEN = re.compile(r"<[^>\s]+>")
"""A token in a grammar; it may have no text."""
_HALF_CHARACTER = "\ufffd"


def measured(constraint: Constraint | None, sink: Sink, *, is_plain: bool = True) -> Sink:
    """Return a sink that checks the answer against the constraint, if there is one.

    Without ``is_plain``, the text has parts that the constraint lacks, so only time is measured.
    """
    if constraint is None:
        return sink
    if constraint.kind in ("json_object", "json_schema"):
        return JsonCheck(sink) if is_plain else sink
    return GrammarMeter(sink, constraint, is_plain=is_plain)


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

    def __init__(self, sink: Sink, constraint: Constraint, *, is_plain: bool = True) -> None:
        self._sink, self._param = sink, constraint.param
        self._matcher = _matcher(constraint)
        self._matchers: dict[int, LLMatcher] = {}
        self._budget_s = _ONCE_S
        # The text need not match where llama.cpp removes parts of it, or cannot decode a token.
        self._has_tokens = not is_plain or bool(_TOKEN.search(constraint.source))
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
        if not fits and not self._has_tokens and choice not in self._incomplete:
            raise _constraint_lost()


class _Bytes:
    """A vocabulary with a token for each byte."""

    bos_token_id = None
    tokens = (*(bytes([code]) for code in range(256)), b"<end>")
    eos_token_id = 256
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache(_CACHED_MATCHERS)
def _matcher(constraint: Constraint) -> LLMatcher:
    """Return a matcher to copy: building one takes milliseconds."""
    return LLMatcher(_byte_tokenizer(), llguidance_grammar(constraint), log_level=0)


@cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257)
