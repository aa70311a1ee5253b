"""What llama-server's ``/infill`` is asked: the text between a prefix and a suffix.

Source: llama.cpp, tools/server/README.md, "POST /infill".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from completions.wire.chat import Timings
from inference_site.api.payload import WireObject, WireRequest
from inference_site.request_fields.wire import ManyStopTexts, SamplingFields

_MOST_EXTRAS = 1000


class ExtraText(WireRequest):
    """``input_extra[]``: a piece of another file, which stands before the prefix."""

    text: str
    filename: str | None = None


class Infill(WireObject):
    """The answer, and the last event of a stream; events before have the first three fields.

    ``stop_type`` is "eos", "word" (a text of ``stop``) or "limit"; counts are tokens.
    """

    index: int = 0
    content: str
    stop: bool
    model: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    tokens_cached: int | None = None
    truncated: bool | None = None
    stop_type: Literal["eos", "limit", "word"] | None = None
    stopping_word: str | None = None
    timings: Timings | None = None


class InfillRequest(SamplingFields):
    """The body of ``POST /infill``; ``prompt`` stands between the prefix and the gap.

    ``n_predict`` is how many tokens may be generated; -1: as many as there is room for.
    """

    model: str | None = None
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[ExtraText], Field(max_length=_MOST_EXTRAS)] | None = None
    prompt: str = ""
    n_predict: Annotated[int, Field(ge=-1)] | None = None
    stop: ManyStopTexts | None = None
    stream: bool | None = None

    def to_completion(self) -> dict[str, Any]:
        """Return the body of ``/v1/completions`` that asks for the same."""
        extra = "".join(f"{piece.text}\n" for piece in self.input_extra or ())
        asked = self.model_dump(
            by_alias=True,
            exclude_unset=True,
            exclude={"input_prefix", "input_suffix", "input_extra", "n_predict", "model", "prompt"},
        )
        limit = {} if self.n_predict in (None, -1) else {"max_tokens": self.n_predict}
        prompt = f"{extra}{self.input_prefix}{self.prompt}"
        return {**asked, **limit, "prompt": prompt, "suffix": self.input_suffix}
