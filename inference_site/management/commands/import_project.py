"""``manage.py import_project PROJECT FOLDER``: store what ``export_project`` has written."""

from __future__ import annotations

import fcntl
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from django.contrib.admin.models import ADDITION
from django.core.exceptions import ValidationError as InvalidName
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DataError, IntegrityError, connection
from django.utils import timezone
from pydantic import ValidationError

from inference_site.accounts.models import Project
from inference_site.core.admin_pages.base_admin import log_entry_of_command
from inference_site.core.errors.api_errors import FileStorageError
from inference_site.core.site_settings.models import SiteSettings
from inference_site.core.storage.fields import replace_nul
from inference_site.core.transfer import (
    FILES_FOLDER,
    LINES_FILE,
    VERSION,
    ExportEnd,
    ExportStart,
    Line,
    ObjectLine,
    Refused,
    Transfer,
    transfers,
)

_LONGEST_LINE = 256 * 2**20
_BATCH, _BATCH_BYTES = 200, 8 * 2**20
"""Most objects of a batch, and the bytes of their lines after which it ends."""
Numbered = tuple[int, int, Line]
"""The number of a line, its bytes and what it has."""


class Command(BaseCommand):
    """Imports objects with their ids. Running it again imports what is missing."""

    help = "Store the objects of an export in a project. Objects that it has already are skipped."
    requires_system_checks: list[str] = []  # They import the whole site.

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("project", help="the name of the project")
        parser.add_argument("folder", type=Path, help="what export_project has written")
        parser.add_argument("--create", action="store_true", help="create the project")

    def handle(self, *_: Any, project: str, folder: Path, create: bool, **__: Any) -> None:
        with _one_import(folder):
            self._import(project, folder, create)

    def _import(self, project: str, folder: Path, create: bool) -> None:
        modules = {kind: module for module in transfers() for kind in module.LINES}
        try:
            total = _check(folder, modules)
        except OSError as exc:
            raise CommandError(f"{exc.filename} cannot be read: {exc.strerror}") from exc
        found = Project.objects.filter(name=project).first()
        if found is None and create:
            name = project.strip()  # As create_api_key and forms of the console do.
            try:
                Project._meta.get_field("name").clean(name, None)
            except InvalidName as exc:
                raise CommandError(f"The name of the project: {exc.messages[0]}") from exc
            found, is_new = Project.objects.get_or_create(name=name)
            if is_new:
                log_entry_of_command(found, "Made by manage.py import_project.", ADDITION)
        if found is None:
            raise CommandError(f"There is no project {project}; --create creates it.")
        log_entry_of_command(found, "Imported by manage.py import_project.")
        new: Counter[str] = Counter()
        with _no_kept_statements():
            for batch in _batches(_lines(folder, modules)):
                kind = batch[0][2].kind
                if kind in modules:
                    imported_at = {"imported_at": timezone.now()}
                    SiteSettings.objects.update_or_create(pk=1, defaults=imported_at)
                    new[kind] += _store(modules[kind], found.pk, kind, batch, folder)
        for kind, count in total.items():
            known = count - new[kind]
            self.stdout.write(f"{new[kind]} × {kind}" + (f", {known} known already" * bool(known)))


