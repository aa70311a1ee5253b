"""The chunks of files: added while a file is indexed, read, and deleted with it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from django.db import connection, transaction
from django.db.models import Sum

from inference_site.vector_stores.models import (
    Chunk,
    FileBatch,
    IndexingStatus,
    VectorStoreFile,
)
from inference_site.vector_stores.search import create_index

_ADD = """
INSERT INTO vector_stores_chunk (store_id, file_id, position, text, words, embedding, dimensions)
VALUES (%(store)s, %(file)s, %(position)s, %(text)s,
        to_tsvector(%(language)s::regconfig, %(text)s), %(vector)s::real[], %(dimensions)s)
"""


class QuotaExceeded(Exception):
    """The project has no room for the chunks."""


def require_room(project_id: int, count: int, most: int) -> None:
    """Raise QuotaExceeded if ``count`` more chunks of a project would be more than ``most``.

    Files that are being indexed do not count yet, so the project can exceed it by these.
    """
    entries = VectorStoreFile.objects.filter(project_id=project_id)
    used = entries.aggregate(chunks=Sum("chunk_count", default=0))["chunks"]
    if used + count > most:
        raise QuotaExceeded(
            f"The vector stores of the project may have {most} chunks: {used} are used, and this "
            f"file has {count}."
        )


def add(
    entry: VectorStoreFile, first: int, texts: Sequence[str], vectors: Sequence[array[float]]
) -> bool:
    """Add chunks of a file, from position ``first``; False if its claim is lost."""
    dimensions = len(vectors[0])
    common: dict[str, Any] = {
        "store": entry.store_id,
        "file": entry.pk,
        "language": entry.store.language,
    }
    rows: list[dict[str, Any]] = [
        {
            **common,
            "position": position,
            "text": text,
            "vector": f"{{{','.join(map(repr, vector))}}}",
            "dimensions": dimensions,
        }
        for position, (text, vector) in enumerate(zip(texts, vectors, strict=True), first)
    ]
    create_index(dimensions)
    with transaction.atomic():
        if not VectorStoreFile.objects.is_held(entry):
            return False
        with connection.cursor() as cursor:
            cursor.executemany(_ADD, rows)
    return True


def delete_of(entry: VectorStoreFile) -> None:
    """Delete the chunks of a file."""
    Chunk.objects.filter(store_id=entry.store_id, file=entry).delete()


def delete_of_cancelled(batch: FileBatch) -> None:
    """Delete the chunks that cancelled files of a batch had got before."""
    cancelled = {"file__batch": batch, "file__status": IndexingStatus.CANCELLED}
    Chunk.objects.filter(store_id=batch.store_id, **cancelled).delete()


def texts_of(entry: VectorStoreFile) -> list[str]:
    """Return the texts of a file's chunks, in order."""
    rows = Chunk.objects.filter(store_id=entry.store_id, file=entry).order_by("position")
    return list(rows.values_list("text", flat=True))
