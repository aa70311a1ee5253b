"""``manage.py forget --user X [--project P]``: delete everything that is stored of an end user."""

from __future__ import annotations

from collections import Counter
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from inference_site.accounts.models import Project
from inference_site.core.admin_pages.base_admin import log_entry_of_command
from inference_site.gateway.idempotency.models import forget_answers
from inference_site.runs.kinds import forgettings, namings
from inference_site.runs.models import Generation
from inference_site.runs.streams.request_documents import drop_documents

_BATCH = 500


class Command(BaseCommand):
    """Deletes by end user, and reports what was deleted."""

    help = "Delete everything that is stored of an end user, and report what was deleted."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--user",
            required=True,
            help="as clients send it: user, safety_identifier or metadata.user_id",
        )
        parser.add_argument("--project", help="only in the project with this name")

    def handle(self, *_: Any, user: str, project: str | None, **__: Any) -> None:
        if not user:
            raise CommandError("--user must not be empty.")
        try:
            user.encode()
        except UnicodeEncodeError as exc:  # Of a terminal with another encoding.
            raise CommandError("--user is not valid UTF-8.") from exc
        target: Project | str = "All projects"
        project_id: int | None = None
        if project is not None:
            found = Project.objects.filter(name=project).first()
            if found is None:
                raise CommandError(f"There is no project {project}.")
            target, project_id = found, found.pk
        # Without the name, which is to be forgotten.
        log_entry_of_command(target, "manage.py forget deleted what was stored of an end user.")
        rows = Generation.objects.filter(end_user=user)
        theirs = rows if project_id is None else rows.filter(project=project_id)
        ended = theirs.filter(finished_at__isnull=False).order_by("pk")
        gone: Counter[str] = Counter({"generations": 0})
        for naming in namings():
            named = list(naming.results_naming(user, project_id))
            for start in range(0, len(named), _BATCH):
                gone.update(_forget(user, project_id, named[start : start + _BATCH]))
        while True:
            batch = dict(ended.values_list("pk", "public_id")[:_BATCH])
            gone.update(_forget(user, project_id, list(batch.values())))
            # The name is removed from the rows last: the next run continues an interrupted one.
            gone["generations"] += Generation.objects.filter(pk__in=batch).update(end_user="")
            if len(batch) < _BATCH:
                break
        for name, count in gone.items():
            self.stdout.write(f"{count} {name}")
        if count := theirs.filter(finished_at=None).count():
            raise CommandError(f"{count} generations of this user have not ended: run it again.")


def _forget(user: str, project_id: int | None, generation_ids: list[str]) -> Counter[str]:
    """Delete what is stored of these generations; return how many objects of each kind."""
    drop_documents(generation_ids)
    forget_answers(generation_ids)
    gone: Counter[str] = Counter()
    for module in forgettings():
        gone.update(module.forget(user, project_id, generation_ids))
    return gone
