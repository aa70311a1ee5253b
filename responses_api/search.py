"""Search of responses by the words of their items, within the time that a view has.

There are two ways (``docs/decisions/0014-two-ways-to-search.md``). For rare words, the full-text
index returns all items that contain them, in no order. For frequent words that are too many rows;
then PostgreSQL goes through the list and checks the items of each response, which finds a page
soon. The index is asked first, unless the planner's estimate says that the words are frequent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg.errors
from django.db import OperationalError, connection, models, transaction
from django.db.models.expressions import RawSQL

_MOST_HITS = 20_000
_MAX_ESTIMATE = 2 * _MOST_HITS
"""Above this estimate the index is not asked. The planner is seldom wrong by a factor of two."""
_HITS_MS, _LIST_MS = 800, 1200
"""Time limits of the two ways. Together they are shorter than the time limit of a view."""

# For frequent words, the planner would read the whole table instead of the index.
_SETTINGS = """
SELECT set_config('enable_seqscan', 'off', true), set_config('work_mem', '64MB', true),
       set_config('jit', 'off', true), set_config('statement_timeout', %s, true)
"""
# The index has the project of an item as a word, so it finds only items of the project.
_HITS = """
SELECT response_id FROM responses_api_item
WHERE responses_api_item_words(project_id, data)
      @@ (websearch_to_tsquery('simple', %(text)s) && %(project)s::tsquery)
  AND numnode(websearch_to_tsquery('simple', %(text)s)) > 0 AND response_id IS NOT NULL
"""
_CONVERSATIONS = """
SELECT DISTINCT conversation_id FROM (
    SELECT conversation_id FROM responses_api_item
    WHERE responses_api_item_words(project_id, data)
          @@ (websearch_to_tsquery('simple', %(text)s) && %(project)s::tsquery)
      AND numnode(websearch_to_tsquery('simple', %(text)s)) > 0 AND conversation_id IS NOT NULL
    LIMIT %(most)s
) found ORDER BY conversation_id DESC LIMIT %(limit)s
"""
# Without OFFSET the planner would search the index again, once for each response.
_HAS_WORDS = """
EXISTS (
    SELECT FROM (
        SELECT project_id, data FROM responses_api_item
        WHERE response_id = responses_api_storedresponse.id OFFSET 0
    ) item
    WHERE responses_api_item_words(project_id, data) @@ websearch_to_tsquery('simple', {})
)
"""
# The texts that the index has, but for names, which are seldom searched for.
_HEADLINES = """
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
"""Characters around each found word in ``headlines``; they are for private use in Unicode."""
_HEADLINE_OPTIONS = (
    f"StartSel={HIT_STARTS}, StopSel={HIT_ENDS}, MaxFragments=1, MaxWords=24, MinWords=10"
)


class SearchTooBroad(Exception):
    """The search took too long."""


def item_words() -> models.Func:
    """Return the expression of the index: the words of an item's texts, and its project."""
    return models.Func("project_id", "data", function="responses_api_item_words")


def contains_words(text: str, project_id: int | None) -> models.Q:
    """Return the condition that an item of a response contains these words.

    The text may have phrases in quotes, ``or``, and a minus before excluded words.
    """
    found = _hits(text, project_id)
    if found is not None:
        return models.Q(pk__in=found)
    has_words = RawSQL(_HAS_WORDS.format("%s"), [text], output_field=models.BooleanField())  # noqa: S611  # Fixed; the text is a parameter.
    return models.Q(has_words)


def contains_words_sql(text: str, project_id: int) -> tuple[str, dict[str, Any]]:
    """Return the same condition as SQL, with its parameters."""
    found = _hits(text, project_id)
    if found is not None:
        return "id = ANY(%(found)s::bigint[])", {"found": list(found)}
    return _HAS_WORDS.format("%(words)s"), {"words": text}


def headlines(responses: Sequence[int], text: str) -> dict[int, str]:
    """Return an excerpt of each response around the words, by the response's key."""
    parameters: dict[str, Any] = {
        "text": text,
        "responses": list(responses),
        "form": _HEADLINE_OPTIONS,
    }
    with connection.cursor() as cursor:
        cursor.execute(_HEADLINES, parameters)
        return dict(cursor.fetchall())


def conversations_with_words(text: str, project_id: int | None, limit: int) -> list[int]:
    """Return the keys of conversations with an item that has these words, the newest first.

    Of frequent words, only some are found. Call it within ``search_timeout``.
    """
    parameters: dict[str, Any] = {
        "text": text,
        "project": "" if project_id is None else f"' {project_id}'",
        "most": _MOST_HITS,
        "limit": limit,
    }
    try:
        with search_timeout(_HITS_MS), connection.cursor() as cursor:
            cursor.execute(_CONVERSATIONS, parameters)
            found = [pk for (pk,) in cursor]
            _limit(_LIST_MS)
    except SearchTooBroad:
        return []
    return found


@contextmanager
def search_timeout(timeout_ms: int = _LIST_MS) -> Iterator[None]:
    """Limit the time of a search and of the query for its page. Raise SearchTooBroad."""
    try:
        with transaction.atomic():
            _limit(timeout_ms)
            yield
    except OperationalError as exc:
        if isinstance(exc.__cause__, psycopg.errors.QueryCanceled):
            raise SearchTooBroad from exc
        raise


def _hits(text: str, project_id: int | None) -> set[int] | None:
    """Return the keys of the responses with the words; None if the words are too frequent."""
    parameters: dict[str, str | int] = {
        "text": text,
        "project": "" if project_id is None else f"' {project_id}'",
    }
    try:
        with search_timeout(_HITS_MS), connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN (FORMAT JSON) {_HITS}", parameters)
            [[explained]] = cursor.fetchone()
            is_frequent = explained["Plan"]["Plan Rows"] > _MAX_ESTIMATE
            if not is_frequent:
                cursor.execute(f"{_HITS} LIMIT {_MOST_HITS + 1}", parameters)
                found = [pk for (pk,) in cursor]
            _limit(_LIST_MS)
    except SearchTooBroad:
        return None
    return None if is_frequent or len(found) > _MOST_HITS else set(found)


def _limit(timeout_ms: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(_SETTINGS, [str(timeout_ms)])
