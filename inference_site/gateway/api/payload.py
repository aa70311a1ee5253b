"""Parses decoded bodies into wire models, with OpenAI's validation errors.

Error codes are those of OpenAI's API: ``missing_required_parameter``, ``invalid_type``,
``invalid_value``, ``integer_below_min_value`` …; ``param`` is the path of the field.
"""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import is_
from typing import Annotated, Any, TypeVar

from django.conf import settings
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails

from inference_site.core.errors.api_errors import InvalidRequestError

_MAX_IGNORED_NAMES = 32
"""Names of ignored fields that the response header and the log row list."""
_MAX_IGNORED_SCANNED = 1_000
"""Undeclared fields that are scanned for these names."""
_MAX_ENTRIES = 2048
"""Entries of an array or object in a request whose field declares no bound."""
_NAME = re.compile(r"[A-Za-z0-9_.\-\[\]]{1,64}")
_POSITION = re.compile(r"\[\d+\]")
_MAX_NAME = 64
"""Characters of a field's name that the path of an error repeats."""
_MAX_PATH = 1_000
"""Characters of the path of an error."""
NO_NUL = r"^[^\x00]*$"
"""The pattern of a text that PostgreSQL can store, or compare with what it has stored."""
_MAX_ECHO = 100
"""Characters of an invalid value that the error message repeats."""

T = TypeVar("T")
Omittable = Annotated[T | None, Field(exclude_if=partial(is_, None))]
"""A field that is left out when it has no value. Other fields are sent as null then."""


def _bound(schema: Any) -> None:
    """Make every array and object of a schema stop at its first error, and bound its entries.

    Arrays of integers (tokens) and of free-form JSON are bounded by the size of the body only.
    """
    if isinstance(schema, list):
        for inner in schema:
            _bound(inner)
    if not isinstance(schema, dict):
        return
    if schema.get("type") in ("list", "dict"):
        schema["fail_fast"] = True
        entries = schema.get("items_schema") or schema.get("values_schema") or {"type": "any"}
        if schema["type"] == "dict" or entries["type"] not in ("any", "int"):
            schema.setdefault("max_length", _MAX_ENTRIES)
    for inner in schema.values():
        _bound(inner)


class WireRequest(BaseModel):
    """Base of request bodies. Undeclared fields are ignored, and the response lists their names.

    Validation of an array or object stops at the first invalid entry: the response reports one
    error, and building a megabyte of errors would take seconds and hundreds of megabytes.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _bound(schema)
        return schema

    @property
    def ignored_params(self) -> list[str]:
        """The names of fields that were sent and are ignored, in order, each once.

        A field of a nested object has its path without indexes: ``messages[].name``. Names that
        are not valid in a response header are omitted; no API has such a field.
        """
        paths = itertools.islice(self._ignored(), _MAX_IGNORED_SCANNED)
        names = dict.fromkeys(_POSITION.sub("[]", path) for path in paths)
        return list(itertools.islice(filter(_NAME.fullmatch, names), _MAX_IGNORED_NAMES))

    @property
    def first_ignored(self) -> str | None:
        """The path of the first field that is ignored, with its positions: ``messages[2].name``."""
        return next((path[:_MAX_PATH] for path in self._ignored()), None)

    def _ignored(self) -> Iterator[str]:
        """Yield the path of each field that is ignored; names are shown as in errors."""
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                yield shown_name(name)
        for field, value in vars(self).items():
            if value is None:  # The common case; isinstance is slow for pydantic models.
                continue
            if isinstance(value, WireRequest):
                yield from (f"{field}.{name}" for name in value._ignored())
            elif isinstance(value, list):
                parts = itertools.islice(value, _MAX_ENTRIES)
                for place, part in zip(places_of(value), parts, strict=False):
                    if isinstance(part, WireRequest):
                        yield from (f"{field}[{place}].{name}" for name in part._ignored())
            elif isinstance(value, dict):
                for key, part in itertools.islice(value.items(), _MAX_ENTRIES):
                    if isinstance(part, WireRequest):
                        yield from (f"{field}.{shown_name(key)}.{name}" for name in part._ignored())


class MovedEntries(list[Any]):
    """Entries of an array that are not at the positions of what the client sent for them.

    Validation may replace an entry by several. ``places`` has these positions; None for an entry
    that the client has not sent.
    """

    def __init__(self, entries: Iterable[Any], places: Sequence[int | None]) -> None:
        super().__init__(entries)
        self.places = places


def places_of(entries: Sequence[Any]) -> Sequence[int | None]:
    """Return the positions of entries in the array that the client sent."""
    return entries.places if isinstance(entries, MovedEntries) else range(len(entries))


class WireObject(BaseModel):
    """Base of objects in responses; a misspelt field name raises at construction."""

    model_config = ConfigDict(extra="forbid", frozen=True)


RequestT = TypeVar("RequestT", bound=WireRequest)


def parse(model: type[RequestT], body: Any) -> RequestT:
    """Return the body as a wire model. Raise InvalidRequestError for the first invalid field."""
    if not isinstance(body, dict):
        raise InvalidRequestError("The JSON body of your request must be an object.")
    if len(body) > _MAX_ENTRIES:
        raise InvalidRequestError(
            f"The JSON body of your request has more than {_MAX_ENTRIES} parameters."
        )
    try:
        request = model.model_validate(body)
    except ValidationError as exc:
        raise _invalid(exc.errors(include_url=False), body) from exc
    if settings.STRICT_FIELDS and (path := request.first_ignored) is not None:
        raise unknown_parameter(path)
    return request


def ignored_params_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header of an answer that names the fields of its request that were ignored."""
    return {"x-unsupported-params": ",".join(names)} if names else {}


