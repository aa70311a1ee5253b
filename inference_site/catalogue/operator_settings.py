"""The base class of everything that operators write, and the sampler settings with their bounds.

Errors name the key and describe the fault in YAML's terms. Requests, entries and ``SAMPLING`` have
the same sampler settings, by the names of ``domain.request.Sampling``, which holds parsed values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from inference_site.core.domain.request import Sampling

_MESSAGES = {
    "dict_type": "must be a mapping",
    "extra_forbidden": "unknown key",
    "list_type": "must be a list",
    "missing": "it is missing",
    "model_type": "must be a mapping",
    "tuple_type": "must be a list",
}
"""By the type of pydantic's error; pydantic's own messages use Python's terms."""
_WITHOUT_INPUT = ("extra_forbidden", "missing", "value_error")
_MAX_INPUT_LENGTH = 100

ResolvePath = Callable[[str, Sequence[str]], str]
"""Turns a file name into a path; the name must have one of these endings. Raises ValueError."""
WEIGHTS = (".gguf", ".ggml", ".bin")
"""The endings of files of weights; GGML files of 2023 have the ending ``.bin``."""
MAX_BIAS = 100
"""Minus this bias forbids a token; this bias forbids all tokens without it."""
_UNCHANGED = {field.name for field in fields(Sampling)} - {"logit_bias", "dry_sequence_breakers"}


class InvalidSetting(ValueError):
    """An unknown key, or a key with a wrong value; ``path`` has the keys that lead to it."""

    def __init__(self, path: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.path = path


class OperatorSettings(BaseModel):
    """A mapping that an operator wrote. A key may be absent, but not be empty.

    Errors repeat the description of a field, which says what is expected. ``_shows_input`` is False
    where a value may be a secret: then errors do not contain the value.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )
    _shows_input: ClassVar[bool] = True

    @classmethod
    def read(cls, values: Any, resolve: ResolvePath | None = None) -> Self:
        """Parse the settings; ``resolve`` turns file names into paths. Raise InvalidSetting."""
        try:
            return cls.model_validate(values, context=resolve)
        except ValidationError as exc:
            error = exc.errors()[0]
        path = tuple(str(part) for part in error["loc"] if part != "[key]")
        message = _MESSAGES.get(error["type"], error["msg"]).removeprefix("Value error, ")
        if cls._shows_input and error["type"] not in _WITHOUT_INPUT:
            message += f", got {repr(error['input'])[:_MAX_INPUT_LENGTH]}"
        field = cls.model_fields.get(path[0]) if path else None
        if field is not None and field.description:
            message += f"; expected {field.description}"
        raise InvalidSetting(path, message)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_empty(cls, value: Any) -> Any:
        if value is None:
            raise ValueError("it is empty; leave it out or give it a value")
        return value


def resolve_path(file: str, info: ValidationInfo, endings: Sequence[str] = ()) -> str:
    """Return the path of a file by the ``resolve`` that was given to ``OperatorSettings.read``."""
    return info.context(file, endings) if info.context else file


def path_validator(*endings: str) -> AfterValidator:
    """Return the validator of an option that names a file; endings are in lower case."""

    def validate(file: str, info: ValidationInfo) -> str:
        return resolve_path(file, info, endings)

    return AfterValidator(validate)


Text = Annotated[str, StringConstraints(min_length=1)]
TextOrNumber = Annotated[str, Field(strict=False, coerce_numbers_to_str=True)]
"""A text that YAML may have parsed as a number."""
Names = Annotated[tuple[Annotated[str, Field(pattern=r"\S")], ...], Field(strict=False)]
WeightsFile = Annotated[TextOrNumber, path_validator(*WEIGHTS)]
GgufFile = Annotated[TextOrNumber, path_validator(".gguf")]


Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
NotNegative = Annotated[float, Field(ge=0)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
_LEAST_FACTOR = 1e-6
"""Engines divide by it as a 32-bit float, which cannot hold every number above 0."""
_TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=False)]  # JSON keys are strings.


class SamplerFields(BaseModel):
    """The fields that requests and defaults share: all but ``logit_bias``, whose keys differ."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Probability | None = None
    typical_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(ge=_LEAST_FACTOR)] | None = None
    dry_multiplier: NotNegative | None = None
    dry_base: Annotated[float, Field(ge=1)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1)] | None = None
    dry_sequence_breakers: (
        Annotated[list[Annotated[str, Field(max_length=256)]], Field(min_length=1, max_length=64)]
        | None
    ) = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    mirostat: Annotated[int, Field(ge=0, le=2)] | None = None
    mirostat_tau: NotNegative | None = None
    mirostat_eta: NotNegative | None = None

    def to_sampling(self, biases: dict[int, float]) -> Sampling:
        """Return the domain's value."""
        breakers = self.dry_sequence_breakers
        return Sampling(
            **{name: getattr(self, name) for name in _UNCHANGED},
            dry_sequence_breakers=None if breakers is None else tuple(breakers),
            logit_bias=tuple(biases.items()),
        )


class SamplerDefaults(SamplerFields, OperatorSettings):
    """An operator's defaults for fields that a request leaves out."""

    logit_bias: dict[_TokenId, Bias] | None = None

    def to_defaults(self) -> Sampling:
        """Return the domain's value."""
        return self.to_sampling(self.logit_bias or {})
