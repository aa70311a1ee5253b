"""The base class of everything that operators write: entries, their options and ``SAMPLING``.

Errors name the key and describe the fault in YAML's terms.
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
WEIGHTS = (".gguf", ".ggml", ".bin")
"""The endings of files of weights; GGML files of 2023 have the ending ``.bin``."""
WeightsFile = Annotated[TextOrNumber, path_validator(*WEIGHTS)]
GgufFile = Annotated[TextOrNumber, path_validator(".gguf")]
