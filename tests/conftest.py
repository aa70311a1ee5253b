"""Fixtures for all tests."""

from __future__ import annotations

import pytest

from inference_site.accounts.keys import create_key
from inference_site.accounts.models import ApiKey, Project


@pytest.fixture
def project(db: None) -> Project:
    """A tenant."""
    return Project.objects.create(name="owner")


@pytest.fixture
def api_key(project: Project) -> tuple[ApiKey, str]:
    """A key of the tenant, and its secret."""
    return create_key(project, "test")
