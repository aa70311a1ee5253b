"""The API of vector stores: ``/v1/vector_stores``, their files, file batches and search."""

from __future__ import annotations

from collections.abc import Sequence

from django.conf import settings
from django.db import transaction
from django.db.models import Count, Sum
from django.http import HttpResponse
from django.utils import timezone
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.accounts.keys import Caller
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.models_file import Route
from inference_site.core.domain.request import GenerationRequest
from inference_site.core.errors.api_errors import (
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
)
from inference_site.files.models import StoredFile
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.paging import keep_position, list_object, parse_page
from inference_site.gateway.api.payload import parse
from inference_site.gateway.api.schema import ListObject, documented
from inference_site.gateway.api.views import ApiView
from inference_site.gateway.request_fields.capabilities import require_endpoint
from inference_site.gateway.submission.model_access import (
    may_use,
    served_model,
    with_capabilities,
)
from inference_site.gateway.submission.submit import Submission, respond
from inference_site.runs.queue import new_id
from inference_site.runs.streams.request_documents import Document
from inference_site.vector_stores import chunks
from inference_site.vector_stores.kinds import SEARCH, SearchAssembly
from inference_site.vector_stores.models import (
    FileBatch,
    IndexingStatus,
    VectorStore,
    VectorStoreFile,
    VectorStoreFileQuerySet,
)
from inference_site.vector_stores.search import require_language, require_pgvector
from inference_site.vector_stores.wire import (
    ContentText,
    DeletedStore,
    FileBatchObject,
    FileBatchRequest,
    FileChanges,
    FileContentPage,
    FileCounts,
    FileRequest,
    FilesQuery,
    IndexingError,
    RemovedFile,
    SearchPage,
    SearchRequest,
    ShownChunks,
    ShownExpiry,
    ShownStrategy,
    StoreChanges,
    StoreFileObject,
    StoreObject,
    StoreRequest,
    StoresQuery,
    chunk_sizes,
    to_ranking,
)

_DEMO = "demo-"


class VectorStoresView(ApiView):
    """``/v1/vector_stores``."""

    counts_writes = True

    @documented(answer=StoreObject, body=StoreRequest, errors=(NotFoundError,))
    def post(self, request: Request) -> Response:
        """Create a vector store, with files if `file_ids` are given.

        `embedding_model` is the model that embeds its chunks; it cannot be changed.
        """
        body, caller = self.parse(StoreRequest, request.data), caller_of(request)
        require_pgvector()
        require_language()
        now = timezone.now()
        store = VectorStore(
            public_id=new_id("vs_"),
            project_id=caller.project_id,
            name=body.name or "",
            description=body.description or "",
            embedding_model=embedding_model(caller, body.embedding_model),
            language=settings.VECTOR_STORE_LANGUAGE,
            metadata=body.metadata or {},
            expires_after_days=body.expires_after.days if body.expires_after else None,
            created_at=now,
            last_active_at=now,
        )
        store.expires_at = store.expiry(now)
        with transaction.atomic():
            VectorStore.objects.accept(store, settings.VECTOR_STORES_PER_PROJECT)
            added = [
                FileRequest(file_id=file_id, chunking_strategy=body.chunking_strategy)
                for file_id in dict.fromkeys(body.file_ids or ())
            ]
            _add(store, caller, added, "file_ids[{}]")
        return Response(_wire_stores([store])[0].model_dump())

    @documented(answer=ListObject[StoreObject], query=StoresQuery)
    def get(self, request: Request) -> Response:
        """List the project's vector stores, the newest first."""
        page = parse_page(request.query_params, "desc", has_before=True)
        project_id = caller_of(request).project_id
        rows = VectorStore.objects.of(project_id)
        found = list(page.rows_by_age(rows, "vector store", project_id, "vector_stores"))
        entries = [store.model_dump() for store in _wire_stores(found)]
        return Response(list_object(entries, page))


