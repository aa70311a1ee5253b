"""What is there at the start of a process is not looked at again."""

from __future__ import annotations

import gc

from inference_site.gc_freeze import collect_rarely, freeze_imported_objects


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
