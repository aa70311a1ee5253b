"""A response in its thread: the turns up to it as bubbles, and the tree around it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inference_site.core.admin_pages.labels import Bubble, Piece, image_piece, text_piece
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.core.storage.cipher import unseal
from inference_site.runs.tool_calls.models import ToolCall
from responses_api.annotations import status_of, with_generation_status
from responses_api.items import ItemData, holds_context, unseal_context
from responses_api.models import Item, StoredResponse
from responses_api.prompt_items import CALLS, RESULTS, WHOLE_CALLS, WORDS

MAX_TURNS = 20
"""The most turns of a thread on a page."""
MAX_ITEMS = 50
"""The most items of a conversation on a page."""
_ANCESTORS, _BRANCHES, _CHILD_ROWS = 4, 20, 200
"""Of a tree: the most ancestors, the most children of a node, and the most rows of a level."""
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


def chain(response: StoredResponse, most: int) -> list[StoredResponse]:
    """Return a response and up to ``most`` responses before it, oldest first."""
    return list(StoredResponse.objects.raw(_CHAIN, [response.pk, most]))


@dataclass(frozen=True, slots=True)
class Turn:
    """The input and output of a response; without a response, the conversation before it.

    ``before`` is the id of the response before a compaction: who continues from it continues with
    the turns that were compacted.
    """

    response: StoredResponse | None
    instructions: str
    bubbles: Sequence[Bubble]
    before: str = ""


def turns(response: StoredResponse) -> list[Turn]:
    """Return the last turns of a thread up to this response, oldest first."""
    responses = chain(response, MAX_TURNS - 1)
    items: dict[int | None, list[Item]] = defaultdict(list)
    for item in Item.objects.filter(response__in=responses).order_by("response", "position"):
        items[item.response_id].append(item)
    first, before = responses[0], list[Item]()
    if first.conversation_id is not None:
        rows = Item.objects.filter(
            conversation=first.conversation_id,
            conversation_position__lt=first.conversation_position or 0,
        )
        before = list(reversed(rows.order_by("-conversation_position")[:MAX_ITEMS]))
    maker = BubbleMaker([*before, *(item for own in items.values() for item in own)])
    shown = [Turn(None, "", maker.bubbles(before))] if before else []
    for previous, member in zip((None, *responses), responses, strict=False):
        instructions = member.request.get("instructions")
        text = instructions if isinstance(instructions, str) else ""
        is_compacted = any(item.is_output and holds_context(item.data) for item in items[member.pk])
        fork = previous.public_id if previous is not None and is_compacted else ""
        shown.append(Turn(member, text, maker.bubbles(items[member.pk]), fork))
    return shown


@dataclass(frozen=True, slots=True)
class ShownCall:
    """A call that the site has run; the texts are None for who may not see them, and while it runs.

    ``call`` is its row.
    """

    call: ToolCall
    arguments: Piece | None = None
    result: Piece | None = None


def site_calls(response: StoredResponse, *, with_content: bool) -> list[ShownCall]:
    """Return the calls of a response that the site has run, in order.

    Each has an item in the output once the response has ended; the items are in the same order.
    """
    calls = list(ToolCall.objects.of(response.public_id))
    if not calls or not with_content:
        return [ShownCall(call) for call in calls]
    output = Item.objects.filter(response=response, is_output=True).order_by("position")
    texts = _texts_of_calls(item.data for item in output.filter(data__type__in=_SITE_ITEMS))
    if len(texts) != len(calls):
        return [ShownCall(call) for call in calls]
    return [
        ShownCall(call, None if given is None else text_piece(given), text_piece(result))
        for call, (given, result) in zip(calls, texts, strict=True)
    ]


_SITE_ITEMS = (
    *("mcp_call", "mcp_list_tools", "web_search_call", "file_search_call"),
    *("tool_search_call", "tool_search_output"),
)


def _texts_of_calls(items: Iterable[ItemData]) -> list[tuple[str | None, str]]:
    """Return the arguments and the result of each call that the site has run, from its items."""
    texts = list[tuple[str | None, str]]()
    is_found = False  # Whether the items since the last call are what a search has found.
    for data in items:
        is_listed = data["type"] in ("mcp_list_tools", "tool_search_output")
        is_found = is_listed and (is_found or data["type"] == "tool_search_output")
        match data["type"]:
            case "mcp_list_tools":
                names = ", ".join(str(tool.get("name")) for tool in data.get("tools") or ())
                text = str(data.get("error") or names or "No tools.")
                if is_found:
                    label = f"{data.get('server_label')}: {text}"
                    texts[-1] = (texts[-1][0], f"{texts[-1][1]}\n{label}")
                else:
                    texts.append((None, text))
            case "tool_search_call":
                if data.get("execution") == "server":
                    texts.append((CALLS[data["type"]](data).arguments, ""))
            case "tool_search_output":  # It follows its call.
                texts[-1] = (texts[-1][0], str(RESULTS[data["type"]](data)))
            case kind:
                made = WHOLE_CALLS[kind](data)
                texts.append((made.arguments, made.result or ""))
    return texts


class BubbleMaker:
    """Makes bubbles of the items of a page; the output of a call is part of the call's bubble."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._called: set[str] = set()
        self._outputs: dict[str, list[Piece]] = {}
        for item in items:
            kind, call_id = item.data["type"], item.data.get("call_id")
            if call_id is None:
                continue
            if kind in CALLS:
                self._called.add(call_id)
            elif kind in RESULTS:
                self._outputs[call_id] = _pieces(RESULTS[kind](item.data))

    def bubbles(self, items: Iterable[Item]) -> list[Bubble]:
        """Return the bubbles of items, without outputs whose call is on the page.

        What a search of the site has found has no ``call_id``: it follows its call.
        """
        made: list[Bubble] = []
        for item in items:
            data = item.data
            if data["type"] == "tool_search_output" and data.get("execution") == "server" and made:
                made[-1] = replace(made[-1], result=_pieces(RESULTS[data["type"]](data)))
            elif data["type"] not in RESULTS or data.get("call_id") not in self._called:
                made.append(self._bubble(data, item.project_id))
        return made

    def _bubble(self, data: ItemData, project_id: int) -> Bubble:
        match data["type"]:
            case "message":
                return Bubble("message", data["role"], _pieces(data["content"]))
            case "reasoning":
                parts = [*data.get("summary", ()), *data.get("content", ())]
                return Bubble("reasoning", "assistant", _pieces(parts))
            case "compaction":
                return _compaction(data, project_id)
            case kind if make := CALLS.get(kind) or WHOLE_CALLS.get(kind):
                call = make(data)
                text = data.get("input") if kind == "custom_tool_call" else call.arguments
                result = None if call.result is None else [text_piece(call.result)]
                output = result or self._outputs.get(data.get("call_id") or "")
                return Bubble("call", "assistant", [text_piece(text or "")], call.name, output)
            case kind if kind in RESULTS:
                return Bubble("result", "tool", _pieces(RESULTS[kind](data)))
            case kind if kind in WORDS:
                words = WORDS[kind](data)
                if words.role == "system":
                    return Bubble("note", "", name=words.text)
                return Bubble("message", words.role, [text_piece(words.text)])
            case other:
                return Bubble("note", "", name=f"{other}: it is not shown to the model.")


