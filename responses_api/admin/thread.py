"""A response and what it builds on, as turns of bubbles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inference_site.admin_pages.bubbles import Bubble, Piece, image_piece, text_piece
from responses_api.annotations import status_of, status_of_run
from responses_api.items import ItemData
from responses_api.models import Item, StoredResponse

MOST_TURNS = 20
"""How many responses of a chain one page shows."""
MOST_ITEMS = 50
"""How many items of a conversation one page shows before a response."""

_CHAIN = """
WITH RECURSIVE chain (id, previous_id, depth) AS (
    SELECT id, previous_id, 0 FROM responses_api_storedresponse WHERE id = %s
  UNION ALL
    SELECT parent.id, parent.previous_id, chain.depth + 1
    FROM responses_api_storedresponse parent JOIN chain ON parent.id = chain.previous_id
    WHERE chain.depth < %s
)
SELECT stored.* FROM responses_api_storedresponse stored JOIN chain USING (id)
ORDER BY chain.depth DESC
"""
_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")


@dataclass(frozen=True, slots=True)
class Turn:
    """One response with what it was sent and what it said; without a response, what came before."""

    response: StoredResponse | None
    instructions: str
    bubbles: Sequence[Bubble]


def chain(response: StoredResponse, most: int) -> list[StoredResponse]:
    """Return a response and up to ``most`` before it, oldest first."""
    return list(StoredResponse.objects.raw(_CHAIN, [response.pk, most]))


def turns(response: StoredResponse) -> list[Turn]:
    """Return the last turns up to this response, oldest first."""
    members = chain(response, MOST_TURNS - 1)
    own: dict[int | None, list[Item]] = defaultdict(list)
    for item in Item.objects.filter(response__in=members).order_by("response", "position"):
        own[item.response_id].append(item)
    before = _conversation_before(members[0])
    tools = Tools([*before, *(item for items in own.values() for item in items)])
    earlier = [Turn(None, "", tools.bubbles(before))] if before else []
    return earlier + [
        Turn(member, _instructions(member), tools.bubbles(own[member.pk])) for member in members
    ]


def _instructions(response: StoredResponse) -> str:
    found = response.request.get("instructions")
    return found if isinstance(found, str) else ""


def _conversation_before(first: StoredResponse) -> list[Item]:
    if first.conversation_id is None:
        return []
    rows = Item.objects.filter(
        conversation=first.conversation_id,
        conversation_position__lt=first.conversation_position or 0,
    )
    return list(reversed(rows.order_by("-conversation_position")[:MOST_ITEMS]))


class Tools:
    """Which call has which result, among the items that a page shows."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._called: set[str] = set()
        self._results: dict[str, list[Piece]] = {}
        for item in items:
            if item.data["type"] in _CALLS:
                self._called.add(item.data["call_id"])
            elif item.data["type"] in _RESULTS:
                self._results[item.data["call_id"]] = _pieces(item.data["output"])

    def bubbles(self, items: Iterable[Item]) -> list[Bubble]:
        """Return items as bubbles; a result is shown with its call, if that is shown."""
        return [self._bubble(item.data) for item in items if not self._is_told(item.data)]

    def _is_told(self, data: ItemData) -> bool:
        return data["type"] in _RESULTS and data["call_id"] in self._called

    def _bubble(self, data: ItemData) -> Bubble:
        match data["type"]:
            case "message":
                return Bubble("message", data["role"], _pieces(data["content"]))
            case "reasoning":
                parts = [*data.get("summary", ()), *data.get("content", ())]
                return Bubble("reasoning", "assistant", _pieces(parts))
            case "function_call" | "custom_tool_call":
                given: str = data.get("arguments") or data.get("input") or ""
                result = self._results.get(data["call_id"])
                return Bubble("call", "assistant", [text_piece(given)], data["name"], result)
            case "function_call_output" | "custom_tool_call_output":
                return Bubble("result", "tool", _pieces(data["output"]))
            case other:
                return Bubble("note", "", name=f"{other}: its content is sealed.")


def _pieces(content: Any) -> list[Piece]:
    """Return a text, or the parts of a message or of a result."""
    if isinstance(content, str):
        return [text_piece(content)]
    return [_piece(part) for part in content]


def _piece(part: Mapping[str, Any]) -> Piece:
    match part["type"]:
        case "refusal":
            return text_piece(part["refusal"])
        case "input_image":
            return image_piece(part.get("image_url") or f"file {part.get('file_id')}")
        case "input_file":
            name = part.get("filename") or part.get("file_id") or part.get("file_url") or "no name"
            return Piece("note", f"File: {name}")
        case _:
            return text_piece(part.get("text", ""))


_ANCESTORS, _BRANCHES, _BELOW = 4, 20, 200


@dataclass(slots=True)
class Node:
    """A response in the tree; ``more`` of its children are not shown."""

    response: StoredResponse
    is_current: bool = False
    children: list[Node] = field(default_factory=list)
    more: bool = False
    status: str = ""


def tree(response: StoredResponse) -> Node:
    """Return the tree around a response: four before it, forks, and two levels below it."""
    before = chain(response, _ANCESTORS)[:-1]
    current = Node(response, is_current=True)
    root = here = Node(before[0]) if before else current
    for member in before[1:]:
        here.children.append(node := Node(member))
        here = node
    if here is not current:
        _fill([here], current)
    _fill([current])
    _fill(current.children)
    _tell_statuses(list(_nodes(root)))
    return root


def _nodes(root: Node) -> Iterator[Node]:
    yield root
    for child in root.children:
        yield from _nodes(child)


def _tell_statuses(nodes: list[Node]) -> None:
    rows = StoredResponse.objects.filter(pk__in=[node.response.pk for node in nodes])
    runs = dict(rows.values_list("pk", status_of_run()))
    for node in nodes:
        node.status = status_of(node.response, runs.get(node.response.pk))


def _fill(parents: list[Node], known: Node | None = None) -> None:
    """Give nodes their children; one of them may have a node already."""
    by_pk = {parent.response.pk: parent for parent in parents}
    rows = StoredResponse.objects.filter(previous__in=by_pk, deleted_at=None).order_by("pk")
    if known is not None and known.response.previous_id is not None:
        by_pk[known.response.previous_id].children.append(known)
    for row in rows[:_BELOW]:
        parent = by_pk[row.previous_id or 0]
        if known is not None and row.pk == known.response.pk:
            continue
        if len(parent.children) < _BRANCHES:
            parent.children.append(Node(row))
        else:
            parent.more = True
