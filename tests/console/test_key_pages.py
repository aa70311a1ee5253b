"""The page of a key says whether it works and why not; its buttons rotate, end and revoke."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import transaction
from django.test import Client
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from inference_site.accounts.budgets import Spent, period_start
from inference_site.accounts.keys import create_key, find_caller, key_of_imports, rotate_key
from inference_site.accounts.models import ApiKey, Budget, BudgetSpend, ModelLimit, Project
from inference_site.accounts.rate_limits import hit
from inference_site.console import key_states
from inference_site.console.key_states import KeyState, bars_of, state_of, states_of
from inference_site.runs.models import Status
from inference_site.runs.request_log.models import Refusal
from tests.generations.rows import create_generation

pytestmark = pytest.mark.redis
Key = tuple[ApiKey, str]
SECRET = re.compile(r"sk-[A-Za-z0-9_-]{40,}")


def state(key: ApiKey) -> KeyState:
    read = ApiKey.objects.select_related("project", "owner").get(pk=key.pk)
    return state_of(read, bars_of(read), with_refusals=True)


def in_list(key: ApiKey) -> KeyState:
    return states_of(ApiKey.objects.filter(pk=key.pk).select_related("project", "owner"))[key.pk]


def spend(key: ApiKey, every: str, amount: int, spent: int, **fields: Any) -> Budget:
    budget = Budget.objects.create(
        project=key.project, unit="tokens", every=every, amount=amount, **fields
    )
    start = period_start(every, timezone.now())
    BudgetSpend.objects.update_or_create(budget=budget, start=start, defaults={"spent": spent})
    return budget


def test_a_list_reads_only_budgets_that_bound_its_keys(
    api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _ = api_key
    other, _ = create_key(key.project, "other")
    bounding = [spend(key, "day", 10, 1), spend(key, "day", 10, 1, api_key=key)]
    spend(key, "day", 10, 1, api_key=other)
    read: list[int] = []

    def spent_of(budgets: Sequence[Budget], now: dt.datetime) -> dict[int, Spent]:
        read.extend(budget.pk for budget in budgets)
        return {}

    monkeypatch.setattr(key_states, "spent_of", spent_of)
    in_list(key)
    assert read == [budget.pk for budget in bounding]


def test_a_key_works_until_something_refuses_its_requests(api_key: Key) -> None:
    key, secret = api_key
    assert state(key) == KeyState("works", "Works; not used yet.")
    find_caller(secret)
    assert state(key).sentence == "Works; last used 0 s ago."
    spend(key, "day", 1000, 999)
    assert state(key).label == in_list(key).label == "works"
    spend(key, "month", 0, 0, api_key=key)
    assert in_list(key).sentence.startswith("Refused: budget of 0 tokens a month spent until ")
    BudgetSpend.objects.filter(budget__every="day").update(spent=1000)
    each = Budget.objects.create(
        project=key.project, each="user", unit="tokens", every="day", amount=1
    )
    BudgetSpend.objects.create(budget=each, start=timezone.now().date(), value="ann", spent=5)
    Budget.objects.filter(every="month").delete()
    expected = "Refused: budget of the project of 1,000 tokens a day spent until 00:00 UTC."
    assert state(key).sentence == in_list(key).sentence == expected


def test_the_key_of_imports_says_what_it_is_for_until_it_has_a_secret(project: Project) -> None:
    with transaction.atomic():
        key = key_of_imports(project.pk)
        assert key_of_imports(project.pk) == key
    assert state(key).sentence == "Works for what was imported, without a secret; not used yet."
    assert in_list(key).sentence == "Works for what was imported, without a secret."
    rotate_key(key, dt.timedelta(0))
    assert in_list(key).sentence == "Works."
    with transaction.atomic():
        assert key_of_imports(project.pk) != key, "that one has a secret now"


def test_a_key_says_that_it_is_revoked_expired_or_of_an_inactive_project(
    admin: Client, api_key: Key
) -> None:
    key = api_key[0]
    key.project.is_active = False
    key.project.save()
    assert state(key).sentence == "Refused: the project owner is inactive."
    ApiKey.objects.filter(pk=key.pk).update(expires_at=timezone.now() - dt.timedelta(days=9))
    assert state(key).label == in_list(key).label == "expired"
    admin.post(f"/admin/accounts/apikey/{key.pk}/revoke/now/")
    assert re.fullmatch(r"Refused: revoked \d\d:\d\d UTC by admin\.", state(key).sentence)


def test_a_key_says_which_limits_are_used_up(api_key: Key) -> None:
    key, secret = api_key
    ApiKey.objects.filter(pk=key.pk).update(requests_per_minute=1, concurrent_runs=2)
    caller = find_caller(secret)
    assert caller is not None
    assert state(key).label == "works"
    hit(caller, None)
    assert re.fullmatch(
        r"Refused: all 1 requests of this minute used, resets in \d+ s\.", state(key).sentence
    )
    ApiKey.objects.filter(pk=key.pk).update(requests_per_minute=None)
    for _ in range(2):
        create_generation(key, status=Status.RUNNING)
    assert state(key).sentence == "Refused: all 2 runs at one time in use."
    assert state(key).label == "refused"


def test_a_key_whose_limits_for_one_model_are_used_up_works_with_others(
    admin: Client, api_key: Key
) -> None:
    key, secret = api_key
    limits = {"project": key.project, "model": "demo"}
    ModelLimit.objects.create(**limits, api_key=key, requests_per_minute=1)
    ModelLimit.objects.create(**limits, concurrent_runs=2)
    ModelLimit.objects.create(project=key.project, model="other", tokens_per_minute=9)
    spent = {"unit": "tokens", "every": "day", "amount": 0}
    Budget.objects.create(project=key.project, model="demo", **spent)
    caller = find_caller(secret)
    assert caller is not None
    hit(caller, 1, "demo")
    create_generation(key, status=Status.RUNNING, model="demo")
    create_generation(key, status=Status.RUNNING, model="other")
    shown = {(bar.name, bar.used, bar.of, bar.refusal) for bar in bars_of(key)}
    assert shown == {
        ("Budget of a day for demo, whole project", "0 tokens", "0 tokens", ""),
        ("Requests in this minute for demo", "1", "1", ""),
        ("Waiting and running now for demo, whole project", "1", "2", ""),
        ("Tokens in this minute for other, whole project", "0", "9", ""),
    }
    assert state(key).label == "works"
    assert in_list(key).label == "works"
    assert len(bars_of(key.project)) == 3


def test_the_runs_of_many_limits_for_models_are_counted_with_one_query(
    api_key: Key, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    """A project with 1,000 had a page of seconds."""
    key = api_key[0]
    limits = [
        ModelLimit(project=key.project, model=f"m{number}", concurrent_runs=number)
        for number in range(1, 21)
    ]
    ModelLimit.objects.bulk_create(limits)
    Project.objects.filter(pk=key.project_id).update(concurrent_runs=9)
    project = Project.objects.get(pk=key.project_id)
    for model in ("m1", "m20", "m20", "demo"):
        create_generation(key, status=Status.RUNNING, model=model)
    with django_assert_num_queries(3):  # Budgets, limits, runs.
        bars = {bar.name: bar.used for bar in bars_of(project)}
    name = "Waiting and running now"
    assert bars[name] == "4"
    assert [bars[f"{name} for m{number}"] for number in (1, 2, 20)] == ["1", "0", "2"]


def refuse(key: ApiKey, code: str, path: str, **fields: Any) -> None:
    Refusal.objects.create(
        api_key=key, project=key.project, error_code=code, path=path, status=403, **fields
    )


def test_a_key_says_why_its_requests_were_refused_in_the_last_day(api_key: Key) -> None:
    key = api_key[0]
    ApiKey.objects.filter(pk=key.pk).update(scopes=["usage:read"])
    refuse(key, "insufficient_scope", "/v1/chat/completions", count=5)
    old = timezone.now() - dt.timedelta(days=2)
    refuse(key, "insufficient_scope", "/v1/responses", created_at=old)
    expected = "Works; not used yet. 5 refused in the last day: scope inference is missing."
    assert state(key).sentence == expected
    refuse(key, "insufficient_quota", "/v1/responses")
    assert state(key).sentence.endswith(
        "6 refused in the last day: scope inference is missing (5), a budget was spent (1)."
    )
    refuse(key, "<b>odd", "/no/such/path")
    refuse(key, "insufficient_scope", "/no/such/path")
    assert "&lt;b&gt;" not in state(key).sentence


def test_more_refusals_are_said_only_if_there_are_more_in_the_last_day(
    api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_states, "_MAX_REFUSALS", 2)
    key, old = api_key[0], timezone.now() - dt.timedelta(days=2)
    for _ in range(3):
        refuse(key, "insufficient_quota", "/v1/responses", created_at=old)
    for _ in range(2):
        refuse(key, "insufficient_quota", "/v1/responses")
    assert " used yet. 2 refused in the last day" in state(key).sentence
    refuse(key, "insufficient_quota", "/v1/responses")
    assert "more than 2 refused in the last day" in state(key).sentence


def test_what_was_refused_is_escaped_and_not_shown_to_who_may_not_see_requests(
    admin: Client, staff: Callable[..., Client], api_key: Key
) -> None:
    refuse(api_key[0], "<b>odd", "/v1/models")
    page = f"/admin/accounts/apikey/{api_key[0].pk}/change/"
    assert "refused in the last day: &lt;b&gt;odd" in admin.get(page).content.decode()
    seen = staff("accounts.view_apikey").get(page).content.decode()
    assert "Works; not used yet." in seen
    assert "refused in the last day" not in seen
    assert "data-confirm" not in seen


def test_the_buttons_of_a_key_rotate_it_end_the_old_secret_and_revoke_it(
    admin: Client, api_key: Key
) -> None:
    key, old = api_key
    page = f"/admin/accounts/apikey/{key.pk}"
    find_caller(old)
    (new,) = SECRET.findall(admin.post(f"{page}/rotate/now/").content.decode())
    assert find_caller(new) is not None
    shown = admin.get(f"{page}/change/").content.decode()
    assert "End the old one now" in shown
    assert new not in shown
    assert {secret.last_used_at is None for secret in key.secrets.all()} == {False}
    admin.post(f"{page}/end-old/now/")
    assert (find_caller(old), find_caller(new) is None) == (None, False)
    again = admin.post(f"{page}/end-old/now/", follow=True).content.decode()
    assert "Nothing was changed" in again
    admin.post(f"{page}/revoke/now/")
    assert find_caller(new) is None
    shown = admin.post(f"{page}/rotate/now/", follow=True).content.decode()
    assert not SECRET.search(shown)
    assert "data-confirm" not in admin.get(f"{page}/change/").content.decode()
    assert admin.post(f"{page}/no-such/now/").status_code == 302
    assert admin.post("/admin/accounts/apikey/999999/revoke/now/").status_code == 404
    assert admin.get(f"{page}/revoke/now/").status_code == 405


def test_a_key_of_a_user_is_rotated_by_that_user_alone_and_revoked_by_others_too(
    admin: Client, project: Project
) -> None:
    owner = User.objects.create_user("owner", is_staff=True)
    key, secret = create_key(project, "own", owner=owner)
    page = f"/admin/accounts/apikey/{key.pk}"
    assert f"{page}/rotate/now/" not in admin.get(f"{page}/change/").content.decode()
    form = {"action": "rotate", "_selected_action": [key.pk]}
    for answer in (
        admin.post(f"{page}/rotate/now/", follow=True),
        admin.post("/admin/accounts/apikey/", form, follow=True),
    ):
        shown = answer.content.decode()
        assert "own was not rotated: only its user may see its secret" in shown
        assert not SECRET.search(shown)
    assert key.secrets.count() == 1
    admin.post(f"{page}/revoke/now/")
    assert find_caller(secret) is None


def test_who_may_only_see_a_key_cannot_press_its_buttons(
    staff: Callable[..., Client], api_key: Key
) -> None:
    browser = staff("accounts.view_apikey")
    for action in ("rotate", "revoke", "end-old"):
        path = f"/admin/accounts/apikey/{api_key[0].pk}/{action}/now/"
        assert browser.post(path).status_code == 403
    assert find_caller(api_key[1]) is not None


def test_the_use_of_each_secret_is_noted_while_both_are_used(api_key: Key) -> None:
    key, old = api_key
    find_caller(old)
    new = rotate_key(key, dt.timedelta(hours=1))
    find_caller(new)  # Within the minute in which the key's own use was written.
    assert [secret.last_used_at is None for secret in key.secrets.order_by("pk")] == [False, False]


def test_the_list_of_keys_shows_states_with_as_many_queries_for_many_as_for_one(
    admin: Client, api_key: Key, django_assert_max_num_queries: Any
) -> None:
    key = api_key[0]
    spend(key, "day", 10, 10, api_key=key)
    for number in range(20):
        create_key(key.project, f"other {number}")
    with django_assert_max_num_queries(25):
        text = admin.get("/admin/accounts/apikey/").content.decode()
    assert text.count('class="status status-refused" title="Refused: budget of 10 tokens') == 1
    assert text.count('class="status status-works"') == 20


def test_a_project_lists_its_keys_with_links(admin: Client, api_key: Key, other_key: Any) -> None:
    text = admin.get(f"/admin/accounts/project/{api_key[0].project_id}/change/").content.decode()
    assert f'<a href="/admin/accounts/apikey/{api_key[0].pk}/change/">test</a>' in text
    assert f"/admin/accounts/apikey/{other_key.pk}/change/" not in text


def test_models_are_ticked_and_one_that_is_gone_stays_until_it_is_not(
    admin: Client, api_key: Key
) -> None:
    key = api_key[0]
    ApiKey.objects.filter(pk=key.pk).update(allowed_models=["gone"])
    page = f"/admin/accounts/apikey/{key.pk}/change/"
    text = admin.get(page).content.decode()
    assert "not in the catalogue now" in text
    assert "make, rename, limit and archive projects, and make, limit and revoke their keys" in text
    form = {"name": "test", "scopes": ["inference"], "allowed_models": ["gone", "demo"]}
    assert admin.post(page, form).status_code == 302
    key.refresh_from_db()
    assert key.allowed_models == ["gone", "demo"]
    refused = admin.post(page, {**form, "allowed_models": ["no such"]})
    assert "is not one of the available choices" in refused.content.decode()
    assert admin.post(page, {"name": "test", "scopes": ["inference"]}).status_code == 302
    key.refresh_from_db()
    assert key.allowed_models == []
