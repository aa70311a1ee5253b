"""Export and import of files with their content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import AwareDatetime, Field

from inference_site.core.transfer import FILES_FOLDER, ObjectLine, Refused, each, known_ids
from inference_site.files import storage
from inference_site.files.models import FilePurpose, FileState, StoredFile

_BATCH = 100


class FileLine(ObjectLine):
    """A file; its content is beside, in ``files/``."""

    kind: Literal["file"] = "file"
    filename: Annotated[str, Field(min_length=1, max_length=255)]
    purpose: FilePurpose
    content_type: Annotated[str, Field(max_length=255)]
    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    created_at: AwareDatetime
    expires_at: AwareDatetime | None


LINES = {"file": FileLine}


def export_lines(project_id: int, folder: Path) -> Iterator[FileLine]:
    """Yield the files of a project, and write their contents.

    See ``inference_site.core.transfer.Transfer``. Raise FileStorageError if one cannot be read.
    """
    for file in each(StoredFile.objects.readable(project_id), _BATCH):
        path, digest = folder / FILES_FOLDER / file.public_id, hashlib.sha256()
        try:
            with path.open("wb") as content:
                for chunk in storage.read(file):
                    digest.update(chunk)
                    content.write(chunk)
        except storage.UNAVAILABLE:
            path.unlink()
            if StoredFile.objects.readable(project_id).filter(pk=file.pk).exists():
                raise
            continue  # It was deleted, or has expired, meanwhile.
        yield FileLine(
            id=file.public_id,
            filename=file.filename,
            purpose=FilePurpose(file.purpose),
            content_type=file.content_type,
            bytes=file.size_bytes,
            sha256=digest.hexdigest(),
            created_at=file.created_at,
            expires_at=file.expires_at,
        )


def import_lines(project_id: int, kind: str, lines: Sequence[ObjectLine], folder: Path) -> int:
    """Store files with their content; see ``inference_site.core.transfer.Transfer``.

    What an interrupted import has left of a file is replaced.
    """
    known = known_ids(StoredFile, project_id, [line.id for line in lines])
    new = 0
    for line in cast(Sequence[FileLine], lines):
        if line.id in known:
            row = StoredFile.objects.get(public_id=line.id)
            if row.state == FileState.READY:
                continue
            storage.delete([row])
        path = folder / FILES_FOLDER / line.id
        try:
            with path.open("rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() != line.sha256:
                    raise Refused(line.id, f"{path} is not the content that was exported")
                content.seek(0)
                file = StoredFile(
                    public_id=line.id,
                    project_id=project_id,
                    filename=line.filename,
                    purpose=line.purpose,
                    content_type=line.content_type,
                    size_bytes=line.bytes,
                )
                dates = {"created_at": line.created_at, "expires_at": line.expires_at}
                storage.store(file, content, has_quota=False, dates=dates)
        except OSError as exc:
            raise Refused(line.id, f"{path} cannot be read: {exc.strerror}") from exc
        new += 1
    return new
