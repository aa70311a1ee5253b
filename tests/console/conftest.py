"""Fixtures of the console's tests."""

from __future__ import annotations

import pytest

from inference_site.accounts.keys import create_key
from inference_site.accounts.models import ApiKey, Project


@pytest.fixture
def other_key(db: None) -> ApiKey:
    """A key of another project."""
    return create_key(Project.objects.create(name="other"), "other key")[0]
