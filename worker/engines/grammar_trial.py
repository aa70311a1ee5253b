"""The trial of a grammar in a limited process, before an engine gets it.

``python -m worker.engines.grammar_trial`` compiles grammars and takes random steps through them,
which shows the cost of the steps. A question is the kind and the source of a grammar; the answer is
its error, empty if it is valid, and its Lark form if it is GBNF.
"""

from __future__ import annotations

import random
import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from inference_site.core.limited_process import serve
from worker.engines.gbnf import lark_of_gbnf
from worker.engines.grammars import PYTHON_PATTERN

_CPU_S = 0.5
"""Processor time for one grammar; ordinary ones take a hundredth of it."""
_MEMORY = 2**30
_STEPS = 300
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)")
_REASON = re.compile(r"^error: (.*)", re.MULTILINE)
_LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)


class _Vocabulary:
    """All bytes and all pairs of ASCII characters: enough to measure the cost of masks."""

    bos_token_id = None

    def __init__(self) -> None:
        ascii_ = [bytes([code]) for code in range(32, 127)]
        pairs = [first + second for first in ascii_ for second in ascii_]
        self.tokens = [*(bytes([code]) for code in range(256)), *pairs, b"<end>"]
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def try_grammar(kind: str, source: str, tokenizer: LLTokenizer) -> tuple[str, str]:
    """Return the error of a grammar, empty if it is valid, and its Lark form if it is GBNF."""
    if kind == PYTHON_PATTERN:
        try:
            re.compile(source)
        except (re.error, OverflowError, RecursionError) as exc:
            return str(exc), ""
        return "", ""
    lark = ""
    try:
        if kind == "gbnf":
            kind, source = "lark", (lark := lark_of_gbnf(source))
        grammar = grammar_from(kind, source)  # type: ignore[arg-type]  # A kind of constraint.
    except ValueError as exc:
        return str(exc), ""
    if error := LLMatcher.validate_grammar(grammar, limits=_LIMITS):
        return _one_line(error), ""
    return _walk(LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)), lark


def _one_line(error: str) -> str:
    """Return llguidance's error in one line, with the reason, and the place if it has one."""
    place, reason = _PLACE.match(error), _REASON.search(error)
    message = place[3] if place else error.splitlines()[0]
    where = f"line {place[1]}, column {place[2]}: " if place else ""
    return f"{where}{message}{f' {reason[1]}' if reason else ''} (llguidance)"


def _walk(matcher: LLMatcher) -> str:
    """Take random steps; return the error that ended them, if any."""
    choice = random.Random(0)  # noqa: S311  # Makes the trial of a grammar repeatable.
    for _ in range(_STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_stopped():
            break
        allowed = [code for code in range(256) if mask[code // 8] >> code % 8 & 1]
        if not allowed or not matcher.consume_token(choice.choice(allowed)):
            break
    error = matcher.get_error()
    # The model's vocabulary has special tokens, this one does not.
    return "" if "special token" in error else error


if __name__ == "__main__":
    vocabulary = _Vocabulary()
    wrapped = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens))

    def answer(kind: str, source: str) -> tuple[str, str]:
        return try_grammar(kind, source, wrapped)

    serve(answer, _CPU_S, _MEMORY)
