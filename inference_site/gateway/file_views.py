"""The files API: ``/v1/files`` and ``/v1/uploads``.

Source of the wire models: API reference, "Files" and "Uploads".
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import re
from typing import IO, Annotated, Any, Literal, cast

from django.conf import settings
from django.core.files.uploadedfile import UploadedFile
from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils import timezone
from django.utils.http import content_disposition_header
from pydantic import AfterValidator, Field
from pydantic.json_schema import SkipJsonSchema
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.accounts.rate_limits import count_request
from inference_site.core.errors.api_errors import (
    ANTHROPIC_VERSION,
    ConflictError,
    FileStorageError,
    InvalidRequestError,
    PayloadTooLargeError,
    RangeError,
)
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.core.storage.temporary_files import (
    new_temporary_file,
    temporary_file_errors,
)
from inference_site.files import storage
from inference_site.files.models import (
    BATCH_LIFETIME,
    FilePurpose,
    FileState,
    StoredFile,
    Upload,
    UploadStatus,
)
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.multipart import FileFormParser
from inference_site.gateway.api.paging import PageQuery, keep_position, list_object, parse_page
from inference_site.gateway.api.payload import WireObject, WireRequest
from inference_site.gateway.api.schema import ListObject, documented
from inference_site.gateway.api.views import ApiView
from inference_site.gateway.idempotency.models import KeyLocked, KeyTaken
from inference_site.gateway.idempotency.requests import answered_with, claim_of
from inference_site.runs.queue import new_id

_UPLOAD_LIFETIME = dt.timedelta(hours=1)
_COMPLETING_TIMEOUT = dt.timedelta(minutes=10)
"""After this, a ``complete`` that has not ended may be tried again: its process has died."""
_MAX_PARTS = 8_192
_MAX_PAGE = 10_000
_PATH = "files"
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII | re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""Characters that are in no name of a file, and in no header with the type of a content."""

Content = Annotated[bytes, Field(json_schema_extra={"format": "binary"})]
Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]


def _file_name(given: str) -> str:
    """Return the last part of a path, without control characters. Raise ValueError if it is empty.

    Of a name of more than 255 characters, the end is kept: it has the type.
    """
    name = _CONTROL.sub("", given.replace("\\", "/").rpartition("/")[2])[-255:]
    if name in ("", ".", ".."):
        raise ValueError("Expected the name of a file.")
    return name


_FormLifetime = Annotated[int, Field(strict=False, ge=3600, le=2_592_000)]
"""Seconds from the creation of a file to its deletion, in a form, whose fields are texts."""


class ExpiresAfter(WireRequest):
    """``expires_after``: the seconds from the creation of the file to its deletion."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class FormExpiresAfter(ExpiresAfter):
    """The same in a form."""

    seconds: _FormLifetime


class FileRequest(WireRequest):
    """The fields of ``POST /v1/files`` beside the file itself."""

    purpose: Purpose
    expires_after: FormExpiresAfter | None = None
    expires_in_seconds: _FormLifetime | None = None


class FileForm(FileRequest):
    """The form of ``POST /v1/files``."""

    file: Content


class PartForm(WireRequest):
    """The form of ``POST /v1/uploads/{upload_id}/parts``."""

    data: Content


class UploadRequest(WireRequest):
    """Body of ``POST /v1/uploads``."""

    bytes: Annotated[int, Field(ge=0)]
    filename: Annotated[str, AfterValidator(_file_name)]
    mime_type: Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")]
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class CompleteRequest(WireRequest):
    """Body of ``POST /v1/uploads/{upload_id}/complete``."""

    part_ids: Annotated[list[str], Field(max_length=_MAX_PARTS)]
    md5: Annotated[str | None, Field(description="The MD5 digest of the whole file, to check.")] = (
        None
    )


class FileObject(WireObject):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: str | None = None


class DeletedFile(WireObject):
    """The answer of ``DELETE /v1/files/{file_id}``."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class AnthropicFile(WireObject):
    """A file, for clients of Anthropic's API."""

    type: Literal["file"] = "file"
    id: str
    filename: str
    mime_type: str
    size_bytes: int
    created_at: dt.datetime
    expires_at: dt.datetime | None
    downloadable: Literal[True] = True


class AnthropicFileList(ListObject[AnthropicFile]):
    """The list for them; ``next_page`` is the ``page`` of the next request."""

    next_page: str | None


class UploadObject(WireObject):
    """An upload; ``file`` is set when it is completed."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: UploadStatus
    file: FileObject | None


class UploadPartObject(WireObject):
    """A part of an upload."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


