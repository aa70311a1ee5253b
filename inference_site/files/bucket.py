"""A bucket of S3 as the storage of files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

from botocore.config import Config  # type: ignore[import-untyped]  # It has no types.
from storages.backends.s3 import S3Storage  # type: ignore[import-untyped]  # As above.

_CONNECT_S, _ANSWER_S, _TRIES = 5.0, 15.0, 2
"""By default boto3 waits for a server that does not answer for five minutes, and so do the threads
of as many requests."""


class BucketStorage(S3Storage):  # type: ignore[misc]  # As above.
    """django-storages' storage, which reads ranges, and whose waits for the server have limits.

    A file that is opened in the usual way is downloaded as a whole before its first byte is read.
    """

    client_config: Any

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        limits = Config(
            connect_timeout=_CONNECT_S,
            read_timeout=_ANSWER_S,
            retries={"total_max_attempts": _TRIES, "mode": "standard"},
        )
        self.client_config = self.client_config.merge(limits)

    def read_range(self, name: str, start: int, end: int, chunk: int) -> Iterator[bytes]:
        """Yield the bytes from ``start`` to before ``end``, which the object has; one request."""
        found = self.open(name).obj.get(Range=f"bytes={start}-{end - 1}")
        with closing(found["Body"]) as body:
            yield from body.iter_chunks(chunk)
