"""Tools that the site runs: how they are offered to the model, and how their calls become items.

Each type of tool has a ``SiteToolType``. The worker has the code that runs it (``worker.tools``);
both know each other by the type's name and by the options, which are plain data in the request
document.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic_core import from_json

from inference_site.core.domain.request import distinct_name, function_name
from inference_site.core.domain.site_tools import Source, ToolResult, find_citations
from responses_api.wire.objects import (
    FileCitation,
    Message,
    OutputItem,
    OutputText,
    SiteCallItem,
    UrlCitation,
    changed,
)

if TYPE_CHECKING:
    from responses_api.client_tools import OfferedTools
    from responses_api.wire.tools import TypedTool

_MODULES: tuple[str, ...] = (
    "responses_api.web_search",
    "responses_api.file_search",
    "responses_api.mcp",
    "responses_api.tool_search",
)
"""Modules with a ``TYPE``, the ``SiteToolType`` of a tool."""
_registered: list[SiteToolType] = []


@dataclass(frozen=True, slots=True)
class Route:
    """The tool that a name leads to: its ``type``, its own name and its namespace."""

    type: str
    name: str
    namespace: str | None = None

    @property
    def usual_name(self) -> str:
        """The name that the model calls, unless another tool has the same one."""
        is_own = (self.type, self.namespace) == ("function", self.name)  # A deferred function.
        return function_name(self.name, None if is_own else self.namespace, self.type)

    def distinct_name(self, name: str) -> str:
        """Return a name that no other tool has: ``name``, shortened, and a digest of the tool."""
        return distinct_name(name, self.name, self.namespace, self.type)


@dataclass(frozen=True, slots=True)
class FirstCall:
    """A call before the first turn of the model; ``arguments`` is JSON text.

    ``fields`` are fields of its item that ``SiteToolType.begin`` does not know.
    """

    route: Route
    arguments: str = "{}"
    fields: Mapping[str, Any] = field(default_factory=dict)


class SiteToolType(ABC):
    """A type of tool that the site runs.

    ``type`` is the type of its routes and of its options. ``names`` are the values of
    ``tools[].type`` that mean this tool. An item of its calls is made by ``begin`` and ``end``;
    ``responses_api.events`` has the events of each class of item.
    """

    type: ClassVar[str]
    names: ClassVar[frozenset[str]]

    @abstractmethod
    def offer(
        self, tool: TypedTool, offered: OfferedTools, project_id: int
    ) -> dict[str, Any] | None:
        """Offer the functions of a tool with ``offered.add(Route(self.type, …), make)``.

        Return the options for the worker: JSON with ``type``, and ``server_label`` if its routes
        have a namespace. Return None if this site does not run such tools: the tool is then named
        in the header of ignored parameters. Raise InvalidRequestError if the project may not use
        it.

        What must be called before the first turn of the model is added to
        ``offered.first_calls``, for example to list the tools of a server, or a call that was
        approved.
        """

    @abstractmethod
    def begin(self, route: Route, options: Mapping[str, Any]) -> SiteCallItem:
        """Return the item of a call that begins, in progress and without its arguments."""

    @abstractmethod
    def end(self, item: SiteCallItem, arguments: str, result: ToolResult) -> SiteCallItem:
        """Return the item of a call with its result. ``arguments`` is JSON text.

        If a result with ``is_error`` has no error in its ``fields``, ``output`` is the message.
        """

    def is_run(self, route: Route, options: Mapping[str, Any]) -> bool:
        """Whether the site runs a call at once.

        Otherwise ``begin`` returns an item that has no result, such as a request to approve the
        call, and the response ends with the turn.
        """
        return True

    def discover(  # noqa: B027  # Most types have nothing to discover.
        self,
        route: Route,
        options: Mapping[str, Any],
        result: ToolResult,
        offered: OfferedTools,
    ) -> None:
        """Offer the functions that the result of a call has brought, with ``offered.add``."""

    def is_spent(
        self, options: Mapping[str, Any], result: ToolResult, offered: OfferedTools
    ) -> bool:
        """Whether the model is not offered the tool any more after this result.

        ``offered`` has the functions that it has brought (see ``discover``).
        """
        return False

    def following(
        self, item: SiteCallItem, options: Mapping[str, Any], result: ToolResult
    ) -> Sequence[OutputItem]:
        """Return the items of the output that come after that of a call, which has ended."""
        return ()

    def is_message(self, route: Route) -> bool:
        """Whether the model is shown the call and its result; a list of tools is not."""
        return True


def register(type_: SiteToolType) -> None:
    """Add a type of tool that is not one of the product's own."""
    _registered.append(type_)
    site_tools.cache_clear()
    _by_name.cache_clear()


@cache
def site_tools() -> Mapping[str, SiteToolType]:
    """Return the types of tools, by their names in routes and options."""
    own = [import_module(name).TYPE for name in _MODULES]
    return {type_.type: type_ for type_ in (*own, *_registered)}


@cache
def _by_name() -> Mapping[str, SiteToolType]:
    return {name: type_ for type_ in site_tools().values() for name in type_.names}


def site_tool_named(name: str) -> SiteToolType | None:
    """Return the type of tool that ``tools[].type`` means, if the site may run it."""
    return _by_name().get(name)


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call from their JSON text; none if that is no object."""
    try:
        given = from_json(text or "{}")
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}


def text_argument(arguments: str, name: str) -> str | None:
    """Return an argument of a call, whose arguments are JSON text; None if it is no text."""
    value = arguments_of(arguments).get(name)
    return value if isinstance(value, str) else None


def with_citations(item: OutputItem, sources: Sequence[Source]) -> OutputItem:
    """Return the item, which has all of its text; a message with its annotations."""
    match item:
        case Message(content=[OutputText(text=text) as part]):
            annotations: list[UrlCitation | FileCitation] = []
            for found in find_citations(text, sources):
                start, url, title = found.start, found.source.url, found.source.title
                annotations.append(
                    FileCitation(index=start, file_id=url, filename=title)
                    if found.source.is_file
                    else UrlCitation(start_index=start, end_index=found.end, url=url, title=title)
                )
            return changed(item, content=[changed(part, annotations=annotations)])
    return item