def _compaction(data: ItemData, project_id: int) -> Bubble:
    """Return the summary that the model is sent; a note if it was sealed with another key."""
    sealed = data["encrypted_content"]
    try:
        if holds_context(data):
            text = unseal_context(sealed, project_id, "").context.summary
            name = "From here on the model is sent this summary in place of the turns above."
        else:
            text, name = unseal(sealed, project_id, ""), "A summary of earlier turns."
    except InvalidRequestError:
        return Bubble("note", "", name="compaction: its content is sealed.")
    return Bubble("compaction", "", [text_piece(text)], name)


def _pieces(content: Any) -> list[Piece]:
    """Return the pieces of a text, or of the parts of a message or an output."""
    if isinstance(content, str):
        return [text_piece(content)]
    pieces: list[Piece] = []
    for part in content:
        match part["type"]:
            case "refusal":
                pieces.append(text_piece(part["refusal"]))
            case "input_image":
                image = part.get("image_url") or f"file {part.get('file_id')}"
                pieces.append(image_piece(image))
            case "input_file":
                names = (part.get(key) for key in ("filename", "file_id", "file_url"))
                pieces.append(Piece("note", f"File: {next(filter(None, names), 'no name')}"))
            case _:
                pieces.append(text_piece(part.get("text", "")))
    return pieces


@dataclass(slots=True)
class Node:
    """A response in a tree; ``more``: it has more children than the tree shows."""

    response: StoredResponse
    is_current: bool = False
    children: list[Node] = field(default_factory=list)
    more: bool = False
    status: str = ""


def tree(response: StoredResponse) -> Node:
    """Return the tree around a response: four ancestors, its siblings, and two levels below it."""
    ancestors = chain(response, _ANCESTORS)[:-1]
    current = Node(response, is_current=True)
    root = last = Node(ancestors[0]) if ancestors else current
    for ancestor in ancestors[1:]:
        last.children.append(node := Node(ancestor))
        last = node
    if last is not current:
        _add_children([last], current)
    _add_children([current])
    _add_children(current.children)
    nodes = list(_nodes(root))
    rows = StoredResponse.objects.filter(pk__in=[node.response.pk for node in nodes])
    statuses = dict(with_generation_status(rows).values_list("pk", "generation_status"))
    for node in nodes:
        node.status = status_of(node.response, statuses.get(node.response.pk))
    return root


def _nodes(root: Node) -> Iterator[Node]:
    yield root
    for child in root.children:
        yield from _nodes(child)


def _add_children(parents: list[Node], known: Node | None = None) -> None:
    """Add the children of these nodes; ``known`` is the node of one of the children."""
    by_pk = {parent.response.pk: parent for parent in parents}
    rows = StoredResponse.objects.filter(previous__in=by_pk, deleted_at=None).order_by("pk")
    if known is not None and known.response.previous_id is not None:
        by_pk[known.response.previous_id].children.append(known)
    for row in rows[:_CHILD_ROWS]:
        parent = by_pk[row.previous_id or 0]
        if known is not None and row.pk == known.response.pk:
            continue
        if len(parent.children) < _BRANCHES:
            parent.children.append(Node(row))
        else:
            parent.more = True
