"""The head of an API request, read once: its route, its sender, and whether its body is read.

The relay decides by it before it reads the body, and puts it into the ASGI scope. The view takes
the route and the caller from there instead of finding them again.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.core.handlers.asgi import ASGIRequest
from django.urls import Resolver404, ResolverMatch, resolve
from django.utils.http import parse_header_parameters
from rest_framework.utils.mediatypes import media_type_matches

from inference_site.accounts.keys import Caller, cached_caller, read_secret
from inference_site.core.errors.api_errors import (
    ApiError,
    InvalidRequestError,
    PayloadTooLargeError,
    UnsupportedMediaError,
)
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.gateway.api.authentication import KeyAuthentication

SCOPE_KEY = "inference_site.head"
_LONGEST_CACHED = 100
_FORM_EXPECTED = "The request body must be a form: send 'Content-Type: multipart/form-data'."
_COMPRESSIONS = frozenset({"gzip", "x-gzip", "deflate", "br", "zstd", "compress"})
_COMPRESSED = "The request body must not be compressed: send it without a 'Content-Encoding'."


@dataclass(slots=True)
class Head:
    """The facts in a request's head, read without the database.

    ``project_id`` is known before the sender when a key was valid a moment ago. The body is read
    only if ``takes_body``, and only of an authenticated ``user``: see ``authenticate``. It may have
    ``largest_body`` bytes, and goes to a temporary file if ``spools_body``.
    """

    project_id: int | None = None
    takes_body: bool = False
    largest_body: int = 0
    spools_body: bool = False
    route: ResolverMatch | None = None
    user: Any = None

    def note_user(self, user: Any) -> None:
        """Keep the sender that a view has authenticated: a ``Caller``, or a user of the console."""
        self.user = user
        if isinstance(user, Caller):
            self.project_id = user.project_id

    def authenticate(self, scope: dict[str, Any]) -> None:
        """Authenticate as the view would, which may query the database. Raise its errors."""
        bodiless = [(key, value) for key, value in scope["headers"] if key != b"content-length"]
        request = ASGIRequest({**scope, "headers": bodiless}, io.BytesIO())
        assert self.route is not None
        with release_connection_after():
            self.note_user(self.route.func.cls().initialize_request(request).user)  # type: ignore[attr-defined]  # Set by Django.


def read_head(scope: dict[str, Any]) -> Head:
    """Return the head of a request to the API, without a query.

    Raise InvalidRequestError for a malformed URL or length, AuthenticationError without a key,
    PayloadTooLargeError, and UnsupportedMediaError.
    """
    require_no_nul(scope)
    headers = {key: value.decode("latin-1") for key, value in scope["headers"]}
    media_type(headers.get(b"content-type", ""))
    key_headers = headers.get(b"authorization", ""), headers.get(b"x-api-key", "")
    try:
        caller, is_fresh = cached_caller(read_secret(*key_headers))
    except ApiError:
        caller, is_fresh = None, False
    head = Head(None if caller is None else caller.project_id)
    head.route = resolve_cached(scope["path"].rstrip("/"))
    view = None if head.route is None else getattr(head.route.func, "cls", None)
    if view is None or not view.authentication_classes:
        return head
    needs_key = KeyAuthentication in view.authentication_classes
    if needs_key and is_fresh:
        head.note_user(caller)
    method = scope["method"]
    if method not in ("POST", "PUT", "PATCH") or not hasattr(view, method.lower()):
        return head
    if needs_key:
        read_secret(*key_headers)
    head.spools_body = getattr(view, "spools_body", False)
    head.largest_body = settings.MAX_FILE_BYTES if head.spools_body else settings.MAX_BODY_BYTES
    head.takes_body = length_of_body(scope, head.largest_body) > 0
    content_type = headers.get(b"content-type", "").partition(";")[0]
    if head.takes_body and not _has_parser(view, content_type):
        takes_json = _has_parser(view, "application/json")
        raise UnsupportedMediaError(None if takes_json else _FORM_EXPECTED)
    codings = headers.get(b"content-encoding", "").lower().split(",")
    if head.takes_body and any(coding.strip() in _COMPRESSIONS for coding in codings):
        raise UnsupportedMediaError(_COMPRESSED)
    return head


@lru_cache(256)
def _has_parser(view: Any, content_type: str) -> bool:
    """Return whether a view has a parser for bodies of this type."""
    accepted = (parser.media_type for parser in view.parser_classes)
    return any(media_type_matches(accepts, content_type) for accepts in accepted)


def require_no_nul(scope: dict[str, Any]) -> None:
    """Raise InvalidRequestError for a NUL in the URL, which PostgreSQL does not accept."""
    query = scope["query_string"]
    if "\0" in scope["path"] or b"%00" in query or b"\0" in query:
        raise InvalidRequestError("The URL must not hold a NUL character.")


def media_type(header: str) -> tuple[str, dict[str, str]]:
    """Return a content type and its parameters, all names in lower case, as Django reads them.

    Raise InvalidRequestError for one that Django cannot read (RFC 2231): it fails there.
    """
    try:
        return parse_header_parameters(header)
    except ValueError as exc:
        raise InvalidRequestError("The header 'Content-Type' cannot be read.") from exc


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
        raise InvalidRequestError("The header 'Content-Length' is no number of bytes.")
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
