"""The settings as they are now, at most two seconds old: requests ask for them."""

from __future__ import annotations

import logging

import django.db
from django.conf import settings
from django.db import connection

from inference_site.site_settings.models import SiteSettings
from inference_site.storage.cached_value import CachedValue

logger = logging.getLogger(__name__)

_FRESH_S = 2.0
_last = SiteSettings()


def _read() -> SiteSettings:
    global _last  # noqa: PLW0603  # One copy for the process.
    try:
        _last = SiteSettings.objects.first() or SiteSettings()
    except django.db.Error as exc:
        if connection.in_atomic_block:
            raise
        logger.warning("settings: cannot be read, the last ones hold: %s", exc)
    return _last


_recent = CachedValue(_read, _FRESH_S)


def site_settings() -> SiteSettings:
    """Return the settings; those known before while the database cannot be asked."""
    return _recent.now()


def forget() -> None:
    """Read the settings anew when they are asked for next."""
    _recent.forget()


def disconnect_grace_s(own: int | None) -> int:
    """Return for how long a stored response outlives its client; ``own`` is its project's."""
    if own is not None:
        return own
    changed = site_settings().disconnect_grace_s
    return settings.DISCONNECT_GRACE_S if changed is None else changed


def usage_log_days() -> int:
    """Return for how many days generations are kept; 0 is for ever."""
    return site_settings().usage_log_days or settings.USAGE_LOG_DAYS
