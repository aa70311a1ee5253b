"""``manage.py create_api_key --project NAME --name NAME [--scope …]``: print a new key."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.models import ADDITION
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser

from inference_site.accounts.keys import create_key
from inference_site.accounts.models import ApiKey, Project, Scope, default_scopes
from inference_site.core.admin_pages.base_admin import log_entry_of_command


class Command(BaseCommand):
    """Creates the key, and its project if there is none with this name."""

    help = "Create an API key and print only the key to standard output."
    requires_system_checks: list[str] = []  # They import the whole site.

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--project", default="default", help="name of the project")
        parser.add_argument("--name", required=True, help="what the key is for")
        parser.add_argument(
            "--scope",
            action="append",
            choices=Scope.values,
            help=f"a scope of the key; may be repeated (default: {', '.join(default_scopes())})",
        )

    def handle(self, *_: Any, project: str, name: str, scope: list[str] | None, **__: Any) -> None:
        project, name = project.strip(), name.strip()  # As forms of the console do.
        for what, model, given in (("project", Project, project), ("name", ApiKey, name)):
            try:
                model._meta.get_field("name").clean(given, None)
            except ValidationError as exc:
                raise CommandError(f"--{what}: {exc.messages[0]}") from exc
        owner, is_new = Project.objects.get_or_create(name=project)
        record, secret = create_key(owner, name, scopes=scope or default_scopes())
        for target in (owner, record) if is_new else (record,):
            log_entry_of_command(target, "Made by manage.py create_api_key.", ADDITION)
        if not owner.is_active:
            self.stderr.write(f"The project {project} is inactive, so the key is refused.")
        self.stdout.write(secret)
