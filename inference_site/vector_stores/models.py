"""Vector stores, their files and the chunks of these.

A file waits in a store until a worker claims it (``worker.indexing``), splits its text into chunks,
embeds these and stores them. Each change of a file's status is an UPDATE guarded by the old status
and the claim, so a worker that was given up as dead changes nothing when it comes back.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from django.contrib.postgres.indexes import GinIndex
from django.contrib.postgres.search import SearchVectorField
from django.db import connection, models, transaction
from django.db.models import Case, Count, F, Q, When
from django.db.models.functions import Now
from django.utils import timezone

from inference_site.core.errors.api_errors import InvalidRequestError, NotFoundError
from inference_site.core.storage.fields import ContentField
from inference_site.core.storage.waits import is_over
from inference_site.files.models import FileState, StoredFile

MAX_ATTEMPTS = 3
"""How often a file is claimed. A file whose indexing ends its worker again and again may be why."""
_LOCK_STORES = f"SELECT pg_advisory_xact_lock({0x76656374}, %s)"
"""The lock under which the vector stores of a project are counted."""
_USE_NOTED_EVERY = dt.timedelta(minutes=1)
_DELETED_AT_ONCE = 500
_DELETE_CHUNKS = """
DELETE FROM vector_stores_chunk WHERE id IN (
    SELECT id FROM vector_stores_chunk WHERE store_id = %(store)s AND file_id IN (
        SELECT id FROM vector_stores_vectorstorefile
        WHERE store_id = %(store)s AND status = 'cancelled'
    ) LIMIT %(most)s
)
"""


class RealArrayField(models.Field[Sequence[float], Sequence[float]]):
    """A column of type ``real[]``: four bytes a number. pgvector casts it to its own types."""

    def db_type(self, connection: Any) -> str:
        return "real[]"


class VectorStoreQuerySet(models.QuerySet["VectorStore"]):
    """Queries for stores."""

    def of(self, project_id: int) -> VectorStoreQuerySet:
        """Return the stores of a project that were not deleted."""
        return self.filter(project_id=project_id, is_deleted=False)

    def get_of(self, project_id: int, public_id: str) -> VectorStore:
        """Return a store. Raise NotFoundError for an unknown one and another project's."""
        found = self.of(project_id).filter(public_id=public_id).first()
        if found is None:
            message = f"No such vector store: {public_id[:100]}"
            raise NotFoundError(message, param="vector_store_id")
        return found

    def accept(self, store: VectorStore, most: int) -> None:
        """Insert a new store. Raise InvalidRequestError if the project has ``most`` already."""
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute(_LOCK_STORES, [store.project_id % 2147483647])
            count = self.of(store.project_id).count()
            if count >= most:
                raise InvalidRequestError(
                    f"The project has {count} vector stores; it may have {most}.",
                    code="vector_store_quota_exceeded",
                )
            store.save(force_insert=True)

    def note_use(self, stores: Sequence[VectorStore]) -> None:
        """Note that stores are used now, at most once a minute: their expiry counts from then."""
        for store in stores:
            if store.last_active_at < timezone.now() - _USE_NOTED_EVERY:
                now = timezone.now()
                changes = {"last_active_at": now, "expires_at": store.expiry(now)}
                self.filter(pk=store.pk).update(**changes)


class VectorStore(models.Model):
    """A vector store. ``embedding_model`` embeds its chunks, and the questions about them.

    ``language`` is the text search configuration of PostgreSQL for its words. After
    ``expires_after_days`` without use it has expired: it is not searched any more, and its chunks
    are deleted.
    """

    public_id = models.CharField("ID", max_length=64, unique=True)
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, db_index=False)
    name = models.CharField(max_length=512, blank=True, default="")
    description = models.TextField(blank=True, default="")
    embedding_model = models.CharField(max_length=200)
    language = models.CharField(max_length=63)
    metadata = ContentField(default=dict, blank=True)
    expires_after_days = models.PositiveSmallIntegerField(null=True, blank=True)
    created_at = models.DateTimeField(default=timezone.now)
    last_active_at = models.DateTimeField(default=timezone.now)
    expires_at = models.DateTimeField(null=True, blank=True)
    is_deleted = models.BooleanField(default=False, editable=False)

    objects = VectorStoreQuerySet.as_manager()

    class Meta:
        indexes = [models.Index(fields=["project", "-id"], name="vector_store_by_project")]

    def __str__(self) -> str:
        return self.name or self.public_id

    @property
    def has_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= timezone.now()

    def expiry(self, used_at: dt.datetime) -> dt.datetime | None:
        """Return when it expires if this is its last use; None if it does not expire."""
        days = self.expires_after_days
        return None if days is None else used_at + dt.timedelta(days=days)


