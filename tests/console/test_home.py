"""The home page: sums and percentiles of the roll-ups, by time, project, key and model."""

from __future__ import annotations

import csv
import html
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from django.utils.http import urlencode

from inference_site.accounts.keys import create_key
from inference_site.accounts.models import ApiKey
from inference_site.console import request_filters, usage_table
from inference_site.core.site_settings import models as site_settings
from inference_site.core.site_settings.models import SiteSettings
from inference_site.runs.models import Status
from inference_site.runs.usage import dimensions
from inference_site.runs.usage.accounting import account
from inference_site.runs.usage.models import Period
from inference_site.runs.usage.pruning import prune_counts
from inference_site.runs.usage.queries import Span
from tests.console.test_refusal_counts import tiles
from tests.console.test_requests_page import downloaded
from tests.generations.rows import create_generation

Key = tuple[ApiKey, str]


def used(api_key: ApiKey, age: timedelta = timedelta(), **fields: Any) -> None:
    """Account a generation that ended this long ago."""
    end = timezone.now() - age
    create_generation(
        api_key,
        **{
            "status": Status.COMPLETED,
            "created_at": end - timedelta(seconds=2),
            "claimed_at": end - timedelta(seconds=1.9),
            "first_token_at": end - timedelta(seconds=1.5),
            "finished_at": end,
            "input_tokens": 100,
            "cached_tokens": 40,
            "output_tokens": 50,
            **fields,
        },
    )
    account()


def page(browser: Client, **query: Any) -> str:
    response = browser.get("/admin/", query)
    assert response.status_code == 200
    return response.content.decode()


def tile(text: str, name: str) -> tuple[str, str]:
    """The value and the note of a tile."""
    found = re.search(
        rf'<dt>(?:<a [^>]*>)?{name}(?:</a>)?</dt><dd class="tile-value">(.*?)</dd>'
        r'<dd class="tile-note">(.*?)</dd>',
        text,
    )
    assert found, f"there is no tile {name}"
    return found.group(1), found.group(2)


def test_tiles_show_sums_and_percentiles(admin: Client, api_key: Key, other_key: ApiKey) -> None:
    used(api_key[0])
    used(other_key, model="other")
    used(other_key, status=Status.FAILED, error_code="model_error")
    used(other_key, status=Status.CANCELLED)
    text = page(admin)
    assert tile(text, "Requests") == ("4", "1 cancelled")
    assert tile(text, "Errors") == ("1", "25.0 %")
    assert tile(text, "Input tokens") == ("400", "40 % cached")
    assert tile(text, "Output tokens")[0] == "200"
    first, note = tile(text, "First token")
    assert 400 < float(first.removesuffix(" ms")) < 700
    found = re.fullmatch(r"p95 \S+ ms; p50 without queue wait (\S+) ms", note)
    assert found
    assert 330 < float(found[1]) < 480


@pytest.mark.parametrize(
    ("range_", "shown"), [("1h", "1"), ("24h", "2"), ("7d", "3"), ("30d", "4")]
)
def test_the_page_covers_the_chosen_time_range(
    admin: Client, api_key: Key, range_: str, shown: str
) -> None:
    for age in (timedelta(), timedelta(hours=5), timedelta(days=3), timedelta(days=20)):
        used(api_key[0], age)
    assert tile(page(admin, range=range_), "Requests")[0] == shown


@pytest.mark.parametrize(
    ("hours", "since", "shown"),
    [(2, 3, "1"), (30, 40, "1"), (30, 20, "0"), (24 * 50, 24 * 60, "1"), (0, -1, "1")],
)
def test_a_custom_range_counts_what_ended_in_it_at_any_age(
    admin: Client, api_key: Key, hours: int, since: int, shown: str
) -> None:
    used(api_key[0], timedelta(hours=hours))
    start = timezone.now() - timedelta(hours=since)
    field = f"{start:%Y-%m-%dT%H:%M}"
    end = f"{timezone.now():%Y-%m-%dT%H:%M}"
    text = page(admin, range="custom", **{"from": field, "to": end})
    assert tile(text, "Requests")[0] == shown
    assert 'value="custom" checked' in text


