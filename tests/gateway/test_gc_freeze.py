"""What is there at the start of a process is not looked at again."""

from __future__ import annotations

import gc

from inference_site.gc_freeze import freeze_imported_objects


def test_what_is_there_is_exempt_and_what_comes_later_is_not() -> None:
    before = ["there"]
    freeze_imported_objects(sender=None)
    try:
        later = ["later"]
        assert gc.get_freeze_count() > 10_000
        assert not any(found is before for found in gc.get_objects())
        assert any(found is later for found in gc.get_objects())
    finally:
        gc.unfreeze()