class FilesQuery(PageQuery):
    """Query parameters of the list of files."""

    limit: Annotated[int, Field(ge=1, le=_MAX_PAGE)] = _MAX_PAGE
    order: Literal["asc", "desc"] = "desc"
    purpose: str | SkipJsonSchema[None] = Field(None, description="Only files with this purpose.")


class FileFormView(ApiView):
    """A view whose POST takes a form with a file, which is never held in memory as a whole."""

    spools_body = True
    parser_classes = (FileFormParser,)

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Count a POST. ``counts_writes`` would make one transaction of it, file included."""
        super().initial(request, *args, **kwargs)
        if request.method == "POST":
            self.headers = count_request(caller_of(request))

    def finalize_response(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """Delete temporary files, which a traceback would keep until the garbage collector runs."""
        for file in request.parser_context.get("files", {}).values():
            with contextlib.suppress(OSError):
                file.close()
        return super().finalize_response(request, *args, **kwargs)


class FilesView(FileFormView):
    """``/v1/files``, in Anthropic's form for requests with its header of a version."""

    @documented(answer=FileObject | AnthropicFile, form=FileForm)
    def post(self, request: Request) -> Response:
        """Upload a file.

        A form (`multipart/form-data`) with `file`, `purpose` and optionally `expires_after[anchor]`
        and `expires_after[seconds]`. Files with the purpose `batch` expire after 30 days if it is
        not given.
        """
        form: Any = request.data
        fields = {name: value for name, value in form.items() if name != "file"}
        if ANTHROPIC_VERSION in request.headers:
            fields.setdefault("purpose", "user_data")
        body, content = self.parse(FileRequest, fields), _file_of(form, "file")
        try:
            name = _file_name(content.name or "")
        except ValueError as exc:
            raise InvalidRequestError(f"Invalid 'file': {exc}", param="file") from exc
        file = _new_file(
            caller_of(request).project_id,
            name,
            body.purpose,
            _CONTROL.sub("", content.content_type or "")[:255],
            content.size or 0,
            body.expires_after.seconds if body.expires_after else body.expires_in_seconds,
        )
        return _store(request, file, content, _shown(request, file))

    @documented(answer=ListObject[FileObject] | AnthropicFileList, query=FilesQuery)
    def get(self, request: Request) -> Response:
        """List the project's files."""
        query, default = request.query_params.copy(), _MAX_PAGE
        if is_anthropic := ANTHROPIC_VERSION in request.headers:
            query["after"], default = query.get("page") or query.get("after_id", ""), 20
            query["before"] = query.get("before_id", "")
        page = parse_page(query, "desc", default, _MAX_PAGE, has_before=is_anthropic)
        rows = StoredFile.objects.readable(caller_of(request).project_id)
        if purpose := query.get("purpose"):
            rows = rows.filter(purpose=purpose)
        found = page.rows_by_age(rows, "file", caller_of(request).project_id, _PATH)
        listed = list_object([_shown(request, file) for file in found], page)
        if is_anthropic:
            listed["next_page"] = listed["last_id"] if listed["has_more"] else None
        return Response(listed)


class FileView(ApiView):
    """``/v1/files/{file_id}``."""

    counts_writes = True

    @documented(answer=FileObject | AnthropicFile)
    def get(self, request: Request, file_id: str) -> Response:
        """Get a file's description."""
        return Response(_shown(request, _file(request, file_id)))

    @documented(answer=DeletedFile)
    def delete(self, request: Request, file_id: str) -> Response:
        """Delete a file."""
        file = _file(request, file_id)
        keep_position(file.project_id, _PATH, file_id, file.pk)
        storage.delete([file])
        return Response(DeletedFile(id=file_id).model_dump())


class FileContentView(ApiView):
    """``/v1/files/{file_id}/content``."""

    @documented(answer=None, binaries=("application/octet-stream",))
    def get(self, request: Request, file_id: str) -> HttpResponseBase:
        """Get a file's content.

        With a header `Range` of one range, status 206 and that part of it; with `If-Range` too, the
        whole content, since no answer has an ETag or a time that it could name.
        """
        with release_connection_after():  # The content may be sent for minutes.
            file = _file(request, file_id)
        asked = "" if "If-Range" in request.headers else request.headers.get("Range", "")
        span = _requested_range(asked, file.size_bytes)
        start, end = span or (0, file.size_bytes)
        answer = StreamingHttpResponse(
            storage.read(file, start, end),
            status=206 if span else 200,
            content_type=file.content_type or "application/octet-stream",
            headers={
                "Accept-Ranges": "bytes",
                "Content-Length": str(end - start),
                "Content-Disposition": content_disposition_header(True, file.filename),
            },
        )
        if span:
            answer["Content-Range"] = f"bytes {start}-{end - 1}/{file.size_bytes}"
        return answer


