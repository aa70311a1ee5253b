"""Prompts and answers as the admin shows them: a bubble for each message, made of pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import orjson
from django.apps import apps
from django.http import HttpRequest

from inference_site.core.site_settings.current import site_settings

_MAX_CHARACTERS = 20_000
"""Characters of one piece on a page; exports have the full text."""
_MAX_IMAGE_CHARACTERS = 2_000_000
_STRING_OR_LONG_NUMBER = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[-+.0-9eE]{16,}')


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
    """Return the text as a piece; a JSON object or list is indented."""
    indented = _indented(text)
    if indented is not None:
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


def _indented(text: str) -> str | None:
    """Return JSON with indentation; None for other texts and if indenting would alter a number."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        indented = pretty(orjson.loads(text))
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # No JSON, or nested too deep.
        return None
    found = _STRING_OR_LONG_NUMBER.findall(text)
    numbers = (one for one in found if not one.startswith('"'))
    return indented if all(pretty(orjson.loads(one)) == one for one in numbers) else None
