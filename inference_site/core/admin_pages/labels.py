"""Values as text, for lists and pages of the admin; some are also template filters."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

from django import template
from django.conf import settings
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

register = template.Library()

PREVIEW_LENGTH = 90
"""Characters of a prompt or answer in a list."""
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def status_label(status: str) -> SafeString:
    """Return a status as a coloured badge."""
    return format_html('<span class="status status-{}">{}</span>', status, status.replace("_", " "))


def time_label(moment: dt.datetime | None) -> SafeString:
    """Return a time in UTC, to the second; a dash for None."""
    text = "—" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"
    return format_html('<span class="nowrap">{}</span>', text)


def preview(text: str | None) -> str:
    """Return the beginning of a text as one line; a dash for an empty text."""
    line = " ".join((text or "").split())
    return f"{line[:PREVIEW_LENGTH]}…" if len(line) > PREVIEW_LENGTH else line or "—"


@register.filter
def milliseconds(value: float | None) -> str:
    """Return ``850 ms`` or ``1.25 s`` for milliseconds, in three digits; a dash for None."""
    if value is None:
        return "—"
    if round(value) < 1000:
        return f"{value:.0f} ms"
    digits = 2 if value < 9_995 else 1 if value < 99_950 else 0
    return f"{value / 1000:,.{digits}f} s"


@register.filter
def size(count: int) -> str:
    """Return a number of bytes in MiB or GiB; a dash for 0."""
    if not count:
        return "—"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


@register.filter
def free_memory(device: Any) -> str:
    """Return the free and the total memory of a device in GiB; a dash for None."""
    if device is None:
        return "—"
    return f"{device.memory_free / 2**30:.1f} of {device.memory_total / 2**30:.1f} GiB"


@register.filter
def money(amount: Decimal | float) -> str:
    """Return an amount in the site's currency: two decimals, or two digits below one cent."""
    value = float(amount)
    digits = f"{value:.2g}" if 0 < abs(value) < 0.01 else f"{value:,.2f}"
    shown = f"{Decimal(digits):f}" if "e" in digits else digits
    return f"{shown} {settings.CURRENCY}"


@register.filter
def duration(seconds: float) -> str:
    """Return seconds in the two largest units, such as ``8 s`` or ``2 h 5 min``."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
        elif parts:
            break
    return " ".join(parts[:2])


@register.filter
def time_since(moment: dt.datetime | None) -> str:
    """Return how long ago a time was, in the form of ``duration``; a dash for None."""
    return "—" if moment is None else duration((timezone.now() - moment).total_seconds())
