"""Validation by schemas of clients, users and other servers, in a limited process.

A schema of a kilobyte can take years: two references to the next definition in each of 40. Neither
its compilation nor a validation by it lets other threads run. So
``python -m inference_site.core.json_schemas`` does both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from inference_site.core.domain.errors import GenerationFailed
from inference_site.core.limited_process import LimitedProcess, serve

TOO_COMPLEX = "It needs too much time or memory."
_CPU_S = 1.0
"""Processor time for one question; the tools of a server take a hundredth of it."""
_MEMORY = 2**30
_LONGEST_ERROR = 500
_PATIENCE_S = 10

_process = LimitedProcess("inference_site.core.json_schemas")


def schema_errors(schemas: Sequence[Any]) -> list[str] | None:
    """Return why each schema is none, empty for one that is.

    A schema that refers to another document is none. Return None if they need too much time or
    memory together.
    """
    errors: list[str] | None = _asked("schemas", schemas)
    return errors


def value_error(schema: Any, text: str) -> str:
    """Return why a JSON text does not fit a schema, empty if it does."""
    error = _asked("value", schema, text)
    return TOO_COMPLEX if error is None else str(error)


def arguments_fit(schemas: Mapping[str, Any], calls: Sequence[tuple[str, Any]]) -> bool:
    """Whether the arguments of each call fit the schema of its name.

    What needs too much time or memory fits nothing.
    """
    return bool(_asked("arguments", schemas, calls))


def _asked(*question: Any) -> Any:
    """Return the answer of the limited process; None if it needs too much time or memory."""
    try:
        return _process.ask(*question, patience_s=_PATIENCE_S)
    except (GenerationFailed, RecursionError):  # The host is too busy, or a schema too deep.
        return None


def _schema_error(schema: Any) -> str:
    try:
        _validator(schema)
    except ValueError as exc:
        return str(exc)[:_LONGEST_ERROR]
    return ""


def _value_error(schema: Any, text: str) -> str:
    import jsonschema_rs

    try:
        _validator(schema).validate(orjson.loads(text))
    except orjson.JSONDecodeError:
        return "It is not JSON."
    except jsonschema_rs.ValidationError as exc:
        return str(exc.message)[:_LONGEST_ERROR]
    return ""


def _arguments_fit(schemas: Mapping[str, Any], calls: Sequence[tuple[str, Any]]) -> bool:
    try:
        validators = {name: _validator(schema) for name, schema in schemas.items()}
    except ValueError:
        return False
    return all(validators[name].is_valid(arguments) for name, arguments in calls)


def _validator(schema: Any) -> Any:
    """Return a validator that fetches nothing and whose patterns take linear time.

    Raise ValueError for what is no schema, and for a reference to another document.
    """
    import jsonschema_rs  # Only the limited process needs it.

    def refuse_reference(uri: str) -> Any:
        raise ValueError(f"{uri} is elsewhere")

    try:
        return jsonschema_rs.validator_for(
            schema, pattern_options=jsonschema_rs.RegexOptions(), retriever=refuse_reference
        )
    except jsonschema_rs.ReferencingError as exc:
        raise ValueError(str(exc)) from exc


def _answer(kind: str, *question: Any) -> object:
    match kind:
        case "schemas":
            return [_schema_error(schema) for schema in question[0]]
        case "value":
            return _value_error(*question)
        case _:
            return _arguments_fit(*question)


if __name__ == "__main__":
    serve(_answer, _CPU_S, _MEMORY)
