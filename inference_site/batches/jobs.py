"""The jobs of beat for batches, which cost almost nothing while there are none.

The modules that work on a batch import the whole handling of requests, so they are imported when
the first batch is there.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from django.db.models import QuerySet

from inference_site.batches.models import Batch
from inference_site.core.storage.postgresql import cached_sql

if TYPE_CHECKING:
    from inference_site.batches.feeding import Feeder

_LOOK_S = 0.5
_looked_at, _has_open = 0.0, False
_lock = threading.Lock()
_known: Feeder | None = None


def feed() -> None:
    """Put the lines of batches into the queue."""
    if has_open_batches():
        _feeder().feed()


def prepare() -> None:
    """Validate new batches, and write the results of ended ones."""
    if has_open_batches():
        _feeder().prepare()


def has_open_batches() -> bool:
    """Whether a batch has not ended; looks twice a second while there is none."""
    global _looked_at, _has_open  # noqa: PLW0603  # One value for the process.
    if _has_open or time.monotonic() - _looked_at >= _LOOK_S:
        _looked_at = time.monotonic()
        _has_open = bool(_one_open_batch())
    return _has_open


@cached_sql
def _one_open_batch() -> QuerySet[Any, Any]:
    return Batch.objects.open().values_list("pk")[:1]


def _feeder() -> Feeder:
    global _known  # noqa: PLW0603  # One for the process.
    with _lock:  # The jobs have a thread each.
        if _known is None:
            from inference_site.batches.feeding import Feeder

            _known = Feeder()
        return _known
