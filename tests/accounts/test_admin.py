"""The admin, through Django's test client: what it shows, and what it never allows."""

from __future__ import annotations

import html
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.db import connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from inference_site.accounts.budgets import spent_of
from inference_site.accounts.keys import create_key, find_caller, revoke_key
from inference_site.accounts.models import ApiKey, Budget, BudgetSpend, ModelLimit, Project
from inference_site.catalogue.catalogue import Catalogue, demo_specs
from inference_site.console import accounts_admin
from inference_site.console.accounts_admin import RETENTION, ApiKeyAdmin, ProjectAdmin
from inference_site.core.admin_pages import base_admin
from inference_site.runs.models import Generation, Status
from inference_site.runs.usage.accounting import hold_lock
from inference_site.runs.usage.models import PrunedLog
from responses_api.models import StoredResponse
from tests.conftest import AtTheSameMoment
from tests.generations.rows import create_generation
from tests.waiting import wait_for_a_wait

Key = tuple[ApiKey, str]
GENERATIONS = "/admin/generations/generation/"
KEYS = "/admin/accounts/apikey/"
PROJECTS = "/admin/accounts/project/"


def page(response: Any) -> str:
    assert response.status_code == 200
    text: str = response.content.decode()
    return text


def finished(api_key: ApiKey, **fields: Any) -> Generation:
    ended = {"status": Status.COMPLETED, "finished_at": timezone.now()}
    return create_generation(api_key, **(ended | fields))


@pytest.mark.django_db
def test_an_api_key_does_not_open_the_admin(api_key: Key) -> None:
    response = Client().get(GENERATIONS, headers={"authorization": f"Bearer {api_key[1]}"})
    assert response.status_code == 302


def test_the_password_opens_the_admin(admin: Client) -> None:
    user = get_user_model().objects.get()
    user.set_password("a long password")
    user.save()
    admin.logout()
    wrong, right = ({"username": "admin", "password": p} for p in ("wrong", "a long password"))
    admin.post("/admin/login/", wrong)
    assert admin.get(GENERATIONS).status_code == 302
    admin.post("/admin/login/", right)
    assert admin.get(GENERATIONS).status_code == 200


def is_listed(row: Generation, text: str) -> bool:
    return f"{GENERATIONS}{row.pk}/change/" in text


def test_the_list_shows_project_model_and_times(admin: Client, api_key: Key) -> None:
    start = timezone.now()
    row = finished(
        api_key[0],
        model="tiny",
        created_at=start,
        claimed_at=start + timedelta(seconds=1.25),
        first_token_at=start + timedelta(seconds=2.5),
        finished_at=start + timedelta(seconds=4.5),
        input_tokens=1107,
        cached_tokens=13,
        output_tokens=85,
    )
    shown = page(admin.get(GENERATIONS))
    assert is_listed(row, shown)
    for text in ("owner", "tiny", "Completed", "1.25 s", "2.50 s", ">42<", "1,107", "13", "85"):
        assert text in shown


def test_the_list_is_never_counted(admin: Client, api_key: Key) -> None:
    for _ in range(60):
        finished(api_key[0])
    for query in ("", "?p=2", "?status__exact=completed", "?q=chatcmpl-x", "?o=2", "?_facets=True"):
        with CaptureQueriesContext(
            connection,
        ) as captured:
            page(admin.get(f"{GENERATIONS}{query}"))
        counted = [q["sql"] for q in captured if re.search(r"count\s*\(", q["sql"], re.I)]
        assert not [sql for sql in counted if "generations_generation" in sql]


def test_the_list_takes_as_many_queries_for_fifty_rows_as_for_one(
    admin: Client, api_key: Key
) -> None:
    taken = []
    for rows in (1, 49):
        for _ in range(rows):
            finished(api_key[0])
        with CaptureQueriesContext(connection) as captured:
            page(admin.get(GENERATIONS))
        # The settings are cached for two seconds.
        taken.append(sum("site_settings" not in query["sql"] for query in captured))
    assert taken[0] == taken[1]


