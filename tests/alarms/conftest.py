"""The rules that a migration makes, which tests that empty all tables have taken away."""

from __future__ import annotations

from importlib import import_module

import pytest
from django.apps import apps


@pytest.fixture(autouse=True)
def _default_rules(db: None) -> None:
    import_module("inference_site.alarms.migrations.0002_default_rules").create(apps, None)
