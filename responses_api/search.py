"""Search: responses by the words of their items, in the time that a view has.

Two ways, for neither serves all words. The index knows all items that have the words, in no order;
that is right as long as there are not too many. Words that are more frequent than that are soon met
by going through the list and looking into the items of each response. PostgreSQL's statistics tell
which words are frequent beyond doubt; of all others the index is asked first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg.errors
from django.db import OperationalError, connection, models, transaction
from django.db.models.expressions import RawSQL

_MOST_HITS = 20_000
_SURELY_MORE = 2 * _MOST_HITS
"""From this estimate on the index is not asked: statistics are seldom that far from the truth."""
_HITS_MS, _LIST_MS = 800, 1200
"""What the one and the other may take; with them a view comes back before it counts as stalled."""

# The index is the way here: what the planner thinks of frequent words would have it read the table.
_SETTINGS = """
SELECT set_config('enable_seqscan', 'off', true), set_config('work_mem', '64MB', true),
       set_config('jit', 'off', true), set_config('statement_timeout', %s, true)
"""
# The project is a word of its items: so the index finds no others.
_HITS = """
SELECT response_id FROM responses_api_item
WHERE responses_api_item_words(project_id, data)
      @@ (websearch_to_tsquery('simple', %(text)s) && %(project)s::tsquery)
  AND numnode(websearch_to_tsquery('simple', %(text)s)) > 0 AND response_id IS NOT NULL
"""
# Without OFFSET the planner would look for the words in the index again, once for each response.
_HAS_WORDS = """
EXISTS (
    SELECT FROM (
        SELECT project_id, data FROM responses_api_item
        WHERE response_id = responses_api_storedresponse.id OFFSET 0
    ) item
    WHERE responses_api_item_words(project_id, data) @@ websearch_to_tsquery('simple', {})
)
"""


# The texts of the index, but for names: short, and seldom what was looked for.
_FOUND_IN = """
SELECT DISTINCT ON (response_id) response_id,
    ts_headline('simple', left(texts.text, 20000),
                websearch_to_tsquery('simple', %(text)s), %(form)s)
FROM responses_api_item, LATERAL (
    SELECT string_agg(piece #>> '{}', ' ') AS text
    FROM (
        SELECT jsonb_path_query(data, '$.content[*].text') AS piece
        UNION ALL SELECT jsonb_path_query(data, '$.summary[*].text')
        UNION ALL SELECT jsonb_path_query(data, '$.output ? (@.type() == "string")')
        UNION ALL SELECT jsonb_path_query(data, '$.arguments')
    ) pieces
) texts
WHERE response_id = ANY(%(responses)s)
  AND responses_api_item_words(project_id, data) @@ websearch_to_tsquery('simple', %(text)s)
ORDER BY response_id, position
"""
HIT_STARTS, HIT_ENDS = "\ue000", "\ue001"
"""What surrounds each word that was found: characters that no text has."""
_HIT_FORM = f"StartSel={HIT_STARTS}, StopSel={HIT_ENDS}, MaxFragments=1, MaxWords=24, MinWords=10"


class SearchTooBroad(Exception):
    """Too much was to be searched for the time that there is."""


def item_words() -> models.Func:
    """Return what is indexed of an item: the words of its texts, and its project."""
    return models.Func("project_id", "data", function="responses_api_item_words")


def is_mentioned(text: str, project_id: int | None) -> models.Q:
    """Return the condition for responses of which one item has these words.

    The text may have phrases in quotes, ``or``, and a minus before what must not be there.
    """
    found = _hits(text, project_id)
    if found is not None:
        return models.Q(pk__in=found)
    has_words = RawSQL(_HAS_WORDS.format("%s"), [text], output_field=models.BooleanField())  # noqa: S611  # Fixed; the text is a parameter.
    return models.Q(has_words)


def mentioned(text: str, project_id: int) -> tuple[str, dict[str, Any]]:
    """Return the same condition as SQL about their table, with the values that it names."""
    found = _hits(text, project_id)
    if found is not None:
        return "id = ANY(%(found)s::bigint[])", {"found": list(found)}
    return _HAS_WORDS.format("%(words)s"), {"words": text}


def hits_in(responses: Sequence[int], text: str) -> dict[int, str]:
    """Return where each of these responses has the words, in the text around them."""
    wanted: dict[str, Any] = {"text": text, "responses": list(responses), "form": _HIT_FORM}
    with connection.cursor() as cursor:
        cursor.execute(_FOUND_IN, wanted)
        return dict(cursor.fetchall())


@contextmanager
def search_time() -> Iterator[None]:
    """Run a search, and what lists its responses. Raise SearchTooBroad when that takes too long."""
    try:
        with transaction.atomic():
            _limit(_LIST_MS)
            yield
    except OperationalError as exc:
        raise _told(exc) from exc


def _hits(text: str, project_id: int | None) -> set[int] | None:
    """Return the responses that have the words; None if there are too many for this way."""
    wanted: dict[str, str | int] = {
        "text": text,
        "project": "" if project_id is None else f"' {project_id}'",
    }
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            _limit(_HITS_MS)
            cursor.execute(f"EXPLAIN (FORMAT JSON) {_HITS}", wanted)
            is_frequent = _expected(cursor.fetchone()) > _SURELY_MORE
            if not is_frequent:
                cursor.execute(f"{_HITS} LIMIT {_MOST_HITS + 1}", wanted)
                found = [pk for (pk,) in cursor]
            _limit(_LIST_MS)
    except OperationalError as exc:
        if not isinstance(_told(exc), SearchTooBroad):
            raise
        return None
    return None if is_frequent or len(found) > _MOST_HITS else set(found)


def _expected(explained: Any) -> int:
    """Return how many rows PostgreSQL expects."""
    [[query]] = explained
    rows: int = query["Plan"]["Plan Rows"]
    return rows


def _limit(timeout_ms: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(_SETTINGS, [str(timeout_ms)])


def _told(error: OperationalError) -> Exception:
    if isinstance(error.__cause__, psycopg.errors.QueryCanceled):
        return SearchTooBroad()
    return error
