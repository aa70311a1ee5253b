"""Forms with a file, as clients upload sounds and files: ``multipart/form-data``.

The body of a sound is in memory already, and bounded (``gateway.bodies``); nothing of it is written
to the disk, and its type and name are not looked at: ``ending_of`` looks at the content.
"""

from __future__ import annotations

import contextlib
import os
import re
from io import BytesIO
from typing import IO, Any, cast

from django.core.exceptions import RequestDataTooBig, SuspiciousOperation
from django.core.files.uploadedfile import SimpleUploadedFile, UploadedFile
from django.core.files.uploadhandler import (
    FileUploadHandler,
    MemoryFileUploadHandler,
    TemporaryFileUploadHandler,
)
from django.http.multipartparser import MultiPartParser, MultiPartParserError
from rest_framework.parsers import BaseParser
from rest_framework.request import Request

from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.core.storage.temporary_files import temporary_file_errors
from inference_site.gateway.api.payload import shown_name

MEDIA_TYPE = "multipart/form-data"
_ENTRY = re.compile(r"([^\[\]]+)\[([^\[\]]*)\]")
_SIGNATURES = (
    (re.compile(rb"RIFF....WAVE", re.S), "wav"),
    (re.compile(rb"fLaC"), "flac"),
    (re.compile(rb"OggS"), "ogg"),
    (re.compile(rb"....ftyp", re.S), "m4a"),
    (re.compile(rb"\x1a\x45\xdf\xa3"), "webm"),
    (re.compile(rb"ID3|\xff[\xe2-\xff]"), "mp3"),
)
"""How files of each format begin. ``m4a`` stands for all files of MPEG-4."""


class FormParser(BaseParser):
    """Parses a form into a dict, with the content of each file as bytes.

    ``name[]`` or a repeated name is a list, and ``name[key]`` an entry of an object, as OpenAI's
    clients send them.
    """

    media_type = MEDIA_TYPE

    def parse(self, stream: IO[bytes], media_type: Any = None, parser_context: Any = None) -> Any:
        """Return the fields. Raise InvalidRequestError for a malformed form."""
        held = BytesIO(stream.read())
        fields, files = _parsed(parser_context["request"], held, [_InMemory()])
        return fields | {name: uploaded.read() for name, uploaded in files.items()}


class FileFormParser(FormParser):
    """Parses a form whose body is in a temporary file; large files of it go to others.

    The values of files are Django's ``UploadedFile``; ``parser_context`` has them as ``files``, for
    who closes them.
    """

    def parse(self, stream: IO[bytes], media_type: Any = None, parser_context: Any = None) -> Any:
        """Return the fields.

        Raise InvalidRequestError for a malformed form, and FileStorageError when a file of it
        cannot be written; then nothing is left of it.
        """
        request = parser_context["request"]
        handlers = [MemoryFileUploadHandler(request), _InNamelessFile(request)]
        try:
            with temporary_file_errors():
                fields, files = _parsed(request, stream, handlers)
        except BaseException:
            # Else the file lives as long as the traceback, which waits for the garbage collector.
            for handler in handlers:
                with contextlib.suppress(OSError):
                    handler.upload_interrupted()
            raise
        parser_context["files"] = files
        return fields | files


def _parsed(
    request: Request, stream: IO[bytes], handlers: list[FileUploadHandler]
) -> tuple[dict[str, Any], dict[str, UploadedFile[Any]]]:
    """Return the fields and the files of a form; of files with one name, the first.

    Raise InvalidRequestError for a malformed form, and for a file whose name is none.
    """
    # Django knows the type in lower case only.
    kind = request.META["CONTENT_TYPE"]
    meta = {**request.META, "CONTENT_TYPE": MEDIA_TYPE + kind[len(MEDIA_TYPE) :]}
    try:
        fields, files = _Parser(meta, cast(Any, stream), handlers).parse()
    except (MultiPartParserError, SuspiciousOperation, RequestDataTooBig) as exc:
        message = f"We could not parse the form of your request: {exc}."
        raise InvalidRequestError(message) from exc
    body: dict[str, Any] = {}
    for name, values in fields.lists():
        entry = _ENTRY.fullmatch(name)
        if entry is None:
            body[name] = values if len(values) > 1 else values[0]
        elif entry[2]:
            values_of = body.setdefault(entry[1], {})
            if isinstance(values_of, dict):
                values_of[entry[2]] = values[0]
        else:
            body[entry[1]] = values
    return body, {name: uploaded[0] for name, uploaded in files.lists()}


class _Parser(MultiPartParser):
    """Django's parser, which would leave out a file whose name is a folder's."""

    def sanitize_file_name(self, file_name: str) -> str:
        """Return the last part of a file's name. Raise InvalidRequestError if it names no file."""
        name = super().sanitize_file_name(file_name)
        if name is None:
            raise InvalidRequestError(f"The file name '{shown_name(file_name)}' is not valid.")
        return name


class _InNamelessFile(TemporaryFileUploadHandler):
    """Writes files to temporary files without a name, which are gone when the process is killed."""

    def new_file(self, *args: Any, **kwargs: Any) -> None:
        """Begin a file."""
        super().new_file(*args, **kwargs)
        os.unlink(self.file.temporary_file_path())


class _InMemory(FileUploadHandler):
    """Keeps files in memory, whatever their size."""

    def new_file(self, *args: Any, **kwargs: Any) -> None:
        """Begin a file."""
        super().new_file(*args, **kwargs)
        self._content = bytearray()

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
        """Take a part of a file."""
        self._content += raw_data

    def file_complete(self, file_size: int) -> SimpleUploadedFile:
        """Return the file."""
        return SimpleUploadedFile(self.file_name or "file", bytes(self._content))


def ending_of(sound: bytes) -> str | None:
    """Return the usual ending of a file with this content; None for no known format of sounds."""
    return next((ending for begins, ending in _SIGNATURES if begins.match(sound)), None)