class VectorStoreView(ApiView):
    """``/v1/vector_stores/{vector_store_id}``."""

    counts_writes = True

    @documented(answer=StoreObject)
    def get(self, request: Request, vector_store_id: str) -> Response:
        """Get a vector store."""
        return Response(_wire_stores([_store(request, vector_store_id)])[0].model_dump())

    @documented(answer=StoreObject, body=StoreChanges)
    def post(self, request: Request, vector_store_id: str) -> Response:
        """Change a vector store. Fields that are not given stay as they are."""
        body, store = self.parse(StoreChanges, request.data), _store(request, vector_store_id)
        given, changed = body.model_fields_set, list[str]()
        if "name" in given:
            store.name = body.name or ""
            changed += ["name"]
        if "metadata" in given:
            store.metadata = body.metadata or {}
            changed += ["metadata"]
        if "expires_after" in given:
            store.expires_after_days = body.expires_after.days if body.expires_after else None
            store.last_active_at = timezone.now()
            store.expires_at = store.expiry(store.last_active_at)
            changed += ["expires_after_days", "last_active_at", "expires_at"]
        # Another request may change other fields now, or delete the store.
        rows = VectorStore.objects.of(store.project_id).filter(pk=store.pk)
        if changed and not rows.update(**{name: getattr(store, name) for name in changed}):
            _store(request, vector_store_id)  # Raises NotFoundError.
        return Response(_wire_stores([store])[0].model_dump())

    @documented(answer=DeletedStore)
    def delete(self, request: Request, vector_store_id: str) -> Response:
        """Delete a vector store. Its files stay."""
        store = _store(request, vector_store_id)
        keep_position(store.project_id, "vector_stores", vector_store_id, store.pk)
        VectorStore.objects.filter(pk=store.pk).update(is_deleted=True)
        VectorStoreFile.objects.filter(store=store).cancel()
        return Response(DeletedStore(id=vector_store_id).model_dump())


class VectorStoreSearchView(ApiView):
    """``POST /v1/vector_stores/{vector_store_id}/search``."""

    @documented(answer=SearchPage, body=SearchRequest, queued=True)
    def post(self, request: Request, vector_store_id: str) -> HttpResponse:
        """Search a vector store: the chunks that fit a question best."""
        body, caller = parse(SearchRequest, request.data), caller_of(request)
        store = _store(request, vector_store_id)
        if store.has_expired:
            raise InvalidRequestError(f"The vector store {vector_store_id} has expired.")
        require_pgvector()
        model = served_model(caller, store.embedding_model)
        queries = tuple([body.query] if isinstance(body.query, str) else body.query)
        assembly = SearchAssembly(
            store.pk,
            queries,
            body.max_num_results,
            body.filters.model_dump() if body.filters else None,
            to_ranking(body.ranking_options),
        )
        generation = GenerationRequest(model.spec.id, operation="embed", prompts=queries)
        ignored = ["rewrite_query"] if body.rewrite_query else []
        submission = Submission(
            SEARCH,
            new_id("vsearch_"),
            caller,
            Document(generation, assembly),
            ignored_params=[*body.ignored_params, *ignored],
            subject="query",
        )
        return respond(request, submission)


class VectorStoreFilesView(ApiView):
    """``/v1/vector_stores/{vector_store_id}/files``."""

    counts_writes = True

    @documented(answer=StoreFileObject, body=FileRequest)
    def post(self, request: Request, vector_store_id: str) -> Response:
        """Add a file to a vector store.

        A worker indexes it. One that is in the store already stays as it is, unless its indexing
        had failed or was cancelled: then it begins again.
        """
        body, store = self.parse(FileRequest, request.data), _store(request, vector_store_id)
        with transaction.atomic():
            _add(store, caller_of(request), [body], "file_id")
        return Response(_wire_file(store, _entry(store, body.file_id)).model_dump())

    @documented(answer=ListObject[StoreFileObject], query=FilesQuery)
    def get(self, request: Request, vector_store_id: str) -> Response:
        """List the files of a vector store, the newest first."""
        store = _store(request, vector_store_id)
        return _list_of(request, store, VectorStoreFile.objects.filter(store=store))


