"""What the views of the API have in common."""

from __future__ import annotations

from typing import ClassVar

from rest_framework.views import APIView

from inference_site.accounts.models import Scope


class ApiView(APIView):
    """A view of the API: short, synchronous, JSON in and out, for holders of a key."""

    scope: ClassVar[Scope] = Scope.INFERENCE
    """What the key must open."""

    @property
    def default_response_headers(self) -> dict[str, str]:
        """None: DRF would name the allowed methods on every answer, streams included."""
        return {}


class OpenView(ApiView):
    """A view that needs no key."""

    authentication_classes = ()
    permission_classes = ()
