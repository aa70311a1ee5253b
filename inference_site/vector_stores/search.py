"""Search in the chunks of vector stores, by meaning (pgvector) and by words (full text).

Both rankings are fused by their ranks (reciprocal rank fusion; Cormack, Clarke and Büttcher, 2009).
Among few chunks all distances are computed. Among more, an HNSW index of the embeddings as half
precision numbers finds the nearest; there is one for each number of dimensions.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from django.conf import settings
from django.db import DatabaseError, ProgrammingError, connection, transaction
from django.db.models import Sum
from psycopg import sql

from inference_site.core.errors.api_errors import UnavailableError
from inference_site.files.models import FileState
from inference_site.vector_stores.models import IndexingStatus, VectorStore, VectorStoreFile

logger = logging.getLogger(__name__)

MAX_RESULTS = 50
_EXACT_CHUNKS = 5_000
"""Up to this many chunks, all distances are computed: 3 microseconds each."""
_INDEX_COST = 1_000
"""The index pays if the square of the searched chunks is more than this times all chunks: among
those of other stores, the search has to pass many of them."""
_MOST_DIMENSIONS = 4_000
"""Dimensions that an HNSW index of half precision vectors can have; more are never indexed."""
_CANDIDATES = 100
"""Chunks that each of the two rankings contributes."""
_EF_SEARCH = 200
"""``hnsw.ef_search``: nodes that the search of the index keeps; more find more of the nearest."""
_RANK_OFFSET = 60
"""The constant of reciprocal rank fusion."""
_MOST_WORDS = 16
_MOST_WITH_WORDS = 1_000
"""Chunks that may have the searched words, as PostgreSQL estimates: the rarest words are searched,
and those that more chunks have say little about any of them."""
_LOCK_INDEX = f"SELECT pg_advisory_xact_lock({0x76656378}, %s)"

Filter = Mapping[str, Any]
"""A filter of the API: a comparison ``{type, key, value}``, or ``{type: and|or, filters}``."""
_ORDERS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}

_WORDS = """
SELECT quote_literal(lexeme) FROM unnest(to_tsvector(%(language)s::regconfig, %(text)s))
LIMIT %(most)s
"""
_EXPLAINED = """
EXPLAIN (FORMAT JSON) SELECT FROM vector_stores_chunk chunk
WHERE chunk.words @@ %(word)s::tsquery AND chunk.store_id = ANY(%(stores)s)
"""
_ALL_CHUNKS = "SELECT reltuples FROM pg_class WHERE oid = 'vector_stores_chunk'::regclass"
_BY_WORDS = sql.SQL("""
SELECT chunk.id FROM vector_stores_chunk chunk
WHERE chunk.words @@ %(any_word)s::tsquery AND chunk.store_id = ANY(%(stores)s) {files}
ORDER BY (
    SELECT sum(weight)
    FROM unnest(%(words)s::text[], %(weights)s::float8[]) AS searched (word, weight)
    WHERE chunk.words @@ searched.word::tsquery
) DESC, ts_rank(chunk.words, %(any_word)s::tsquery) DESC, chunk.id
LIMIT %(limit)s
""")
_EXACT = sql.SQL("""
SELECT chunk.id FROM vector_stores_chunk chunk
WHERE chunk.dimensions = {dimensions} AND chunk.store_id = ANY(%(stores)s) {files}
ORDER BY chunk.embedding::vector <=> %(vector)s::vector, chunk.id
LIMIT %(limit)s
""")
_NEAREST = sql.SQL("""
SELECT chunk.id FROM vector_stores_chunk chunk
WHERE chunk.dimensions = {dimensions} AND chunk.store_id = ANY(%(stores)s) {files}
ORDER BY chunk.embedding::halfvec({dimensions}) <=> %(vector)s::halfvec({dimensions})
LIMIT %(limit)s
""")
_SETTINGS = """
SELECT set_config('hnsw.ef_search', %(ef_search)s, true),
       set_config('hnsw.iterative_scan', 'strict_order', true)
"""
_FOUND = """
SELECT chunk.id, file.public_id, file.filename, entry.attributes, chunk.text,
       CASE WHEN chunk.dimensions = %(dimensions)s
            THEN 1 - (chunk.embedding::vector <=> %(vector)s::vector) ELSE 0 END
FROM vector_stores_chunk chunk
JOIN vector_stores_vectorstorefile entry ON entry.id = chunk.file_id
JOIN files_storedfile file ON file.id = entry.file_id
WHERE chunk.id = ANY(%(ids)s) AND entry.status = %(completed)s AND file.state = %(ready)s
      AND (file.expires_at IS NULL OR file.expires_at > now())
