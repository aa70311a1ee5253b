"""The current site settings, cached for two seconds, because requests read them."""

from __future__ import annotations

import logging

import django.db
from django.conf import settings
from django.db import connection

from inference_site.core.site_settings.models import SiteSettings
from inference_site.core.storage.cached_value import CachedValue

logger = logging.getLogger(__name__)

_TTL_S = 2.0
_last = SiteSettings()


def _read() -> SiteSettings:
    global _last  # noqa: PLW0603  # One value for the process.
    try:
        _last = SiteSettings.objects.first() or SiteSettings()
    except django.db.Error as exc:
        if connection.in_atomic_block:
            raise
        logger.warning("settings: cannot be read, the last ones hold: %s", exc)
    return _last


_recent = CachedValue(_read, _TTL_S)


def site_settings() -> SiteSettings:
    """Return the settings; while the database is unavailable, the last known ones."""
    return _recent.now()


def forget() -> None:
    """Read the settings from the database at the next use."""
    _recent.forget()


def disconnect_grace_s(own: int | None) -> int:
    """Return for how long a stored response continues without its client.

    ``own`` is the setting of its project, which takes precedence.
    """
    if own is not None:
        return own
    site_s = site_settings().disconnect_grace_s
    return settings.DISCONNECT_GRACE_S if site_s is None else site_s


def usage_log_days() -> int:
    """Return for how many days generations are kept; 0 means forever."""
    return site_settings().usage_log_days or settings.USAGE_LOG_DAYS
