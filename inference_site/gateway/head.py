"""What the gateway decides by the head of a request: who sends it, and whether to read its body."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.urls import Resolver404, ResolverMatch, resolve

from inference_site.core.errors.api_errors import InvalidRequestError, PayloadTooLargeError

_LONGEST_CACHED = 100


@dataclass(frozen=True, slots=True)
class Head:
    """What the head says, without asking the database.

    The body is read only if ``takes_body``, and after ``check`` has not raised; ``check`` blocks,
    so it runs on a thread. The view is called in any case and authenticates again. ``is_queued``:
    a worker will answer, so the request may be refused early when the queue is full.
    """

    project_id: int | None = None
    takes_body: bool = False
    check: Callable[[], object] | None = None
    is_queued: bool = False


ReadHead = Callable[[dict[str, Any]], Head]
"""Returns the head of an ASGI scope without blocking. Raises ApiError to refuse the request."""


def require_no_nul(scope: dict[str, Any]) -> None:
    """Raise InvalidRequestError for a NUL in the URL, which PostgreSQL does not accept."""
    query = scope["query_string"]
    if "\0" in scope["path"] or b"%00" in query or b"\0" in query:
        raise InvalidRequestError("The URL must not hold a NUL character.")


def length_of_body(scope: dict[str, Any], most: int | None = None) -> int:
    """Return the length of the body in bytes, ``most`` if it is sent in chunks, 0 without a body.

    ``most`` is ``MAX_BODY_BYTES`` unless given. Raise PayloadTooLargeError for a longer body, and
    InvalidRequestError for a length that is not a number.
    """
    most = int(settings.MAX_BODY_BYTES) if most is None else most
    headers = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        return most
    given = headers.get(b"content-length", b"0")
    if not given.isdigit() or len(given) > 18:
        raise InvalidRequestError("The header 'Content-Length' is no length.")
    if int(given) > most:
        raise too_large(most)
    return int(given)


def too_large(most: int) -> PayloadTooLargeError:
    """Return the error for a body of more than ``most`` bytes."""
    return PayloadTooLargeError(f"The request body is larger than {most} bytes.")


def resolve_cached(path: str) -> ResolverMatch | None:
    """Return the URL match of a path; None if there is none. The match is shared: do not change it.

    Short paths are cached: resolving one takes as long as the rest of a refusal.
    """
    return (_resolve_short if len(path) <= _LONGEST_CACHED else _resolve)(path)


def _resolve(path: str) -> ResolverMatch | None:
    try:
        return resolve(path)
    except Resolver404:
        return None


_resolve_short = lru_cache(1024)(_resolve)