class UploadsView(ApiView):
    """``/v1/uploads``."""

    counts_writes = True

    @documented(answer=UploadObject, body=UploadRequest)
    def post(self, request: Request) -> Response:
        """Begin an upload in parts, which has to be completed within an hour."""
        body = self.parse(UploadRequest, request.data)
        if body.bytes > settings.MAX_FILE_BYTES:
            raise InvalidRequestError(
                f"Invalid 'bytes': a file may have at most {settings.MAX_FILE_BYTES} bytes.",
                param="bytes",
            )
        upload = Upload.objects.create(
            public_id=new_id("upload_"),
            project_id=caller_of(request).project_id,
            filename=body.filename,
            purpose=body.purpose,
            content_type=body.mime_type,
            size_bytes=body.bytes,
            lifetime_s=body.expires_after.seconds if body.expires_after else None,
            expires_at=timezone.now() + _UPLOAD_LIFETIME,
        )
        return Response(_wire_upload(upload).model_dump())


class UploadPartsView(FileFormView):
    """``/v1/uploads/{upload_id}/parts``."""

    @documented(answer=UploadPartObject, form=PartForm)
    def post(self, request: Request, upload_id: str) -> Response:
        """Add a part to an upload.

        A form (`multipart/form-data`) with the file `data`. Parts may come at the same time.
        """
        upload = _upload(request, upload_id)
        _require_pending(upload)
        content = _file_of(request.data, "data")
        size = content.size or 0
        if size > settings.MAX_PART_BYTES:
            raise PayloadTooLargeError(f"A part may have at most {settings.MAX_PART_BYTES} bytes.")
        part = _new_file(upload.project_id, upload.filename, upload.purpose, "", size, None, upload)
        answer = UploadPartObject(
            id=part.public_id,
            created_at=int(part.created_at.timestamp()),
            upload_id=upload.public_id,
        )
        try:
            return _store(request, part, content, answer.model_dump())
        except FileStorageError:
            upload.refresh_from_db()
            _require_pending(upload)  # It has ended meanwhile.
            raise


class UploadCompleteView(ApiView):
    """``/v1/uploads/{upload_id}/complete``."""

    @documented(answer=UploadObject, body=CompleteRequest, errors=(ConflictError,))
    def post(self, request: Request, upload_id: str) -> Response:
        """Join the parts of an upload, in the order of `part_ids`, to a file."""
        body, upload = self.parse(CompleteRequest, request.data), _upload(request, upload_id)
        _require_pending(upload)
        stale_before = timezone.now() - _COMPLETING_TIMEOUT
        if not Upload.objects.begin_completing(upload, stale_before):
            upload.refresh_from_db()
            _require_pending(upload)
            raise ConflictError("The upload is being completed.")
        file = _new_file(
            upload.project_id,
            upload.filename,
            upload.purpose,
            upload.content_type,
            upload.size_bytes,
            upload.lifetime_s,
        )
        try:
            # Here, as the parts are deleted when another request ends the upload.
            parts = _parts(upload, body)
            with temporary_file_errors(), new_temporary_file() as joined:
                digest = hashlib.md5(usedforsecurity=False)
                for part in parts:
                    for chunk in storage.read(part):
                        joined.write(chunk)
                        digest.update(chunk)
                joined.seek(0)
                md5 = digest.hexdigest()
                if body.md5 is not None and md5 != body.md5.lower():
                    raise InvalidRequestError(
                        f"Invalid 'md5': that of the parts is {md5}.", param="md5"
                    )
                storage.store(file, joined, completes=upload)
        except BaseException:
            Upload.objects.stop_completing(upload)
            upload.refresh_from_db()
            _require_pending(upload)
            raise
        storage.delete(list(upload.parts.all()))
        upload.refresh_from_db()
        return Response(_wire_upload(upload).model_dump())


class UploadCancelView(ApiView):
    """``/v1/uploads/{upload_id}/cancel``."""

    @documented(answer=UploadObject)
    def post(self, request: Request, upload_id: str) -> Response:
        """Cancel an upload. No parts can be added after that."""
        upload = _upload(request, upload_id)
        if not Upload.objects.cancel(upload):
            upload.refresh_from_db()
            _require_pending(upload)
        storage.delete(list(upload.parts.all()))
        upload.refresh_from_db()
        return Response(_wire_upload(upload).model_dump())


def _file_of(form: Any, name: str) -> UploadedFile[Any]:
    """Return the file in the field of a form. Raise InvalidRequestError if there is none."""
    content = form.get(name)
    if not isinstance(content, UploadedFile):
        raise InvalidRequestError(
            f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
        )
    return content


