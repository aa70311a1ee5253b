"""``manage.py usage [--check | --rebuild]``: print, check or rebuild the recorded usage."""

from __future__ import annotations

import csv
import datetime as dt
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from inference_site.core.admin_pages.base_admin import log_entry_of_command
from inference_site.runs.usage import accounting
from inference_site.runs.usage.accounting import settle
from inference_site.runs.usage.dimensions import bound
from inference_site.runs.usage.models import Period
from inference_site.runs.usage.queries import (
    USAGE_COLUMNS,
    Span,
    csv_row,
    usage_by,
    usage_records,
)

_MAX_DAYS = 3660


class Command(BaseCommand):
    """Prints CSV with one row for each day, project, key and model."""

    help = "Print usage by day, project, key and model as CSV, or check or rebuild its counters."
    requires_system_checks: list[str] = []  # They import the whole site.

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--days", type=int, default=30, help="how many days back (30)")
        parser.add_argument(
            "--check",
            action="store_true",
            help="compare roll-ups and budgets with the usage log; fail if they differ",
        )
        parser.add_argument(
            "--rebuild",
            action="store_true",
            help="rebuild roll-ups and budget counters from the usage log",
        )

    def handle(self, *_: Any, days: int, check: bool, rebuild: bool, **__: Any) -> None:
        if not 0 < days <= _MAX_DAYS:
            raise CommandError(f"--days must be from 1 to {_MAX_DAYS}.")
        while settle():
            pass
        if rebuild:
            accounting.rebuild()
            bound()
            log_entry_of_command("Usage", "Rebuilt by manage.py usage.")
            self.stderr.write("Roll-ups and budget counters were rebuilt.")
        if check:
            found = accounting.differences()
            for difference in found:
                self.stdout.write(str(difference))
            if found:
                # With fewer, no table has had more rows than are listed.
                least = "at least " if len(found) >= accounting.MAX_LISTED_ROWS else ""
                raise CommandError(
                    f"{least}{len(found)} counters differ from the usage log; correct them with "
                    "--rebuild."
                )
            self.stdout.write("Roll-ups and budgets add up to the usage log.")
        if not check and not rebuild:
            now = timezone.now()
            span = Span(Period.DAY, now - dt.timedelta(days=days - 1), now)
            writer = csv.writer(self.stdout)
            writer.writerow(USAGE_COLUMNS)
            for row in usage_records(usage_by(span, "project_id", "api_key_id", "model")):
                writer.writerow(csv_row(row, USAGE_COLUMNS))