@pytest.mark.parametrize("address", ["/admin/", "/admin/requests/"])
def test_the_form_shows_what_is_chosen_and_no_key_of_a_project_before(
    admin: Client, api_key: Key, other_key: ApiKey, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_filters, "_MAX_KEYS", 1)
    key = api_key[0]
    used(key, model="gone")
    used(other_key)
    create_key(key.project, "newer")

    def shown(**query: Any) -> str:
        text = admin.get(address, query).content.decode()
        form = text.partition('<form method="get"')[2].partition("</form>")[0]
        chosen = re.findall(r"<option[^>]* selected>([^<]+)</option>", form)
        return ", ".join(one for one in chosen if one in ("gone", key.name, other_key.name))

    assert shown(project=key.project_id, key=key.pk) == key.name
    assert shown(key=key.pk) == key.name
    assert shown(model="gone") == "gone"
    # The form of another project, in which the project is changed.
    changed = {"project": other_key.project_id, "key": key.pk}
    assert shown(**changed) == ""
    assert tile(page(admin, **changed), "Requests")[0] == "1"
    row = "/admin/requests/accepted/"
    assert admin.get("/admin/requests/", changed).content.decode().count(f'href="{row}') == 1


@pytest.mark.parametrize(
    ("hours", "length", "query", "shown"),
    [
        (38, 6, {}, False),  # Minutes are kept for two days.
        (20, 6, {}, True),
        (24 * 40, 24 * 7, {}, True),  # Days are for ever,
        (24 * 25, 24 * 7, {"user": "ann"}, False),  # and hours of end users for 35.
        (24 * 10, 24 * 7, {"user": "ann"}, True),
    ],
)
def test_usage_is_not_compared_with_a_time_of_which_a_part_is_deleted(
    admin: Client, api_key: Key, hours: int, length: int, query: dict[str, str], *, shown: bool
) -> None:
    end = timezone.now() - timedelta(hours=hours)
    start = end - timedelta(hours=length)
    # One in each half of the time before; the first is what may be deleted.
    for part in (0.25, 0.75):
        used(api_key[0], timezone.now() - start + timedelta(hours=length * part), end_user="ann")
    used(api_key[0], timezone.now() - end + timedelta(hours=length / 2), end_user="ann")
    prune_counts(time.monotonic() + 5)
    given = {"from": f"{start:%Y-%m-%dT%H:%M}", "to": f"{end:%Y-%m-%dT%H:%M}"}
    found = tiles(page(admin, range="custom", **given, **query))["Requests"]
    assert (found[0], found[2]) == ("1", "50 % less" if shown else "")


@pytest.mark.parametrize("odd", ["", "x", "0001-01-01T00:00", "9999-12-31T23:59", "\0", "1" * 99])
def test_a_custom_range_of_odd_ends_is_a_day_or_at_most_two_years(
    admin: Client, api_key: Key, odd: str
) -> None:
    used(api_key[0])
    page(admin, range="custom", **{"from": odd, "to": odd})
    text = page(admin, range="custom", **{"from": "2000-01-01T00:00", "to": odd})
    assert text.count('<tr><th scope="row">2') < 4 * 733


def test_a_site_without_requests_shows_the_first_steps(
    admin: Client, staff: Callable[..., Client], api_key: Key
) -> None:
    text = page(admin)
    assert "First steps" in text
    assert "curl http://testserver/v1/chat/completions" in text
    for address in ("accounts/apikey/add", "model_store/storedmodel/add", "model_store/pull/add"):
        assert f'href="/admin/{address}/"' in text
    assert "<dt>Requests</dt>" not in text
    assert "/add/" not in page(staff("usage.view_usagerollup"))
    used(api_key[0])
    text = page(admin)
    assert "First steps" not in text
    assert tile(text, "Requests")[0] == "1"


def test_the_axis_of_a_chart_names_its_zone(admin: Client, api_key: Key) -> None:
    used(api_key[0])
    assert 'text-anchor="end">UTC</text>' in page(admin)


def test_a_cost_without_prices_is_said_to_have_none(admin: Client, api_key: Key) -> None:
    used(api_key[0], model="demo")
    text = page(admin)
    assert tile(text, "Cost") == ("—", "no price set")
    assert '<td class="num">no price set</td>' in text
    used(api_key[0], model="gone", cost=Decimal("0.5"))
    assert tile(page(admin), "Cost") == ("0.50 USD", "")


def test_the_page_is_filtered_by_project_key_and_model(
    admin: Client, api_key: Key, other_key: ApiKey
) -> None:
    used(api_key[0])
    used(other_key)
    used(other_key, model="small")
    assert tile(page(admin, project=other_key.project_id), "Requests")[0] == "2"
    assert tile(page(admin, key=api_key[0].pk), "Requests")[0] == "1"
    assert tile(page(admin, model="small"), "Requests")[0] == "1"


@pytest.mark.parametrize(
    ("by", "name"),
    [("model", "small"), ("project_id", "other"), ("api_key_id", "other: other key")],
)
def test_the_table_is_by_model_project_or_key(
    admin: Client, other_key: ApiKey, by: str, name: str
) -> None:
    used(other_key, model="small")
    row = re.search(
        rf'<th scope="row">(?:<a [^>]*>)?{name}(?:</a>)?</th>'
        r'<td class="num"><a [^>]*>(\d+)</a></td>',
        page(admin, by=by),
    )
    assert row is not None
    assert row.group(1) == "1"


