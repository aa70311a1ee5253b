"""The heap of a process that serves: what it is made of at its start stays for good."""

from __future__ import annotations

import gc
from typing import Any

_USUAL = gc.get_threshold()
_RARE, _SERVING = 500_000, 10_000


def collect_rarely() -> None:
    """Look for garbage after 500,000 new objects; to be called before anything is imported.

    Imports make objects that stay. With Python's usual thresholds their collections are a sixth of
    the start of a process, and find a few hundred objects.
    """
    gc.set_threshold(_RARE, *_USUAL[1:])


def freeze_imported_objects(**_: Any) -> None:
    """Exempt all that there is now from garbage collection; to be called once all is imported.

    Libraries are some 160,000 objects. A full collection looks at each of them, and while it does,
    for a tenth of a second, no thread of the process runs: each stream stands still. From then on
    there is a look at the latest after 10,000 new objects, where Python's usual is 700: requests
    leave next to no garbage, and a large body is 60,000 objects, which the looks would find alive.
    Takes the arguments of a Celery signal.
    """
    gc.freeze()
    gc.set_threshold(_SERVING, *_USUAL[1:])