def test_a_long_list_has_pages_and_each_shows_its_rows(admin: Client, api_key: Key) -> None:
    rows = [finished(api_key[0]) for _ in range(120)]
    expected = [rows[70:], rows[20:70], rows[:20]]
    addresses = [GENERATIONS]
    shown: list[str] = []
    while len(shown) < len(addresses):
        shown.append(page(admin.get(addresses[-1])))
        if older := link(shown[-1], "next"):
            addresses.append(f"{GENERATIONS}{older}")
    for part, text in zip(expected, shown, strict=True):
        assert [row for row in rows if is_listed(row, text)] == part
    newer = link(shown[2], "prev")
    assert newer is not None
    assert listed(rows, page(admin.get(f"{GENERATIONS}{newer}"))) == expected[1]
    assert link(shown[0], "prev") is None


def listed(rows: list[Generation], text: str) -> list[Generation]:
    return [row for row in rows if is_listed(row, text)]


def link(text: str, rel: str) -> str | None:
    found = re.search(rf'<a rel="{rel}" href="([^"]*)"', text)
    return html.unescape(found.group(1)) if found else None


def test_a_page_keeps_the_filters(admin: Client, api_key: Key) -> None:
    failed = [finished(api_key[0], status=Status.FAILED) for _ in range(55)]
    for _ in range(55):
        finished(api_key[0])
    older = link(page(admin.get(GENERATIONS, {"status__exact": "failed"})), "next")
    assert older is not None
    assert listed(failed, page(admin.get(f"{GENERATIONS}{older}"))) == failed[:5]


def test_a_list_goes_back_as_far_as_asked(admin: Client, api_key: Key) -> None:
    old = finished(api_key[0], created_at=timezone.now() - timedelta(days=2))
    young = finished(api_key[0])
    assert listed([old, young], page(admin.get(GENERATIONS, {"since": "24h"}))) == [young]
    assert listed([old, young], page(admin.get(GENERATIONS, {"since": "7d"}))) == [old, young]


def test_a_search_over_the_time_limit_stops_and_can_continue(
    admin: Client, api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_admin, "_LARGEST_WINDOW", 10)
    monkeypatch.setattr(base_admin, "_FIRST_WINDOW", 10)
    monkeypatch.setattr(base_admin, "_TIME_LIMIT_S", -1)
    rare = finished(api_key[0], status=Status.FAILED)
    for _ in range(15):
        finished(api_key[0])
    address, pages = f"{GENERATIONS}?status__exact=failed", 0
    while not is_listed(rare, text := page(admin.get(address))):
        older, pages = link(text, "next"), pages + 1
        assert older is not None, "the row was not found"
        assert "Search further back" in text
        assert pages < 10
        address = f"{GENERATIONS}{older}"


def test_a_list_that_was_searched_to_its_end_has_no_further_page(
    admin: Client, api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_admin, "_TIME_LIMIT_S", -1)
    row = finished(api_key[0])
    for place in ("", f"&before={row.pk + 1}", f"&after={row.pk - 1}"):
        text = page(admin.get(f"{GENERATIONS}?status__exact=failed{place}"))
        assert "Search further back" not in text
        assert "was looked through" not in text


def test_the_keys_of_the_chosen_project_are_a_filter(admin: Client, api_key: Key) -> None:
    record, _ = api_key
    second, _ = create_key(record.project, "second")
    first_row, second_row = finished(record), finished(second)
    assert "second" in page(admin.get(GENERATIONS, {"project__id__exact": record.project_id}))
    shown = page(admin.get(GENERATIONS, {"api_key": second.pk}))
    assert listed([first_row, second_row], shown) == [second_row]


def test_a_key_of_another_project_than_the_chosen_one_is_no_filter(
    admin: Client, api_key: Key
) -> None:
    other = create_key(Project.objects.create(name="second"), "theirs")[0]
    rows = mine, theirs = finished(api_key[0]), finished(other)
    query: dict[str, Any] = {"project__id__exact": other.project_id, "api_key": api_key[0].pk}
    assert listed([*rows], page(admin.get(GENERATIONS, query))) == [theirs]
    query["project__id__exact"] = api_key[0].project_id
    assert listed([*rows], page(admin.get(GENERATIONS, query))) == [mine]


def test_a_generation_is_found_by_its_id_and_by_its_request(admin: Client, api_key: Key) -> None:
    wanted = finished(api_key[0], request_id="req_wanted")
    other = finished(api_key[0], request_id="req_other")
    for query in (wanted.public_id, "req_wanted"):
        shown = page(admin.get(GENERATIONS, {"q": query}))
        assert is_listed(wanted, shown)
        assert not is_listed(other, shown)


