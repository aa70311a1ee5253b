"""Prompts and answers as the admin shows them: speech bubbles, indented JSON, shortened texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import orjson
from django.http import HttpRequest

from inference_site.site_settings.current import site_settings

MOST_SHOWN = 20_000
"""The most characters of one text on a page; exports have the full text."""
_MOST_IMAGE = 2_000_000
_PERMISSION = "responses_api.view_content"
_STRING_OR_LONG_NUMBER = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[-+.0-9eE]{16,}')


def may_see_content(request: HttpRequest) -> bool:
    """Return whether this user may see prompts and answers of any endpoint, and anybody may."""
    return request.user.has_perm(_PERMISSION) and site_settings().show_content


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message. ``json`` is indented; an ``image`` is a data URL, never fetched."""

    kind: Literal["text", "json", "image", "note"]
    text: str
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Bubble:
    """One message, reasoning text, tool call or tool result.

    ``name`` is the name of the called tool; ``result`` is its result, None while it is unknown.
    """

    kind: Literal["message", "reasoning", "call", "result", "note"]
    role: str
    pieces: Sequence[Piece] = ()
    name: str = ""
    result: Sequence[Piece] | None = None


def text_piece(text: str) -> Piece:
    """Return the text as a piece; a JSON object or list is indented."""
    indented = _indented(text)
    if indented is not None:
        return Piece("json", indented[:MOST_SHOWN], len(indented) > MOST_SHOWN)
    return Piece("text", text[:MOST_SHOWN], len(text) > MOST_SHOWN)


def image_piece(address: str) -> Piece:
    """Return an image of the request: a data URL as an image, another address as a note."""
    if address.startswith("data:image/") and len(address) < _MOST_IMAGE:
        return Piece("image", address)
    return Piece("note", f"Image: {address[:200]}")


def pretty(value: object) -> str:
    """Return the value as indented JSON."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


def _indented(text: str) -> str | None:
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        indented = pretty(orjson.loads(text))
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # No JSON, or nested too deep.
        return None
    return indented if _keeps_numbers(text) else None


def _keeps_numbers(text: str) -> bool:
    """Return whether every number in this JSON survives decoding and encoding unchanged."""
    found = _STRING_OR_LONG_NUMBER.findall(text)
    return all(one.startswith('"') or pretty(orjson.loads(one)) == one for one in found)