"""


@dataclass(frozen=True, slots=True)
class Ranking:
    """How results are ranked. The weights are those of the two rankings.

    Without a text weight the score is the cosine similarity, else that of the fusion; both are
    between 0 and 1. Results with less than ``score_threshold`` are left out.
    """

    embedding_weight: float = 1.0
    text_weight: float = 1.0
    score_threshold: float = 0.0


@dataclass(frozen=True, slots=True)
class Found:
    """One result: a chunk's text, its file and how relevant it is (0 to 1)."""

    file_id: str
    filename: str
    attributes: Mapping[str, Any]
    text: str
    score: float


def search(
    stores: Sequence[VectorStore],
    question: str,
    vector: array[float],
    *,
    limit: int,
    filters: Filter | None = None,
    ranking: Ranking = Ranking(),  # Frozen.
) -> list[Found]:
    """Return the best chunks of the stores for a question, whose embedding is ``vector``.

    Expired stores have none. The stores must have the same embedding model. Chunks of an earlier
    model of its name, with another number of dimensions, are found by their words only.
    """
    live = [store for store in stores if not store.has_expired]
    if not live:
        return []
    VectorStore.objects.note_use(live)
    values: dict[str, Any] = {
        "stores": [store.pk for store in live],
        "vector": f"[{','.join(map(repr, vector))}]",
        "limit": _CANDIDATES,
    }
    files, chunks = _searched_files(live, filters)
    if not chunks:
        return []
    only_files = sql.SQL("AND chunk.file_id = ANY(%(files)s)" if files is not None else "")
    values["files"] = files
    by_meaning = _by_meaning(values, only_files, len(vector), chunks)
    by_words: list[int] = []
    if ranking.text_weight:
        by_words = _by_words(values, only_files, live[0].language, question, chunks)
    scores = _fused(by_meaning, by_words, ranking)
    with connection.cursor() as cursor:
        known = {
            "ids": list(scores),
            "vector": values["vector"],
            "dimensions": len(vector),
            "completed": IndexingStatus.COMPLETED,
            "ready": FileState.READY,
        }
        cursor.execute(_FOUND, known)
        rows = cursor.fetchall()
    found = []
    for id_, file_id, filename, attributes, text, similarity in rows:
        score = scores[id_] if ranking.text_weight else min(1.0, max(0.0, similarity))
        given = orjson.loads(attributes) if isinstance(attributes, str) else attributes
        if score >= ranking.score_threshold:
            found.append((Found(file_id, filename, given, text, score), similarity))
    found.sort(key=lambda pair: (-pair[0].score, -pair[1]))
    return [one for one, _ in found[:limit]]


def _searched_files(
    stores: Sequence[VectorStore], filters: Filter | None
) -> tuple[list[int] | None, int]:
    """Return the ids of the files that the filters let through, and how many chunks they have.

    The ids are None if there are no filters.
    """
    entries = VectorStoreFile.objects.filter(store__in=stores, status=IndexingStatus.COMPLETED)
    if filters is None:
        return None, entries.aggregate(chunks=Sum("chunk_count", default=0))["chunks"]
    values: dict[str, Any] = {}
    condition = _condition(filters, values)
    query = sql.SQL(
        "SELECT id, chunk_count FROM vector_stores_vectorstorefile entry "
        "WHERE entry.store_id = ANY(%(stores)s) AND entry.status = %(completed)s AND {}"
    ).format(condition)
    values |= {"stores": [store.pk for store in stores], "completed": IndexingStatus.COMPLETED}
    with connection.cursor() as cursor:
        cursor.execute(query, values)
        found = cursor.fetchall()
    return [pk for pk, _ in found], sum(chunks for _, chunks in found)


def _condition(given: Filter, values: dict[str, Any]) -> sql.Composable:
    """Return the SQL of a filter; its values are added to ``values``."""
    kind = given["type"]
    if kind in ("and", "or"):
        parts = [_condition(part, values) for part in given["filters"]]
        if not parts:
            return sql.SQL("TRUE" if kind == "and" else "FALSE")
        return sql.SQL("({})").format(sql.SQL(" AND " if kind == "and" else " OR ").join(parts))
    name = f"value{len(values)}"
    value, key = sql.Placeholder(name), sql.Placeholder(f"key{len(values)}")
    values[f"key{len(values)}"] = given["key"]
    attribute = sql.SQL("entry.attributes -> {}::text").format(key)
    if kind in ("in", "nin"):
        values[name] = [orjson.dumps(one).decode() for one in given["value"]]
        among = sql.SQL("coalesce({} = ANY({}::jsonb[]), FALSE)").format(attribute, value)
        return among if kind == "in" else sql.SQL("NOT {}").format(among)
    values[name] = orjson.dumps(given["value"]).decode()
    if kind in _ORDERS:
        return sql.SQL(
            "(jsonb_typeof({attribute}) = jsonb_typeof({value}::jsonb)"
            " AND {attribute} {order} {value}::jsonb)"
        ).format(attribute=attribute, value=value, order=sql.SQL(_ORDERS[kind]))
    differs = sql.SQL("({} IS DISTINCT FROM {}::jsonb)").format(attribute, value)
    return differs if kind == "ne" else sql.SQL("NOT {}").format(differs)