def test_a_generation_links_to_what_is_stored_of_it(admin: Client, api_key: Key) -> None:
    row = create_generation(api_key[0], public_id="resp_1")
    shown = page(admin.get(f"{GENERATIONS}{row.pk}/change/"))
    assert "not stored" in shown
    assert "still waiting" in shown
    stored = StoredResponse.objects.create(
        public_id="resp_1", project=api_key[0].project, model="m", status="queued"
    )
    shown = page(admin.get(f"{GENERATIONS}{row.pk}/change/"))
    assert f'href="/admin/responses_api/storedresponse/{stored.pk}/change/"' in shown


def test_generations_are_neither_added_nor_changed_nor_deleted(admin: Client, api_key: Key) -> None:
    row = finished(api_key[0])
    shown = page(admin.get(f"{GENERATIONS}{row.pk}/change/"))
    assert row.public_id in shown
    assert 'name="_save"' not in shown
    assert admin.get(f"{GENERATIONS}add/").status_code == 403
    assert admin.post(f"{GENERATIONS}{row.pk}/change/", {"status": "failed"}).status_code == 403
    assert admin.post(f"{GENERATIONS}{row.pk}/delete/", {"post": "yes"}).status_code == 403
    selected = {"action": "delete_selected", "_selected_action": [row.pk], "post": "yes"}
    admin.post(GENERATIONS, selected)
    row.refresh_from_db()
    assert row.status == Status.COMPLETED


def test_the_form_of_a_key_begins_with_what_its_address_gives(
    admin: Client, project: Project
) -> None:
    given = {"project": str(project.pk), "name": "laptop", "expires_at": "2030-01-01"}
    page = admin.get(f"{KEYS}add/", given)
    assert 'value="laptop"' in page.content.decode()


def test_a_key_is_shown_once_and_later_only_its_prefix(admin: Client, project: Project) -> None:
    form = {"project": project.pk, "name": "laptop", "scopes": ["inference"], "_save": "Save"}
    shown = page(admin.post(f"{KEYS}add/", form, follow=True))
    (secret,) = re.findall(r"sk-[A-Za-z0-9_-]{40,}", shown)
    record = ApiKey.objects.get()
    caller = find_caller(secret)
    assert caller is not None
    assert (caller.api_key_id, caller.project_id) == (record.pk, project.pk)
    for path in (KEYS, f"{KEYS}{record.pk}/change/", f"{KEYS}{record.pk}/history/"):
        later = page(admin.get(path))
        assert secret not in later
        assert record.secrets.get().digest not in later
    assert record.prefix in page(admin.get(KEYS))


def test_the_secrets_of_keys_are_on_the_page_of_their_post_only(
    admin: Client, project: Project
) -> None:
    """No cookie, session or cache of a browser keeps them."""
    form = {"project": project.pk, "name": "laptop", "scopes": ["inference"], "_save": "Save"}
    created = admin.post(f"{KEYS}add/", form)
    (old,) = re.findall(r"sk-[A-Za-z0-9_-]{40,}", page(created))
    rotated = admin.post(KEYS, {"action": "rotate", "_selected_action": [ApiKey.objects.get().pk]})
    (new,) = re.findall(r"sk-[A-Za-z0-9_-]{40,}", page(rotated))
    assert new != old
    for answer in (created, rotated):
        assert answer.status_code == 200
        assert "no-store" in answer["Cache-Control"]
        assert "messages" not in answer.cookies
    assert "sk-" not in f"{dict(admin.session)}"
    assert new not in page(admin.get(KEYS))


def test_changing_a_key_keeps_its_secret_and_its_project(admin: Client, api_key: Key) -> None:
    record, secret = api_key
    other = Project.objects.create(name="other")
    form = {"name": "renamed", "project": other.pk, "scopes": ["usage:read"], "_save": "Save"}
    admin.post(f"{KEYS}{record.pk}/change/", form)
    record.refresh_from_db()
    assert (record.name, record.project.name) == ("renamed", "owner")
    assert find_caller(secret) is not None


