"""``manage.py models``: list the catalogue; ``manage.py models check FILE``: look at a file."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis.exceptions
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from inference_site.catalogue.catalogue import Catalogue, catalogue
from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.catalogue.fleet.fleet import context_of
from inference_site.catalogue.gguf_files import CHAT_TEMPLATE
from inference_site.catalogue.memory import ModelMemory, fitting_sizes
from inference_site.catalogue.model_files import model_file_error, quantisation_of
from inference_site.catalogue.model_store.entries import refresh_catalogue
from inference_site.catalogue.models_file import entry_lines, read_models_and_routes
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.host import memory_bytes

_MODELS_FILES = (".yaml", ".yml")
_HEADER = ("model", "engine", "slots", "context", "needs", "file")


class Command(BaseCommand):
    """Lists the models with the memory they need, or checks a models file or a GGUF file."""

    help = "List the models, or check a models file, or a GGUF file and the memory that it needs."
    requires_system_checks: list[str] = []  # They import the whole site.

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("action", nargs="?", choices=["check"])
        parser.add_argument("file", nargs="?", type=Path, help="models.yaml, or a GGUF file")
        for name, of in (("slots", ""), ("context-length", "tokens a slot ")):
            parser.add_argument(f"--{name}", type=_at_least_one, help=f"{of}(default: as served)")

    def handle(
        self,
        *_: Any,
        action: str | None,
        file: Path | None,
        slots: int | None,
        context_length: int | None,
        **__: Any,
    ) -> None:
        try:
            if action is None:
                refresh_catalogue()
                known, contexts = catalogue(), dict[str, int]()
                try:  # As GET /v1/models says them.
                    contexts = {spec.id: context_of(spec) for spec in known.models.values()}
                except redis.exceptions.RedisError as exc:
                    self.stderr.write(f"Redis cannot be asked what the workers serve: {exc}")
                self._list(known, contexts)
            elif file is None:
                raise CommandError("Which file? manage.py models check models.yaml")
            elif file.suffix in _MODELS_FILES:
                self._check_models_file(file)
            else:
                self._check(file, slots, context_length)
        except ImproperlyConfigured as exc:
            raise CommandError(str(exc)) from exc

    def _check_models_file(self, path: Path) -> None:
        specs, routes = read_models_and_routes(path)
        known = Catalogue(specs, routes=routes)
        self._list(known, {})
        lines = entry_lines(path)
        faults = [
            f"{path}:{lines.get(spec.id, 1)}: models.{spec.id}: {fault}."
            for spec in known.models.values()
            if (fault := model_file_error(spec))
        ]
        if faults:
            raise CommandError("\n".join(faults))
        self.stdout.write(f"{path} is good.")

    def _list(self, known: Catalogue, contexts: Mapping[str, int]) -> None:
        models = known.models.values()
        rows = [
            _HEADER,
            *(_row(spec, contexts.get(spec.id, spec.context_length)) for spec in models),
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.stdout.write("  ".join(cells).rstrip())
        for route in known.routes.values():
            self.stdout.write(f"{route.id}: a route to {', '.join(s.id for s in route.specs)}")
        self.stdout.write(f"\n{_gib(memory_bytes()[1])} of memory is free.")

    def _check(self, file: Path, slots: int | None, context_length: int | None) -> None:
        slots, context = fitting_sizes(file, slots, context_length, {})
        spec = ModelSpec(file.stem, "llama_cpp", file, slots=slots, context_length=context)
        if fault := model_file_error(spec):
            raise CommandError(f"{fault}.")
        try:
            model = ModelMemory(spec, file)
            needs, free = model.needs, memory_bytes()[1]
        except (OSError, ValueError) as exc:
            raise CommandError(f"{file}: {exc}") from exc
        says = model.metadata.get
        architecture = says("general.architecture", "unknown")
        kind = says("general.type", "mmproj" if architecture == "clip" else "model")
        has_template = CHAT_TEMPLATE in model.metadata
        self.stdout.write(
            f"name           {says('general.name', file.stem)}\n"
            f"type           {kind}\n"
            f"architecture   {architecture}\n"
            f"quantisation   {quantisation_of(says('general.file_type'))}\n"
            f"context        {model.number('context_length'):,} tokens, as trained\n"
            f"chat template  {'yes' if has_template else 'no: chats need one from models.yaml'}\n"
            f"memory         {_gib(needs.total)} for {slots} slots of {context:,} tokens\n"
            f"               {needs}\n"
            f"free           {_gib(free)}"
        )
        if needs.total > free:
            raise CommandError(
                "That is more than is free: take fewer slots or a shorter context, or a smaller "
                "quantisation."
            )


def _at_least_one(text: str) -> int:
    try:
        number = int(text)
    except ValueError as exc:
        raise ArgumentTypeError(f"{text!r} is not a whole number") from exc
    if number < 1:
        raise ArgumentTypeError(f"{number} is less than 1")
    return number


def _row(spec: ModelSpec, context_length: int) -> tuple[str, ...]:
    needs = "—"
    if spec.file is not None:
        try:
            needs = _gib(ModelMemory(spec, spec.file).needs.total)
        except FileNotFoundError:
            needs = "missing"
        except (OSError, ValueError):
            needs = "unknown"
    file = "—" if spec.file is None else str(spec.file)
    has_chat = "" if "chat" in model_capabilities(spec) else " (no chat)"
    return (
        spec.id + has_chat,
        spec.engine,
        str(spec.slots),
        f"{context_length:,}",
        needs,
        file,
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"
