"""``manage.py worker --models a,b``: serve models on this host."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from inference_site.celery import app
from worker.catalog import catalog
from worker.engines.base import EngineLoadError, ModelSpec
from worker.process import run_worker


class Command(BaseCommand):
    """Loads the models, then runs their generations until stopped."""

    help = "Serve models on this host: load them, then run generations until stopped."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--models", help="ids separated by commas (default: all)")
        parser.add_argument("--loglevel", default="INFO")
        parser.add_argument("--parent", default="", help=argparse.SUPPRESS)

    def handle(self, *_: Any, models: str | None, loglevel: str, parent: str, **__: Any) -> None:
        try:
            status = run_worker(app, _specs(models), loglevel, parent)
        except EngineLoadError as exc:
            raise CommandError(str(exc)) from exc
        sys.exit(status)


def _specs(models: str | None) -> list[ModelSpec]:
    """Return the wanted entries of the catalogue. Raise CommandError for an unknown id."""
    known = catalog()
    if models is None:
        return list(known.models.values())
    specs = []
    for name in models.split(","):
        spec = known.find(name)
        if spec is None:
            raise CommandError(f"Unknown model {name!r}; there are {', '.join(known.models)}.")
        specs.append(spec)
    return specs
