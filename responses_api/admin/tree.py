"""Where a response stands: what it builds on, what else builds on that, and what builds on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from responses_api.admin.listed import status_of, with_run
from responses_api.admin.turns import chain
from responses_api.models import StoredResponse

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
    rows = with_run(StoredResponse.objects.filter(pk__in=[node.response.pk for node in nodes]))
    runs = dict(rows.values_list("pk", "run"))
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
