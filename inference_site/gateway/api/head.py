"""Checks the head of a request before its body is received: the caller, and the content type."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

from django.core.handlers.asgi import ASGIRequest
from rest_framework.utils.mediatypes import media_type_matches

from inference_site.accounts.keys import cached_caller, read_secret
from inference_site.core.errors.api_errors import ApiError, UnsupportedMediaError
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.gateway.api.authentication import KeyAuthentication
from inference_site.gateway.head import Head, length_of_body, resolve_cached


def check_head(scope: dict[str, Any]) -> Head:
    """Return the head of a request, without a query.

    Raise AuthenticationError without a key, PayloadTooLargeError, and UnsupportedMediaError.
    """
    headers = {key: value.decode("latin-1") for key, value in scope["headers"]}
    key_headers = headers.get(b"authorization", ""), headers.get(b"x-api-key", "")
    try:
        caller, is_fresh = cached_caller(read_secret(*key_headers))
    except ApiError:
        caller, is_fresh = None, False
    project_id = None if caller is None else caller.project_id
    method, view = scope["method"].lower(), None
    if scope["method"] in ("POST", "PUT", "PATCH"):
        match = resolve_cached(scope["path"].rstrip("/"))
        view = None if match is None else getattr(match.func, "cls", None)
    if view is None or not hasattr(view, method) or not view.authentication_classes:
        return Head(project_id)
    needs_key = KeyAuthentication in view.authentication_classes
    if needs_key:
        read_secret(*key_headers)
    if length_of_body(scope) == 0:
        return Head(project_id)
    if not _has_parser(view, headers.get(b"content-type", "").partition(";")[0]):
        raise UnsupportedMediaError

    def authenticate() -> None:
        """Raise the errors of the view's authentication; it may query the database."""
        bodiless = [(key, value) for key, value in scope["headers"] if key != b"content-length"]
        request = ASGIRequest({**scope, "headers": bodiless}, io.BytesIO())
        with release_connection_after():
            _ = view().initialize_request(request).user

    check = None if needs_key and is_fresh else authenticate
    documented = getattr(getattr(view, method), "documented", None)
    return Head(project_id, True, check, documented is not None and documented.queued)


@lru_cache(256)
def _has_parser(view: Any, content_type: str) -> bool:
    """Return whether a view has a parser for bodies of this type."""
    accepted = (parser.media_type for parser in view.parser_classes)
    return any(media_type_matches(accepts, content_type) for accepts in accepted)
