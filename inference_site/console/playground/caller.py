"""Who asks on the playground: a member of the staff, as their own key in its project.

The page calls the API's own views with the admin's session. No key reaches the browser, and CSRF
tokens protect its requests. Requests are accounted to the playground's project and to the user's
own key in it. That key has no secret; operators can revoke and limit it.
"""

from __future__ import annotations

from itertools import chain, count
from typing import Any

from rest_framework.request import Request

from inference_site.accounts.keys import Caller, caller_of_key
from inference_site.accounts.models import ApiKey, Project
from inference_site.api.authentication import StaffSession
from inference_site.errors.api_errors import ForbiddenError

_NAME = "playground"


class PlaygroundSession(StaffSession):
    """Authenticates a staff user as their own key in the playground's project."""

    def authenticate(self, request: Request) -> tuple[Any, None]:
        """Return the caller.

        Raise AuthenticationError without a session, ForbiddenError if the key was revoked.
        """
        user, _ = super().authenticate(request)
        caller = playground_caller(user)
        if caller is None:
            raise ForbiddenError("Your playground key was revoked.", code="key_revoked")
        return caller, None


def playground_caller(user: Any) -> Caller | None:
    """Return the caller for this user's playground key, None if an operator revoked it."""
    fields = {"project": _project, "name": user.get_username()[:100]}
    key, _ = ApiKey.objects.get_or_create(user=user, defaults=fields)
    return caller_of_key(key.pk)


def _project() -> Project:
    # No grace: an answer ends at once when its user stops it or leaves the page.
    fields = {"name": _free_name, "disconnect_grace_s": 0}
    return Project.objects.get_or_create(is_playground=True, defaults=fields)[0]


def _free_name() -> str:
    """Return a project name that is not taken."""
    names = chain([_NAME], (f"{_NAME}-{number}" for number in count(2)))
    return next(name for name in names if not Project.objects.filter(name=name).exists())
