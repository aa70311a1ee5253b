"""The tool ``file_search``: its function, its options for the worker, and its items.

Source: API reference, "Responses", ``tools``, and "File search tool call".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from inference_site.core.domain.request import Tool
from inference_site.core.domain.site_tools import ToolResult
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.runs.queue import new_id
from inference_site.vector_stores.models import VectorStore
from inference_site.vector_stores.wire import to_ranking
from responses_api.site_tools import Route, SiteToolType, text_argument
from responses_api.wire.objects import FileSearchCall, SiteCallItem, changed
from responses_api.wire.tools import FileSearchTool, TypedTool

if TYPE_CHECKING:
    from responses_api.client_tools import OfferedTools

RESULTS = "file_search_call.results"
"""The value of ``include`` that adds the results to the items."""
DEFAULT_RESULTS = 5
"""OpenAI's default, 20, would take 16,000 tokens of the context."""
_DESCRIPTION = (
    "Searches the files that the user has provided{names}, and returns the passages that fit the "
    "query best, each after the number of its file in brackets. Search before you answer a "
    "question that the files may answer. Cite the files that you use by their numbers, such as [1]."
)
_SHOWN_NAMES = 10


class FileSearchType(SiteToolType):
    """See ``SiteToolType``. The worker runs it with ``worker.tools.file_search``."""

    type = "file_search"
    names = frozenset({"file_search"})

    def offer(
        self, tool: TypedTool, offered: OfferedTools, project_id: int
    ) -> dict[str, Any] | None:
        """Offer the function. Raise InvalidRequestError for a store that cannot be searched."""
        assert isinstance(tool, FileSearchTool)
        if any(one["type"] == self.type for one in offered.site_tools):
            raise InvalidRequestError(
                f"Invalid '{offered.param}': a request has one tool 'file_search', which may name "
                "several vector stores.",
                param=offered.param,
            )
        stores = _stores(tool, offered.param, project_id)
        names = ", ".join(store.name for store in stores if store.name)[:200]
        description = _DESCRIPTION.format(names=f" ({names})" if names else "")
        parameters = {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for."}},
            "required": ["query"],
            "additionalProperties": False,
        }
        offered.add(Route(self.type, self.type), lambda name: Tool(name, description, parameters))
        return {
            "type": self.type,
            "stores": [store.pk for store in stores],
            "limit": tool.max_num_results or DEFAULT_RESULTS,
            "filters": tool.filters.model_dump() if tool.filters else None,
            "ranking": asdict(to_ranking(tool.ranking_options)),
            "shows_results": RESULTS in offered.include,
        }

    def begin(self, route: Route, options: Mapping[str, Any]) -> FileSearchCall:
        """Return the item of a call that begins (see ``SiteToolType.begin``)."""
        return FileSearchCall(id=new_id("fs_"), status="in_progress", queries=[])

    def end(self, item: SiteCallItem, arguments: str, result: ToolResult) -> SiteCallItem:
        """Return the item of a call with its result (see ``SiteToolType.end``)."""
        assert isinstance(item, FileSearchCall)
        found = result.fields.get("results")
        status = "failed" if result.is_error else "completed"
        query = text_argument(arguments, "query")
        queries = [] if query is None else [query]
        return changed(item, status=status, queries=queries, results=found)


TYPE = FileSearchType()


def _stores(tool: FileSearchTool, param: str, project_id: int) -> list[VectorStore]:
    """Return the stores of a tool, in its order. Raise InvalidRequestError."""
    ids = list(dict.fromkeys(tool.vector_store_ids))
    found = VectorStore.objects.of(project_id).filter(public_id__in=ids)
    by_id = {store.public_id: store for store in found}
    for index, id_ in enumerate(tool.vector_store_ids):
        place = f"{param}.vector_store_ids[{index}]"
        store = by_id.get(id_)
        if store is None or store.has_expired:
            what = f"there is no vector store '{id_[:100]}'" if store is None else "it has expired"
            raise InvalidRequestError(f"Invalid '{place}': {what}.", param=place)
        if store.embedding_model != by_id[ids[0]].embedding_model:
            raise InvalidRequestError(
                f"Invalid '{place}': it has another embedding model than the first.", param=place
            )
    return [by_id[id_] for id_ in ids]