class VectorStoreFileView(ApiView):
    """``/v1/vector_stores/{vector_store_id}/files/{file_id}``."""

    counts_writes = True

    @documented(answer=StoreFileObject)
    def get(self, request: Request, vector_store_id: str, file_id: str) -> Response:
        """Get a file of a vector store."""
        store = _store(request, vector_store_id)
        return Response(_wire_file(store, _entry(store, file_id)).model_dump())

    @documented(answer=StoreFileObject, body=FileChanges)
    def post(self, request: Request, vector_store_id: str, file_id: str) -> Response:
        """Replace the attributes of a file."""
        body, store = self.parse(FileChanges, request.data), _store(request, vector_store_id)
        rows = VectorStoreFile.objects.filter(pk=_entry(store, file_id).pk)
        rows.update(attributes=body.attributes or {})
        # Read again: it may have been taken out meanwhile.
        return Response(_wire_file(store, _entry(store, file_id)).model_dump())

    @documented(answer=RemovedFile)
    def delete(self, request: Request, vector_store_id: str, file_id: str) -> Response:
        """Take a file out of a vector store. The file itself stays."""
        store = _store(request, vector_store_id)
        entry = _entry(store, file_id)
        keep_position(store.project_id, _files_path(store), file_id, entry.pk)
        with transaction.atomic():
            VectorStoreFile.objects.filter(pk=entry.pk).cancel()
            chunks.delete_of(entry)
            VectorStoreFile.objects.filter(pk=entry.pk).delete()
        return Response(RemovedFile(id=file_id).model_dump())


class VectorStoreFileContentView(ApiView):
    """``/v1/vector_stores/{vector_store_id}/files/{file_id}/content``."""

    @documented(answer=FileContentPage)
    def get(self, request: Request, vector_store_id: str, file_id: str) -> Response:
        """Get the texts of a file's chunks, which overlap."""
        entry = _entry(_store(request, vector_store_id), file_id)
        texts = [ContentText(text=text) for text in chunks.texts_of(entry)]
        page = FileContentPage(data=texts, has_more=False, next_page=None)
        return Response(page.model_dump())


class FileBatchesView(ApiView):
    """``POST /v1/vector_stores/{vector_store_id}/file_batches``."""

    counts_writes = True

    @documented(answer=FileBatchObject, body=FileBatchRequest)
    def post(self, request: Request, vector_store_id: str) -> Response:
        """Add many files to a vector store."""
        body, store = self.parse(FileBatchRequest, request.data), _store(request, vector_store_id)
        added = body.files or [
            FileRequest(
                file_id=file_id,
                attributes=body.attributes,
                chunking_strategy=body.chunking_strategy,
            )
            for file_id in body.file_ids or ()
        ]
        added = list({one.file_id: one for one in added}.values())
        param = "file_ids[{}]" if body.files is None else "files[{}].file_id"
        with transaction.atomic():
            batch = FileBatch.objects.create(public_id=new_id("vsfb_"), store=store)
            _add(store, caller_of(request), added, param, batch)
        return Response(_wire_batch(store, batch).model_dump())


class FileBatchView(ApiView):
    """``/v1/vector_stores/{vector_store_id}/file_batches/{file_batch_id}``."""

    @documented(answer=FileBatchObject)
    def get(self, request: Request, vector_store_id: str, file_batch_id: str) -> Response:
        """Get the state of files that were added together."""
        store = _store(request, vector_store_id)
        return Response(_wire_batch(store, _batch(store, file_batch_id)).model_dump())


class FileBatchCancelView(ApiView):
    """``POST /v1/vector_stores/{vector_store_id}/file_batches/{file_batch_id}/cancel``."""

    counts_writes = True

    @documented(answer=FileBatchObject)
    def post(self, request: Request, vector_store_id: str, file_batch_id: str) -> Response:
        """Cancel the files of a batch that are not indexed yet."""
        store = _store(request, vector_store_id)
        batch = _batch(store, file_batch_id)
        with transaction.atomic():  # One that is added again waits until its chunks are deleted.
            if VectorStoreFile.objects.filter(batch=batch).cancel():
                chunks.delete_of_cancelled(batch)
                FileBatch.objects.filter(pk=batch.pk).update(is_cancelled=True)
                batch.refresh_from_db()
        return Response(_wire_batch(store, batch).model_dump())


class FileBatchFilesView(ApiView):
    """``/v1/vector_stores/{vector_store_id}/file_batches/{file_batch_id}/files``."""

    @documented(answer=ListObject[StoreFileObject], query=FilesQuery)
    def get(self, request: Request, vector_store_id: str, file_batch_id: str) -> Response:
        """List the files of a batch, the newest first."""
        store = _store(request, vector_store_id)
        rows = VectorStoreFile.objects.filter(batch=_batch(store, file_batch_id))
        return _list_of(request, store, rows)


