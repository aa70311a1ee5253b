"""Files of projects, and uploads in parts. The content is in the storage ``files`` of Django."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence

from django.db import connection, models, transaction
from django.db.models import Count, Q, Sum
from django.db.models.functions import Now
from django.utils import timezone

from inference_site.core.errors.api_errors import InvalidRequestError, NotFoundError
from inference_site.core.site_settings.models import BATCH_DAYS

BATCH_LIFETIME = dt.timedelta(days=BATCH_DAYS)
"""How long the files of batches are kept unless the request says otherwise."""
_QUOTA_LOCK = 0x66696C65
"""The class of the advisory locks that serialise the uploads of a project ("file")."""


class FileState(models.TextChoices):
    """Where the content of a row is. The row is made before its content, and deleted after it."""

    STORING = "storing"  # The content is being stored; after an hour the row is deleted.
    READY = "ready"
    DELETING = "deleting"  # Nobody can read it any more; its content is being deleted.


class FilePurpose(models.TextChoices):
    """What a file is for (API reference, "Files")."""

    ASSISTANTS = "assistants"
    ASSISTANTS_OUTPUT = "assistants_output"
    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"
    EVALS = "evals"
    FINE_TUNE = "fine-tune"
    FINE_TUNE_RESULTS = "fine-tune-results"
    USER_DATA = "user_data"
    VISION = "vision"


class StoredFileQuerySet(models.QuerySet["StoredFile"]):
    """Queries for files and parts."""

    def ready(self) -> StoredFileQuerySet:
        """Return the files and parts whose content is stored and has not expired."""
        is_current = Q(expires_at=None) | Q(expires_at__gt=Now())
        return self.filter(is_current, state=FileState.READY)

    def readable(self, project_id: int) -> StoredFileQuerySet:
        """Return the files of a project that can be read, without parts of uploads."""
        return self.ready().filter(project_id=project_id, upload=None)

    def get_readable(self, project_id: int, public_id: str) -> StoredFile:
        """Return a file. Raise NotFoundError for an unknown one and another project's."""
        found = self.readable(project_id).filter(public_id=public_id).first()
        if found is None:
            raise NotFoundError(f"No such File object: {public_id[:100]}", param="id")
        return found

    def accept(self, file: StoredFile, *, most_files: int, most_bytes: int) -> None:
        """Insert the row of a file that will be stored, if the project's quota has room for it.

        Raise InvalidRequestError if it has none. Uploads of one project are counted one at a time.
        """
        with transaction.atomic():
            with connection.cursor() as cursor:
                lock = (_QUOTA_LOCK, file.project_id)
                cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", lock)
            kept = self.filter(project_id=file.project_id).exclude(state=FileState.DELETING)
            used = kept.aggregate(files=Count("pk"), bytes=Sum("size_bytes", default=0))
            if used["files"] >= most_files:
                raise InvalidRequestError(
                    f"The project has {used['files']} files; it may have {most_files}.",
                    param="file",
                    code="file_quota_exceeded",
                )
            if used["bytes"] + file.size_bytes > most_bytes:
                raise InvalidRequestError(
                    f"The files of the project may have {most_bytes} bytes: {used['bytes']} are "
                    f"used, and this file has {file.size_bytes}.",
                    param="file",
                    code="file_quota_exceeded",
                )
            file.save(force_insert=True)

    def make_ready(
        self,
        file: StoredFile,
        upload: Upload | None,
        dates: Mapping[str, dt.datetime | None],
        also: Callable[[], None] | None = None,
    ) -> bool:
        """Show a file whose content is stored, complete its upload and call ``also``, all or none.

        False if the file was deleted, or the upload has ended, meanwhile.
        """
        storing = self.filter(pk=file.pk, state=FileState.STORING)
        with transaction.atomic():
            if also is not None:
                also()
            if upload is not None and not Upload.objects.complete(upload, file):
                return False
            is_ready = bool(storing.update(state=FileState.READY, **dates))
            if not is_ready:
                transaction.set_rollback(True)
        return is_ready

    def hide(self) -> int:
        """Hide these files, so that their content can be deleted; return how many were shown."""
        return self.exclude(state=FileState.DELETING).update(state=FileState.DELETING)

    def to_delete(self, storing_since: dt.datetime) -> StoredFileQuerySet:
        """Return hidden files, expired ones, and those whose storing began before this time."""
        is_stale = Q(state=FileState.STORING, created_at__lt=storing_since)
        return self.filter(
            Q(state=FileState.DELETING) | is_stale | Q(expires_at__lte=timezone.now())
        )