def _by_meaning(
    values: Mapping[str, Any], files: sql.Composable, dimensions: int, chunks: int
) -> list[int]:
    """Return the ids of the nearest chunks, nearest first."""
    is_indexed = chunks > _EXACT_CHUNKS and dimensions <= _MOST_DIMENSIONS
    if is_indexed:
        with connection.cursor() as cursor:
            cursor.execute(_ALL_CHUNKS)
            (total,) = cursor.fetchone()
        is_indexed = chunks**2 > _INDEX_COST * total
    query = _NEAREST if is_indexed else _EXACT
    with transaction.atomic(), connection.cursor() as cursor:
        if is_indexed:
            cursor.execute(_SETTINGS, {"ef_search": str(_EF_SEARCH)})
        cursor.execute(query.format(files=files, dimensions=sql.Literal(dimensions)), values)
        return [id_ for (id_,) in cursor.fetchall()]


def _by_words(
    values: Mapping[str, Any], files: sql.Composable, language: str, question: str, chunks: int
) -> list[int]:
    """Return the ids of the chunks with the most, and the rarest, words of a question.

    ``chunks`` is how many are searched.
    """
    with connection.cursor() as cursor:
        given: dict[str, Any] = {"language": language, "text": question, "most": _MOST_WORDS}
        cursor.execute(_WORDS, given)
        counts: list[tuple[int, str]] = []
        for (word,) in cursor.fetchall():
            cursor.execute(_EXPLAINED, dict(values, word=word))
            (((plan,),),) = cursor.fetchall()
            counts.append((max(1, plan["Plan"]["Plan Rows"]), word))
        words: list[tuple[str, int]] = []
        left = _MOST_WITH_WORDS
        for count, word in sorted(counts):
            left -= count
            if left >= 0:
                words.append((word, count))
        if not words:
            return []
        searched = {
            **values,
            "any_word": " | ".join(word for word, _ in words),
            "words": [word for word, _ in words],
            "weights": [math.log(1 + chunks / count) for _, count in words],
        }
        cursor.execute(_BY_WORDS.format(files=files), searched)
        return [id_ for (id_,) in cursor.fetchall()]


def _fused(
    by_meaning: Sequence[int], by_words: Sequence[int], ranking: Ranking
) -> dict[int, float]:
    """Return the score of each chunk: 1 for one that is the first of both rankings."""
    scores: dict[int, float] = defaultdict(float)
    rankings = ((by_meaning, ranking.embedding_weight), (by_words, ranking.text_weight))
    whole = sum(weight for _, weight in rankings) / (_RANK_OFFSET + 1)
    for ids, weight in rankings:
        for rank, id_ in enumerate(ids, 1):
            scores[id_] += weight / (_RANK_OFFSET + rank) / whole
    return scores


def require_pgvector() -> None:
    """Make sure that the database has pgvector. Raise UnavailableError if it cannot have it.

    The extension is created when the first vector store is, and not by a migration: a server
    without it runs everything else.
    """
    if _has_pgvector():
        return
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("CREATE EXTENSION IF NOT EXISTS vector")
    except DatabaseError as exc:
        if _has_pgvector():  # Another request has just created it.
            return
        logger.warning("pgvector: %s", exc)
        raise UnavailableError(
            "This site has no vector stores: its PostgreSQL server lacks the extension 'vector' "
            "(pgvector), or the site may not create it.",
            code="vector_stores_unavailable",
        ) from exc


def require_language() -> None:
    """Raise UnavailableError if PostgreSQL does not know ``VECTOR_STORE_LANGUAGE``."""
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT %s::regconfig", [settings.VECTOR_STORE_LANGUAGE])
    except ProgrammingError as exc:
        logger.error("VECTOR_STORE_LANGUAGE: %s", exc)
        raise UnavailableError(
            "This site has no vector stores: its setting VECTOR_STORE_LANGUAGE is no text search "
            "configuration of its PostgreSQL server.",
            code="vector_stores_unavailable",
        ) from exc


def _has_pgvector() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT FROM pg_extension WHERE extname = 'vector'")
        return cursor.fetchone() is not None


def create_index(dimensions: int) -> None:
    """Create the index of embeddings with this many dimensions, if it is missing and can exist."""
    name = f"chunk_by_meaning_{dimensions}"
    if dimensions > _MOST_DIMENSIONS:
        return
    with connection.cursor() as cursor:
        cursor.execute("SELECT to_regclass(%s)", [name])
        if cursor.fetchone() != (None,):
            return
    statement = sql.SQL(
        "CREATE INDEX IF NOT EXISTS {name} ON vector_stores_chunk "
        "USING hnsw ((embedding::halfvec({dimensions})) halfvec_cosine_ops) "
        "WHERE dimensions = {dimensions}"
    ).format(name=sql.Identifier(name), dimensions=sql.Literal(dimensions))
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(_LOCK_INDEX, [dimensions])
        cursor.execute(statement)
