"""What operators write: the base of the models that check it, and the words for what is wrong.

The entries of the models file, their options and ``SAMPLING`` are checked with these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

_WORDS = {
    "dict_type": "must be a mapping",
    "extra_forbidden": "unknown key",
    "list_type": "must be a list",
    "missing": "it is missing",
    "model_type": "must be a mapping",
    "tuple_type": "must be a list",
}
"""Errors for which pydantic's words are those of Python, not of YAML."""
_NEED_NO_INPUT = ("extra_forbidden", "missing", "value_error")
_LONGEST_INPUT = 100

Locate = Callable[[str, Sequence[str]], str]
"""Makes a path of the name of a file, which may have these endings. Raises ValueError."""


class BadKey(ValueError):
    """A key that must not be there, or whose value is wrong; ``path`` leads to it."""

    def __init__(self, path: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.path = path


class OperatorSettings(BaseModel):
    """A mapping that an operator wrote. A key may be left out, but not be empty.

    The description of a field says what it must be; errors repeat it. ``_shows_input`` is false
    where a value may be a secret, which no error must repeat.
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
    def read(cls, values: Any, locate: Locate | None = None) -> Self:
        """Return the settings; ``locate`` makes a path of the name of a file. Raise BadKey."""
        try:
            return cls.model_validate(values, context=locate)
        except ValidationError as exc:
            raise cls._bad_key(exc) from exc

    @classmethod
    def _bad_key(cls, exc: ValidationError) -> BadKey:
        error = exc.errors()[0]
        path = tuple(str(part) for part in error["loc"] if part != "[key]")
        message = _WORDS.get(error["type"], error["msg"]).removeprefix("Value error, ")
        if cls._shows_input and error["type"] not in _NEED_NO_INPUT:
            message += f", got {repr(error['input'])[:_LONGEST_INPUT]}"
        field = cls.model_fields.get(path[0]) if path else None
        if field is not None and field.description:
            message += f"; expected {field.description}"
        return BadKey(path, message)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_empty(cls, value: Any) -> Any:
        if value is None:
            raise ValueError("it is empty; leave it out or give it a value")
        return value


def located(file: str, info: ValidationInfo, endings: Sequence[str] = ()) -> str:
    """Return the path of a file of a known type, as the caller of ``read`` locates it."""
    return info.context(file, endings) if info.context else file


def file_name(*endings: str) -> AfterValidator:
    """Return the validator of an option that names a file; endings are in lower case."""

    def validate(file: str, info: ValidationInfo) -> str:
        return located(file, info, endings)

    return AfterValidator(validate)


Text = Annotated[str, StringConstraints(min_length=1)]
AnyText = Annotated[str, Field(strict=False, coerce_numbers_to_str=True)]
"""A text that YAML may have read as a number."""
Names = Annotated[tuple[Annotated[str, Field(pattern=r"\S")], ...], Field(strict=False)]
WEIGHTS = (".gguf", ".ggml", ".bin")
"""The endings of the names of files of weights; GGML files of 2023 are called ``.bin``."""
WeightsFile = Annotated[AnyText, file_name(*WEIGHTS)]
GgufFile = Annotated[AnyText, file_name(".gguf")]
