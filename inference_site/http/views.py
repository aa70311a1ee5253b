"""What the views of the API have in common."""

from __future__ import annotations

from rest_framework.views import APIView


class ApiView(APIView):
    """A view of the API: short, synchronous, JSON in and out, for holders of a key."""

    @property
    def default_response_headers(self) -> dict[str, str]:
        """None: DRF would name the allowed methods on every answer, streams included."""
        return {}


class OpenView(ApiView):
    """A view that needs no key."""

    authentication_classes = ()
    permission_classes = ()
