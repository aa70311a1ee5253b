"""How many of the requests that were looked at have which status, error, key and model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference_site.accounts.models import ApiKey
from inference_site.console.request_log.choice import Choice
from inference_site.console.request_log.rows import Entry
from inference_site.generations.models import Generation

_MOST = 12


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a facet: its text, how many have it, and the query that chooses it, or not."""

    label: str
    count: int
    query: str
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class Facet:
    """One property of requests, with its most frequent values."""

    title: str
    values: Sequence[Value]


def facets(
    choice: Choice, entries: Sequence[Entry], keys: Mapping[int, ApiKey], query: Any
) -> list[Facet]:
    """Return the facets of these entries; ``query`` is the query of the page."""
    labels = {pk: f"{key.name} ({key.prefix}…)" for pk, key in keys.items()}
    properties: list[tuple[str, str, Iterable[tuple[Any, int]], str]] = [
        ("Status", "status", ((_status(e), _weight(e)) for e in entries), choice.status),
        ("Error", "error", ((e.error_code, _weight(e)) for e in entries), choice.error),
        ("Key", "key", ((e.api_key_id, _weight(e)) for e in entries), str(choice.key or "")),
        ("Model", "model", ((e.model, _weight(e)) for e in entries), choice.model),
    ]
    return [
        Facet(title, _values(name, found, chosen, query, labels if name == "key" else {}))
        for title, name, found, chosen in properties
    ]


def _values(
    name: str,
    found: Iterable[tuple[Any, int]],
    chosen: str,
    query: Any,
    labels: Mapping[Any, str],
) -> list[Value]:
    counts: Counter[Any] = Counter()
    for value, weight in found:
        if value:
            counts[value] += weight
    return [
        Value(
            labels.get(value, str(value)),
            count,
            _with(query, name, "" if str(value) == chosen else str(value)),
            str(value) == chosen,
        )
        for value, count in counts.most_common(_MOST)
    ]


def _with(query: Any, name: str, value: str) -> str:
    changed = query.copy()
    changed.pop("before", None)
    changed.pop(name, None)
    if value:
        changed[name] = value
    return str(changed.urlencode())


def _status(entry: Entry) -> str:
    return str(entry.status)


def _weight(entry: Entry) -> int:
    return 1 if isinstance(entry, Generation) else entry.count
