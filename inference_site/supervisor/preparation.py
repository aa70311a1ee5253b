"""Migrates a site's database and, on the first run, creates a project, a key and an admin."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.db import connections

from inference_site import environment
from inference_site.accounts.keys import create_key
from inference_site.accounts.models import ApiKey, Project, Scope
from inference_site.supervisor.stack import write_private

_FIRST_SCOPES = [Scope.INFERENCE, Scope.USAGE, Scope.DEBUG]
"""It goes into apps, so it must not take models from the others: no ``models:write``."""

_CONNECT_S = 30
"""A request is refused sooner; a site does not give up its start because its host is busy."""


@dataclass(frozen=True, slots=True)
class FirstSecrets:
    """The secrets that this run created, if any; they are shown once."""

    admin_password: str | None
    api_key: str | None


def prepare_site(database_url: str, data_dir: Path) -> FirstSecrets:
    """Migrate the database at this address, and create what the first run needs.

    Safe to repeat: existing objects are not changed.
    """
    # The settings were read before the database had an address; nothing has connected yet.
    default = connections.settings["default"]
    found = environment.database(database_url)
    default.update(found, OPTIONS={**default["OPTIONS"], **found.get("OPTIONS", {})})
    default["OPTIONS"].pop("pool")  # A single connection is enough here.
    default["OPTIONS"]["connect_timeout"] = _CONNECT_S
    try:
        call_command("migrate", verbosity=0, interactive=False)
        return FirstSecrets(_first_admin(), _first_key(data_dir))
    finally:
        connections.close_all()


def _first_admin() -> str | None:
    """Create the user ``admin`` if there are no users; return its password."""
    users = get_user_model()
    if users.objects.exists():
        return None
    password = secrets.token_urlsafe(12)
    users.objects.create_superuser(username="admin", email="", password=password)
    return password


def _first_key(data_dir: Path) -> str | None:
    """Create a key if there are none; write it to ``DATA_DIR/api_key`` and return it."""
    if ApiKey.objects.exists():
        return None
    project, _created = Project.objects.get_or_create(name="default")
    _record, secret = create_key(project, "first key", scopes=_FIRST_SCOPES)
    write_private(data_dir / "api_key", secret)
    return secret
