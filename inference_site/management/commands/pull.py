"""``manage.py pull owner/name:Q4_K_M``: fetch a model from a Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from inference_site.catalogue.catalogue import id_of
from inference_site.catalogue.hub import HubError, Reference, fetch


class Command(BaseCommand):
    """Continues an interrupted download. The hub reads ``HF_ENDPOINT`` and ``HF_TOKEN``."""

    help = "Fetch a model into MODELS_DIR, resume an interrupted download, and check the file."
    requires_system_checks: list[str] = []  # They import the whole site.

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("reference", help="owner/name:Q4_K_M, or owner/name/file")
        parser.add_argument("--revision", default="main", help="branch, tag or commit")

    def handle(self, *_: Any, reference: str, revision: str, **__: Any) -> None:
        path = pulled(reference, revision)
        name = path.relative_to(settings.MODELS_DIR).as_posix()
        self.stdout.write(f"{path}\nIts id is {id_of(path)}; in a models file: file: hf:{name}")


def pulled(reference: str, revision: str = "main") -> Path:
    """Fetch a model with a progress bar; return its file. Raise CommandError."""
    from tqdm import tqdm

    bar: tqdm[NoReturn] | None = None

    def show_progress(have: int, size: int) -> None:
        nonlocal bar
        if bar is None:  # Not before the hub answers.
            bar = tqdm(unit="B", unit_scale=True, desc=reference)
        bar.total = size
        bar.update(have - bar.n)

    try:
        return fetch(Reference.read(reference), Path(settings.MODELS_DIR), revision, show_progress)
    except HubError as exc:
        raise CommandError(str(exc)) from exc
    finally:
        if bar is not None:
            bar.close()
