"""Whether a prompt ends inside of a reasoning, so that the answer begins there."""

from __future__ import annotations

import re

from worker.engines.chat.parser.channels import CHANNEL, REASONING_CHANNELS
from worker.engines.chat.parser.syntax import Syntax

_TAG = re.compile(r"<[^\s<>]+>|\[/?[A-Z_]{2,}\]")
"""What looks like a tag of any format."""
_MAX_BEGUN = 256
"""Characters of reasoning that a prompt may begin with. More of it is a text *about* reasoning."""
_HARMONY_END = re.compile(r"<\|channel\|>\s*([\w-]+)[^<]*<\|message\|>([^<]*)\Z")
_NAMED_END = re.compile(rf"{re.escape(CHANNEL)}([A-Za-z0-9_-]+)([^<]*)\Z")


def ends_in_reasoning(prompt: str, syntax: Syntax) -> bool:
    """Return whether what follows this prompt is reasoning.

    It is when the last start tag comes after the last end tag, at most 256 characters before the
    end, with nothing after it that looks like a tag.
    """
    match syntax.channels:
        case "harmony":
            return _last_channel(_HARMONY_END, prompt)
        case "named":
            return _last_channel(_NAMED_END, prompt)
    if syntax.reasoning is None:
        return False
    tail = prompt[-_MAX_BEGUN - len(syntax.reasoning.start) :]
    start = tail.rfind(syntax.reasoning.start)
    if start < 0:
        return False
    after = tail[start + len(syntax.reasoning.start) :]
    return syntax.reasoning.end not in after and _TAG.search(after) is None


def _last_channel(pattern: re.Pattern[str], prompt: str) -> bool:
    tail = prompt[-2 * _MAX_BEGUN :]
    found = pattern.search(tail)
    return bool(found and found[1].lower() in REASONING_CHANNELS and len(found[2]) <= _MAX_BEGUN)
