"""Tools of a request, and its choice of them. Source: API reference, "Responses", ``tools``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from inference_site.gateway.api.payload import NO_NUL, Omittable, WireRequest
from inference_site.gateway.request_fields.web_search import ContextSize, Location
from inference_site.gateway.request_fields.wire import CustomFormat, flat_tool
from inference_site.mcp.access import MAX_HEADERS_BYTES
from inference_site.mcp.models import LABEL
from inference_site.vector_stores.wire import Filters, MaxResults, RankingOptions

WEB_SEARCH_NAMES = frozenset(
    {
        *("web_search", "web_search_2025_08_26", "web_search_preview"),
        "web_search_preview_2025_03_11",
    }
)
"""The names of the web search tool."""
_TYPES_ALONE = WEB_SEARCH_NAMES | frozenset(
    {
        *("file_search", "code_interpreter", "computer"),
        *("computer_use_preview", "computer_use", "mcp", "image_generation"),
        *("programmatic_tool_calling", "local_shell", "shell", "apply_patch"),
    }
)
"""Types of tools whose type says what they do."""
_TYPES = ("function", "custom", "namespace", "tool_search")

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]


class CallableTool(WireRequest):
    """Fields that functions and custom tools share.

    A tool with ``defer_loading`` is hidden from the model until a tool search loads it.
    """

    name: ToolName
    description: str | None = None
    defer_loading: bool | None = None
    allowed_callers: (
        Annotated[list[Literal["direct", "programmatic"]], Field(min_length=1)] | None
    ) = None


class FunctionTool(CallableTool):
    """``tools[]`` of type ``function``; flat, unlike those of chat completions."""

    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None


class CustomTool(CallableTool):
    """``tools[]`` of type ``custom``."""

    type: Literal["custom"]
    format: CustomFormat | None = None


class NamespaceTool(WireRequest):
    """``tools[]`` of type ``namespace``: functions and custom tools under one name."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    tools: Annotated[
        list[
            Annotated[
                Annotated[FunctionTool | CustomTool, Field(discriminator="type")],
                BeforeValidator(flat_tool),
            ]
        ],
        Field(min_length=1),
    ]


class TypedTool(WireRequest):
    """A tool that its type defines; its other fields are echoed.

    One of an unknown type is not offered to the model, and the header of the answer names it.
    """

    type: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,50}$")]

    @property
    def is_known(self) -> bool:
        """Whether the API had its type when this was written."""
        return self.type in _TYPES_ALONE

    @property
    def environment(self) -> dict[str, Any]:
        """Where a shell runs; empty if that was not given."""
        given = (self.model_extra or {}).get("environment")
        return given if isinstance(given, dict) else {}

    @property
    def runs_elsewhere(self) -> bool:
        """Whether its environment is a container of OpenAI and not the client's machine."""
        return self.environment.get("type") not in (None, "local")

    def _ignored(self) -> Any:
        return iter(() if self.is_known else (self.type,))


class ToolSearchTool(TypedTool):
    """``tools[]`` of type ``tool_search``.

    The client runs it if ``execution`` is ``client``, else the site.
    """

    type: Literal["tool_search"]
    execution: Literal["server", "client"] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def _ignored(self) -> Any:
        return WireRequest._ignored(self)


class SearchFilters(WireRequest):
    """``filters`` of the web search tool: domains, each with its subdomains."""

    allowed_domains: (
        Annotated[
            list[Annotated[str, Field(max_length=253, pattern=r"^[\w-]+(\.[\w-]+)*\.?$")]],
            Field(max_length=100),
        ]
        | None
    ) = None


class UserLocation(Location):
    """``user_location`` of the web search tool."""

    type: Literal["approximate"] | None = None


class WebSearchTool(TypedTool):
    """``tools[]`` of type ``web_search``, under all of its names."""

    filters: SearchFilters | None = None
    user_location: UserLocation | None = None
    search_context_size: ContextSize | None = None
    external_web_access: bool | None = None
    search_content_types: list[str] | None = None

    def _ignored(self) -> Any:
        return WireRequest._ignored(self)


class FileSearchTool(TypedTool):
    """``tools[]`` of type ``file_search``: a search in vector stores."""

    type: Literal["file_search"]
    vector_store_ids: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=64, pattern=NO_NUL)]],
        Field(min_length=1, max_length=10),
    ]
    max_num_results: MaxResults | None = None
    filters: Filters | None = None
    ranking_options: RankingOptions | None = None

    def _ignored(self) -> Any:
        return WireRequest._ignored(self)


class McpFilter(WireRequest):
    """Tools of an MCP server: those of these names, and those that only read, or do not."""

    tool_names: list[str] | None = None
    read_only: bool | None = None


class McpApprovals(WireRequest):
    """``require_approval`` as an object: tools that always and that never need an approval."""

    always: McpFilter | None = None
    never: McpFilter | None = None


def _filter_kind(value: object) -> str:
    return "object" if isinstance(value, (dict, WireRequest)) else "plain"


