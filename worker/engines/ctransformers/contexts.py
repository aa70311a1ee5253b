"""Contexts: loaded copies of the model, one for each sequence that runs at a time.

The library has no batching: a second sequence needs a second context, with weights of its own but
for what the operating system shares of a mapped file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import addressof, c_float, c_int
from typing import Any

import numpy as np

from inference_site.domain.errors import GenerationFailed
from worker.engines.ctransformers.sampler import Floats

PREFILL_BATCH = 32
"""Tokens of a prompt between two looks at cancellation."""

_ONE_BUFFER = {
    **dict.fromkeys(("dollyv2", "gptj"), 1),
    **dict.fromkeys(("gpt2", "replit"), 8),
    **dict.fromkeys(("gptbigcode", "gptneox", "mpt", "starcoder"), 0),
}
"""Architectures all models of which compute in one buffer, which the library has once in a process.
Where it must be made to grow (see ``Context._make_room``), the number says how late in the context
it is measured: 1, at its end; 8, at an eighth, because the values of all tokens are copied."""
_evaluates = threading.Lock()


class Context:
    """One copy of the model, and the tokens it has read."""

    def __init__(self, llm: Any, threads: int, architecture: str) -> None:
        self._llm, self._threads = llm, threads  # It frees the model when nobody holds it.
        is_alone = architecture in _ONE_BUFFER
        self._rewinds = architecture != "falcon"  # Its values lie where the length put them.
        self._turn: AbstractContextManager[Any] = _evaluates if is_alone else nullcontext()
        self.tokens: list[int] = []
        # Looked up once: the library makes these anew whenever they are asked for.
        self._eval = llm.ctransformers_llm_batch_eval
        self._logits_data = llm.ctransformers_llm_logits_data
        self._logits_type: Any = c_float * int(llm.ctransformers_llm_vocab_size())
        if share := _ONE_BUFFER.get(architecture):
            self._make_room(int(llm.context_length), share)

    def _make_room(self, context_length: int, share: int) -> None:
        """Have the library allot what a full context takes. Raise GenerationFailed.

        It measures what a token took the first time, and later allots that for each token of a
        batch; but what a token takes grows with those before it, and too little ends the process.
        So the first is a single one late in the context, and the next as many as there ever are.
        """
        late = min(context_length // share, context_length - 1)
        for count, before in ((1, late), (min(PREFILL_BATCH, context_length), 0)):
            self.tokens = [0] * before
            self.read([0] * count)
        self.tokens = []

    def rewind(self, tokens: Sequence[int]) -> int:
        """Keep what is read already of these tokens, all but the last; return how many."""
        kept = min(common_prefix(self.tokens, tokens), max(0, len(tokens) - 1))
        if kept < len(self.tokens) and not self._rewinds:
            kept = 0
        del self.tokens[kept:]
        return kept

    def read(self, tokens: Sequence[int]) -> None:
        """Read on. Raise GenerationFailed."""
        given = (c_int * len(tokens))(*tokens)
        with self._turn:
            done = self._eval(given, len(tokens), len(self.tokens), PREFILL_BATCH, self._threads)
        if not done:
            self.tokens.clear()
            raise GenerationFailed("ctransformers could not evaluate the tokens.")
        self.tokens += tokens

    def logits(self) -> Floats:
        """Return the scores of all tokens for the next place, as a copy."""
        data = self._logits_type.from_address(addressof(self._logits_data().contents))
        return np.frombuffer(data, np.float32).copy()


class Contexts:
    """The contexts of one model. As many are taken at once as there are slots."""

    def __init__(self, contexts: list[Context]) -> None:
        self._free = contexts
        self._changed = threading.Condition()

    @contextmanager
    def take(self, tokens: Sequence[int]) -> Iterator[Context]:
        """Lend the free context that has read most of these tokens already."""
        with self._changed:
            while not self._free:
                self._changed.wait()
            best = max(self._free, key=lambda context: common_prefix(context.tokens, tokens))
            self._free.remove(best)
        try:
            yield best
        finally:
            with self._changed:
                self._free.append(best)
                self._changed.notify()


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)
