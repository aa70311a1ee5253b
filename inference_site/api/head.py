"""Looks at the head of a request: whose it is, and whether its body is worth receiving."""

from __future__ import annotations

import io
from functools import lru_cache, partial
from typing import Any

from django.core.handlers.asgi import ASGIRequest
from rest_framework.utils.mediatypes import media_type_matches

from inference_site.accounts.keys import given_secret, known_caller
from inference_site.api.authentication import KeyAuthentication
from inference_site.errors.api_errors import ApiError, UnsupportedMediaError
from inference_site.gateway.head import Head, length_of_body, resolved
from inference_site.storage.postgresql import release_connection_after

_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


def look_at(scope: dict[str, Any]) -> Head:
    """Return the head of a request.

    Raise AuthenticationError without a key, PayloadTooLargeError, and UnsupportedMediaError.
    """
    headers = {key: value.decode("latin-1") for key, value in scope["headers"]}
    caller, is_fresh = _known(headers)
    project_id = None if caller is None else caller.project_id
    view = _view(scope) if scope["method"] in _WITH_BODY else None
    method = scope["method"].lower()
    if view is None or not hasattr(view, method) or not view.authentication_classes:
        return Head(project_id)
    has_key = KeyAuthentication in view.authentication_classes
    if has_key:
        given_secret(headers.get(b"authorization", ""), headers.get(b"x-api-key", ""))
    if length_of_body(scope) == 0:
        return Head(project_id)
    if not _takes(view, headers.get(b"content-type", "").partition(";")[0]):
        raise UnsupportedMediaError
    is_known = has_key and is_fresh
    check = None if is_known else partial(_authenticate, scope, view)
    documented = getattr(getattr(view, method), "documented", None)
    return Head(project_id, True, check, documented is not None and documented.queued)


def _known(headers: dict[bytes, str]) -> tuple[Any, bool]:
    try:
        secret = given_secret(headers.get(b"authorization", ""), headers.get(b"x-api-key", ""))
    except ApiError:
        return None, False
    return known_caller(secret)


def _view(scope: dict[str, Any]) -> Any:
    """Return the class of the view; None when there is none."""
    match = resolved(scope["path"].rstrip("/"))
    return None if match is None else getattr(match.func, "cls", None)


@lru_cache(256)
def _takes(view: Any, content_type: str) -> bool:
    """Return whether a view has a parser for bodies of this type."""
    accepted = (parser.media_type for parser in view.parser_classes)
    return any(media_type_matches(accepts, content_type) for accepts in accepted)


def _authenticate(scope: dict[str, Any], view: Any) -> None:
    """Raise what the view would raise of who calls."""
    headers = [(key, value) for key, value in scope["headers"] if key != b"content-length"]
    bare = ASGIRequest({**scope, "headers": headers}, io.BytesIO())
    with release_connection_after():
        _ = view().initialize_request(bare).user
