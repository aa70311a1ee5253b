"""Names of functions that models call for tools which have names of their own."""

from __future__ import annotations

import re
from hashlib import sha256

MAX_FUNCTIONS = 1024
"""The most functions of one request, those of its tools with several functions included."""
_NAME_LENGTH = 64
"""The most characters of a function's name that models and their templates are known to take."""
_DIGEST_LENGTH = 8


def function_name(name: str, namespace: str | None, kind: str) -> str:
    """Return the name by which a model calls a tool, unless another tool has the same one.

    It has only letters, digits, ``_`` and ``-``, and at most 64 of them.
    """
    joint = "" if (namespace or "").endswith("__") else "__"
    whole = re.sub(r"[^A-Za-z0-9_-]", "_", f"{namespace}{joint}{name}" if namespace else name)
    return whole if len(whole) <= _NAME_LENGTH else distinct_name(whole, name, namespace, kind)


def short_name(name: str) -> str:
    """Return the name by which a model calls a client's function: a long one ends in a digest."""
    return name if len(name) <= _NAME_LENGTH else distinct_name(name, name, None, "function")


def distinct_name(usual: str, name: str, namespace: str | None, kind: str) -> str:
    """Return a name that no other tool has: ``usual``, shortened, and a digest of the tool."""
    identity = "\0".join((kind, namespace or "", name))
    digest = sha256(identity.encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"{usual[: _NAME_LENGTH - _DIGEST_LENGTH - 1]}_{digest}"