def unknown_parameter(path: str) -> InvalidRequestError:
    """Return the error for a field that a request may not have."""
    return InvalidRequestError(
        f"Unknown parameter: '{path}'.", param=path, code="unknown_parameter"
    )


def shown_name(name: str) -> str:
    """Return the name of a client's field for an error: at most 64 characters, all printable.

    Quotes, backslashes and what is not printable are escaped: the name stands between quotes in
    messages, and in lines of the log.
    """
    if _NAME.fullmatch(name):
        return name
    shown = "".join(
        c if c.isprintable() and c not in "\"'`\\" else f"\\u{ord(c):04x}" for c in name[:_MAX_NAME]
    )
    return shown if len(name) <= _MAX_NAME else f"{shown}…"


QueryT = TypeVar("QueryT", bound=BaseModel)


def parse_query(model: type[QueryT], values: dict[str, Any]) -> QueryT:
    """Return the query as its model. Raise InvalidRequestError for an invalid parameter."""
    try:
        return model.model_validate(values)
    except ValidationError as exc:
        raise _invalid(exc.errors(include_url=False), values) from exc


def _invalid(errors: list[ErrorDetails], body: Any) -> InvalidRequestError:
    # Of the branches of a union, report the one that matched the body most deeply; of several, one
    # of the right type.
    found = [(_path(e, body), e) for e in errors]
    path, error = max(found, key=lambda pair: (len(pair[0]), pair[1]["type"] in _OF_RIGHT_TYPE))
    param = ""
    for part in path:
        if isinstance(part, int):
            param += f"[{part}]"
        else:
            param += f".{shown_name(part)}" if param else shown_name(part)
        if len(param) > _MAX_PATH:
            param = f"{param[:_MAX_PATH]}…"
            break
    beside = [one["type"] for place, one in found if place == path]
    code, message = _describe(error, param, beside)
    return InvalidRequestError(message, param=param or None, code=code)


def _path(error: ErrorDetails, body: Any) -> list[int | str]:
    """Return the path in the body: pydantic's location without the names of union branches."""
    path: list[int | str] = []
    value, loc, missing = body, error["loc"], error["type"] == "missing"
    for i, part in enumerate(loc):
        if value is error["input"] and not missing:
            break
        if isinstance(value, dict) and part in value and _is_branch(error, value, i):
            continue
        if isinstance(value, dict) and (part in value or i == len(loc) - 1):
            path.append(part)
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            path.append(part)
            value = value[part] if part < len(value) else None
    # Pydantic's location of a missing or invalid tag ends at the object that has the tag.
    discriminator = str(error.get("ctx", {}).get("discriminator", ""))
    if discriminator.startswith("'"):
        path.append(discriminator.strip("'"))
    elif error["type"] == "union_tag_not_found" and isinstance(error["input"], dict):
        path.append("type")  # Functions that choose the branch look there.
    return path


def _is_branch(error: ErrorDetails, value: dict[str, Any], i: int) -> bool:
    """Whether a part of a location names a branch of a union, and not the field of the same name.

    A block of type ``text`` has a field ``text``, and a call of type ``function`` an object
    ``function``. After the name of a branch the location goes on in the object itself; after the
    name of the field it goes on in the field.
    """
    name, after = str(error["loc"][i]), error["loc"][i + 1 :]
    field = value[name]
    if not after or not isinstance(after[0], str):
        return False
    is_last_missing = error["type"] == "missing" and len(after) == 1
    if isinstance(field, dict | list):
        if value.get("type") != name:
            return False
        if is_last_missing:
            return value is error["input"]
        return after[0] in value and after[0] not in field
    return is_last_missing or (field is not error["input"] and after[0] in value)


