"""Values as text, and prompts and answers as bubbles, for lists and pages of the admin.

Some of the functions are also template filters. A bubble shows one message and is made of pieces.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

import orjson
from django import template
from django.apps import apps
from django.conf import settings
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe

from inference_site.core.site_settings.models import site_settings

register = template.Library()

PREVIEW_LENGTH = 90
"""Characters of a prompt or answer in a list."""
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
_MAX_CHARACTERS = 20_000
"""Characters of one piece on a page; exports have the full text."""
_MAX_IMAGE_CHARACTERS = 2_000_000
_STRING_OR_LONG_NUMBER = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[-+.0-9eE]{16,}')


def status_label(status: str, reason: str = "") -> SafeString:
    """Return a status as a coloured badge, with its reason as a tooltip."""
    title = format_html(' title="{}"', reason) if reason else ""
    text = status.replace("_", " ")
    return format_html('<span class="status status-{}"{}>{}</span>', status, title, text)


@register.filter
def time_label(moment: dt.datetime | None, zone: str = "") -> SafeString:
    """Return a time in UTC, to the second, followed by ``zone``; a dash for None.

    The console's script ``times.js`` shows it in the zone of the browser, if the reader wants that.
    """
    if moment is None:
        return mark_safe("—")  # A constant.
    return format_html(
        '<time class="nowrap" datetime="{}"{}>{}</time>',
        f"{moment:%Y-%m-%dT%H:%M:%SZ}",
        " data-zone" if zone else "",
        f"{moment:%Y-%m-%d %H:%M:%S} {zone}".rstrip(),
    )


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
    """Return a number of bytes in bytes, KiB, MiB or GiB; a dash for 0."""
    if count >= 2**20:
        return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
    if count >= 2**10:
        return f"{count / 2**10:.1f} KiB"
    return f"{count} byte{'s' if count > 1 else ''}" if count else "—"


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


def may_see_content(request: HttpRequest) -> bool:
    """Return whether the user has the permission to see prompts and answers, and the site shows
    them at all.

    The app that declares the permission names it in ``content_permission`` of its ``AppConfig``.
    """
    named = [getattr(config, "content_permission", "") for config in apps.get_app_configs()]
    return request.user.has_perms(filter(None, named)) and site_settings().show_content


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message. A ``json`` text is indented; an ``image`` is a data URL."""

    kind: Literal["text", "json", "image", "note"]
    text: str
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Bubble:
    """One message, reasoning text, compaction, tool call or tool result.

    ``name`` is the name of the called tool, or what a note or a compaction says. ``result`` is the
    result of a call, None while it is unknown.
    """

    kind: Literal["message", "reasoning", "compaction", "call", "result", "note"]
    role: str
    pieces: Sequence[Piece] = ()
    name: str = ""
    result: Sequence[Piece] | None = None


def text_piece(text: str) -> Piece:
    """Return the text as a piece; JSON is indented, unless that would alter a number."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            indented = pretty(orjson.loads(text))
        except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # No JSON, or nested too deep.
            pass
        else:
            found = _STRING_OR_LONG_NUMBER.findall(text)
            numbers = (one for one in found if not one.startswith('"'))
            if all(pretty(orjson.loads(one)) == one for one in numbers):
                return Piece("json", indented[:_MAX_CHARACTERS], len(indented) > _MAX_CHARACTERS)
    return Piece("text", text[:_MAX_CHARACTERS], len(text) > _MAX_CHARACTERS)


def image_piece(address: str) -> Piece:
    """Return a data URL as an image. Other addresses become a note: a page fetches no images."""
    if address.startswith("data:image/") and len(address) < _MAX_IMAGE_CHARACTERS:
        return Piece("image", address)
    return Piece("note", f"Image: {address[:200]}")


def pretty(value: object) -> str:
    """Return the value as indented JSON."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