def embedding_model(caller: Caller, name: str | None) -> str:
    """Return the id of the model for a new store: the one of this name, or the site's.

    Raise the errors of ``served_model``, and InvalidRequestError for a model that does not embed.
    """
    wanted = name or settings.EMBEDDING_MODEL
    if not wanted:
        specs = [s for s in catalogue().models.values() if s.is_for(caller.project_name)]
        specs.sort(key=lambda spec: spec.id.startswith(_DEMO))
        wanted = next(
            (
                spec.id
                for spec in specs
                if may_use(caller, spec) and "embeddings" in with_capabilities(spec).capabilities
            ),
            "",
        )
    if not wanted:
        raise InvalidRequestError(
            "This site has no model that embeds texts, or this API key does not allow one.",
            param="embedding_model",
            code="no_embedding_model",
        )
    if isinstance(catalogue().named(wanted, caller.project_name), Route):
        raise InvalidRequestError(
            f"Invalid 'embedding_model': `{wanted[:100]}` is a route; its models may differ.",
            param="embedding_model",
        )
    try:
        model = served_model(caller, wanted)
        require_endpoint(model, "embeddings")
    except (NotFoundError, ForbiddenError, InvalidRequestError) as exc:
        exc.param = "embedding_model"
        raise
    return model.spec.id


def _add(
    store: VectorStore,
    caller: Caller,
    added: Sequence[FileRequest],
    param: str,
    batch: FileBatch | None = None,
) -> None:
    """Add files to a store, in a transaction. ``param`` is their place in the request.

    Raise InvalidRequestError for a file that is not the project's, is too large, or has no room,
    and NotFoundError if the store was deleted meanwhile.
    """
    ids = [one.file_id for one in added]
    readable = StoredFile.objects.readable(caller.project_id).filter(public_id__in=ids)
    # A file is hidden before it is deleted; that waits for this transaction.
    locked = readable.order_by("pk").select_for_update(no_key=True)
    files = {file.public_id: file for file in locked}
    for index, id_ in enumerate(ids):
        file, place = files.get(id_), param.format(index)
        if file is None:
            message = f"Invalid '{place}': there is no file '{id_[:100]}'."
            raise InvalidRequestError(message, param=place)
        if file.size_bytes > settings.MAX_DOCUMENT_BYTES:
            raise InvalidRequestError(
                f"Invalid '{place}': a file of a vector store may have "
                f"{settings.MAX_DOCUMENT_BYTES} bytes, and this one has {file.size_bytes}.",
                param=place,
            )
    # No lock of the key: a worker that adds chunks needs that, and may hold a file's row for it.
    VectorStore.objects.select_for_update(no_key=True).get_of(store.project_id, store.public_id)
    entries = VectorStoreFile.objects.filter(store=store)
    have = set(entries.values_list("file__public_id", flat=True)) if ids else set()
    if len(have.union(ids)) > settings.FILES_PER_VECTOR_STORE:
        raise InvalidRequestError(
            f"The vector store has {len(have)} files; it may have "
            f"{settings.FILES_PER_VECTOR_STORE}.",
            param=param.format(0),
            code="vector_store_quota_exceeded",
        )
    fresh: list[VectorStoreFile] = []
    for one in added:
        size, overlap = chunk_sizes(one.chunking_strategy)
        facts = {
            "api_key_id": caller.api_key_id,
            "attributes": one.attributes or {},
            "chunk_size": size,
            "chunk_overlap": overlap,
        }
        file = files[one.file_id]
        if one.file_id not in have:
            owner = {"store": store, "file": file, "project_id": caller.project_id}
            fresh.append(VectorStoreFile(**owner, **facts, batch=batch))
            continue
        entry = entries.filter(file=file)
        ended = (IndexingStatus.FAILED, IndexingStatus.CANCELLED)
        again = {"status": IndexingStatus.IN_PROGRESS, "attempts": 0, "worked_by": ""}
        entry.filter(status__in=ended).update(**again, **facts, error_code="", error_message="")
        if batch is not None:
            entry.update(batch=batch)
    VectorStoreFile.objects.bulk_create(fresh)


