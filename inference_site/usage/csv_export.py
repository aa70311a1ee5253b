"""Usage as CSV rows for spreadsheets: one row for each bucket, project, key and model."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from dataclasses import astuple, fields
from typing import Any

from inference_site.accounts.models import ApiKey, Project
from inference_site.usage.queries import GroupKey, Usage

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def usage_rows(usage: Mapping[tuple[dt.datetime, GroupKey], Usage]) -> Iterator[list[Any]]:
    """Yield the header, then the rows; groups are ``project_id``, ``api_key_id``, ``model``."""
    projects = dict(Project.objects.values_list("pk", "name"))
    keys = dict(ApiKey.objects.values_list("pk", "name"))
    yield ["start", "project", "key", "model", *(field.name for field in fields(Usage))]
    for (start, (project, key, model)), sums in usage.items():
        names = (projects.get(project, project), keys.get(key, key), model)
        yield [start.isoformat(), *map(_safe, names), *map(_number, astuple(sums))]


def _safe(name: Any) -> str:
    """Return the name, quoted if a spreadsheet would read it as a formula."""
    text = str(name)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
