"""Form-encoded request bodies: a form becomes the object that JSON would have been.

A form has names and texts only. The schema of the wire model says what each text is: a field that
may be a text is one; of any other field the text is read as JSON, and left as it is when it is no
JSON, so that validation reports it. Objects and arrays are written as JSON, or in brackets:
``metadata[key]=value``, ``input[0][role]=user``, ``include[]=…``. An array may also be written by
repeating its name. A field that may be a text or an array, such as ``input``, is an array only in
brackets or if its name is repeated. Source: Open Responses, ``POST /responses``; brackets as
OpenAI's SDKs write them in queries.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import IO, Any, ClassVar
from urllib.parse import parse_qsl

from rest_framework.parsers import BaseParser

from inference_site.core.errors.api_errors import InvalidRequestError, UnsupportedMediaError
from inference_site.gateway.api.json_bodies import decode_json, is_too_deep, require_bounded
from inference_site.gateway.api.payload import WireRequest, shown_name

_MAX_FIELDS = 2048
_MAX_DEPTH = 32
_NAME = re.compile(r"([^\[\]]+)((?:\[[^\[\]]*\])*)")
_INDEX = re.compile(r"\d{1,4}", re.ASCII)

Schema = dict[str, Any]
Tree = dict[str, Any]
"""The fields of a form: the texts of each name, or the tree of the names in brackets below it."""


class FormParser(BaseParser):
    """Parses forms whose fields are those of ``model``."""

    media_type = "application/x-www-form-urlencoded"
    model: ClassVar[type[WireRequest]]

    def parse(self, stream: IO[bytes], media_type: Any = None, parser_context: Any = None) -> Any:
        """Return the object. Raise InvalidRequestError as ``decode_form`` does."""
        return decode_form(stream.read(), self.model)


def form_parser(model_: type[WireRequest]) -> type[FormParser]:
    """Return the parser of forms for this model."""

    class Parser(FormParser):
        model = model_

    return Parser


def decode_form(encoded: bytes, model: type[WireRequest]) -> dict[str, Any]:
    """Return the object that a form stands for, for the model to validate.

    Raise InvalidRequestError if it is no form, has too many fields, is nested too deeply, or
    contradicts itself; and for the bounds of ``decode_json``, which hold for its texts together.
    Raise UnsupportedMediaError for JSON, which ``curl -d`` calls a form unless told otherwise.
    """
    if encoded.lstrip().startswith(b"{"):
        raise UnsupportedMediaError
    if encoded.count(b"&") >= _MAX_FIELDS:
        raise InvalidRequestError(f"The form has more than {_MAX_FIELDS} fields.")
    try:
        fields = parse_qsl(encoded.decode("ascii"), keep_blank_values=True, errors="strict")
    except ValueError as exc:
        raise InvalidRequestError(
            f"We could not parse the form of your request. (The parser said: {exc}.)"
        ) from exc
    containers = require_bounded(",".join(text for _, text in fields).encode())
    tree: Tree = {}
    for name, text in fields:
        matched = _NAME.fullmatch(name)
        path = [name]
        if matched is not None and matched[2]:
            path = [matched[1], *matched[2][1:-1].split("][")]
        if len(path) > _MAX_DEPTH:
            raise InvalidRequestError(f"A field of the form is nested more than {_MAX_DEPTH} deep.")
        branch = tree
        for step in path[:-1]:
            branch = branch.setdefault(step, {})
            if not isinstance(branch, dict):
                raise _contradiction(path[0])
        texts = branch.setdefault(path[-1], [])
        if not isinstance(texts, list):
            raise _contradiction(path[0])
        texts.append(text)
    schema = _schema_of(model)
    whole = list(_branches([schema], schema))
    body = {
        name: _value(node, _inner(whole, name, schema), schema, name) for name, node in tree.items()
    }
    if containers > _MAX_DEPTH and is_too_deep(body):
        raise InvalidRequestError("The form of your request is nested too deeply.")
    return body


def _contradiction(name: str) -> InvalidRequestError:
    shown = shown_name(name)
    return InvalidRequestError(
        f"Invalid '{shown}': the form has it more than once, as a text and as an object or array.",
        param=shown,
        code="invalid_value",
    )


@cache
def _schema_of(model: type[WireRequest]) -> Schema:
    return model.model_json_schema()


def _branches(schemas: Iterable[Any], root: Schema) -> Iterator[Schema]:
    """Yield the alternatives of schemas, without references and unions."""
    for schema in schemas:
        if not isinstance(schema, dict):
            yield {}
        elif "$ref" in schema:
            yield from _branches([root["$defs"][schema["$ref"].rpartition("/")[2]]], root)
        elif (union := schema.get("anyOf") or schema.get("oneOf")) is not None:
            yield from _branches(union, root)
        else:
            yield schema


def _inner(branches: Iterable[Schema], name: str | None, root: Schema) -> list[Schema]:
    """Return the alternatives of the field ``name`` of objects; with None, of the array's items."""
    inner: list[Any] = []
    for branch in branches:
        if name is None:
            inner += [branch["items"]] if "items" in branch else []
        elif name in (fields := branch.get("properties", {})):
            inner.append(fields[name])
        elif "additionalProperties" in branch:
            inner.append(branch["additionalProperties"])
    return list(_branches(inner, root))


def _value(node: list[str] | Tree, branches: list[Schema], root: Schema, field: str) -> Any:
    """Return the value of a field of the form; ``field`` is the name that errors have."""
    types = {branch.get("type", "any") for branch in branches} or {"any"}
    if isinstance(node, list):
        if len(node) > 1:
            if "array" not in types:
                raise _contradiction(field)
            return [_read(text, _inner(branches, None, root)) for text in node]
        value = _read(node[0], branches)
        is_item = types <= {"array", "null"} and not isinstance(value, list)
        return [_read(node[0], _inner(branches, None, root))] if is_item else value
    if set(node) == {""} and isinstance(node[""], list):
        return [_read(text, _inner(branches, None, root)) for text in node[""]]
    if "array" in types and all(map(_INDEX.fullmatch, node)):
        items = _inner(branches, None, root)
        return [_value(node[index], items, root, field) for index in sorted(node, key=int)]
    named = node.get("type")
    if isinstance(named, list):  # It names one of the alternatives of an object.
        kinds = [(branch, branch.get("properties", {}).get("type", {})) for branch in branches]
        branches = [b for b, kind in kinds if kind.get("const") == named[0]] or branches
    return {
        name: _value(inner, _inner(branches, name, root), root, field)
        for name, inner in node.items()
    }


def _read(text: str, branches: list[Schema]) -> Any:
    """Return a text as what its field may be."""
    if not branches or any(_may_be_text(branch) for branch in branches):
        return text
    try:
        return decode_json(text.encode())
    except InvalidRequestError:
        return text


def _may_be_text(branch: Schema) -> bool:
    values = [*branch.get("enum", ()), *([branch["const"]] if "const" in branch else ())]
    if values:
        return any(isinstance(value, str) for value in values)
    return str(branch.get("type", "string")) == "string"
