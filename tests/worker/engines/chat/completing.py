"""An engine that only completes, with answers that are given to it."""

from __future__ import annotations

from collections.abc import Iterator

from inference_site.core.domain.deltas import Finish, TextDelta, TokensDelta, Usage
from inference_site.core.domain.errors import InvalidRequest
from inference_site.core.domain.request import GenerationRequest
from worker.engines.base import Engine, Sink

PROMPT_TOKENS = 7


class CompletingEngine(Engine):
    """Says the answers, one a completion and choice, in pieces of so many characters.

    A piece is a token. ``requests`` are the completions it was asked for.
    """

    def __init__(self, *answers: str, piece: int = 3) -> None:
        self._answers, self._piece = iter(answers), piece
        self.requests: list[GenerationRequest] = []
        self.is_closed = False

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        raise InvalidRequest("It has no template.")

    def complete(self, request: GenerationRequest, sink: Sink) -> None:
        self.requests.append(request)
        output = 0
        for index in range(request.choices):
            limit = request.max_output_tokens or 10_000
            pieces = list(self._pieces(next(self._answers)))
            for piece in pieces[:limit]:
                if sink.cancelled:
                    sink.feed(Usage(PROMPT_TOKENS, 1, output, 0, 1.0, 2.0))
                    return
                sink.feed(TextDelta(piece, index))
                output += 1
            sink.feed(Finish("length" if len(pieces) > limit else "stop", index))
        sink.feed(Usage(PROMPT_TOKENS, 1, output, 0, 1.0, 2.0))

    def tokenize(self, request: GenerationRequest, sink: Sink) -> None:
        for index, prompt in enumerate(request.prompts):
            sink.feed(TokensDelta(tuple(map(ord, str(prompt))), index))
            sink.feed(Finish("stop", index))

    def close(self) -> None:
        self.is_closed = True

    def _pieces(self, text: str) -> Iterator[str]:
        for at in range(0, len(text), self._piece):
            yield text[at : at + self._piece]