@pytest.mark.django_db(transaction=True)
def test_the_selection_is_downloaded_as_csv(admin: Client, api_key: Key, other_key: ApiKey) -> None:
    used(api_key[0])
    used(other_key, model="small")
    query: dict[str, str | int] = {"range": "1h", "project": other_key.project_id}
    answer = admin.get("/admin/usage.csv", query)
    assert answer["Content-Disposition"].startswith('attachment; filename="usage-1h-')
    [row] = csv.DictReader(downloaded(admin, f"/admin/usage.csv?{urlencode(query)}").splitlines())
    assert (row["project"], row["key"], row["model"]) == ("other", "other key", "small")
    assert (row["requests"], row["input_tokens"]) == ("1", "100")
    said = f"Exported as csv: range=1h&project={other_key.project_id}."
    assert LogEntry.objects.latest("pk").change_message == said


def test_the_download_needs_the_usage_permission(admin: Client) -> None:
    user = get_user_model().objects.create_user("staff", is_staff=True)
    admin.force_login(user)
    assert admin.get("/admin/usage.csv").status_code == 403


def test_invalid_query_values_become_the_defaults(admin: Client, api_key: Key) -> None:
    used(api_key[0])
    query = {"range": "x", "project": "-1", "key": "9" * 30, "by": "password", "model": ""}
    assert 'value="24h" checked' in page(admin, **query)


def test_the_usage_log_is_read_only_for_waiting_generations(admin: Client, api_key: Key) -> None:
    used(api_key[0])
    with CaptureQueriesContext(connection) as captured:
        page(admin)
    asked = [q["sql"] for q in captured if "generations_generation" in q["sql"]]
    assert len(asked) == 1
    assert "'queued'" in asked[0]


def test_usage_needs_its_permission(staff: Callable[..., Client], api_key: Key) -> None:
    used(api_key[0])
    assert "do not have permission to see usage" in page(staff())
    assert "Requests" in page(staff("usage.view_usagerollup"))


def table(text: str) -> dict[str, tuple[int, str]]:
    """The requests of each row of the table, and the address of its list, by its name."""
    rows = re.findall(
        r'<tr><th scope="row">(?:<\w+[^>]*>)?([^<]*)(?:</\w+>)?</th>'
        r'<td class="num">(?:<a href="([^"]*)">)?(\d+)(?:</a>)?</td>',
        text[text.index("<h2>By ") :],
    )
    return {name: (int(requests), html.unescape(address)) for name, address, requests in rows}


def test_the_table_by_end_user_adds_up_and_leads_to_the_requests(
    admin: Client, api_key: Key, other_key: ApiKey
) -> None:
    for user in ("ann", "ann", "bob", "=x&y", " odd", ""):
        used(api_key[0], end_user=user)
    used(other_key, end_user="ann")
    rows = table(page(admin, by="user", project=api_key[0].project_id))
    link = f"/admin/requests/?project={api_key[0].project_id}&user="
    assert rows.pop("ann") == (2, f"{link}ann&since=24h")
    assert rows.pop("bob") == (1, f"{link}bob&since=24h")
    assert rows.pop("=x&amp;y") == (1, f"{link}%3Dx%26y&since=24h")
    assert rows.pop(" odd") == (1, ""), "the list's filter is stripped"
    assert rows == {"No end user": (1, ""), "Sum": (6, "")}


def test_the_page_is_filtered_by_end_user_and_by_tag(admin: Client, api_key: Key) -> None:
    used(api_key[0], end_user="ann", tags=["team=red"], model="small")
    used(api_key[0], end_user="ann", tags=["team=a=b"])
    used(api_key[0], end_user="bob", tags=["team=red"])
    text = page(admin, user="ann")
    assert tile(text, "Requests")[0] == "2"
    assert "<dt>Refused" not in text
    assert ">First token<" not in text
    assert table(text)["small"] == (1, "/admin/requests/?user=ann&model=small&since=24h")
    assert tile(page(admin, user="ann", model="small"), "Requests")[0] == "1"
    assert tile(page(admin, tag="team=red"), "Requests")[0] == "2"
    assert tile(page(admin, tag="team=a=b"), "Requests")[0] == "1"
    assert tile(page(admin, user="nobody"), "Requests")[0] == "0"
    by_tag = page(admin, by="tag:team", tag="team=red")
    assert table(by_tag)["red"] == (2, "/admin/requests/?metadata=team%3Dred&since=24h")
    for both in ({"user": "ann", "tag": "team=red"}, {"user": "ann", "by": "tag:team"}):
        text = page(admin, **both)
        assert tile(text, "Requests")[0] == "2"
        assert 'role="status">Usage of' in text