def _store(
    request: Request, file: StoredFile, content: UploadedFile[Any], body: dict[str, Any]
) -> Response:
    """Store a file, with the row of its idempotency key; return the answer with this body."""
    answer, claim = Response(body), claim_of(request)
    write = None if claim is None else answered_with(claim, answer).write
    try:
        storage.store(file, cast(IO[bytes], content), also=write)
    except (KeyTaken, KeyLocked):  # The same request has stored another file.
        storage.delete([file])
        raise
    return answer


def _new_file(
    project_id: int,
    filename: str,
    purpose: str,
    content_type: str,
    size_bytes: int,
    lifetime_s: int | None,
    upload: Upload | None = None,
) -> StoredFile:
    """Return a file that is not stored yet."""
    now = timezone.now()
    if lifetime_s is None and upload is None and purpose == FilePurpose.BATCH:
        lifetime_s = int(BATCH_LIFETIME.total_seconds())
    return StoredFile(
        public_id=new_id("file-" if upload is None else "part_"),
        project_id=project_id,
        filename=filename,
        purpose=purpose,
        content_type=content_type,
        size_bytes=size_bytes,
        created_at=now,
        expires_at=None if lifetime_s is None else now + dt.timedelta(seconds=lifetime_s),
        upload=upload,
    )


def _file(request: Request, file_id: str) -> StoredFile:
    return StoredFile.objects.get_readable(caller_of(request).project_id, file_id)


def _upload(request: Request, upload_id: str) -> Upload:
    return Upload.objects.get_of(caller_of(request).project_id, upload_id)


def _require_pending(upload: Upload) -> None:
    """Raise InvalidRequestError unless parts can be added."""
    status = upload.status
    if status == UploadStatus.PENDING and upload.expires_at <= timezone.now():
        status = UploadStatus.EXPIRED
    if status != UploadStatus.PENDING:
        raise InvalidRequestError(
            f"The upload is {status}: only a pending upload can be changed.",
            param="upload_id",
            code="invalid_upload_status",
        )


def _parts(upload: Upload, body: CompleteRequest) -> list[StoredFile]:
    """Return the parts in order. Raise InvalidRequestError if they are not the upload's bytes."""
    stored = {part.public_id: part for part in upload.parts.filter(state=FileState.READY)}
    for i, id_ in enumerate(body.part_ids):
        if id_ not in stored:
            raise InvalidRequestError(
                f"Invalid 'part_ids[{i}]': the upload has no part '{id_[:100]}'.",
                param=f"part_ids[{i}]",
            )
    parts = [stored[id_] for id_ in body.part_ids]
    size = sum(part.size_bytes for part in parts)
    if size != upload.size_bytes:
        raise InvalidRequestError(
            f"The parts have {size} bytes; the upload was created for {upload.size_bytes}.",
            param="part_ids",
        )
    return parts


def _requested_range(header: str, size: int) -> tuple[int, int] | None:
    """Return (start, end) of a single range in bytes, ``end`` exclusive; None for the whole file.

    Raise RangeError for a range that begins after the end (RFC 9110, 14.1.2).
    """
    found = _RANGE.fullmatch(header.strip())
    if found is None or not any(found.groups()):
        return None
    first, last = found.groups()
    if not first:  # ``-N``: the last N bytes.
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < start:
            return None
    if start >= size or start >= end:
        raise RangeError(headers={"Content-Range": f"bytes */{size}"})
    return start, end


def _shown(request: Request, file: StoredFile) -> dict[str, Any]:
    """Return the file in the form of the client's API."""
    if ANTHROPIC_VERSION not in request.headers:
        return _wire_file(file).model_dump()
    shown = AnthropicFile(
        id=file.public_id,
        filename=file.filename,
        mime_type=file.content_type or "application/octet-stream",
        size_bytes=file.size_bytes,
        created_at=file.created_at,
        expires_at=file.expires_at,
    )
    return shown.model_dump(mode="json")


def _wire_file(file: StoredFile) -> FileObject:
    return FileObject(
        id=file.public_id,
        bytes=file.size_bytes,
        created_at=int(file.created_at.timestamp()),
        expires_at=None if file.expires_at is None else int(file.expires_at.timestamp()),
        filename=file.filename,
        purpose=file.purpose,
    )


def _wire_upload(upload: Upload) -> UploadObject:
    return UploadObject(
        id=upload.public_id,
        bytes=upload.size_bytes,
        created_at=int(upload.created_at.timestamp()),
        expires_at=int(upload.expires_at.timestamp()),
        filename=upload.filename,
        purpose=upload.purpose,
        status=UploadStatus(upload.status),
        file=None if upload.file is None else _wire_file(upload.file),
    )
