"""What is there at the start of a process is not looked at again, and large blocks go back."""

from __future__ import annotations

import gc
import subprocess
import sys

import psutil
import pytest

from inference_site.core.process_lifecycle import collect_rarely, freeze_imported_objects


def test_what_is_there_is_exempt_and_what_comes_later_is_not() -> None:
    before, usual = ["there"], gc.get_threshold()
    freeze_imported_objects(sender=None)
    try:
        later = ["later"]
        assert gc.get_freeze_count() > 10_000
        assert not any(found is before for found in gc.get_objects())
        assert any(found is later for found in gc.get_objects())
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def test_garbage_is_collected_very_rarely_only_until_then() -> None:
    usual = gc.get_threshold()
    collect_rarely()
    at_start = gc.get_threshold()[0]
    try:
        freeze_imported_objects()
        assert 700 < gc.get_threshold()[0] < at_start / 10
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


FREED = """
import psutil
from inference_site.core.process_lifecycle import give_memory_back

if {is_set}:
    give_memory_back()
process, mib = psutil.Process(), 2**20
block = bytes(16 * mib)
del block
before = process.memory_info().rss
blocks = [(b"x" * mib, b"x" * 65_536) for _ in range(100)]
small = [each for _, each in blocks]
del blocks
print((process.memory_info().rss - before) // mib)
"""


@pytest.mark.skipif(not psutil.LINUX, reason="only glibc has these thresholds")
@pytest.mark.parametrize(("is_set", "least", "most"), [(True, 0, 30), (False, 80, 200)])
def test_large_blocks_between_small_ones_are_given_back_when_they_are_freed(
    is_set: bool, least: int, most: int
) -> None:
    code = FREED.format(is_set=is_set)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert least <= int(done.stdout) <= most


ARENAS = """
import ctypes, threading
from inference_site.core.process_lifecycle import give_memory_back

if {is_set}:
    give_memory_back()
blocks, together = [], threading.Barrier(6)

def allocate():
    together.wait()
    blocks.append(bytes(4096))
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.skipif(not psutil.LINUX, reason="only glibc has arenas")
@pytest.mark.parametrize(("is_set", "least", "most"), [(True, 1, 2), (False, 3, 100)])
def test_threads_share_two_arenas(is_set: bool, least: int, most: int) -> None:
    code = ARENAS.format(is_set=is_set)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert least <= done.stdout.count("<heap nr=") <= most