class IndexingStatus(models.TextChoices):
    """Status of a file in a store; all but the first are final."""

    IN_PROGRESS = "in_progress"  # It waits for a worker, or is being indexed.
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class FileBatch(models.Model):
    """Files that were added to a store by one request."""

    public_id = models.CharField("ID", max_length=64, unique=True)
    store = models.ForeignKey(VectorStore, on_delete=models.CASCADE)
    is_cancelled = models.BooleanField(default=False)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.public_id


class VectorStoreFileQuerySet(models.QuerySet["VectorStoreFile"]):
    """Queries and status changes of the files in stores."""

    def readable(self) -> VectorStoreFileQuerySet:
        """Return the files that were not deleted from the project."""
        ready = self.filter(file__state=FileState.READY)
        return ready.filter(Q(file__expires_at=None) | Q(file__expires_at__gt=Now()))

    def get_of(self, store: VectorStore, file_id: str) -> VectorStoreFile:
        """Return a file of a store by the file's id. Raise NotFoundError."""
        rows = self.readable().filter(store=store, file__public_id=file_id)
        found = rows.select_related("file").first()
        if found is None:
            message = f"No such file in the vector store: {file_id[:100]}"
            raise NotFoundError(message, param="file_id")
        return found

    def counts(self) -> dict[str, int]:
        """Count the files by status."""
        return dict(self.order_by().values_list("status").annotate(Count("pk")))

    def has_waiting(self) -> bool:
        """Whether any file is in progress; workers ask this all the time."""
        return self.filter(status=IndexingStatus.IN_PROGRESS).exists()

    def claim(
        self,
        worker: str,
        held: Collection[int],
        live: Sequence[str],
        served: Mapping[int, int],
        hold_s: float,
    ) -> VectorStoreFile | None:
        """Claim a file that waits, of the project that was ``served`` least, by number of files.

        A claim of a worker that is not ``live`` is over, and so is one that was not renewed within
        ``hold_s`` seconds. So is one of this worker beside those that it has ``held``: it does not
        know of it, or could not give it back, because the database was away. That attempt does not
        count. Those that it has ``held`` are left to others: one that was cancelled and added again
        would get the claim that a thread of this worker had, and does not know to be lost. None if
        no file waits.
        """
        is_abandoned = ~Q(worked_by="") & ~Q(worked_by__in=live)
        is_unknown = Q(worked_by=worker)
        hold = dt.timedelta(seconds=hold_s)
        free = is_over("worked_until", hold) | is_abandoned | is_unknown
        free &= ~Q(pk__in=list(held))
        waiting = self.readable().filter(free, status=IndexingStatus.IN_PROGRESS)
        firsts = waiting.order_by("project_id", "pk").distinct("project_id")
        rows = list(firsts.values_list("project_id", "pk"))
        for _, pk in sorted(rows, key=lambda row: (served.get(row[0], 0), row[1])):
            # Cancelled in between and claimed by another worker, it would be read with that claim.
            with transaction.atomic():
                claimed = self.filter(free, pk=pk, status=IndexingStatus.IN_PROGRESS).update(
                    worked_by=worker,
                    worked_until=Now() + hold,
                    attempts=Case(When(is_unknown, then=F("attempts")), default=F("attempts") + 1),
                )
                if claimed:
                    return self.select_related("file", "store").get(pk=pk)
        return None

    def _held(self, claim: VectorStoreFile) -> VectorStoreFileQuerySet:
        return self.filter(
            pk=claim.pk,
            status=IndexingStatus.IN_PROGRESS,
            worked_by=claim.worked_by,
            attempts=claim.attempts,
        )

    def is_held(self, claim: VectorStoreFile) -> bool:
        """Whether a claim is not lost; locks the row until the end of the transaction."""
        return self._held(claim).select_for_update().exists()

    def renew(self, claim: VectorStoreFile, hold_s: float) -> bool:
        """Renew a claim; False if it is lost, or the file was cancelled or deleted."""
        until = Now() + dt.timedelta(seconds=hold_s)
        return bool(self._held(claim).readable().update(worked_until=until))

    def release(self, claim: VectorStoreFile, rest_s: float, *, counts: bool) -> None:
        """Give a claim back; the file is claimed again after ``rest_s``.

        The attempt only ``counts`` if it may have failed because of the file.
        """
        until = Now() + dt.timedelta(seconds=rest_s)
        attempts = claim.attempts if counts else claim.attempts - 1
        self._held(claim).update(worked_until=until, worked_by="", attempts=attempts)

    def release_all(self, worker: str) -> None:
        """Give back all claims of a worker that is stopped; their attempts do not count."""
        claims = self.filter(status=IndexingStatus.IN_PROGRESS, worked_by=worker)
        claims.update(worked_until=None, worked_by="", attempts=F("attempts") - 1)

    def end(self, claim: VectorStoreFile, status: IndexingStatus, **facts: Any) -> bool:
        """End the indexing of a file; False if the claim is lost."""
        return bool(self._held(claim).update(status=status, worked_until=None, **facts))

    def cancel(self) -> int:
        """Cancel those that are in progress; return how many."""
        waiting = self.filter(status=IndexingStatus.IN_PROGRESS)
        return waiting.update(status=IndexingStatus.CANCELLED, worked_until=None)