def test_a_key_that_is_revoked_while_its_form_is_saved_stays_revoked(
    admin: Client, api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, secret = api_key
    kept = ApiKeyAdmin.save_model

    def save_after_another(*given: Any) -> None:
        revoke_key(record)
        kept(*given)

    monkeypatch.setattr(ApiKeyAdmin, "save_model", save_after_another)
    form = {"name": "renamed", "scopes": ["inference"], "_save": "Save"}
    assert admin.post(f"{KEYS}{record.pk}/change/", form).status_code == 302
    record.refresh_from_db()
    assert record.name == "renamed"
    assert record.revoked_at is not None
    assert find_caller(secret) is None


@pytest.mark.django_db(transaction=True)
def test_of_two_projects_of_one_name_added_at_the_same_moment_one_is_refused_by_the_form(
    admin: Client, at_the_same_moment: AtTheSameMoment
) -> None:
    at_the_same_moment(ProjectAdmin, lambda: Project.objects.create(name="new"))
    form = {"name": "new", "is_active": "on", "_save": "Save", **NO_BUDGETS}
    assert "Project with this Name already exists." in page(admin.post(f"{PROJECTS}add/", form))
    assert Project.objects.count() == 1


def test_renaming_a_project_tells_which_models_name_it(
    admin: Client, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = demo_specs()[0]
    own = replace(demo, id="of-own", projects=(project.name,))
    monkeypatch.setattr(accounts_admin, "catalogue", lambda: Catalogue([demo, own]))
    form = {"name": "renamed", "is_active": "on", "_save": "Save", **NO_BUDGETS}
    shown = page(admin.post(f"{PROJECTS}{project.pk}/change/", form, follow=True))
    told = f"Models for the project “{project.name}” are not for “renamed” until they name it: "
    assert f"{told}of-own." in shown
    again = page(admin.post(f"{PROJECTS}{project.pk}/change/", form, follow=True))
    assert "until they name it" not in again


def test_the_revoke_action_refuses_the_selected_keys(admin: Client, api_key: Key) -> None:
    record, secret = api_key
    assert find_caller(secret) is not None
    form = {"action": "revoke", "confirmed": "yes", "_selected_action": [record.pk]}
    shown = page(admin.post(KEYS, form, follow=True))
    assert "Revoked" in shown
    record.refresh_from_db()
    assert record.revoked_at is not None
    assert find_caller(secret) is None


def test_a_user_with_view_permission_only_cannot_revoke(admin: Client, api_key: Key) -> None:
    looker = get_user_model().objects.create_user("looker", is_staff=True)
    looker.user_permissions.add(Permission.objects.get(codename="view_apikey"))
    admin.force_login(looker)
    form = {"action": "revoke", "confirmed": "yes", "_selected_action": [api_key[0].pk]}
    admin.post(KEYS, form, follow=True)
    api_key[0].refresh_from_db()
    assert api_key[0].revoked_at is None


@pytest.mark.parametrize("kind", ["project", "apikey"])
def test_projects_and_keys_are_never_deleted(admin: Client, api_key: Key, kind: str) -> None:
    record = api_key[0].project if kind == "project" else api_key[0]
    path = f"/admin/accounts/{kind}/"
    assert admin.post(f"{path}{record.pk}/delete/", {"post": "yes"}).status_code == 403
    selected = {"action": "delete_selected", "_selected_action": [record.pk], "post": "yes"}
    admin.post(path, selected)
    record.refresh_from_db()
    assert "delete_selected" not in page(admin.get(path))


NO_LIMITS = {"model_limits-TOTAL_FORMS": "0", "model_limits-INITIAL_FORMS": "0"}
NO_BUDGETS = {**NO_LIMITS, "budgets-TOTAL_FORMS": "0", "budgets-INITIAL_FORMS": "0"}


def test_a_project_is_created_and_deactivated(admin: Client) -> None:
    admin.post(f"{PROJECTS}add/", {"name": "new", "is_active": "on", "_save": "Save", **NO_BUDGETS})
    project = Project.objects.get(name="new")
    assert project.is_active
    admin.post(f"{PROJECTS}{project.pk}/change/", {"name": "new", "_save": "Save", **NO_BUDGETS})
    project.refresh_from_db()
    assert not project.is_active


def test_a_project_gets_limits_and_a_budget(admin: Client, project: Project) -> None:
    form = {
        "name": project.name,
        "is_active": "on",
        "requests_per_minute": "60",
        **NO_LIMITS,
        "budgets-TOTAL_FORMS": "2",
        "budgets-INITIAL_FORMS": "0",
        "budgets-1-model": "demo",
        "budgets-1-each": "user",
        "budgets-1-unit": "tokens",
        "budgets-1-every": "day",
        "budgets-1-amount": "100",
        "budgets-0-unit": "tokens",
        "budgets-0-every": "day",
        "budgets-0-amount": "1000",
        "_save": "Save",
    }
    assert admin.post(f"{PROJECTS}{project.pk}/change/", form).status_code == 302
    project.refresh_from_db()
    assert project.requests_per_minute == 60
    budget, for_each = Budget.objects.filter(project=project).order_by("pk")
    assert (budget.each, for_each.each) == ("", "user")
    assert (budget.model, for_each.model) == ("", "demo")
    now = timezone.now().date()
    budget.spends.filter(start=now).update(spent=250)
    BudgetSpend.objects.create(budget=budget, start=now - timedelta(days=1), spent=900)
    for value, spent in (("ann", 130), ("bob", 4)):
        BudgetSpend.objects.create(budget=for_each, start=now, value=value, spent=spent)
    shown = page(admin.get("/admin/accounts/budget/"))
    assert ">130 tokens by the highest; 1 used up<" in shown
    assert "ann" not in page(admin.get(f"{PROJECTS}{project.pk}/change/")).split("Budgets and")[1]
    assert ">250 tokens<" in shown
    assert ">900 tokens<" not in shown


def test_a_project_gets_limits_for_a_model_once_for_all_keys_and_for_each(
    admin: Client, api_key: Key
) -> None:
    key = api_key[0]
    address = f"{PROJECTS}{key.project_id}/change/"

    def post(*limits: dict[str, Any], kept: int = 0) -> str:
        form: dict[str, Any] = {"name": key.project.name, "is_active": "on", **NO_BUDGETS}
        form |= {"model_limits-TOTAL_FORMS": len(limits), "model_limits-INITIAL_FORMS": kept}
        for number, limit in enumerate(limits):
            form |= {f"model_limits-{number}-{name}": value for name, value in limit.items()}
        answer = admin.post(address, form)
        return "" if answer.status_code == 302 else page(answer)

    of_all = {"api_key": "", "model": "demo", "requests_per_minute": "60"}
    of_key = {"api_key": key.pk, "model": "demo", "concurrent_runs": "2"}
    assert "Select a valid choice" in post({**of_all, "model": "none"})
    assert "The project has limits for this already" in post(of_all, of_all)
    assert post(of_all, of_key) == ""
    first, second = ModelLimit.objects.order_by("pk")
    assert (first.api_key, first.requests_per_minute) == (None, 60)
    assert (second.api_key, second.concurrent_runs) == (key, 2)
    entry = LogEntry.objects.latest("pk").get_change_message()
    assert "demo: requests per minute 60" in entry
    assert "The project has limits for this already" in post(of_all)
    ModelLimit.objects.filter(pk=first.pk).update(model="removed")
    kept = [
        {"id": row.pk, "project": key.project_id, "api_key": row.api_key_id or "", **fields}
        for row, fields in ((first, {"model": "removed"}), (second, {"model": "demo"}))
    ]
    assert post(kept[0], {**kept[1], "DELETE": "on"}, kept=2) == ""
    (left,) = ModelLimit.objects.all()
    assert (left.model, left.requests_per_minute) == ("removed", None)


@pytest.mark.parametrize("is_of_a_key", [False, True])
def test_a_project_has_one_budget_of_a_unit_a_period_and_a_key(
    admin: Client, api_key: Key, is_of_a_key: bool
) -> None:
    key = api_key[0]
    wanted: dict[str, Any] = {"api_key": key.pk if is_of_a_key else "", "unit": "tokens"}
    wanted |= {"every": "day", "amount": "5", "each": ""}

    def post(kept: int, *budgets: dict[str, Any]) -> Any:
        form = {"name": key.project.name, "is_active": "on"}
        form |= NO_LIMITS
        form |= {"budgets-TOTAL_FORMS": str(len(budgets)), "budgets-INITIAL_FORMS": str(kept)}
        for number, budget in enumerate(budgets):
            form |= {f"budgets-{number}-{name}": value for name, value in budget.items()}
        return admin.post(f"{PROJECTS}{key.project_id}/change/", form)

    told = "The project has a budget for this already" if not is_of_a_key else "duplicate"
    assert told in page(post(0, wanted, wanted))
    assert post(0, wanted, {**wanted, "every": "month"}).status_code == 302
    day, month = Budget.objects.order_by("pk")
    told = "The project has a budget for this already"
    assert told in page(post(0, wanted))  # Of a page that is older than the budgets.
    ids = [{"id": one.pk, "project": key.project_id} for one in (day, month)]
    assert told in page(post(2, wanted | ids[0], wanted | ids[1]))
    on_its_page = f"/admin/accounts/budget/{month.pk}/change/"
    assert told in page(admin.post(on_its_page, {**wanted, "every": "day"}))
    changed = {**wanted, "every": "month", "amount": "7"}
    assert admin.post(on_its_page, changed).status_code == 302
    assert post(2, {**wanted, **ids[0], "DELETE": "on"}, changed | ids[1]).status_code == 302
    assert [str(one.amount.normalize()) for one in Budget.objects.all()] == ["7"]


@pytest.mark.django_db(transaction=True)
def test_the_form_of_a_budget_holds_no_row_while_it_waits_for_accounting(
    admin: Client, project: Project
) -> None:
    """Who has the accounting lock waits for that row: it was a deadlock."""
    budget = Budget.objects.create(project=project, unit="tokens", every="day", amount=1)

    def save() -> int:
        form = {"unit": "tokens", "every": "day", "amount": "2"}
        answer = admin.post(f"/admin/accounts/budget/{budget.pk}/change/", form)
        connection.close()
        return answer.status_code

    with ThreadPoolExecutor(1) as threads:
        with transaction.atomic(), connection.cursor() as cursor:
            hold_lock(cursor)
            saving = threads.submit(save)
            wait_for_a_wait()
            assert Budget.objects.select_for_update(nowait=True).get().amount == 1
        assert saving.result(30) == 302
    assert Budget.objects.get().amount == 2


def test_a_page_with_a_budget_that_was_deleted_meanwhile_says_so(
    admin: Client, project: Project
) -> None:
    kept, deleted = (
        Budget.objects.create(project=project, unit="tokens", every=every, amount=5)
        for every in ("day", "month")
    )
    form = {"name": "renamed", "is_active": "on"}
    form |= {**NO_LIMITS, "budgets-TOTAL_FORMS": "2", "budgets-INITIAL_FORMS": "2"}
    for number, one in enumerate((kept, deleted)):
        fields = {"id": one.pk, "project": project.pk, "unit": "tokens", "every": one.every}
        form |= {f"budgets-{number}-{name}": str(value) for name, value in fields.items()}
        form[f"budgets-{number}-amount"] = "7"
    deleted.delete()
    shown = page(admin.post(f"{PROJECTS}{project.pk}/change/", form))
    assert "Nothing was saved: a budget was deleted meanwhile. Open the page again." in shown
    kept.refresh_from_db()
    project.refresh_from_db()
    assert kept.amount == 5
    assert project.name != "renamed"


@pytest.mark.parametrize(
    ("changed", "spent"), [({"amount": "9"}, 40), ({"unit": "cost"}, 0), ({"every": "month"}, 0)]
)
def test_a_budget_that_bounds_something_else_forgets_what_was_spent(
    admin: Client, project: Project, changed: dict[str, str], spent: int
) -> None:
    # The generations of this spend are deleted, so it cannot be counted again.
    now = timezone.now()
    PrunedLog.objects.create(project_id=project.pk, complete_since=now + timedelta(days=2))
    budget = Budget.objects.create(project=project, unit="tokens", every="day", amount=100)
    budget.spends.update(spent=40)
    form = {"unit": "tokens", "every": "day", "amount": "100", **changed}
    assert admin.post(f"/admin/accounts/budget/{budget.pk}/change/", form).status_code == 302
    budget.refresh_from_db()
    assert spent_of([budget], now)[budget.pk].highest == spent


def test_many_budgets_of_a_project_are_on_pages_that_can_be_saved(
    admin: Client, project: Project
) -> None:
    keys = [create_key(project, f"key {number}")[0] for number in range(45)]
    address = f"{PROJECTS}{project.pk}/change/"

    def make(some: list[ApiKey]) -> None:
        same: dict[str, Any] = {"project": project, "unit": "tokens", "every": "day", "amount": 5}
        Budget.objects.bulk_create(Budget(api_key=key, **same) for key in some)

    def queries() -> int:
        with CaptureQueriesContext(connection) as made:
            page(admin.get(address))
        return len(made)

    make(keys[:2])
    few = queries()
    make(keys[2:])
    assert queries() <= few + 1  # The number of budgets, for the pages.
    shown = page(admin.get(address))
    assert 'name="budgets-19-amount"' in shown
    assert 'name="budgets-20-amount"' not in shown
    assert "budgets-page=3" in shown
    third = f"{address}?budgets-page=3"
    assert 'name="budgets-5-amount"' not in page(admin.get(third))
    last = list(Budget.objects.order_by("pk"))[40:]
    form = {"name": project.name, "is_active": "on"}
    form |= {**NO_LIMITS, "budgets-TOTAL_FORMS": "5", "budgets-INITIAL_FORMS": "5"}
    for number, one in enumerate(last):
        values = {"id": one.pk, "project": project.pk, "api_key": one.api_key_id, "amount": "9"}
        values |= {"each": "", "unit": "tokens", "every": "day"}
        form |= {f"budgets-{number}-{name}": str(value) for name, value in values.items()}
    assert admin.post(third, form).status_code == 302
    assert Budget.objects.filter(amount=9).count() == 5
    assert Budget.objects.filter(amount=5).count() == 40


def test_more_keys_than_a_form_has_fields_by_default_are_revoked_at_once(
    admin: Client, project: Project
) -> None:
    ApiKey.objects.bulk_create(ApiKey(project=project, name=f"{n}") for n in range(1_100))
    chosen = {"_selected_action": list(ApiKey.objects.values_list("pk", flat=True))}
    assert admin.post(KEYS, {"action": "revoke", "confirmed": "yes", **chosen}).status_code == 302
    assert not ApiKey.objects.filter(revoked_at=None).exists()


def test_the_question_before_many_keys_are_revoked_has_few_fields_and_only_what_it_shows(
    admin: Client, project: Project
) -> None:
    """With a field for each key, 20,000 were a 400."""
    for number in range(3):
        create_key(project, f"k{number}")
    first = ApiKey.objects.earliest("pk").pk
    form = {"action": "revoke", "_selected_action": first, "select_across": "1", "index": "0"}
    asked = page(admin.post(f"{KEYS}?q=k", form))
    assert "Revoke 3 API keys?" in asked
    create_key(project, "k3")
    text = asked[asked.index("Revoke 3 API keys?") :]
    hidden = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', text)
    assert len(hidden) == 4
    assert admin.post(f"{KEYS}?q=k", {**dict(hidden), "confirmed": "yes"}).status_code == 302
    assert [key.name for key in ApiKey.objects.filter(revoked_at=None)] == ["k3"]


def test_a_budget_offers_the_newest_keys_and_those_that_have_one(
    admin: Client, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts_admin, "_MAX_KEYS", 1)
    limited, _, newest, revoked = (create_key(project, name)[0] for name in "abcd")
    revoke_key(revoked)
    Budget.objects.create(project=project, api_key=limited, unit="cost", every="day", amount=1)
    text = page(admin.get(f"{PROJECTS}{project.pk}/change/"))
    field = text.partition('name="budgets-0-api_key"')[2].partition("</select>")[0]
    offered = re.findall(r'<option value="(\d+)"', field)
    assert sorted(map(int, offered)) == [limited.pk, newest.pk]
    assert '<option value="">all keys</option>' in field


def test_a_form_of_a_project_keeps_members_who_are_deactivated(
    admin: Client, project: Project
) -> None:
    users = get_user_model().objects
    away = users.create_user("away", is_staff=True, is_active=False)
    users.create_user("stranger", is_staff=True, is_active=False)
    project.members.add(away)
    address = f"{PROJECTS}{project.pk}/change/"
    shown = page(admin.get(address))
    assert "away" in shown
    assert "stranger" not in shown
    form = {"name": project.name, "is_active": "on", "members": [str(away.pk)]}
    form |= NO_BUDGETS
    assert admin.post(address, form).status_code == 302
    assert [*project.members.all()] == [away]


def test_a_budget_is_for_each_of_what_is_counted(admin: Client, project: Project) -> None:
    form = {
        "name": project.name,
        "is_active": "on",
        **NO_LIMITS,
        "budgets-TOTAL_FORMS": "1",
        "budgets-INITIAL_FORMS": "0",
        "budgets-0-each": "tag:unknown",
        "budgets-0-unit": "tokens",
        "budgets-0-every": "day",
        "budgets-0-amount": "1",
    }
    assert "Select a valid choice" in page(admin.post(f"{PROJECTS}{project.pk}/change/", form))
    assert not Budget.objects.exists()
    kept = Budget.objects.create(
        project=project, each="tag:old", unit="tokens", every="day", amount=1
    )
    shown = page(admin.get(f"{PROJECTS}{project.pk}/change/"))
    assert '<option value="tag:old" selected>each tag old</option>' in shown
    assert '<option value="user">each end user</option>' in shown
    assert 'aria-label="For each"' in shown
    assert kept.shown_each in page(admin.get(f"/admin/accounts/budget/{kept.pk}/change/"))


@pytest.mark.parametrize("days", ["", "0", "30", "36500"])
def test_a_project_keeps_each_kind_for_its_days(admin: Client, project: Project, days: str) -> None:
    form = dict.fromkeys(RETENTION, days) | {"name": project.name, "is_active": "on"}
    assert admin.post(f"{PROJECTS}{project.pk}/change/", form | NO_BUDGETS).status_code == 302
    project.refresh_from_db()
    stored = {getattr(project, kind) for kind in RETENTION}
    assert stored == {int(days) if days else None}


@pytest.mark.parametrize("days", ["-1", "36501", "x", "1e3", "9" * 30])
def test_a_wrong_retention_is_refused(admin: Client, project: Project, days: str) -> None:
    form = dict.fromkeys(RETENTION, days) | {"name": project.name, "is_active": "on"}
    refused = admin.post(f"{PROJECTS}{project.pk}/change/", form | NO_BUDGETS)
    assert set(refused.context["adminform"].form.errors) == set(RETENTION)
    project.refresh_from_db()
    assert {getattr(project, kind) for kind in RETENTION} == {None}


def test_a_key_has_the_scopes_that_are_ticked(admin: Client, project: Project) -> None:
    form = {"project": project.pk, "name": "reader", "scopes": ["usage:read"], "_save": "Save"}
    admin.post(f"{KEYS}add/", form)
    assert ApiKey.objects.get(name="reader").scopes == ["usage:read"]


def test_the_form_of_a_key_ticks_the_usual_scopes_and_wants_one(
    admin: Client, project: Project
) -> None:
    shown = page(admin.get(f"{KEYS}add/"))
    ticked = re.findall(r'name="scopes" value="([^"]+)"[^>]* checked(?=[ >])', shown)
    assert ticked == ["inference", "usage:read"]
    refused = page(admin.post(f"{KEYS}add/", {"project": project.pk, "name": "dead"}))
    assert "Choose at least one permission." in refused
    assert not ApiKey.objects.exists()


def test_keys_are_listed_by_their_state(admin: Client, project: Project) -> None:
    past = timezone.now() - timedelta(days=1)
    states = {"active": {}, "expired": {"expires_at": past}, "revoked": {"revoked_at": past}}
    for name, fields in states.items():
        create_key(project, f"key-{name}", **fields)
    for state in states:
        shown = page(admin.get(KEYS, {"state": state}))
        assert re.findall(r">key-(\w+)</a>", shown) == [state]


def test_revoking_asks_first_and_names_the_key(admin: Client, api_key: Key) -> None:
    record, secret = api_key
    asked = page(admin.post(KEYS, {"action": "revoke", "_selected_action": [record.pk]}))
    assert f"<strong>{record.name}</strong>" in asked
    assert find_caller(secret) is not None


def test_the_audit_log_has_who_revoked_a_key_and_not_who_came_later(
    admin: Client, api_key: Key
) -> None:
    button = f"{KEYS}{api_key[0].pk}/revoke/now/"
    assert "Revoked. The key stops" in page(admin.post(button, follow=True))
    assert "the key has changed meanwhile" in page(admin.post(button, follow=True))
    form = {"action": "revoke", "confirmed": "yes", "_selected_action": [api_key[0].pk]}
    admin.post(KEYS, form)
    assert LogEntry.objects.filter(change_message="Revoked.").count() == 1


def test_actions_of_an_admin_are_in_the_audit_log(admin: Client, api_key: Key) -> None:
    admin.post(KEYS, {"action": "revoke", "confirmed": "yes", "_selected_action": [api_key[0].pk]})
    shown = page(admin.get("/admin/admin/logentry/"))
    assert "Revoked." in shown
    assert "admin" in shown
    assert admin.get("/admin/admin/logentry/add/").status_code == 403
