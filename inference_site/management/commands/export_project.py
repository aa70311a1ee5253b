"""``manage.py export_project PROJECT FOLDER``: write what is stored of a project."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from inference_site.accounts.models import Project
from inference_site.core.admin_pages.base_admin import log_entry_of_command
from inference_site.core.errors.api_errors import FileStorageError
from inference_site.core.transfer import (
    FILES_FOLDER,
    LINES_FILE,
    VERSION,
    ExportEnd,
    ExportStart,
    transfers,
)


class Command(BaseCommand):
    """Exports what is stored of a project, in a folder."""

    help = "Write the stored objects of a project to a folder, which import_project reads."
    requires_system_checks: list[str] = []  # They import the whole site.

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("project", help="the name of the project")
        parser.add_argument("folder", type=Path, help="a folder that is empty or does not exist")

    def handle(self, *_: Any, project: str, folder: Path, **__: Any) -> None:
        found = Project.objects.filter(name=project).first()
        if found is None:
            raise CommandError(f"There is no project {project}.")
        try:
            is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
        except OSError as exc:
            raise CommandError(f"The export cannot be written: {exc}") from exc
        if not is_free:
            raise CommandError(f"{folder} is not an empty folder.")
        counts: Counter[str] = Counter()
        start = ExportStart(version=VERSION, project=found.name, exported_at=timezone.now())
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / FILES_FOLDER).mkdir(mode=0o700)
            log_entry_of_command(found, "Exported by manage.py export_project.")
            with (folder / LINES_FILE).open("w", encoding="utf-8") as lines:
                lines.write(start.model_dump_json() + "\n")
                for module in transfers():
                    for line in module.export_lines(found.pk, folder):
                        lines.write(line.model_dump_json() + "\n")
                        counts[line.kind] += 1
                lines.write(ExportEnd(counts=counts).model_dump_json() + "\n")
        except FileStorageError as exc:
            raise CommandError(f"The content of a file cannot be read: {exc.__cause__}") from exc
        except OSError as exc:
            raise CommandError(f"The export cannot be written: {exc}") from exc
        for kind, count in counts.items():
            self.stdout.write(f"{count} × {kind}")
