"""Content as the admin shows it: who said what, JSON laid out, long texts cut."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import orjson
from django.http import HttpRequest

MOST_SHOWN = 20_000
"""Characters of one text that a page shows; exports have all of them."""
_MOST_IMAGE = 2_000_000
_PERMISSION = "responses_api.view_content"
_STRING_OR_LONG_NUMBER = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[-+.0-9eE]{16,}')


def may_see_content(request: HttpRequest) -> bool:
    """Whether this user may see prompts and answers, of any endpoint."""
    return request.user.has_perm(_PERMISSION)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message. ``json`` is laid out; an ``image`` is the data itself, never fetched."""

    kind: Literal["text", "json", "image", "note"]
    text: str
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Bubble:
    """One thing said, thought, called or answered.

    ``name`` is that of a called tool; ``result`` what it answered, None while that is not known.
    """

    kind: Literal["message", "reasoning", "call", "result", "note"]
    role: str
    pieces: Sequence[Piece] = ()
    name: str = ""
    result: Sequence[Piece] | None = None


def text_piece(text: str) -> Piece:
    """Return a text; one that is a JSON object or list is laid out."""
    laid_out = _laid_out(text)
    if laid_out is not None:
        return Piece("json", laid_out[:MOST_SHOWN], len(laid_out) > MOST_SHOWN)
    return Piece("text", text[:MOST_SHOWN], len(text) > MOST_SHOWN)


def image_piece(address: str) -> Piece:
    """Return an image that came with the request; of one that lies elsewhere only its address."""
    if address.startswith("data:image/") and len(address) < _MOST_IMAGE:
        return Piece("image", address)
    return Piece("note", f"Image: {address[:200]}")


def pretty(value: object) -> str:
    """Return JSON with line breaks."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


def _laid_out(text: str) -> str | None:
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        laid_out = pretty(orjson.loads(text))
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # No JSON, or nested too deep.
        return None
    return laid_out if _keeps_numbers(text) else None


def _keeps_numbers(text: str) -> bool:
    """Whether no number of this JSON has more digits than are kept when it is read."""
    found = _STRING_OR_LONG_NUMBER.findall(text)
    return all(one.startswith('"') or pretty(orjson.loads(one)) == one for one in found)