@contextmanager
def _one_import(folder: Path) -> Iterator[None]:
    """Raise CommandError while another process imports this folder.

    To each of two, the file that the other one is storing would be left of an interrupted import.
    """
    try:
        lines = (folder / LINES_FILE).open("rb")
    except OSError as exc:
        raise CommandError(f"{exc.filename} cannot be read: {exc.strerror}") from exc
    with lines:
        try:
            fcntl.flock(lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise CommandError(f"Another import of {folder} runs.") from exc
        except OSError:  # The file system has no locks.
            pass
        yield


@contextmanager
def _no_kept_statements() -> Iterator[None]:
    """Have psycopg not keep the texts of the last hundred statements, with the values in them."""
    connection.ensure_connection()
    threshold = connection.connection.prepare_threshold
    connection.connection.prepare_threshold = None
    try:
        yield
    finally:
        connection.connection.prepare_threshold = threshold


def _check(folder: Path, modules: dict[str, Transfer]) -> dict[str, int]:
    """Check all lines, and that each content is there; return the number of objects by kind.

    Raise CommandError that names the first line at fault.
    """
    counts: Counter[str] = Counter()
    number, line = 0, Line(kind="")
    for number, _, line in _lines(folder, modules):
        is_first, is_start = number == 1, isinstance(line, ExportStart)
        if is_first != is_start:
            raise CommandError(f"Line {number}: an export has one start, in its first line.")
        if isinstance(line, ExportStart) and line.version != VERSION:
            raise CommandError(
                f"Line 1: this is version {line.version} of the format; this site reads {VERSION}."
            )
        if isinstance(line, ObjectLine):
            counts[line.kind] += 1
            if line.kind == "file":
                path = folder / FILES_FOLDER / line.id
                if not path.is_file() or path.stat().st_size != getattr(line, "bytes", None):
                    raise CommandError(f"Line {number}: {path} is missing or has another size.")
        if isinstance(line, ExportEnd) and line.counts != counts:
            raise CommandError(f"Line {number}: lines before it are missing.")
    if not isinstance(line, ExportEnd):
        raise CommandError(f"Line {number + 1} is missing: the export was not written to its end.")
    return line.counts


def _lines(folder: Path, modules: dict[str, Transfer]) -> Iterator[Numbered]:
    """Yield the lines. Raise CommandError for one that is not valid."""
    path = folder / LINES_FILE
    models: dict[str, type[Line]] = {"export": ExportStart, "end": ExportEnd}
    for module in modules.values():
        models |= module.LINES
    with path.open("rb") as lines:
        number = 0
        while text := lines.readline(_LONGEST_LINE + 1):
            number += 1
            if len(text) > _LONGEST_LINE:
                raise CommandError(f"Line {number} has more than {_LONGEST_LINE} bytes.")
            if not text.endswith(b"\n"):
                raise CommandError(f"Line {number} is cut off.")
            yield number, len(text), _parsed(number, text, models)


def _parsed(number: int, text: bytes, models: dict[str, type[Line]]) -> Line:
    try:
        # Of what a later release may add, the kind is read first.
        kind = _KindOnly.model_validate_json(text).kind
        if kind not in models:
            raise CommandError(f"Line {number}: this site does not know the kind '{kind[:100]}'.")
        if b"\\u0000" in text and replace_nul(given := orjson.loads(text)) != given:
            raise CommandError(f"Line {number} is not valid: it has the character NUL.")
        return models[kind].model_validate_json(text)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        reason = f"'{where}': {first['msg']}" if where else first["msg"]
        raise CommandError(f"Line {number} is not valid: {reason}.") from exc


class _KindOnly(Line):
    """Any line."""

    model_config = {"extra": "ignore"}


def _batches(lines: Iterator[Numbered]) -> Iterator[list[Numbered]]:
    """Yield lines of one kind that stand together, few and short enough for a transaction."""
    batch: list[Numbered] = []
    size = 0
    for numbered in lines:
        is_full = len(batch) >= _BATCH or size >= _BATCH_BYTES
        if batch and (is_full or batch[0][2].kind != numbered[2].kind):
            yield batch
            batch, size = [], 0
        batch.append(numbered)
        size += numbered[1]
    if batch:
        yield batch


def _store(
    module: Transfer, project_id: int, kind: str, batch: list[Numbered], folder: Path
) -> int:
    """Store a batch; return how many objects were new. Raise CommandError."""
    objects = [line for _, _, line in batch if isinstance(line, ObjectLine)]
    first = batch[0][0]
    before = f"What stands before line {first} is stored; run it again once the cause is gone."
    try:
        return module.import_lines(project_id, kind, objects, folder)
    except Refused as exc:
        number = first + [line.id for line in objects].index(exc.public_id)
        raise CommandError(f"Line {number}: {exc}. {before}") from exc
    except IntegrityError as exc:
        last = batch[-1][0]
        raise CommandError(f"Lines {first} to {last} contradict what is stored: {exc}") from exc
    except (DataError, OverflowError) as exc:
        raise CommandError(
            f"Lines {first} to {batch[-1][0]} have a value that cannot be stored: {exc}. {before}"
        ) from exc
    except FileStorageError as exc:
        raise CommandError(f"A file cannot be stored: {exc.__cause__}. {before}") from exc
