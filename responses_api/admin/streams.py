"""What a page of the admin follows: the events of a response that runs."""

from __future__ import annotations

from django.http import HttpResponse
from rest_framework.request import Request

from inference_site.api.authentication import HasPermission, StaffSession
from inference_site.api.views import ApiView
from inference_site.errors.api_errors import ForbiddenError, NotFoundError
from inference_site.site_settings.current import site_settings
from responses_api.models import StoredResponse
from responses_api.views.responses import stream


class WatchView(ApiView):
    """``GET /console/responses/{id}/events``: the same events that the client gets."""

    authentication_classes = (StaffSession,)
    permission_classes = (HasPermission,)
    permissions = ("responses_api.view_storedresponse", "responses_api.view_content")

    def get(self, request: Request, response_id: str) -> HttpResponse:
        """Send all events from the beginning, and go on live; leaving stops nothing."""
        if not site_settings().show_content:
            raise ForbiddenError("Prompts and answers are shown to nobody.", code="content_hidden")
        rows = StoredResponse.objects.select_related("previous", "conversation")
        stored = rows.filter(public_id=response_id).first()
        if stored is None:
            raise NotFoundError
        return stream(request, stored, after=-1, grace_s=0)
