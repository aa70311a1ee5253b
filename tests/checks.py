"""``python -m tests.checks``: Django's own checks on a real database, for ``make lint``."""

from __future__ import annotations

import os

import django
from django.core.management import call_command

from tests import embedded_services


def main() -> None:
    """Run ``check --deploy`` and ``makemigrations --check``; raise on any finding."""
    os.environ["HTTPS"] = "true"  # What a deployment has; the local stack turns it off.
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inference_site.settings")
    embedded_services.start()
    django.setup()
    call_command("check", deploy=True, fail_level="WARNING", databases=["default"])
    # Not migrated: the tests are, and what is compared here are models and files.
    call_command("makemigrations", check=True, dry_run=True)


if __name__ == "__main__":
    main()
