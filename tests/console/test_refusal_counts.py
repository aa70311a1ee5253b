"""Tiles: refused requests are counted, each tile leads to its list, and says how it has changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape

import pytest
from django.test import Client
from pytest_django.fixtures import Settings

from inference_site.accounts.models import ApiKey, Project
from inference_site.console import tiles as tiles_module
from inference_site.console.tiles import change, short
from inference_site.core.storage.old_rows import _first_id_at
from inference_site.runs.models import Status
from inference_site.runs.request_log.models import Refusal
from inference_site.runs.usage.accounting import account_ended
from tests.console.test_request_log import ago, refused
from tests.generations.rows import create_generation

Key = tuple[ApiKey, str]
USAGE, VIEW = "usage.view_usagerollup", "generations.view_generation"


@pytest.fixture
def busy(api_key: Key) -> ApiKey:
    """A key with a request, refusals of today and of the days before, and those of others."""
    _first_id_at.cache_clear()  # It has ids of rows that other tests have rolled back.
    key = api_key[0]
    ended = {"status": Status.COMPLETED, "finished_at": ago(5)}
    create_generation(key, created_at=ago(9), model="demo", **ended)
    account_ended()
    mine = {"project_id": key.project_id, "api_key_id": key.pk, "model": "demo"}
    for days in (50, 40, 1.5, 0.01, 0):
        refused(days * 86_400 + 5, count=10 if days == 40 else 4, **mine)
    refused(3, status=401, count=100)
    return key


def tiles(page: str) -> dict[str, tuple[str, str, str]]:
    """The tiles of a page: value, address and change, by name."""
    found = {}
    for name, rest in re.findall(r"<dt>(.*?)</dt>(.*?)</div>", page, re.DOTALL):
        values = re.findall(r'<dd class="tile-(?:value|note)">(.*?)</dd>', rest, re.DOTALL)
        if len(values) > 1:
            link = re.search(r'href="([^"]*)"', name)
            label = re.sub(r"<[^>]*>", "", name)
            changed = re.search(r"[0-9,]+ % (more|less)", rest)
            texts = values[0], unescape(link[1]) if link else "", changed[0] if changed else ""
            found[label] = texts
    return found


def test_the_pages_of_a_key_a_project_and_a_model_count_refusals(
    busy: ApiKey, admin: Client, settings: Settings
) -> None:
    settings.REFUSALS_DAYS = 0
    requests = "/admin/requests/?"
    found = tiles(admin.get(f"/admin/accounts/apikey/{busy.pk}/change/").content.decode())
    query = f"key={busy.pk}&since=30d"
    assert found["Refused"] == ("12", f"{requests}{query}&status=refused", "14 % less")
    assert found["Errors"][1] == f"{requests}{query}&status=failed"
    assert found["First token"][1] == f"{requests}{query}&sort=-ttft"
    found = tiles(admin.get(f"/admin/accounts/project/{busy.project_id}/change/").content.decode())
    assert found["Refused"][0] == "12"
    found = tiles(admin.get("/admin/fleet/models/demo/").content.decode())
    assert found["Refused"][:2] == ("8", f"{requests}model=demo&since=24h&status=refused")
    found = tiles(admin.get("/admin/?range=24h").content.decode())
    assert found["Refused"][:2] == ("108", f"{requests}since=24h&status=refused")
    assert found["Waiting now"][1] == "/admin/queue/"
    for _, link, _ in found.values():
        assert admin.get(link).status_code == 200


def test_who_may_not_see_requests_has_numbers_without_links(
    busy: ApiKey, staff: Callable[..., Client]
) -> None:
    found = tiles(staff(USAGE).get("/admin/?range=24h").content.decode())
    assert found["Refused"][:2] == ("108", "")


def test_more_than_is_counted_is_said(
    busy: ApiKey, admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles_module, "MAX_READ", 2)
    found = tiles(admin.get("/admin/?range=24h").content.decode())
    assert found["Refused"][0].startswith("more than ")
    Refusal.objects.all().delete()
    found = tiles(admin.get("/admin/?range=24h").content.decode())
    assert found["Refused"][0] == "0"


def test_a_change_is_against_something() -> None:
    assert change(5, 0) == ""
    assert change(0, 5) == "100 % less"
    assert change(15, 10) == "50 % more"


@pytest.mark.parametrize(
    ("days", "own", "shown"),
    [(60, None, "14 % less"), (30, None, ""), (30, 0, "14 % less"), (60, 30, "")],
)
def test_refusals_are_not_compared_with_a_time_of_which_some_are_deleted(
    busy: ApiKey, admin: Client, settings: Settings, days: int, own: int | None, shown: str
) -> None:
    settings.REFUSALS_DAYS = days
    Project.objects.filter(pk=busy.project_id).update(refusals_days=own)
    found = tiles(admin.get(f"/admin/accounts/project/{busy.project_id}/change/").content.decode())
    assert found["Refused"][2] == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (9_999, "9,999"),
        (12_345, "12.3 k"),
        (999_499, "999 k"),
        (999_500, "1 M"),
        (999_499_999, "999 M"),
        (999_500_000, "1 G"),
        (1_234_567_890_123, "1,235 G"),
    ],
)
def test_a_large_number_has_three_digits_and_its_unit(value: float, shown: str) -> None:
    assert short(value) == shown