class VectorStoreFile(models.Model):
    """A file in a store. Its chunks have at most ``chunk_size`` tokens, ``chunk_overlap`` of which
    are the last of the chunk before.

    ``attributes`` are what searches filter by. ``usage_bytes`` is the size of its chunks. While it
    is in progress, the worker ``worked_by`` indexes it, if ``worked_until`` is later than now.
    """

    store = models.ForeignKey(
        VectorStore, on_delete=models.CASCADE, related_name="files", db_index=False
    )
    file = models.ForeignKey(StoredFile, on_delete=models.CASCADE)
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, db_index=False)
    api_key = models.ForeignKey("accounts.ApiKey", on_delete=models.PROTECT, db_index=False)
    batch = models.ForeignKey(
        FileBatch, on_delete=models.SET_NULL, null=True, blank=True, related_name="files"
    )
    attributes = ContentField(default=dict, blank=True)
    chunk_size = models.PositiveSmallIntegerField()
    chunk_overlap = models.PositiveSmallIntegerField()
    status = models.CharField(
        max_length=16, choices=IndexingStatus.choices, default=IndexingStatus.IN_PROGRESS
    )
    error_code = models.CharField(max_length=32, blank=True, default="")
    error_message = models.TextField(blank=True, default="")
    chunk_count = models.PositiveIntegerField(default=0)
    usage_bytes = models.BigIntegerField(default=0)
    attempts = models.PositiveSmallIntegerField(default=0)
    worked_by = models.CharField(max_length=64, blank=True, default="", editable=False)
    worked_until = models.DateTimeField(null=True, editable=False)
    created_at = models.DateTimeField(default=timezone.now)

    objects = VectorStoreFileQuerySet.as_manager()

    class Meta:
        default_permissions = ()  # The page of the store shows them.
        indexes = [
            models.Index(
                fields=["project", "id"],
                condition=Q(status=IndexingStatus.IN_PROGRESS),
                name="vector_store_file_waiting",
            ),
        ]
        constraints = [
            models.UniqueConstraint(fields=["store", "file"], name="vector_store_file_once"),
        ]

    def __str__(self) -> str:
        return f"{self.store_id}:{self.file_id}"


class Chunk(models.Model):
    """A part of a file's text: ``embedding`` is its meaning, ``words`` its words.

    A cosine index exists for each number of ``dimensions`` (``search.create_index``).
    """

    store = models.ForeignKey(VectorStore, on_delete=models.CASCADE, db_index=False)
    file = models.ForeignKey(VectorStoreFile, on_delete=models.CASCADE, db_index=False)
    position = models.PositiveIntegerField()
    text = models.TextField()
    words = SearchVectorField()
    embedding = RealArrayField()
    dimensions = models.PositiveSmallIntegerField()

    class Meta:
        default_permissions = ()
        indexes = [
            models.Index(fields=["store", "file"], name="chunk_by_store"),
            GinIndex(fields=["words"], name="chunk_by_words"),
        ]
        constraints = [
            models.UniqueConstraint(fields=["file", "position"], name="chunk_position"),
        ]

    def __str__(self) -> str:
        return f"{self.file_id}:{self.position}"


def prune(until: float) -> int:
    """Delete deleted stores and the chunks of expired ones; return how many rows were deleted.

    Stop when the monotonic clock passes ``until``.
    """
    has_expired = Q(expires_at__lte=Now(), files__isnull=False)
    ended = VectorStore.objects.filter(Q(is_deleted=True) | has_expired)
    store_ended = Q(store__is_deleted=True) | Q(store__expires_at__lte=Now())
    deleted = 0
    for store in ended.distinct().order_by("pk")[:_DELETED_AT_ONCE]:
        # One that has expired may be used again before all chunks of its files are deleted.
        files = VectorStoreFile.objects.filter(store=store)
        changes = {"status": IndexingStatus.CANCELLED, "worked_until": None}
        if not files.filter(store_ended).update(**changes) and not store.is_deleted:
            continue
        while time.monotonic() < until:
            with connection.cursor() as cursor:
                values = {"store": store.pk, "most": _DELETED_AT_ONCE}
                cursor.execute(_DELETE_CHUNKS, values)
                some = cursor.rowcount
            deleted += some
            if some < _DELETED_AT_ONCE:
                break
        else:
            return deleted
        deleted += files.filter(status=IndexingStatus.CANCELLED).delete()[0]
        if store.is_deleted:
            deleted += store.delete()[0]
    return deleted
