"""SiteSettings: one row of settings that operators change while the site runs.

Requests read them, so a process caches them for two seconds.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import django.db
from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import connection, models

from inference_site.core.observability.outages import OutageLog
from inference_site.core.storage.cached_value import CachedValue

logger = logging.getLogger(__name__)

LONGEST_DAYS = 36_500
"""The longest retention: 100 years ago is still a valid date."""
LONGEST_DEBUG_HOURS = 24
BATCH_DAYS = 30
"""How long batches and their files are kept without a setting."""
MAX_USAGE_TAGS = 8
"""Metadata keys by which usage is counted; each adds rows to the accounting of a request."""
LONGEST_TAG = 64
"""Characters of such a key, as OpenAI bounds keys of metadata."""
_TTL_S = 2.0


RetentionKind = Literal[
    "responses_days",
    "conversations_days",
    "completions_days",
    "files_days",
    "batches_days",
    "generations_days",
    "refusals_days",
]
"""The kinds of stored objects, by their field in ``Project``."""


def retention_field(label: str, help_text: str, least: int = 1) -> Any:
    """Return a field for a retention in days; an empty value means another setting decides."""
    bounds = [MinValueValidator(least), MaxValueValidator(LONGEST_DAYS)]
    return models.PositiveIntegerField(
        label, null=True, blank=True, validators=bounds, help_text=help_text
    )


def check_tag(key: str) -> None:
    """Raise ValidationError for a metadata key by which usage cannot be counted."""
    if "=" in key or not key.isprintable():
        raise ValidationError("A key has no equals sign and no control characters.")
    if key == "user_id":
        raise ValidationError("user_id names the end user, whose usage is counted anyway.")


def check_tags(keys: list[str]) -> None:
    """Raise ValidationError if a key is in the list twice."""
    if len(set(keys)) < len(keys):
        raise ValidationError("A key is in the list twice.")


class SiteSettings(models.Model):
    """Settings of all projects. For an empty field, the environment's setting applies."""

    disconnect_grace_s = models.PositiveIntegerField(
        "disconnect grace (s)",
        null=True,
        blank=True,
        validators=[MaxValueValidator(86_400)],
        help_text=(
            "How long a stored response continues after its client has disconnected. Empty: "
            "DISCONNECT_GRACE_S. A project may have its own."
        ),
    )
    responses_days = retention_field("responses (days)", "Empty: for ever.")
    conversations_days = retention_field(
        "conversations (days)", "Counted from their last response. Empty: for ever."
    )
    completions_days = retention_field("chat completions (days)", "Empty: for ever.")
    files_days = retention_field(
        "files (days)", "Also of batches and uploads. Empty: until they expire or are deleted."
    )
    batches_days = retention_field(
        "batches (days)", f"Counted from the end of their window. Empty: {BATCH_DAYS} days."
    )
    usage_log_days = retention_field(
        "generations (days)", "The usage log, without content. Empty: USAGE_LOG_DAYS."
    )
    refusals_days = retention_field(
        "refused requests (days)", "In the request log. Empty: REFUSALS_DAYS."
    )
    debug_content_hours = models.PositiveSmallIntegerField(
        "content of unstored requests (hours)",
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(LONGEST_DEBUG_HOURS)],
        help_text=(
            "For debugging: keeps how prompts and answers begin that clients did not ask to store. "
            "Empty: nothing is kept, and what was kept is deleted within minutes. At most 24."
        ),
    )
    usage_tags = ArrayField(
        models.CharField(max_length=LONGEST_TAG, validators=[check_tag]),
        verbose_name="metadata keys of usage",
        size=MAX_USAGE_TAGS,
        validators=[check_tags],
        default=list,
        db_default=[],
        blank=True,
        help_text=(
            "Keys of requests' metadata, separated by commas, by which usage is counted from now "
            f"on, such as team. At most {MAX_USAGE_TAGS}; usage by end user is always counted."
        ),
    )
    show_content = models.BooleanField(
        "show prompts and answers",
        default=True,
        db_default=True,
        help_text=(
            "Whether the console shows them to users who have the permission. Off: to nobody."
        ),
    )
    updated_at = models.DateTimeField(auto_now=True)
    # No setting: when import_project last stored rows, with times older than their ids.
    imported_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        verbose_name = verbose_name_plural = "site settings"
        constraints = [
            models.CheckConstraint(condition=models.Q(pk=1), name="site_settings_one_row")
        ]

    def __str__(self) -> str:
        return "Settings"


_last = SiteSettings()
_outage = OutageLog(logger, "settings: the last ones hold")


def _read() -> SiteSettings:
    global _last  # noqa: PLW0603  # One value for the process.
    try:
        _last = SiteSettings.objects.first() or SiteSettings()
    except django.db.Error as exc:
        if connection.in_atomic_block:
            raise
        _outage.failed(exc)
    else:
        _outage.succeeded()
    return _last


_recent = CachedValue(_read, _TTL_S)


def site_settings() -> SiteSettings:
    """Return the settings; while the database is unavailable, the last known ones."""
    return _recent.now()


def keep_fresh() -> None:
    """Read the settings on a thread, so that no request waits for them."""
    _recent.keep_fresh()


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


def retention_days(kind: RetentionKind) -> int | None:
    """Return for how many days the site keeps objects of a kind; None means until deleted."""
    stored = site_settings()
    match kind:
        case "generations_days":
            return stored.usage_log_days or settings.USAGE_LOG_DAYS or None
        case "refusals_days":
            return stored.refusals_days or settings.REFUSALS_DAYS or None
        case "batches_days":
            return stored.batches_days or BATCH_DAYS
    days: int | None = getattr(stored, kind)
    return days
