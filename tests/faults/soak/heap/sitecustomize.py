"""Write what the heap of a web, worker or beat process holds, at each ``SIGUSR2``.

Python imports this module at its start when the folder is on ``PYTHONPATH``. The census is JSON in
``HEAP_OUT``, in a file named by the id of the process. With ``HEAP_TRACE``, a number of frames,
``tracemalloc`` notes where memory was allocated; the process is then several times slower.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import tracemalloc
from collections import Counter, deque
from functools import _lru_cache_wrapper
from pathlib import Path
from typing import Any

_OUT = os.environ.get("HEAP_OUT", "")
_FRAMES = int(os.environ.get("HEAP_TRACE") or 0)
_ROLES = {"web", "worker", "beat"}
_LARGE, _MOST = 300, 60
"""Containers of fewer entries are not listed by themselves, and of the others only the largest."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def census() -> dict[str, Any]:
    """Return counts of live objects by type, sizes of caches and large containers, and memory."""
    gc.unfreeze()  # What was frozen at the start may hold containers that grow.
    collected = gc.collect()
    memory = _memory()  # Before the lists of this census take some.
    found = _reached(gc.get_objects())
    types: Counter[str] = Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in found)
    caches, large = {}, []
    for each in found:
        kind = type(each)  # Not `isinstance`: Django's lazy objects would import what they are for.
        if kind is _lru_cache_wrapper:
            caches[f"{each.__module__}.{each.__qualname__}"] = each.cache_info().currsize
        elif issubclass(kind, dict | list | set | deque) and len(each) >= _LARGE:
            large.append(each)
    large = sorted(large, key=len)[-_MOST:]
    containers = {
        f"{type(each).__name__} {id(each):x}": (len(each), _holder(each, [found, large]))
        for each in large
    }
    return {
        "collected": collected,
        "types": types,
        "caches": caches,
        "containers": containers,
        "memory": memory,
        "traces": _traces(),
    }


def _reached(tracked: list[Any]) -> list[Any]:
    """Return these objects and all that they refer to.

    The garbage collector knows neither texts and numbers nor a dict that holds only such.
    """
    found, known, level = [], set(), tracked
    while level:
        fresh = []
        for each in level:
            if id(each) not in known:
                known.add(id(each))
                fresh.append(each)
        found += fresh
        level = gc.get_referents(*fresh)
    return found


def _holder(container: Any, own: list[list[Any]]) -> str:
    """Name what refers to a container, for people."""
    names = []
    for holder in gc.get_referrers(container):
        if any(holder is each for each in own) or type(holder).__name__ == "frame":
            continue
        name = f"{type(holder).__module__}.{type(holder).__qualname__}"
        if isinstance(holder, dict):
            keys = [str(key) for key, value in holder.items() if value is container]
            name = f"{holder.get('__name__', 'dict')}[{','.join(keys)[:60]}]"
        names.append(name)
    sample = next(iter(container), None)
    return f"{', '.join(names[:3])} e.g. {repr(sample)[:80]}"


def _memory() -> dict[str, int]:
    """Return bytes: resident, used and free in the C heap; and blocks of Python's allocator."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    memory = {"resident": resident, "python blocks": sys.getallocatedblocks()}
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # Another C library.
        return memory
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    memory |= {"C heap used": info.uordblks, "C heap free": info.fordblks, "mapped": info.hblkhd}
    return memory


def _traces() -> list[tuple[int, int, list[str]]]:
    if not tracemalloc.is_tracing():
        return []
    snapshot = tracemalloc.take_snapshot().filter_traces(
        (tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, __file__))
    )
    statistics = snapshot.statistics("traceback")
    return [(each.size, each.count, each.traceback.format()) for each in statistics[:3000]]


def _write(*_: Any) -> None:
    path = Path(_OUT) / str(os.getpid())
    path.with_suffix(".part").write_text(json.dumps(census()))
    path.with_suffix(".part").rename(path)


if _OUT and _ROLES & set(sys.orig_argv):
    if _FRAMES:
        tracemalloc.start(_FRAMES)
    signal.signal(signal.SIGUSR2, _write)
