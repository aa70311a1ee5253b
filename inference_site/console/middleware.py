"""Middleware of the pages: time for long statements, and the content security policy by path."""

from __future__ import annotations

from collections.abc import Callable

from csp.constants import UNSAFE_EVAL, UNSAFE_INLINE
from csp.middleware import CSPMiddleware, PolicyParts
from django.conf import settings
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from inference_site.core.storage.postgresql import statement_timeout

GetResponse = Callable[[HttpRequest], HttpResponseBase]

_POLICY_ADDITIONS: dict[str, dict[str, list[str]]] = {
    # The theme uses Alpine, which evaluates expressions in attributes; htmx and the theme write
    # inline styles. Inline scripts stay forbidden.
    "/admin/": {"script-src": [UNSAFE_EVAL], "style-src": [UNSAFE_INLINE]},
    "/docs": {"style-src": [UNSAFE_INLINE]},
}


def long_statements(get_response: GetResponse) -> GetResponse:
    """Give the SQL statements of a page ``DATABASE_LONG_TIMEOUT_S``."""

    def respond(request: HttpRequest) -> HttpResponseBase:
        with statement_timeout(settings.DATABASE_LONG_TIMEOUT_S):
            return get_response(request)

    return respond


class ContentPolicy(CSPMiddleware):
    """Sends the policy of the settings, with the additions for the path of the request."""

    def get_policy_parts(
        self, request: HttpRequest, response: HttpResponseBase, report_only: bool = False
    ) -> PolicyParts:
        """Return the parts of the policy header."""
        parts = super().get_policy_parts(request, response, report_only)
        for prefix, additions in _POLICY_ADDITIONS.items():
            if request.path.startswith(prefix):
                parts.update = {**(parts.update or {}), **additions}
        return parts
