"""What a page may load and run, where the settings' content security policy is too tight."""

from __future__ import annotations

from typing import Any

from csp.constants import UNSAFE_EVAL, UNSAFE_INLINE
from csp.middleware import CSPMiddleware, PolicyParts
from django.http import HttpRequest
from django.http.response import HttpResponseBase

_LOOSER: dict[str, dict[str, list[str]]] = {
    # Alpine, which the theme is built on, evaluates expressions of attributes; htmx and the theme
    # write styles into the page. Scripts in the page stay forbidden.
    "/admin/": {"script-src": [UNSAFE_EVAL], "style-src": [UNSAFE_INLINE]},
    "/docs": {"style-src": [UNSAFE_INLINE]},
}


class ContentPolicy(CSPMiddleware):
    """Sends the policy; some parts of the site need a looser one."""

    def get_policy_parts(
        self, request: HttpRequest, response: HttpResponseBase, report_only: bool = False
    ) -> PolicyParts:
        """Return what the header is made of."""
        parts = super().get_policy_parts(request, response, report_only)
        parts.update = {**(parts.update or {}), **_added(request.path)}
        return parts


def _added(path: str) -> dict[str, Any]:
    found = (added for prefix, added in _LOOSER.items() if path.startswith(prefix))
    return next(found, {})
