"""Queries whose SQL is made once."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.models import QuerySet

from inference_site.accounts.models import Project
from inference_site.storage.postgresql import cached_sql


@pytest.mark.django_db
def test_its_sql_is_made_once_for_each_argument_and_its_rows_are_those_of_now() -> None:
    made = []

    @cached_sql
    def named(name: str) -> QuerySet[Any, Any]:
        made.append(name)
        return Project.objects.filter(name=name).values_list("name", "pk")

    assert named("100 %s") == named("other") == []
    project = Project.objects.create(name="100 %s")
    assert named("100 %s") == [("100 %s", project.pk)]
    assert named("other") == []
    assert made == ["100 %s", "other"]
