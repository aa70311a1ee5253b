"""Export and import of batches that have ended. Their files are exported with all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

from django.db import transaction
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from inference_site.accounts.keys import key_of_imports
from inference_site.batches.models import ENDED, Batch, BatchStatus
from inference_site.batches.requests import endpoints
from inference_site.batches.views import BatchError
from inference_site.core.transfer import (
    FILES_FOLDER,
    Count,
    Id,
    Money,
    ObjectLine,
    Refused,
    each,
    known_ids,
)
from inference_site.files.models import StoredFile
from inference_site.gateway.request_fields.wire import Metadata

_BATCH = 100
_LATEST = 253_402_300_799  # The last second of the year 9999.

FileId = Id | Literal[""]


class UsagePart(BaseModel):
    """The tokens of all lines."""

    model_config = ConfigDict(extra="forbid")
    input_tokens: Annotated[int, Field(ge=0)]
    cached_tokens: Annotated[int, Field(ge=0)]
    output_tokens: Annotated[int, Field(ge=0)]
    reasoning_tokens: Annotated[int, Field(ge=0)]


class BatchExport(ObjectLine):
    """A batch that has ended. Files that it names may have been deleted or have expired."""

    kind: Literal["batch"] = "batch"
    dialect: Literal["openai", "anthropic"]
    endpoint: Annotated[str, Field(max_length=64)]
    model: Annotated[str, Field(max_length=200)]
    input_file_id: FileId
    output_file_id: FileId
    error_file_id: FileId
    output_lifetime_s: Count | None
    metadata: Metadata
    window_s: Count
    status: Literal[
        BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.FAILED, BatchStatus.CANCELLED
    ]
    times: dict[BatchStatus, Annotated[int, Field(ge=0, le=_LATEST)]]
    errors: list[BatchError]
    total: Count
    completed: Count
    failed: Count
    skipped: Count
    failures: dict[str, Count]
    usage: UsagePart | None
    cost: Money
    most_cost: Money
    created_at: AwareDatetime
    expires_at: AwareDatetime


LINES = {"batch": BatchExport}
_COLUMNS = tuple(BatchExport.model_fields.keys() - {"kind", "id", "times", "errors", "usage"})


def export_lines(project_id: int, folder: Path) -> Iterator[BatchExport]:
    """Yield the batches that have ended; see ``inference_site.core.transfer.Transfer``.

    One that has ended while the export ran, with files that it lacks, is left out.
    """
    for batch in each(Batch.objects.filter(project=project_id, status__in=ENDED), _BATCH):
        if _has_newer_files(batch, folder):
            continue
        columns = {name: getattr(batch, name) for name in _COLUMNS}
        yield BatchExport(
            id=batch.public_id,
            times=batch.times,
            errors=[BatchError(**error) for error in batch.errors],
            usage=batch.usage,
            **columns,
        )


def _has_newer_files(batch: Batch, folder: Path) -> bool:
    """Return whether files of the batch were stored after those of the project were exported."""
    named = {batch.input_file_id, batch.output_file_id, batch.error_file_id} - {""}
    lacking = [name for name in named if not (folder / FILES_FOLDER / name).exists()]
    files = StoredFile.objects.readable(batch.project_id).filter(public_id__in=lacking)
    return bool(lacking) and files.exists()


@transaction.atomic
def import_lines(project_id: int, kind: str, lines: Sequence[ObjectLine], folder: Path) -> int:
    """Store batches; see ``inference_site.core.transfer.Transfer``."""
    del kind, folder
    known = known_ids(Batch, project_id, [line.id for line in lines])
    new = [line for line in cast(Sequence[BatchExport], lines) if line.id not in known]
    for line in new:
        if line.endpoint not in endpoints():
            raise Refused(line.id, f"batches of this site have no endpoint {line.endpoint}")
    if not new:
        return 0
    key = key_of_imports(project_id)
    Batch.objects.bulk_create(
        Batch(
            public_id=line.id,
            project_id=project_id,
            api_key=key,
            ends_as=line.status,
            times={status.value: time for status, time in line.times.items()},
            errors=[error.model_dump() for error in line.errors],
            usage=None if line.usage is None else line.usage.model_dump(),
            **{name: getattr(line, name) for name in _COLUMNS},
        )
        for line in new
    )
    return len(new)
