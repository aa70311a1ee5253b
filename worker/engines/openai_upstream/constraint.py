"""From a constraint to the fields of the server's request that hold it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import orjson

from inference_site.catalogue.engines.upstream_flavors import RESPONSE_FORMAT
from inference_site.domain.errors import InvalidRequest
from inference_site.domain.request import Constraint
from worker.engines.grammars import check_grammar, lark_or_schema, regex_as_lark
from worker.engines.openai_upstream.server import Server


def constraint_fields(constraint: Constraint, server: Server) -> dict[str, Any]:
    """Return the fields. Raise InvalidRequest for a constraint the server has no field for."""
    source = constraint.source
    _check(constraint)
    match constraint.kind:
        case "json_object":
            if server.flavor.schema_value:
                return schema_fields({"type": "object"}, server)
            target = _target("json_object", constraint, server)
            return _placed(target, {"type": "json_object"})
        case "json_schema":
            return schema_fields(orjson.loads(source), server, constraint.named)
        case "gbnf":
            return _placed(_target("gbnf", constraint, server), source)
        case "lark":
            return _lark(source, constraint, server)
        case "regex":
            if server.flavor.lark_prefix:
                return _lark(regex_as_lark(source), constraint, server)
            return _placed(_target("regex", constraint, server), source)
        case "llguidance":
            part = lark_or_schema(constraint)
            if isinstance(part, str):
                return _lark(part, constraint, server)
            return schema_fields(part, server)


def _check(constraint: Constraint) -> None:
    """Check what llguidance knows; GBNF and schemas are for the server to judge."""
    if constraint.kind in ("lark", "regex", "llguidance"):
        check_grammar(constraint)


def schema_fields(
    schema: dict[str, Any], server: Server, named: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the fields for an answer that is JSON of this schema, which a client has ``named``."""
    target = server.fields.get("json_schema", RESPONSE_FORMAT)
    if target != RESPONSE_FORMAT:
        return _placed(target, schema)
    if server.flavor.schema_value:
        return {RESPONSE_FORMAT: {"type": "json_object", "value": schema}}
    given = {"name": "answer", "strict": True, **named, "schema": schema}
    return {RESPONSE_FORMAT: {"type": "json_schema", "json_schema": given}}


def _lark(source: str, constraint: Constraint, server: Server) -> dict[str, Any]:
    target = _target("lark", constraint, server)
    return _placed(target, f"{server.flavor.lark_prefix}{source}")


def _target(kind: str, constraint: Constraint, server: Server) -> str:
    target = server.fields.get(kind)
    if target is None:
        raise InvalidRequest(
            f"The server of this model knows no constraints of the type '{kind}'.",
            constraint.param,
        )
    return target


def _placed(target: str, value: Any) -> dict[str, Any]:
    """Return the value at its place; a dot leads into an object."""
    for name in reversed(target.split(".")):
        value = {name: value}
    placed: dict[str, Any] = value
    return placed
