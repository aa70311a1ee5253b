"""Text of clients as the log and traces may have it: without secrets, and on one line."""

from __future__ import annotations

import re

_HIDDEN = "[redacted]"
_SECRET = re.compile(
    # The token of a link with which somebody sets a password (people/urls.py).
    r"(?P<link>/(?:reset|invitation)/[^/\s]+/)[^/\s?&\"']+"
    # A parameter of a query whose name says that it is a secret; also a code of single sign-on.
    r"|(?P<parameter>(?i:[?&;](?:[a-z0-9_.-]*(?:key|token|secret|password|passwd|signature)"
    r"|code|auth|authorization|state|session_state|sig)=))[^&;\s\"']+"
    # What follows the name of a scheme of HTTP authentication.
    r"|(?P<scheme>\b(?i:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}"
    # An API key, wherever it is. What the console shows of a key is shorter.
    r"|(?P<key>\bsk-)[A-Za-z0-9_-]{16,}"
)


def redacted(text: str) -> str:
    """Return the text without the secrets that URLs and headers of requests may hold."""
    return _SECRET.sub(lambda found: (found[found.lastgroup or 0]) + _HIDDEN, text)


def one_line(text: str) -> str:
    """Return the text with every character escaped that is not printable.

    A line break would forge a line, and a terminal that shows the log acts on escape sequences.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
