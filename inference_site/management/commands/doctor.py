"""``manage.py doctor``: check everything the site needs; print the faults and how to fix them."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from inference_site.ops.doctor import checks, gpu
from inference_site.ops.doctor.checks import FIX_DATABASE, FIX_REDIS, Check, Level, guarded

_CHECKS: tuple[tuple[str, Check, str], ...] = (
    ("versions", checks.check_versions, ""),
    ("Redis of serve", checks.check_bundled_redis, ""),
    ("settings", checks.check_settings, ""),
    ("disk", checks.check_disk, "Make the directories that DATA_DIR and MODELS_DIR name."),
    ("PostgreSQL", checks.check_postgres, FIX_DATABASE),
    ("prepared statements", checks.check_prepared_statements, FIX_DATABASE),
    ("migrations", checks.check_migrations, FIX_DATABASE),
    ("single sign-on", checks.check_single_sign_on, FIX_DATABASE),
    ("Redis", checks.check_redis, FIX_REDIS),
    ("channel layer", checks.check_channel_layer, FIX_REDIS),
    ("clocks", checks.check_clocks, "Both services must answer before clocks can be compared."),
    (
        "models",
        checks.check_models,
        "Correct the models file; docs/models.example.yaml has each key.",
    ),
    ("MCP servers", checks.check_mcp_servers, FIX_DATABASE),
    ("workers", checks.check_workers, FIX_REDIS),
    ("maintenance", checks.check_maintenance, FIX_REDIS),
    ("generations", checks.check_rows, FIX_DATABASE),
    ("event logs", checks.check_logs, FIX_REDIS),
)
_GPU_CHECKS: tuple[tuple[str, Check, str], ...] = (
    ("GPUs", gpu.check_gpus, "Correct the models file; docs/models.example.yaml has each key."),
)


class Command(BaseCommand):
    """Exits with status 1 if a check fails, not for warnings. ``--gpu`` checks only the GPUs."""

    help = "Check versions, services, models, disk, clocks and workers; name a fix for each fault."
    requires_system_checks: list[str] = []  # It reports faults and must not stop at one.

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--gpu",
            action="store_true",
            dest="only_gpus",
            help="check driver, wheel and memory of GPUs instead; docs/gpu.md goes on from there",
        )

    def handle(self, *_: Any, only_gpus: bool, **__: Any) -> None:
        selected = _GPU_CHECKS if only_gpus else _CHECKS
        findings = [found for what, check, fix in selected for found in guarded(what, check, fix)]
        width = max(len(finding.what) for finding in findings)
        styles = {
            Level.OK: self.style.SUCCESS,
            Level.WARN: self.style.WARNING,
            Level.FAIL: self.style.ERROR,
        }
        for finding in findings:
            mark = styles[finding.level](f"{finding.level.value:<4}")
            self.stdout.write(f"{mark}  {finding.what:<{width}}  {finding.found}")
            if finding.fix:
                self.stdout.write(f"{'':<{width + 8}}→ {finding.fix}")
        count = {level: sum(f.level == level for f in findings) for level in Level}
        self.stdout.write(", ".join(f"{number} {level.value}" for level, number in count.items()))
        if only_gpus and not count[Level.FAIL]:
            self.stdout.write("Next: start the site, and follow docs/gpu.md from step 4.")
        sys.exit(1 if count[Level.FAIL] else 0)
