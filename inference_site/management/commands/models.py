"""``manage.py models``: list the catalogue; ``manage.py models check FILE``: look at a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from inference_site.catalogue.catalogue import Catalogue, catalogue
from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.catalogue.entry import LLAMA_CPP_SLOTS, context_of
from inference_site.catalogue.gguf_file import read_gguf
from inference_site.catalogue.memory import needs_of
from inference_site.catalogue.model_files import fault_of
from inference_site.catalogue.models_file import entry_lines, read_models_file
from inference_site.domain.model_spec import ModelSpec
from inference_site.model_store.watching import look

_MODELS_FILES = (".yaml", ".yml")
_HEADER = ("model", "engine", "slots", "context", "needs", "file")


class Command(BaseCommand):
    """Lists the models with the memory they need, or checks a models file or a GGUF file."""

    help = "List the models, or check a models file, or a GGUF file and the memory that it needs."
    requires_system_checks: list[str] = []  # They import the whole site.

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("action", nargs="?", choices=["check"])
        parser.add_argument("file", nargs="?", type=Path, help="models.yaml, or a GGUF file")
        parser.add_argument("--slots", type=int, default=LLAMA_CPP_SLOTS)
        parser.add_argument("--context-length", type=int, help="tokens a slot (default: as served)")

    def handle(
        self,
        *_: Any,
        action: str | None,
        file: Path | None,
        slots: int,
        context_length: int | None,
        **__: Any,
    ) -> None:
        try:
            if action is None:
                look()
                self._list(catalogue())
            elif file is None:
                raise CommandError("Which file? manage.py models check models.yaml")
            elif file.suffix in _MODELS_FILES:
                self._check_models_file(file)
            else:
                self._check(file, slots, context_length)
        except ImproperlyConfigured as exc:
            raise CommandError(str(exc)) from exc

    def _check_models_file(self, path: Path) -> None:
        known = Catalogue(read_models_file(path))
        self._list(known)
        lines = entry_lines(path)
        faults = [
            f"{path}:{lines[spec.id]}: models.{spec.id}: {fault}."
            for spec in known.models.values()
            if (fault := fault_of(spec))
        ]
        if faults:
            raise CommandError("\n".join(faults))
        self.stdout.write(f"{path} is good.")

    def _list(self, known: Catalogue) -> None:
        rows = [_HEADER, *(_row(spec) for spec in known.models.values())]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.stdout.write("  ".join(cells).rstrip())
        self.stdout.write(f"\n{_gib(free_memory_bytes())} of memory is free.")

    def _check(self, file: Path, slots: int, context_length: int | None) -> None:
        try:
            info = read_gguf(file)
        except (OSError, ValueError, KeyError, IndexError) as exc:
            raise CommandError(f"{file}: {exc}") from exc
        context = context_length or context_of(info.context_length)
        spec = ModelSpec(file.stem, "llama_cpp", file, slots=slots, context_length=context)
        needs, free = needs_of(spec, file), free_memory_bytes()
        template = "yes" if info.has_chat_template else "no: chats need one from models.yaml"
        self.stdout.write(
            f"name           {info.name}\n"
            f"type           {info.type}\n"
            f"architecture   {info.architecture}\n"
            f"quantisation   {info.quantisation}\n"
            f"context        {info.context_length:,} tokens, as trained\n"
            f"chat template  {template}\n"
            f"memory         {_gib(needs.total)} for {slots} slots of {context:,} tokens\n"
            f"               {needs}\n"
            f"free           {_gib(free)}"
        )
        if needs.total > free:
            raise CommandError(
                "That is more than is free: take fewer slots or a shorter context, or a smaller "
                "quantisation."
            )


def free_memory_bytes() -> int:
    """Return how much memory this host could give without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _row(spec: ModelSpec) -> tuple[str, ...]:
    needs = "—"
    if spec.file is not None:
        try:
            needs = _gib(needs_of(spec, spec.file).total)
        except FileNotFoundError:
            needs = "missing"
        except (OSError, ValueError, KeyError, IndexError):
            needs = "unknown"
    file = "—" if spec.file is None else str(spec.file)
    has_chat = "" if "chat" in model_capabilities(spec) else " (no chat)"
    return (
        spec.id + has_chat,
        spec.engine,
        str(spec.slots),
        f"{spec.context_length:,}",
        needs,
        file,
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"
