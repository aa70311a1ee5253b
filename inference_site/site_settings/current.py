"""The settings as they are now, at most two seconds old: requests ask for them."""

from __future__ import annotations

import logging
import threading
import time

import django.db
from django.conf import settings
from django.db import connection

from inference_site.site_settings.models import SiteSettings

logger = logging.getLogger(__name__)

_FRESH_S = 2.0
_lock = threading.Lock()
_known = SiteSettings()
_read_at = float("-inf")


def site_settings() -> SiteSettings:
    """Return the settings; those known before while the database cannot be asked."""
    global _known, _read_at  # noqa: PLW0603  # One copy for the process.
    is_first = _read_at == float("-inf")
    if time.monotonic() - _read_at < _FRESH_S or not _lock.acquire(blocking=is_first):
        return _known
    try:
        _known = SiteSettings.objects.first() or SiteSettings()
    except django.db.Error as exc:
        if connection.in_atomic_block:
            raise
        logger.warning("settings: cannot be read, the last ones hold: %s", exc)
    finally:
        _read_at = time.monotonic()
        _lock.release()
    return _known


def forget() -> None:
    """Read the settings anew when they are asked for next."""
    global _read_at  # noqa: PLW0603  # As above.
    _read_at = float("-inf")


def disconnect_grace_s(own: int | None) -> int:
    """Return for how long a stored response outlives its client; ``own`` is its project's."""
    if own is not None:
        return own
    changed = site_settings().disconnect_grace_s
    return settings.DISCONNECT_GRACE_S if changed is None else changed


def usage_log_days() -> int:
    """Return for how many days generations are kept; 0 is for ever."""
    return site_settings().usage_log_days or settings.USAGE_LOG_DAYS
