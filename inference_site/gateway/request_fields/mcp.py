"""MCP servers in requests: the options for the worker, and the functions that models are offered.

The worker calls the tools with ``worker.tools.mcp``. What a server writes about its tools is data:
it is bounded, and goes into the descriptions of the functions and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference_site.accounts.models import Project
from inference_site.core.domain.request import Tool
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.mcp.access import (
    LIST_TOOLS,
    NotUsable,
    check_headers,
    check_requested_url,
    is_allowed,
    seal_headers,
)
from inference_site.mcp.models import McpServer

MCP = "mcp"
"""The type of the options."""


@dataclass(frozen=True, slots=True)
class ServerFields:
    """The paths of the fields of a request that name a server, for errors."""

    label: str
    url: str
    authorization: str
    headers: str = ""


def registered_server(
    label: str, project_id: int, fields: ServerFields, *, has_credentials: bool
) -> dict[str, Any]:
    """Return the options of a server that an operator has registered.

    Raise InvalidRequestError if the project may not use it, and for credentials beside its own.
    """
    server = McpServer.objects.usable_by(project_id).filter(label=label).first()
    if server is None:
        name = fields.url.rpartition(".")[2]
        raise InvalidRequestError(
            f"Invalid '{fields.label}': this project has no MCP server '{label}'; another server "
            f"needs a '{name}'.",
            param=fields.label,
            code="invalid_value",
        )
    if has_credentials:
        raise InvalidRequestError(
            f"Invalid '{fields.authorization}': the server '{label}' is registered with "
            "credentials of its own.",
            param=fields.authorization,
        )
    return {"server_id": server.pk, "description": server.description}


def requested_server(
    url: str,
    headers: Mapping[str, str],
    authorization: str | None,
    project_id: int,
    fields: ServerFields,
) -> dict[str, Any]:
    """Return the options of a server that a request names by its URL.

    ``authorization`` is sent as a bearer token. Raise InvalidRequestError unless the site and the
    project allow its host, and for headers that cannot be sent.
    """
    hosts = Project.objects.values_list("mcp_hosts", flat=True).get(pk=project_id)
    sent = dict(headers)
    param = fields.url
    try:
        check_requested_url(url, hosts)
        param = fields.headers or fields.authorization
        if authorization:
            if any(name.lower() == "authorization" for name in sent):
                raise NotUsable("'authorization' is given too")
            sent["Authorization"] = f"Bearer {authorization}"
        check_headers(sent)
    except NotUsable as exc:
        raise InvalidRequestError(
            f"Invalid '{param}': {exc}.", param=param, code="invalid_value"
        ) from exc
    return {"url": url, "credentials": seal_headers(sent), "description": ""}


def listed_functions(tools: Sequence[Any], options: Mapping[str, Any]) -> Iterator[Tool]:
    """Yield those tools of a list that a request allows, with the names that the server knows.

    The description of the server stands before that of the first one.
    """
    note = options.get("description")
    for tool in tools:
        if not isinstance(tool, dict) or not isinstance(name := tool.get("name"), str):
            continue
        annotations = tool.get("annotations")
        known = annotations if isinstance(annotations, dict) else {}
        if not name or name == LIST_TOOLS or not is_allowed(options, name, known):
            continue
        schema, text = tool.get("input_schema"), tool.get("description")
        texts = (note and f"({note})", text if isinstance(text, str) else None)
        note = None
        description = " ".join(filter(None, texts)) or None
        yield Tool(name, description, schema if isinstance(schema, dict) else {})
