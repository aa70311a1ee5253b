"""``manage.py models``: list the catalogue; ``manage.py models FILE``: describe a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.catalogue.gguf_file import GgufInfo, read_gguf
from inference_site.domain.model_spec import ModelSpec

_HEADER = ("model", "engine", "slots", "context", "needs", "file")


class Command(BaseCommand):
    """Lists the models with the memory they need, or checks one file."""

    help = "List the models, or say what a GGUF file is and what memory it needs."
    requires_system_checks: list[str] = []  # They import the whole site.

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", nargs="?", type=Path, help="a GGUF file to check")
        parser.add_argument("--slots", type=int, default=8)
        parser.add_argument(
            "--context-length", type=int, help="tokens a slot (default: the file's)"
        )

    def handle(
        self, *_: Any, file: Path | None, slots: int, context_length: int | None, **__: Any
    ) -> None:
        if file is None:
            self._list()
        else:
            self._check(file, slots, context_length)

    def _list(self) -> None:
        rows = [_HEADER, *(_row(spec) for spec in catalogue().models.values())]
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
        context = context_length or info.context_length
        needed, free = needed_bytes(info, slots, context), free_memory_bytes()
        template = "yes" if info.has_chat_template else "no: chats need one from models.yaml"
        self.stdout.write(
            f"name           {info.name}\n"
            f"type           {info.type}\n"
            f"architecture   {info.architecture}\n"
            f"quantisation   {info.quantisation}\n"
            f"context        {info.context_length:,} tokens, as trained\n"
            f"chat template  {template}\n"
            f"memory         {_gib(needed)} for {slots} slots of {context:,} tokens\n"
            f"free           {_gib(free)}"
        )
        if needed > free:
            raise CommandError(
                "That is more than is free: take fewer slots or a shorter context, or a smaller "
                "quantisation."
            )


def needed_bytes(info: GgufInfo, slots: int, context_length: int) -> int:
    """Return about how much memory a model takes: weights, and keys and values of all slots."""
    return info.size_bytes + slots * context_length * info.kv_bytes_per_token


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
            needs = _gib(needed_bytes(read_gguf(spec.file), spec.slots, spec.context_length))
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
