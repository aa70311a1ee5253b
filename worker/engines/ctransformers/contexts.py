"""Contexts: loaded copies of the model, one for each concurrent sequence.

The library has no batching: a second sequence needs a second context with its own weights, except
for the pages of a mapped file that the operating system shares.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import addressof, c_float, c_int
from typing import Any

import numpy as np

from inference_site.core.domain.errors import GenerationFailed
from worker.engines.ctransformers.sampler import Floats

PREFILL_BATCH = 32
"""Tokens of a prompt between two checks for cancellation."""

_ONE_BUFFER = {
    **dict.fromkeys(("dollyv2", "gptj"), 1),
    **dict.fromkeys(("gpt2", "replit"), 8),
    **dict.fromkeys(("gptbigcode", "gptneox", "mpt", "starcoder"), 0),
}
"""Architectures whose models share one compute buffer in a process. A number other than 0 is the
divisor of the context length at which ``Context._reserve`` measures the buffer: 1, at the end; 8,
at an eighth, because the library copies the values of all tokens."""
_evaluates = threading.Lock()


class Context:
    """One copy of the model, and the tokens it has read."""

    def __init__(self, llm: Any, threads: int, architecture: str) -> None:
        self._llm, self._threads = llm, threads  # The last reference to it frees the model.
        is_alone = architecture in _ONE_BUFFER
        # The layout of Falcon's values depends on the length, so its tokens cannot be removed.
        self._rewinds = architecture != "falcon"
        self._turn: AbstractContextManager[Any] = _evaluates if is_alone else nullcontext()
        self.tokens: list[int] = []
        # Kept, because the library creates these objects at each access.
        self._eval = llm.ctransformers_llm_batch_eval
        self._logits_data = llm.ctransformers_llm_logits_data
        self._logits_type: Any = c_float * int(llm.ctransformers_llm_vocab_size())
        if divisor := _ONE_BUFFER.get(architecture):
            self._reserve(int(llm.context_length), divisor)

    def _reserve(self, context_length: int, divisor: int) -> None:
        """Make the library allocate the memory of a full context. Raise GenerationFailed.

        The library measures the memory of the first token, and allocates that for each token of a
        later batch. But the memory of a token grows with its position, and too little ends the
        process. So the first token is one late in the context, followed by a batch of full size.
        """
        late = min(context_length // divisor, context_length - 1)
        for count, before in ((1, late), (min(PREFILL_BATCH, context_length), 0)):
            self.tokens = [0] * before
            self.read([0] * count)
        self.tokens = []

    def rewind(self, tokens: Sequence[int]) -> int:
        """Keep the common prefix with these tokens, except the last one; return its length."""
        kept = min(common_prefix(self.tokens, tokens), max(0, len(tokens) - 1))
        if kept < len(self.tokens) and not self._rewinds:
            kept = 0
        del self.tokens[kept:]
        return kept

    def read(self, tokens: Sequence[int]) -> None:
        """Evaluate the next tokens. Raise GenerationFailed."""
        array = (c_int * len(tokens))(*tokens)
        with self._turn:
            done = self._eval(array, len(tokens), len(self.tokens), PREFILL_BATCH, self._threads)
        if not done:
            self.tokens.clear()
            raise GenerationFailed("ctransformers could not evaluate the tokens.")
        self.tokens += tokens

    def logits(self) -> Floats:
        """Return a copy of the logits of the next token."""
        data = self._logits_type.from_address(addressof(self._logits_data().contents))
        return np.frombuffer(data, np.float32).copy()


class Contexts:
    """The contexts of one model. As many are taken at once as there are slots."""

    def __init__(self, contexts: list[Context]) -> None:
        self._free = contexts
        self._changed = threading.Condition()

    @contextmanager
    def take(self, tokens: Sequence[int]) -> Iterator[Context]:
        """Take the free context with the longest common prefix with these tokens."""
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
    """Return the number of tokens that both begin with."""
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)