def _store(request: Request, public_id: str) -> VectorStore:
    return VectorStore.objects.get_of(caller_of(request).project_id, public_id)


def _entry(store: VectorStore, file_id: str) -> VectorStoreFile:
    return VectorStoreFile.objects.get_of(store, file_id)


def _batch(store: VectorStore, public_id: str) -> FileBatch:
    found = FileBatch.objects.filter(store=store, public_id=public_id).first()
    if found is None:
        raise NotFoundError(f"No such file batch: {public_id[:100]}", param="file_batch_id")
    return found


def _files_path(store: VectorStore) -> str:
    return f"vector_stores/{store.public_id}/files"


def _list_of(request: Request, store: VectorStore, rows: VectorStoreFileQuerySet) -> Response:
    """Return a page of files, whose cursor is the id of a file."""
    query = request.query_params
    page = parse_page(query, "desc", has_before=True)
    if status := query.get("filter"):
        if status not in IndexingStatus.values:
            raise InvalidRequestError(
                f"Invalid 'filter': expected one of {', '.join(IndexingStatus.values)}.",
                param="filter",
            )
        rows = rows.filter(status=status)
    owner = store.project_id, _files_path(store)
    last = page.position(rows, "file", *owner, id_field="file__public_id")
    found = page.rows_of(rows.readable().select_related("file"), "pk", last)
    entries = [_wire_file(store, entry).model_dump() for entry in found]
    return Response(list_object(entries, page))


def _wire_stores(stores: Sequence[VectorStore]) -> list[StoreObject]:
    """Return stores as the API shows them, with the counts of their files."""
    entries = VectorStoreFile.objects.filter(store__in=stores).order_by()
    rows = list(entries.values_list("store_id", "status").annotate(Count("pk"), Sum("usage_bytes")))
    shown = []
    for store in stores:
        mine = [row for row in rows if row[0] == store.pk]
        counts = _counts({status: count for _, status, count, _ in mine})
        status = "in_progress" if counts.in_progress else "completed"
        days = store.expires_after_days
        shown.append(
            StoreObject(
                id=store.public_id,
                created_at=int(store.created_at.timestamp()),
                name=store.name or None,
                description=store.description or None,
                usage_bytes=sum(size for *_, size in mine),
                file_counts=counts,
                status="expired" if store.has_expired else status,
                expires_after=None if days is None else ShownExpiry(days=days),
                expires_at=int(store.expires_at.timestamp()) if store.expires_at else None,
                last_active_at=int(store.last_active_at.timestamp()),
                metadata=store.metadata,
                embedding_model=store.embedding_model,
            )
        )
    return shown


def _counts(by_status: dict[str, int]) -> FileCounts:
    counts = {status.value: by_status.get(status, 0) for status in IndexingStatus}
    return FileCounts(**counts, total=sum(counts.values()))


def _wire_file(store: VectorStore, entry: VectorStoreFile) -> StoreFileObject:
    failed = entry.status == IndexingStatus.FAILED
    return StoreFileObject(
        id=entry.file.public_id,
        usage_bytes=entry.usage_bytes,
        created_at=int(entry.created_at.timestamp()),
        vector_store_id=store.public_id,
        status=IndexingStatus(entry.status),
        last_error=IndexingError(code=entry.error_code, message=entry.error_message)
        if failed
        else None,
        chunking_strategy=ShownStrategy(
            static=ShownChunks(
                max_chunk_size_tokens=entry.chunk_size, chunk_overlap_tokens=entry.chunk_overlap
            )
        ),
        attributes=entry.attributes,
    )


def _wire_batch(store: VectorStore, batch: FileBatch) -> FileBatchObject:
    counts = _counts(VectorStoreFile.objects.filter(batch=batch).counts())
    if batch.is_cancelled:
        status = "cancelled"
    elif counts.in_progress:
        status = "in_progress"
    else:
        is_failed = counts.failed > 0 and counts.failed == counts.total
        status = "failed" if is_failed else "completed"
    return FileBatchObject(
        id=batch.public_id,
        created_at=int(batch.created_at.timestamp()),
        vector_store_id=store.public_id,
        status=status,
        file_counts=counts,
    )
