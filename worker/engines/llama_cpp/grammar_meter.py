"""GrammarMeter: what a client's grammar costs while llama.cpp generates with it.

A grammar can pass its trial and still match what the model says in ever more ways, each step slower
than the last, for everybody. Here the text is read along with the grammar byte by byte, which takes
microseconds unless it is such a one. The time is that of the processor, so load does not count.
"""

from __future__ import annotations

import time
from functools import cache, lru_cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from inference_site.domain.deltas import Delta, TextDelta, ToolCallDelta
from inference_site.domain.errors import InvalidRequest
from inference_site.domain.request import Constraint
from worker.engines.base import Sink
from worker.engines.grammars import llguidance_grammar

_ONCE_S, _EACH_BYTE_S = 0.05, 0.0002
"""What may be spent. Ordinary grammars take 2 µs for a byte, ambiguous ones soon milliseconds."""

_MATCHERS_KEPT = 64


class GrammarMeter:
    """A sink that passes on what it is fed, and raises InvalidRequest when the grammar is slow."""

    def __init__(self, sink: Sink, constraint: Constraint) -> None:
        self._sink, self._param = sink, constraint.param
        self._fresh = _matcher(constraint)
        self._matchers: dict[int, LLMatcher] = {}
        self._left_s = _ONCE_S

    @property
    def cancelled(self) -> bool:
        """Whether the engine must stop now (see ``Sink``)."""
        return self._sink.cancelled

    def feed(self, delta: Delta) -> None:
        """Pass the delta on, once its text is measured."""
        if isinstance(delta, TextDelta):
            self._measure(delta.index, delta.text.encode())
        elif isinstance(delta, ToolCallDelta) and delta.is_custom:
            self._measure(delta.index, delta.arguments.encode())
        self._sink.feed(delta)

    def _measure(self, choice: int, text: bytes) -> None:
        if (matcher := self._matchers.get(choice)) is None:
            matcher = self._matchers[choice] = self._fresh.deep_copy()
        started = time.thread_time()
        # What llama.cpp leaves out of the text ends the measurement, not the run.
        for byte in () if matcher.is_stopped() else text:
            if not matcher.consume_token(byte):
                break
        self._left_s += _EACH_BYTE_S * len(text) - (time.thread_time() - started)
        if self._left_s < 0:
            raise InvalidRequest(
                "Invalid grammar: it matches this answer in too many ways.", self._param
            )


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