class McpTool(TypedTool):
    """``tools[]`` of type ``mcp``: the tools of a server.

    ``headers`` and ``authorization`` are secret: no dump of the model has them, so that they are
    neither stored nor shown.
    """

    type: Literal["mcp"]
    server_label: Annotated[str, Field(pattern=rf"^{LABEL}$")]
    server_url: Annotated[str, Field(max_length=2000)] | None = None
    connector_id: str | None = None
    tunnel_id: str | None = None
    authorization: Annotated[str, Field(max_length=MAX_HEADERS_BYTES)] | None = Field(
        None, exclude=True, repr=False
    )
    headers: dict[str, str] | None = Field(None, exclude=True, repr=False)
    server_description: Annotated[str, Field(max_length=2000)] | None = None
    allowed_tools: (
        Annotated[
            Annotated[list[str], Tag("plain")] | Annotated[McpFilter, Tag("object")],
            Discriminator(_filter_kind),
        ]
        | None
    ) = None
    require_approval: (
        Annotated[
            Annotated[Literal["always", "never"], Tag("plain")]
            | Annotated[McpApprovals, Tag("object")],
            Discriminator(_filter_kind),
        ]
        | None
    ) = None
    defer_loading: bool | None = None
    allowed_callers: (
        Annotated[list[Literal["direct", "programmatic"]], Field(min_length=1)] | None
    ) = None


def _type_of(value: object) -> str | None:
    """Return the ``type`` of a JSON object or of a parsed model."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


def _tool_kind(value: object) -> str | None:
    kind = _type_of(value)
    if kind in WEB_SEARCH_NAMES:
        return "web_search"
    return kind if kind in (*_TYPES, "file_search", "mcp", None) else "typed"


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[ToolSearchTool, Tag("tool_search")]
    | Annotated[WebSearchTool, Tag("web_search")]
    | Annotated[FileSearchTool, Tag("file_search")]
    | Annotated[McpTool, Tag("mcp")]
    | Annotated[TypedTool, Tag("typed")],
    Discriminator(_tool_kind),
    BeforeValidator(flat_tool),
]


def tool_object(tool: Tool) -> dict[str, Any]:
    """Return the tool as the response shows it; a function has all fields, null when unset."""
    match tool:
        case FunctionTool():
            return {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict is not False,
                **_given(tool, "output_schema"),
            }
        case CustomTool():
            described = {} if tool.description is None else {"description": tool.description}
            form = {"type": "text"} if tool.format is None else tool.format.model_dump(mode="json")
            return {
                "type": "custom",
                "name": tool.name,
                **described,
                "format": form,
                **_given(tool),
            }
        case NamespaceTool():
            inner = [tool_object(entry) for entry in tool.tools]
            shown = {"type": "namespace", "name": tool.name, "description": tool.description or ""}
            return {**shown, "tools": inner}
        case ToolSearchTool():
            given = tool.model_dump(mode="json", exclude_none=True)
            return {**given, "execution": tool.execution or "server"}
        case WebSearchTool() | FileSearchTool():
            return tool.model_dump(mode="json", exclude_unset=True)
        case McpTool():
            server = tool.model_dump(mode="json", exclude_none=True)
            unset = {"allowed_tools": None, "headers": None, "require_approval": "always"}
            return {**unset, **server}
        case TypedTool():
            return tool.model_dump(mode="json")


def _given(tool: CallableTool, *more: str) -> dict[str, Any]:
    """Return the fields that a tool has only if the request gave them."""
    names = ("defer_loading", "allowed_callers", *more)
    return {name: value for name in names if (value := getattr(tool, name)) is not None}


class NamedChoice(WireRequest):
    """``tool_choice`` that names a tool; also an entry of ``allowed_tools``."""

    type: Literal["function", "custom"]
    name: str
    namespace: Omittable[str] = None


class TypedChoice(WireRequest):
    """``tool_choice`` of a tool by its type; also an entry of ``allowed_tools``."""

    type: str

    def _ignored(self) -> Any:
        return iter(())


def _named_kind(value: object) -> str:
    is_typed = _type_of(value) in (*_TYPES_ALONE, "namespace", "tool_search")
    return "typed" if is_typed else "named"


AllowedTool = Annotated[
    Annotated[NamedChoice, Tag("named")] | Annotated[TypedChoice, Tag("typed")],
    Discriminator(_named_kind),
    BeforeValidator(flat_tool),
]


class AllowedTools(WireRequest):
    """``tool_choice`` of type ``allowed_tools``: the model may call no other tool."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[AllowedTool], Field(min_length=1)]


def _choice_kind(value: object) -> str:
    if not isinstance(value, (dict, WireRequest)):
        return "mode"
    return "allowed" if _type_of(value) == "allowed_tools" else _named_kind(value)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedChoice, Tag("named")]
    | Annotated[AllowedTools, Tag("allowed")]
    | Annotated[TypedChoice, Tag("typed")],
    Discriminator(_choice_kind),
    BeforeValidator(flat_tool),
]
