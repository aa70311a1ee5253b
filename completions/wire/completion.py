"""Completions on the wire. Source: API reference, "Completions" (legacy)."""

from __future__ import annotations

import sys
from array import array
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import InitErrorDetails

from completions.wire.chat import CompletionUsage, PromptLogprobs, StreamOptions, Timings
from inference_site.gateway.api.payload import WireObject, WireRequest
from inference_site.gateway.request_fields.wire import (
    ConstraintFields,
    EndUser,
    ManyStopTexts,
    ResponseFormat,
    SamplingFields,
    TokenReportFields,
)

_PIECE = 8192
"""Token ids that are validated together."""


def _validate_token_ids(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Validate a list of token ids by arrays, ten times as fast as pydantic's check of each.

    If an id is bad, pydantic validates the first bad piece, for its error message.
    """
    if not isinstance(value, list) or not value:
        return validate(value)
    for start in range(0, len(value), _PIECE):
        piece = value[start : start + _PIECE]
        if not _are_token_ids(piece):
            _validate_from(start, piece, validate)
            return validate(value)
    return value


def _validate_from(start: int, piece: list[Any], validate: ValidatorFunctionWrapHandler) -> None:
    """Raise pydantic's ValidationError for a piece of a list, with positions in the list."""
    try:
        validate(piece)
    except ValidationError as exc:
        errors = [
            InitErrorDetails(
                type=error["type"],
                loc=(start + int(error["loc"][0]), *error["loc"][1:]),
                input=error["input"],
                ctx=error.get("ctx", {}),
            )
            for error in exc.errors(include_url=False)
        ]
        raise ValidationError.from_exception_data(exc.title, errors) from None


def _are_token_ids(values: list[Any]) -> bool:
    """Whether decoded JSON has nothing but token ids."""
    try:
        unsigned = array("I", values)
    except (OverflowError, TypeError):
        return False
    # Only integers and booleans fit into the array, and "true" and "false" have an e.
    if b"e" in orjson.dumps(values):
        return False
    # Below 2**31 the highest bit is not set.
    highest = unsigned.tobytes()[3 if sys.byteorder == "little" else 0 :: 4]
    return highest.isascii()


TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31)]],
    Field(min_length=1),
    WrapValidator(_validate_token_ids),
]


def _prompt_kind(value: object) -> str:
    if not isinstance(value, list):
        return "text"
    if value and isinstance(value[0], list):
        return "token_lists"
    return "tokens" if value and isinstance(value[0], int) else "texts"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1, max_length=2048), Tag("texts")]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=2048), Tag("token_lists")],
    Discriminator(_prompt_kind),
]


class CompletionRequest(ConstraintFields, SamplingFields, TokenReportFields):
    """The body of ``POST /v1/completions``."""

    model: str
    prompt: Prompt | None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=8)] | None = None
    best_of: Annotated[int, Field(ge=1, le=8)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stop: ManyStopTexts | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: EndUser | None = None

    @property
    def picks(self) -> bool:
        """Whether only some of the choices are to be returned."""
        return self.best_of is not None and self.best_of > (self.n or 1)

    @property
    def reads_prompt(self) -> bool:
        """Whether the engine must return the prompt: its log probabilities, or its text."""
        is_text = _prompt_kind(self.prompt) in ("text", "texts")
        return bool(self.echo) and (
            self.logprobs is not None or self.max_tokens == 0 or not is_text
        )


class CompletionLogprobs(WireObject):
    """``choices[].logprobs``: parallel lists, one entry a token; offsets are characters.

    The sampled token is in ``top_logprobs``, beside the likeliest. The first token of a prompt has
    no probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(WireObject):
    """``choices[]``: index = prompt × n + choice. The last three are there when asked for."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length", "content_filter"] | None = None
    stop_str: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(WireObject):
    """The answer, and, with ``finish_reason: null`` until the end, each event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: CompletionUsage | None = None
    timings: Timings | None = None


_MOST_EXTRAS = 1000


class ExtraText(WireRequest):
    """``input_extra[]``: a piece of another file, which stands before the prefix."""

    text: str
    filename: str | None = None


class Infill(WireObject):
    """The answer, and the last event of a stream; earlier events have the first three fields.

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


class InfillRequest(ConstraintFields, SamplingFields):
    """The body of ``POST /infill``; ``prompt`` stands between the prefix and the gap.

    ``n_predict`` is how many tokens may be generated; -1: as many as there is room for. 0 reads the
    prompt into the cache, for which llama-server generates one token, too.
    """

    model: str | None = None
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[ExtraText], Field(max_length=_MOST_EXTRAS)] | None = None
    prompt: str = ""
    n_predict: Annotated[int, Field(ge=-1)] | None = None
    stop: ManyStopTexts | None = None
    stream: bool | None = None

    @property
    def other_files(self) -> tuple[tuple[str, str], ...]:
        """The names and texts of ``input_extra``."""
        return tuple((piece.filename or "", piece.text) for piece in self.input_extra or ())

    def to_completion(self) -> dict[str, Any]:
        """Return the body of ``/v1/completions`` for the same gap, without unknown fields.

        They are named as ignored, and some of them are fields of completions.
        """
        asked = self.model_dump(
            by_alias=True,
            exclude_unset=True,
            exclude={
                *("input_prefix", "input_suffix", "input_extra", "n_predict", "model", "prompt"),
                *(self.model_extra or ()),
            },
        )
        tokens = -1 if self.n_predict is None else self.n_predict
        limit = {} if tokens == -1 else {"max_tokens": max(1, tokens)}
        prompt = f"{self.input_prefix}{self.prompt}"
        return {**asked, **limit, "prompt": prompt, "suffix": self.input_suffix}
