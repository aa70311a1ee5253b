"""Export and import of vector stores and of the files in them, without their chunks.

Vectors of one model mean nothing to another one, and the other site may have another model under
the same name. So an imported file waits until a worker indexes it, like one that was just added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Self, cast

from django.db import connection, transaction
from pydantic import AwareDatetime, Field, model_validator

from inference_site.accounts.keys import key_of_imports
from inference_site.core.errors.api_errors import UnavailableError
from inference_site.core.transfer import FILES_FOLDER, Id, ObjectLine, Refused, each, known_ids
from inference_site.files.models import StoredFile
from inference_site.gateway.request_fields.wire import Metadata
from inference_site.vector_stores.models import IndexingStatus, VectorStore, VectorStoreFile
from inference_site.vector_stores.search import require_pgvector
from inference_site.vector_stores.wire import Attributes, StaticChunks

_BATCH = 200
_LANGUAGES = "SELECT cfgname FROM pg_ts_config"


class VectorStoreLine(ObjectLine):
    """A vector store, without its files."""

    kind: Literal["vector_store"] = "vector_store"
    name: Annotated[str, Field(max_length=512)]
    description: Annotated[str, Field(max_length=4096)]
    embedding_model: Annotated[str, Field(min_length=1, max_length=200)]
    language: Annotated[str, Field(max_length=63)]
    metadata: Metadata
    expires_after_days: Annotated[int, Field(ge=1, le=365)] | None
    created_at: AwareDatetime
    last_active_at: AwareDatetime
    expires_at: AwareDatetime | None


class VectorStoreFileLine(ObjectLine):
    """A file in a vector store; ``id`` is that of the file."""

    kind: Literal["vector_store_file"] = "vector_store_file"
    store: Id
    attributes: Attributes
    chunk_size: int
    chunk_overlap: int
    status: IndexingStatus
    error_code: Annotated[str, Field(max_length=32)]
    error_message: Annotated[str, Field(max_length=10_000)]
    created_at: AwareDatetime

    @model_validator(mode="after")
    def _has_possible_chunks(self) -> Self:
        StaticChunks(max_chunk_size_tokens=self.chunk_size, chunk_overlap_tokens=self.chunk_overlap)
        return self


LINES: dict[str, type[ObjectLine]] = {
    "vector_store": VectorStoreLine,
    "vector_store_file": VectorStoreFileLine,
}
_STORE = tuple(VectorStoreLine.model_fields.keys() - {"kind", "id"})
_FILE = tuple(VectorStoreFileLine.model_fields.keys() - {"kind", "id", "store", "status"})


def export_lines(project_id: int, folder: Path) -> Iterator[ObjectLine]:
    """Yield the stores that were not deleted, then their files.

    See ``inference_site.core.transfer.Transfer``. A file without content in the folder was deleted
    or added while the export ran: it is left out.
    """
    stores, last = VectorStore.objects.of(project_id), 0
    for store in each(stores, _BATCH):
        columns = {name: getattr(store, name) for name in _STORE}
        yield VectorStoreLine(id=store.public_id, **columns)
        last = store.pk
    entries = VectorStoreFile.objects.filter(store__in=stores.filter(pk__lte=last))
    for entry in each(entries.select_related("file", "store"), _BATCH):
        if (folder / FILES_FOLDER / entry.file.public_id).exists():
            yield VectorStoreFileLine(
                id=entry.file.public_id,
                store=entry.store.public_id,
                status=IndexingStatus(entry.status),
                **{name: getattr(entry, name) for name in _FILE},
            )


@transaction.atomic
def import_lines(project_id: int, kind: str, lines: Sequence[ObjectLine], folder: Path) -> int:
    """Store vector stores or their files; see ``inference_site.core.transfer.Transfer``."""
    del folder
    if kind == "vector_store":
        return _import_stores(project_id, cast(Sequence[VectorStoreLine], lines))
    return _import_files(project_id, cast(Sequence[VectorStoreFileLine], lines))


def _import_stores(project_id: int, lines: Sequence[VectorStoreLine]) -> int:
    with suppress(UnavailableError):  # It is logged: without pgvector all else can be imported.
        require_pgvector()
    known = known_ids(VectorStore, project_id, [line.id for line in lines])
    with connection.cursor() as cursor:
        cursor.execute(_LANGUAGES)
        languages = {name for (name,) in cursor.fetchall()}
    new = []
    for line in lines:
        if line.language not in languages:
            reason = f"PostgreSQL has no text search configuration {line.language}"
            raise Refused(line.id, reason)
        if line.id not in known:
            columns = {name: getattr(line, name) for name in _STORE}
            new.append(VectorStore(public_id=line.id, project_id=project_id, **columns))
    VectorStore.objects.bulk_create(new)
    return len(new)


def _import_files(project_id: int, lines: Sequence[VectorStoreFileLine]) -> int:
    """Add files to stores, but for files and stores that were deleted or have expired since."""
    mine = VectorStore.objects.filter(project=project_id)
    named = mine.filter(public_id__in={line.store for line in lines})
    stores = {store.public_id: store for store in named}
    ids = {line.id for line in lines}
    kept = StoredFile.objects.filter(project=project_id, upload=None, public_id__in=ids)
    files = dict(kept.values_list("public_id", "pk"))
    readable = set(
        StoredFile.objects.readable(project_id).filter(public_id__in=ids).values_list("pk")
    )
    entries = VectorStoreFile.objects.filter(store__in=stores.values(), file__in=files.values())
    held = set(entries.values_list("store", "file"))
    new: list[VectorStoreFile] = []
    for line in lines:
        store, file = stores.get(line.store), files.get(line.id)
        if store is None:
            raise Refused(line.id, f"the project has no vector store {line.store}")
        if file is None:
            raise Refused(line.id, f"the project has no file {line.id}")
        if (store.pk, file) in held or store.is_deleted or (file,) not in readable:
            continue
        held.add((store.pk, file))
        has_failed = line.status in (IndexingStatus.FAILED, IndexingStatus.CANCELLED)
        new.append(
            VectorStoreFile(
                store=store,
                file_id=file,
                project_id=project_id,
                status=line.status if has_failed else IndexingStatus.IN_PROGRESS,
                **{name: getattr(line, name) for name in _FILE},
            )
        )
    if new:
        key = key_of_imports(project_id)
        for entry in new:
            entry.api_key = key
        VectorStoreFile.objects.bulk_create(new)
    return len(new)