class StoredFile(models.Model):
    """One file, or one part of an upload. ``key`` is its name in storage."""

    public_id = models.CharField("ID", max_length=64, unique=True)
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, db_index=False)
    upload = models.ForeignKey(
        "Upload", on_delete=models.CASCADE, null=True, blank=True, related_name="parts"
    )
    filename = models.CharField(max_length=255)
    purpose = models.CharField(max_length=32, choices=FilePurpose.choices)
    content_type = models.CharField(max_length=255, blank=True, default="")
    size_bytes = models.BigIntegerField()
    state = models.CharField(
        max_length=16, choices=FileState.choices, default=FileState.STORING, editable=False
    )
    created_at = models.DateTimeField(default=timezone.now)
    expires_at = models.DateTimeField(null=True, blank=True)

    objects = StoredFileQuerySet.as_manager()

    class Meta:
        verbose_name = "file"
        indexes = [
            models.Index(fields=["project", "-id"], name="file_by_project"),
            models.Index(
                fields=["id"], condition=~models.Q(state=FileState.READY), name="file_to_delete"
            ),
            models.Index(
                fields=["expires_at"],
                condition=models.Q(expires_at__isnull=False),
                name="file_by_expiry",
            ),
        ]
        constraints = [
            models.CheckConstraint(condition=models.Q(size_bytes__gte=0), name="file_size")
        ]

    def __str__(self) -> str:
        return self.public_id

    @property
    def key(self) -> str:
        """The name of the content in storage. Ids are never used again, so it is unique."""
        return f"{self.project_id}/{self.public_id}"


class UploadStatus(models.TextChoices):
    """Status of an upload; the last three are final."""

    PENDING = "pending"  # Parts can be added.
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # An hour has passed without ``complete``.


class UploadQuerySet(models.QuerySet["Upload"]):
    """The status changes of an upload; each is a guarded UPDATE."""

    def get_of(self, project_id: int, public_id: str) -> Upload:
        """Return an upload. Raise NotFoundError for an unknown one and another project's."""
        found = self.filter(project_id=project_id, public_id=public_id).first()
        if found is None:
            raise NotFoundError(f"No such Upload object: {public_id[:100]}", param="upload_id")
        return found

    def pending(self) -> UploadQuerySet:
        """Return the uploads to which parts can be added."""
        return self.filter(status=UploadStatus.PENDING, expires_at__gt=Now())

    def begin_completing(self, upload: Upload, stale_before: dt.datetime) -> bool:
        """Reserve an upload for one ``complete``; False if it is not pending or is reserved.

        A reservation from before ``stale_before`` was left by a process that died.
        """
        free = Q(completing_since=None) | Q(completing_since__lt=stale_before)
        rows = self.pending().filter(free, pk=upload.pk)
        return bool(rows.update(completing_since=timezone.now()))

    def stop_completing(self, upload: Upload) -> None:
        """End the reservation of a ``complete`` that failed."""
        self.filter(pk=upload.pk, status=UploadStatus.PENDING).update(completing_since=None)

    def complete(self, upload: Upload, file: StoredFile) -> bool:
        """End an upload with its file; False if it has ended meanwhile."""
        rows = self.filter(pk=upload.pk, status=UploadStatus.PENDING)
        return bool(rows.update(status=UploadStatus.COMPLETED, file=file))

    def cancel(self, upload: Upload) -> bool:
        """Cancel a pending upload; False if it is not pending."""
        rows = self.pending().filter(pk=upload.pk)
        return bool(rows.update(status=UploadStatus.CANCELLED))

    def expire(self) -> Sequence[int]:
        """Expire pending uploads whose time is over, and return the ids of all that have parts."""
        over = self.filter(status=UploadStatus.PENDING, expires_at__lte=Now())
        over.update(status=UploadStatus.EXPIRED)
        ended = self.exclude(status=UploadStatus.PENDING).filter(parts__isnull=False)
        return list(ended.distinct().values_list("pk", flat=True)[:100])

    def ended_before(self, moment: dt.datetime) -> UploadQuerySet:
        """Return the uploads without parts that have ended, and began before this time."""
        ended = self.exclude(status=UploadStatus.PENDING).filter(parts=None)
        return ended.filter(created_at__lt=moment)


class Upload(models.Model):
    """A file that comes in parts (API reference, "Uploads").

    ``size_bytes`` is the size that the client announced; ``file`` is set at ``complete``.
    """

    public_id = models.CharField("ID", max_length=64, unique=True)
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT)
    filename = models.CharField(max_length=255)
    purpose = models.CharField(max_length=32, choices=FilePurpose.choices)
    content_type = models.CharField(max_length=255)
    size_bytes = models.BigIntegerField()
    lifetime_s = models.PositiveIntegerField(null=True, blank=True)
    status = models.CharField(
        max_length=16, choices=UploadStatus.choices, default=UploadStatus.PENDING
    )
    completing_since = models.DateTimeField(null=True, blank=True)
    file = models.OneToOneField(
        StoredFile, on_delete=models.SET_NULL, null=True, blank=True, related_name="made_by"
    )
    created_at = models.DateTimeField(default=timezone.now)
    expires_at = models.DateTimeField()

    objects = UploadQuerySet.as_manager()

    class Meta:
        indexes = [
            models.Index(
                fields=["expires_at"],
                condition=models.Q(status=UploadStatus.PENDING),
                name="upload_pending",
            )
        ]

    def __str__(self) -> str:
        return self.public_id
