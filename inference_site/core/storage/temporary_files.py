"""Temporary files, which have no names: for what is received or joined before it is stored."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from django.conf import settings

from inference_site.core.errors.api_errors import FileStorageError

logger = logging.getLogger(__name__)


def new_temporary_file() -> IO[bytes]:
    """Return a new file in ``FILE_UPLOAD_TEMP_DIR``; it is deleted when it is closed."""
    return tempfile.TemporaryFile(dir=settings.FILE_UPLOAD_TEMP_DIR)


@contextmanager
def temporary_file_errors() -> Iterator[None]:
    """Raise FileStorageError for an OSError, and log where the disk is full or not writable."""
    try:
        yield
    except OSError as exc:
        # Without a cached folder none of the system's can be written: the error names them.
        folder = settings.FILE_UPLOAD_TEMP_DIR or tempfile.tempdir or "the system's folder"
        logger.error("a temporary file in %s cannot be written: %s", folder, exc)
        raise FileStorageError from exc
