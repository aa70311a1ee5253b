"""The playground: members of the staff try the models.

Its page asks the views of the API itself, under the admin's session: no key ever reaches the
browser, CSRF protects what it sends, and who logs out is out. A request is accounted to the project
``playground``, to a key named like the user, which no secret opens and which an operator can revoke
and limit like any other.
"""

from __future__ import annotations

from typing import Any

from django.contrib.admin.views.decorators import staff_member_required
from django.contrib.auth.base_user import AbstractBaseUser
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.accounts.keys import Caller, caller_of_key
from inference_site.accounts.models import ApiKey, Project
from inference_site.http.authentication import caller_of
from inference_site.http.errors import ForbiddenError
from inference_site.http.staff import StaffSession
from inference_site.http.views import ApiView
from responses_api.views import ResponsesView
from worker.catalog import catalog
from worker.fleet import capabilities_of, status_of
from worker.interventions import stop
from worker.models import Generation

PROJECT = "playground"

# Name, label, the step of its field, and the most and least it may be.
SAMPLERS = (
    ("temperature", "Temperature", "0.1", "0", "2"),
    ("top_p", "Top p", "0.05", "0", "1"),
    ("top_k", "Top k", "1", "-1", ""),
    ("min_p", "Min p", "0.01", "0", "1"),
    ("presence_penalty", "Presence penalty", "0.1", "-2", "2"),
    ("frequency_penalty", "Frequency penalty", "0.1", "-2", "2"),
    ("seed", "Seed", "1", "", ""),
    ("max_output_tokens", "Most output tokens", "1", "1", ""),
)


def _page(request: HttpRequest) -> HttpResponse:
    """Show the page."""
    chats = [spec for spec in catalog().models.values() if "chat" in capabilities_of(spec)]
    context = {
        "models": sorted(
            ({"id": spec.id, "status": status_of(spec.id).value} for spec in chats),
            key=lambda model: model["status"] != "loaded",
        ),
        "samplers": SAMPLERS,
        "origin": f"{request.scheme}://{request.get_host()}",
    }
    return render(request, "console/playground.html", context)


playground = staff_member_required(_page, login_url="admin:login")


class PlaygroundSession(StaffSession):
    """A member of the staff calls with a key of their own in the project of the playground."""

    def authenticate(self, request: Request) -> tuple[Any, None]:
        """Return the caller. Raise AuthenticationError, or ForbiddenError without such a key."""
        user, _ = super().authenticate(request)
        caller = playground_caller(user)
        if caller is None:
            raise ForbiddenError("Your key of the playground was revoked.", code="key_revoked")
        return caller, None


def playground_caller(user: AbstractBaseUser) -> Caller | None:
    """Return whom this user calls as; None when an operator has revoked that key."""
    # Who stops an answer, or leaves the page, wants it to end at once.
    fields = {"disconnect_grace_s": 0}
    project, _ = Project.objects.get_or_create(name=PROJECT, defaults=fields)
    name = user.get_username()[:100]
    key = ApiKey.objects.filter(project=project, name=name).first()
    if key is None:
        key = ApiKey.objects.create(project=project, name=name)
    return caller_of_key(key.pk)


class PlaygroundResponsesView(ResponsesView):
    """``POST /console/playground/responses``: as ``POST /v1/responses``."""

    authentication_classes = (PlaygroundSession,)
    http_method_names = ["post"]

    def post(self, request: Request) -> HttpResponse:
        """Create a response."""
        return super().post(request)


class PlaygroundStopView(ApiView):
    """``POST /console/playground/responses/{id}/stop``."""

    authentication_classes = (PlaygroundSession,)

    def post(self, request: Request, response_id: str) -> Response:
        """Have an answer stopped, whether it waits or runs."""
        own = Generation.objects.filter(project_id=caller_of(request).project_id)
        return Response({"stopped": stop(get_object_or_404(own, public_id=response_id))})
