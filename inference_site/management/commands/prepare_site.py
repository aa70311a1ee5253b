"""``manage.py prepare_site``: migrate, and on the first run make a project, a key and an admin.

Prints one JSON object: the secrets that were made now, if any. ``manage.py serve`` runs it.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand

from inference_site.accounts.keys import create_key
from inference_site.accounts.models import ApiKey, Project, Scope
from inference_site.supervisor.stack import write_private

_FIRST_SCOPES = [Scope.INFERENCE, Scope.USAGE, Scope.DEBUG, Scope.MODELS]


class Command(BaseCommand):
    """Safe to repeat: what exists is left alone."""

    help = "Migrate the database and make what the first run needs; print it as JSON."

    def handle(self, *_: Any, **__: Any) -> None:
        call_command("migrate", verbosity=0, interactive=False)
        self.stdout.write(json.dumps({"admin_password": _first_admin(), "api_key": _first_key()}))


def _first_admin() -> str | None:
    """Make the user ``admin`` if there are no users; return the password."""
    users = get_user_model()
    if users.objects.exists():
        return None
    password = secrets.token_urlsafe(12)
    users.objects.create_superuser(username="admin", email="", password=password)
    return password


def _first_key() -> str | None:
    """Make a key if there are none; keep it in ``DATA_DIR/api_key`` and return it."""
    if ApiKey.objects.exists():
        return None
    project, _created = Project.objects.get_or_create(name="default")
    _record, secret = create_key(project, "first key", scopes=_FIRST_SCOPES)
    write_private(settings.DATA_DIR / "api_key", secret)
    return secret