_TYPE_NAMES = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a decimal",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_BOUNDS = {
    "greater_than": ("below_min", "below minimum value", ">", "gt"),
    "greater_than_equal": ("below_min", "below minimum value", ">=", "ge"),
    "less_than": ("above_max", "above maximum value", "<", "lt"),
    "less_than_equal": ("above_max", "above maximum value", "<=", "le"),
}
_LENGTHS = {
    "too_short": (
        "empty_array",
        "empty array. Expected an array with minimum length {min_length}, but got an empty array",
    ),
    "too_long": (
        "array_above_max_length",
        "array too long. Expected an array with maximum length {max_length}, "
        "but got an array with length {actual_length}",
    ),
    "object_too_long": (
        "object_above_max_properties",
        "too many properties. Expected an object with at most {max_length} properties, "
        "but got an object with {length} properties",
    ),
    "string_too_short": (
        "empty_string",
        "empty string. Expected a string with minimum length {min_length}, but got an empty string",
    ),
    "string_too_long": (
        "string_above_max_length",
        "string too long. Expected a string with maximum length {max_length}, "
        "but got a string with length {length}",
    ),
}
_OF_RIGHT_TYPE = {*_LENGTHS, "string_pattern_mismatch"}
_JSON_TYPES: list[tuple[type | tuple[type, ...], str]] = [
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a decimal"),
    (str, "a string"),
    (list, "an array"),
    (dict, "an object"),
]

_LONG_INTEGER = 2**63
"""The parser of JSON makes integers of more than 64 bits decimals, which are whole from here on."""


def _describe(error: ErrorDetails, param: str, beside: list[str]) -> tuple[str, str]:
    """Return the error's code and message. ``beside`` are the types of all errors of the place."""
    kind, given, context = error["type"], error["input"], error.get("ctx", {})
    if kind in ("missing", "union_tag_not_found"):
        return "missing_required_parameter", f"Missing required parameter: '{param}'."
    if kind in _TYPE_NAMES:
        is_long = isinstance(given, float) and abs(given) >= _LONG_INTEGER
        got = next((name for type_, name in _JSON_TYPES if isinstance(given, type_)), "null")
        if is_long:
            got = "an integer"
        expected = list(dict.fromkeys(_TYPE_NAMES[one] for one in beside if one in _TYPE_NAMES))
        if is_long and got in expected:
            side, reason, *_ = _BOUNDS["less_than" if given > 0 else "greater_than"]
            return (
                f"integer_{side}_value",
                (
                    f"Invalid '{param}': integer {reason}. "
                    f"Expected an integer of 64 bits, but got {given} instead."
                ),
            )
        return (
            "invalid_type",
            f"Invalid type for '{param}': expected {' or '.join(expected)}, but got {got} instead.",
        )
    if kind in ("literal_error", "union_tag_invalid"):
        supported = _listed(context.get("expected") or context["expected_tags"])
        value = context.get("tag", given)
        # reprlib bounds the time for a large value.
        echo = (value if isinstance(value, str) else reprlib.repr(value))[:_MAX_ECHO]
        return "invalid_value", f"Invalid value: {echo!r}. Supported values are: {supported}."
    if kind in _BOUNDS:
        side, what, sign, key = _BOUNDS[kind]
        bound = context[key]
        number = "integer" if isinstance(bound, int) else "decimal"
        shown = bound if isinstance(bound, int) else f"{bound:g}"
        return (
            f"{number}_{side}_value",
            (
                f"Invalid '{param}': {number} {what}. "
                f"Expected a value {sign} {shown}, but got {given} instead."
            ),
        )
    if kind == "too_long" and isinstance(given, dict):
        kind = "object_too_long"
    if kind in _LENGTHS:
        code, reason = _LENGTHS[kind]
        return code, f"Invalid '{param}': {reason.format(length=len(given), **context)} instead."
    if kind == "string_pattern_mismatch":
        return (
            "invalid_value",
            (
                f"Invalid '{param}': string does not match pattern. Expected a string that matches "
                f"the pattern '{context['pattern']}'."
            ),
        )
    # What a rule of this code says, else the words of pydantic.
    reason = str(context["error"] if kind == "value_error" else error["msg"]).removesuffix(".")
    return "invalid_value", f"Invalid '{param}': {reason}." if param else f"{reason}."


def _listed(quoted: str) -> str:
    """Return pydantic's list of quoted values as the API writes it: ``'a', 'b', and 'c'``."""
    values = re.findall(r"'[^']*'", quoted)
    if len(values) < 3:
        return " and ".join(values)
    return f"{', '.join(values[:-1])}, and {values[-1]}"
