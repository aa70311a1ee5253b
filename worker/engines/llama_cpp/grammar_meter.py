"""What an answer is measured with while llama.cpp generates it under a constraint.

A grammar can pass its trial and still match what the model says in ever more ways, each step slower
than the last, for everybody. Here the text is read along with the grammar byte by byte, which takes
microseconds unless it is such a one. The time is that of the processor, so load does not count.

When llguidance reaches one of its limits in the middle of an answer, llama.cpp goes on without the
constraint, and tells nobody. So an answer that does not fit its constraint is an error.
"""

from __future__ import annotations

import re
import time
from functools import cache, lru_cache

import orjson
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from inference_site.domain.deltas import Delta, Finish, ReasoningDelta, TextDelta, ToolCallDelta
from inference_site.domain.errors import GenerationFailed, InvalidRequest
from inference_site.domain.request import Constraint
from worker.engines.base import Sink
from worker.engines.grammars import llguidance_grammar

_ONCE_S, _EACH_BYTE_S = 0.05, 0.0002
"""What may be spent. Ordinary grammars take 2 µs for a byte, ambiguous ones soon milliseconds."""

_MATCHERS_KEPT = 64
_TOKEN = re.compile(r"<[^>\s]+>")
"""In a grammar: a token that has no text, perhaps."""
_HALF_CHARACTER = "\ufffd"


def measured(constraint: Constraint | None, sink: Sink, *, is_plain: bool = True) -> Sink:
    """Return a sink that measures an answer under this constraint, if there is one.

    Without ``is_plain``, the text also has what the constraint has not, so it need not fit.
    """
    if constraint is None:
        return sink
    if constraint.kind in ("json_object", "json_schema"):
        return JsonCheck(sink) if is_plain else sink
    return GrammarMeter(sink, constraint, is_plain=is_plain)


class JsonCheck:
    """A sink that passes on what it is fed, and raises GenerationFailed if it ends as no JSON."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._texts: dict[int, list[str]] = {}
        self._others: set[int] = set()

    @property
    def cancelled(self) -> bool:
        """Whether the engine must stop now (see ``Sink``)."""
        return self._sink.cancelled

    def feed(self, delta: Delta) -> None:
        """Pass the delta on, once an answer that has ended is checked."""
        match delta:
            case TextDelta(text, index):
                self._texts.setdefault(index, []).append(text)
            case ToolCallDelta():
                self._others.add(delta.index)
            case Finish("stop", index, None) if index not in self._others:
                self._check("".join(self._texts.get(index, ())))
        self._sink.feed(delta)

    def _check(self, text: str) -> None:
        try:
            orjson.loads(text)
        except orjson.JSONDecodeError as exc:
            raise _dropped() from exc


def _dropped() -> GenerationFailed:
    return GenerationFailed("The answer does not fit its constraint, which became too complex.")


class GrammarMeter:
    """A sink that passes on what it is fed.

    Raise InvalidRequest when the grammar is slow, GenerationFailed when the text does not fit it.
    """

    def __init__(self, sink: Sink, constraint: Constraint, *, is_plain: bool = True) -> None:
        self._sink, self._param = sink, constraint.param
        self._fresh = _matcher(constraint)
        self._matchers: dict[int, LLMatcher] = {}
        self._left_s = _ONCE_S
        # What llama.cpp takes out of the text, or cannot show, is not known here.
        self._has_tokens = not is_plain or bool(_TOKEN.search(constraint.source))
        self._unknown: set[int] = set()

    @property
    def cancelled(self) -> bool:
        """Whether the engine must stop now (see ``Sink``)."""
        return self._sink.cancelled

    def feed(self, delta: Delta) -> None:
        """Pass the delta on, once its text is measured."""
        if isinstance(delta, TextDelta):
            if _HALF_CHARACTER in delta.text:
                self._unknown.add(delta.index)
            self._measure(delta.index, delta.text.encode())
        elif isinstance(delta, ReasoningDelta):
            self._unknown.add(delta.index)
        elif isinstance(delta, ToolCallDelta):
            self._unknown.add(delta.index)
            if delta.is_custom:
                self._measure(delta.index, delta.arguments.encode())
        self._sink.feed(delta)

    def _measure(self, choice: int, text: bytes) -> None:
        if (matcher := self._matchers.get(choice)) is None:
            matcher = self._matchers[choice] = self._fresh.deep_copy()
        started = time.thread_time()
        fits = matcher.is_stopped() or all(map(matcher.consume_token, text))
        self._left_s += _EACH_BYTE_S * len(text) - (time.thread_time() - started)
        if self._left_s < 0:
            raise InvalidRequest(
                "Invalid grammar: it matches this answer in too many ways.", self._param
            )
        if not fits and not self._has_tokens and choice not in self._unknown:
            raise _dropped()


class _Bytes:
    """A vocabulary of the bytes."""

    bos_token_id = None
    tokens = (*(bytes([code]) for code in range(256)), b"<end>")
    eos_token_id = 256
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache(_MATCHERS_KEPT)
def _matcher(constraint: Constraint) -> LLMatcher:
    """Return a matcher, to be copied: to build one takes milliseconds."""
    return LLMatcher(_bytes(), llguidance_grammar(constraint), log_level=0)


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257)