def test_many_end_users_are_fifty_rows_and_others(admin: Client, api_key: Key) -> None:
    end = timezone.now()
    for number in range(55):
        create_generation(
            api_key[0],
            status=Status.COMPLETED,
            finished_at=end,
            input_tokens=number,
            end_user=f"u{number}",
        )
    account()
    rows = table(page(admin, by="user"))
    assert len(rows) == 52
    assert "u54" in rows
    assert "u4" not in rows
    assert (rows["Others"], rows["Sum"]) == ((5, ""), (55, ""))


def test_many_keys_are_the_largest_and_others(
    admin: Client, api_key: Key, other_key: ApiKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_table, "MAX_ROWS", 1)
    used(api_key[0])
    used(other_key)
    used(other_key)
    with CaptureQueriesContext(connection) as asked:
        rows = table(page(admin, by="api_key_id"))
    assert [rows[name][0] for name in ("other: other key", "Others", "Sum")] == [2, 1, 3]
    selected = 'SELECT "usage_usagerollup"."api_key_id"'
    [by_key] = [one["sql"] for one in asked if one["sql"].startswith(selected)]
    assert by_key.endswith("LIMIT 1")


def test_a_download_reads_the_names_of_its_own_projects_and_keys(
    api_key: Key, other_key: ApiKey
) -> None:
    used(other_key)
    now = timezone.now()
    span = Span(Period.DAY, now, now)
    with CaptureQueriesContext(connection) as asked:
        [[row]] = usage_table.downloaded("model", span)
    assert (row["project"], row["key"]) == ("other", "other key")
    ids = [re.findall(r"IN \((.*)\)", one["sql"]) for one in asked if "accounts_" in one["sql"]]
    assert ids == [[str(other_key.project_id)], [str(other_key.pk)]]


def test_the_tags_of_the_settings_are_offered(admin: Client, api_key: Key) -> None:
    used(api_key[0])
    site_settings.forget()
    assert 'name="tag"' not in page(admin)
    SiteSettings.objects.update_or_create(pk=1, defaults={"usage_tags": ["team", "<b>"]})
    site_settings.forget()
    text = page(admin)
    assert 'name="tag"' in text
    assert '<option value="tag:&lt;b&gt;">Tag &lt;b&gt;</option>' in text
    site_settings._last = SiteSettings()
    site_settings.forget()


def test_a_tag_leads_to_its_requests_for_those_who_may_see_metadata(
    staff: Callable[..., Client], api_key: Key
) -> None:
    used(api_key[0], tags=["team=red"])
    looker = staff("usage.view_usagerollup", "generations.view_generation")
    assert table(page(looker, by="tag:team"))["red"] == (1, "")
    assert "metadata=" not in page(looker, tag="team=red")
    assert table(page(looker))["m"][1] == "/admin/requests/?model=m&since=24h"


@pytest.mark.django_db(transaction=True)
def test_end_users_are_for_those_who_may_see_requests(
    staff: Callable[..., Client], api_key: Key
) -> None:
    used(api_key[0], end_user="ann")
    used(api_key[0])
    looker = staff("usage.view_usagerollup")
    text = page(looker, user="ann", by="user")
    assert 'name="user"' not in text
    assert "ann" not in table(text)
    assert tile(text, "Requests")[0] == "2"
    assert "ann" not in downloaded(looker, "/admin/usage.csv?by=user&user=ann")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_the_download_by_end_user_adds_up(
    admin: Client, api_key: Key, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dimensions, "MOST_VALUES", 2)
    for user, cost in (("=ann", 3), ("=ann", 3), ("bob", 2), ("cyd", 1), ("", 0)):
        used(api_key[0], end_user=user, cost=Decimal(cost))
    dimensions.bound()
    text = downloaded(admin, f"/admin/usage.{form}?by=user")
    lines: list[dict[str, Any]]
    if form == "csv":
        lines = list(csv.DictReader(text.splitlines()))
    else:
        lines = [json.loads(line) for line in text.splitlines()]
    name = "'=ann" if form == "csv" else "=ann"
    found: Counter[tuple[str, str]] = Counter()
    for line in lines:
        found[line["part"], line["value"]] += int(line["requests"])
    assert found == {("value", name): 2, ("value", "bob"): 1, ("others", ""): 1, ("none", ""): 1}
    only = downloaded(admin, f"/admin/usage.{form}?user=bob")
    assert "bob" in only
    assert "ann" not in only
