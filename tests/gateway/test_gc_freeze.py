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
from inference_site.core.process_lifecycle import give_large_blocks_back

if {is_set}:
    give_large_blocks_back()
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
