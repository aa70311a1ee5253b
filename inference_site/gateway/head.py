"""What the head of a request decides: whose it is, and whether its body is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.urls import Resolver404, ResolverMatch, resolve

from inference_site.errors.api_errors import InvalidRequestError, PayloadTooLargeError

_LONGEST_REMEMBERED = 100


@dataclass(frozen=True, slots=True)
class Head:
    """Whose request it is, as far as is known without a look into the database.

    A body is taken only if ``takes_body``, and after ``check``, which is for a thread, has not
    raised. The view is called in any case, and checks again who calls. ``is_queued``: a worker is
    to answer, so it may be refused before that when too many wait.
    """

    project_id: int | None = None
    takes_body: bool = False
    check: Callable[[], object] | None = None
    is_queued: bool = False


LookAt = Callable[[dict[str, Any]], Head]
"""Returns the head of a scope, at once. Raises ApiError for what is refused by its head alone."""


def require_no_nul(scope: dict[str, Any]) -> None:
    """Raise InvalidRequestError for a NUL in a URL: no name has one, and PostgreSQL takes none."""
    query = scope["query_string"]
    if "\0" in scope["path"] or b"%00" in query or b"\0" in query:
        raise InvalidRequestError("The URL must not hold a NUL character.")


def length_of_body(scope: dict[str, Any], most: int | None = None) -> int:
    """Return the bytes of a body, or the most that they may be; 0: there is none.

    Raise PayloadTooLargeError, and InvalidRequestError for a length that is no number.
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


def resolved(path: str) -> ResolverMatch | None:
    """Return what a path leads to, for all requests to it; None when it leads nowhere.

    To resolve a path anew takes as long as the rest of a refusal.
    """
    return (_remembered if len(path) <= _LONGEST_REMEMBERED else _resolved)(path)


def _resolved(path: str) -> ResolverMatch | None:
    try:
        return resolve(path)
    except Resolver404:
        return None


_remembered = lru_cache(1024)(_resolved)


def too_large(most: int) -> PayloadTooLargeError:
    """Return the error of a body that is larger than it may be."""
    return PayloadTooLargeError(f"The request body is larger than {most} bytes.")
