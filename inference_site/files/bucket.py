"""A bucket of S3 as the storage of files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from storages.backends.s3 import S3Storage  # type: ignore[import-untyped]  # It has no types.


class BucketStorage(S3Storage):  # type: ignore[misc]  # As above.
    """django-storages' storage, which reads ranges.

    A file that is opened in the usual way is downloaded as a whole before its first byte is read.
    """

    def read_range(self, name: str, start: int, end: int, chunk: int) -> Iterator[bytes]:
        """Yield the bytes from ``start`` to before ``end``, which the object has; one request."""
        found = self.open(name).obj.get(Range=f"bytes={start}-{end - 1}")
        with closing(found["Body"]) as body:
            yield from body.iter_chunks(chunk)
