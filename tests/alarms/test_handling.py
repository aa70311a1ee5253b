"""Alarms that people live with: bell, acknowledging and snoozing, scope, recipients, previews."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from html import unescape
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from pytest_django.fixtures import Settings

from inference_site.accounts.keys import create_key
from inference_site.accounts.models import ApiKey, Budget, BudgetSpend, Project
from inference_site.console.alarms import evaluation
from inference_site.console.alarms.evaluation import evaluate
from inference_site.console.alarms.models import Alarm, Rule, RuleKind
from inference_site.outbox.models import Endpoint, Message
from inference_site.runs.usage.models import LatencyHistogram, Period, UsageRollup, bucket_of
from inference_site.runs.usage.queries import floor
from tests.generations.rows import create_generation

pytestmark = [pytest.mark.django_db, pytest.mark.redis]
Key = tuple[ApiKey, str]
RULES = "/admin/alarms/rule/"
ALARMS = "/admin/alarms/alarm/"


@pytest.fixture
def rule() -> Rule:
    """The only rule: a request waits for more than a second."""
    Rule.objects.all().delete()
    return Rule.objects.create(kind=RuleKind.QUEUE_WAIT, bound=1)


def wait_in_queue(key: ApiKey, model: str = "m") -> Any:
    at = timezone.now() - dt.timedelta(seconds=90)
    return create_generation(key, model=model, created_at=at)


def fired() -> Alarm:
    evaluate()
    return Alarm.objects.select_related("rule", "handled_by").latest("pk")


def handle(browser: Client, alarm: Alarm, action: str, **fields: str) -> Any:
    return browser.post(f"{ALARMS}{alarm.pk}/handle/", {"action": action, **fields})


def test_the_bell_counts_open_alarms_on_every_page_and_links_to_their_subject(
    admin: Client, api_key: Key, rule: Rule
) -> None:
    assert "0 open alarms" in admin.get(RULES).content.decode()
    wait_in_queue(api_key[0], "a&b")
    alarm = fired()
    for page in ("/admin/queue/", RULES, f"{RULES}{rule.pk}/change/", "/admin/my-keys/"):
        text = admin.get(page).content.decode()
        assert "1 open alarm<" in text, page
        assert 'href="/admin/queue/?model=a%26b"' in text
    handle(admin, alarm, "acknowledge")
    text = admin.get("/admin/queue/").content.decode()
    assert "0 open alarms" in text
    assert "acknowledged by admin" in text
    handle(admin, alarm, "reopen")
    assert "1 open alarm<" in admin.get("/admin/queue/").content.decode()


def test_an_acknowledged_alarm_says_who_and_when_and_its_end_is_told(
    admin: Client, api_key: Key, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    Endpoint.objects.create(way="email", address="ops@example.org")
    row = wait_in_queue(api_key[0])
    alarm = fired()
    answer = handle(admin, alarm, "acknowledge", next="/admin/queue/")
    assert answer["Location"] == "/admin/queue/"
    assert handle(admin, alarm, "reopen", next="https://evil.example/")["Location"] == ALARMS
    handle(admin, alarm, "acknowledge")
    assert "acknowledged by admin" in admin.get(ALARMS).content.decode()
    assert "acknowledged by admin" in admin.get(f"{ALARMS}{alarm.pk}/change/").content.decode()
    evaluate()
    assert Message.objects.count() == 1
    row.delete()
    monkeypatch.setattr(evaluation, "RESOLVED_AFTER_S", -1)
    evaluate()
    assert Message.objects.latest("pk").event_type == "alarm.resolved"
    shown = handle(admin, alarm, "acknowledge").wsgi_request
    assert "the alarm is over" in str(list(shown._messages))


@pytest.mark.parametrize("odd", ["", "delete", "snooze-2"])
def test_an_action_that_is_none_leaves_an_alarm_as_it_is(
    admin: Client, api_key: Key, rule: Rule, odd: str
) -> None:
    wait_in_queue(api_key[0])
    alarm = fired()
    handle(admin, alarm, "acknowledge")
    answer = handle(admin, alarm, odd, next="/admin/queue/")
    assert "There is no such action." in str(list(answer.wsgi_request._messages))
    alarm.refresh_from_db()
    assert alarm.state == "acknowledged"


def test_a_snoozed_alarm_is_quiet_also_if_it_comes_again_and_is_told_when_the_time_is_over(
    admin: Client, api_key: Key, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    Endpoint.objects.create(way="email", address="ops@example.org")
    monkeypatch.setattr(evaluation, "RESOLVED_AFTER_S", -1)
    row = wait_in_queue(api_key[0])
    handle(admin, fired(), "snooze-1")
    first = Alarm.objects.get()
    assert first.state == "snoozed"
    assert "snoozed by admin until" in admin.get(ALARMS).content.decode()
    row.delete()
    evaluate()
    assert Message.objects.count() == 2  # It was told of, so its end is, too.
    row = wait_in_queue(api_key[0])
    again = fired()
    assert again.pk != first.pk
    assert (again.state, again.handled_by, again.is_told) == ("snoozed", first.handled_by, False)
    assert "0 open alarms" in admin.get(RULES).content.decode()
    assert Message.objects.count() == 2
    Alarm.objects.update(snoozed_until=timezone.now() - dt.timedelta(seconds=1))
    again = fired()
    assert (again.state, again.handled_by, again.is_told) == ("firing", None, True)
    assert Message.objects.count() == 3
    evaluate()
    assert Message.objects.count() == 3


def test_who_may_only_see_alarms_neither_handles_them_nor_tests_rules(
    staff: Callable[..., Client], api_key: Key, rule: Rule
) -> None:
    wait_in_queue(api_key[0])
    alarm = fired()
    looker = staff("alarms.view_alarm", "alarms.view_rule")
    for action in ("acknowledge", "snooze-1", "reopen"):
        assert handle(looker, alarm, action).status_code == 403
    assert looker.post(f"{RULES}{rule.pk}/test/").status_code == 403
    text = looker.get(ALARMS).content.decode()
    assert "1 open alarm<" in text
    assert "Acknowledge" not in text
    assert "/admin/queue/?model" not in text  # They may not see requests.
    assert "Send a test" not in looker.get(f"{RULES}{rule.pk}/change/").content.decode()
    assert "open alarm" not in staff("alarms.view_rule").get(RULES).content.decode()


@pytest.mark.parametrize("action", ["", "snooze-9", "snooze-1 ", "\0", "x" * 1000])
def test_an_odd_action_snoozes_nothing(
    admin: Client, api_key: Key, rule: Rule, action: str
) -> None:
    wait_in_queue(api_key[0])
    alarm = fired()
    assert handle(admin, alarm, action).status_code == 302
    assert handle(admin, Alarm(pk=999_999), "acknowledge").status_code == 404
    alarm.refresh_from_db()
    assert alarm.state == "firing"


def test_a_rule_looks_only_at_its_model_project_or_key(api_key: Key, rule: Rule) -> None:
    key = api_key[0]
    other = create_key(Project.objects.create(name="other"), "other")[0]
    second = create_key(key.project, "second")[0]
    for one, model in ((key, "a"), (other, "b"), (second, "c")):
        wait_in_queue(one, model)
    found = {}
    scopes: dict[str, dict[str, Any]] = {
        "model": {"model": "a"},
        "project": {"project": key.project},
        "key": {"api_key": second},
        "all": {},
    }
    for name, scope in scopes.items():
        Rule.objects.all().delete()
        Rule.objects.create(kind=RuleKind.QUEUE_WAIT, bound=1, **scope)
        evaluate()
        found[name] = sorted(Alarm.objects.values_list("subject", flat=True))
    expected = {"model": ["a"], "project": ["a", "c"], "key": ["c"], "all": ["a", "b", "c"]}
    assert found == expected
    Rule.objects.all().delete()
    Rule.objects.create(kind=RuleKind.QUEUE_WAIT, bound=1, api_key=second)
    alarm = fired()
    assert alarm.text.startswith("1 request for c of key second has waited")
    assert alarm.query == f"model=c&key={second.pk}"


def test_errors_and_budgets_are_those_of_the_scope(api_key: Key, rule: Rule) -> None:
    key = api_key[0]
    other = create_key(Project.objects.create(name="other"), "other")[0]
    Rule.objects.all().delete()
    Rule.objects.create(kind=RuleKind.ERRORS, bound=10, project=key.project)
    Rule.objects.create(kind=RuleKind.BUDGET, bound=80, api_key=other)
    now = floor(timezone.now(), Period.MINUTE)
    for one in (key, other):
        of = {"period": "minute", "start": now, "project_id": one.project_id, "model": "m"}
        failed = 50 if one == other else 0
        UsageRollup.objects.create(**of, api_key_id=one.pk, requests=50, failed=failed)
        budget = Budget.objects.create(project=one.project, unit="tokens", every="day", amount=1)
        BudgetSpend.objects.update_or_create(
            budget=budget, start=timezone.now().date(), defaults={"spent": 1}
        )
    evaluate()
    assert not Alarm.objects.exists()
    UsageRollup.objects.filter(project_id=key.project_id).update(failed=50)
    Budget.objects.filter(project=other.project).update(api_key=other)
    evaluate()
    texts = sorted(Alarm.objects.values_list("text", flat=True))
    assert texts == [
        "100.0 % of the requests for m of project owner fail.",
        "other, key other: 100 % of 1 tokens a day is spent.",
    ]
    queries = sorted(Alarm.objects.values_list("query", flat=True))
    assert queries[0] == f"model=m&project={key.project_id}&status=failed&since=1h"
    assert queries[1] == f"project={other.project_id}&key={other.pk}"


def form(**fields: Any) -> dict[str, Any]:
    return {"kind": "queue_wait", "bound": "5", "factor": "0", "is_enabled": "on", **fields}


def test_a_scope_that_a_rule_cannot_have_is_refused(admin: Client, api_key: Key) -> None:
    key = api_key[0]
    other = Project.objects.create(name="other")
    for wrong, said in (
        ({"kind": "disk", "project": key.project_id}, "of the whole site"),
        ({"kind": "budget", "model": "demo"}, "of no model"),
        ({"project": other.pk, "api_key": key.pk}, "of another project"),
        ({"model": "no such"}, ""),
        ({"project": "999999"}, "valid choice"),
        ({"bound": "-1"}, ""),
        ({"bound": "nan"}, ""),
        ({"emails": "ops@example.org, nobody"}, "is no e-mail address"),
        ({"emails": "a@b.example\r\nBcc: x@y.example"}, "is no e-mail address"),
    ):
        answer = admin.post(f"{RULES}add/", form(**wrong))
        if wrong == {"model": "no such"}:  # A model may come later.
            assert answer.status_code == 302
            continue
        assert answer.status_code == 200, wrong
        assert said in answer.content.decode(), wrong


def test_the_recipients_of_a_rule_are_told_and_the_others_are_not(
    admin: Client, api_key: Key, rule: Rule
) -> None:
    site = Endpoint.objects.create(way="webhook", address="https://example.org/all")
    hook = Endpoint.objects.create(
        way="webhook", address="https://example.org/one", only_if_named=True
    )
    new = {"recipients": [hook.pk], "emails": "ada@example.org, bob@example.org"}
    assert admin.post(f"{RULES}{rule.pk}/change/", form(**new)).status_code == 302
    wait_in_queue(api_key[0])
    fired()
    told = set(Message.objects.values_list("endpoint__address", flat=True))
    assert told == {"https://example.org/one", "ada@example.org", "bob@example.org"}
    Message.objects.all().delete()
    Alarm.objects.all().delete()
    rule.recipients.clear()
    fired()
    assert [message.endpoint for message in Message.objects.all()] == [site]
    project_endpoint = Endpoint.objects.create(
        way="webhook", address="https://example.org/p", project=api_key[0].project
    )
    refused = admin.post(f"{RULES}{rule.pk}/change/", form(recipients=[project_endpoint.pk]))
    assert refused.status_code == 200


def test_addresses_are_taken_only_from_who_may_add_endpoints(
    staff: Callable[..., Client], rule: Rule
) -> None:
    browser = staff("alarms.view_rule", "alarms.change_rule")
    page = f"{RULES}{rule.pk}/change/"
    assert 'name="emails"' not in browser.get(page).content.decode()
    assert browser.post(page, form(emails="ada@example.org")).status_code == 302
    assert not Endpoint.objects.exists()


def test_a_test_goes_to_the_recipients_and_says_that_mail_is_not_configured(
    admin: Client, rule: Rule, settings: Settings
) -> None:
    settings.EMAIL_HOST = ""
    for page in (RULES, f"{RULES}add/", f"{RULES}{rule.pk}/change/", "/admin/outbox/endpoint/add/"):
        assert "Mail is not configured" in admin.get(page).content.decode(), page
    text = admin.post(f"{RULES}{rule.pk}/test/", follow=True).content.decode()
    assert "there is no recipient for this rule" in text
    rule.recipients.add(Endpoint.objects.create(way="email", address="ops@example.org"))
    text = admin.post(f"{RULES}{rule.pk}/test/", follow=True).content.decode()
    assert "on its way to 1 recipient;" in text
    assert "so e-mail addresses get nothing" in text
    assert Message.objects.get().event_type == "endpoint.test"
    settings.EMAIL_HOST = "mail.example.org"
    assert "Mail is not configured" not in admin.get(RULES).content.decode()


def recorded(key: ApiKey, hours_ago: int, *, failed: int = 0, ms: float = 100) -> None:
    start = floor(timezone.now() - dt.timedelta(hours=hours_ago), Period.HOUR)
    of = {"period": "hour", "start": start, "model": "m"}
    tenant = {"project_id": key.project_id, "api_key_id": key.pk}
    UsageRollup.objects.create(**of, **tenant, requests=100, failed=failed)
    every = {"project_id": LatencyHistogram.EVERY, "api_key_id": LatencyHistogram.EVERY}
    for measure in ("ttft", "queue"):
        LatencyHistogram.objects.create(
            **of, **every, measure=measure, bucket=bucket_of(ms), count=100
        )


def preview(browser: Client, **fields: Any) -> str:
    text: str = browser.get(f"{RULES}preview/", form(**fields)).content.decode()
    return text


def test_a_preview_says_how_often_a_rule_would_have_fired_in_the_last_week(
    admin: Client, api_key: Key
) -> None:
    key = api_key[0]
    for hours_ago in range(1, 60):
        is_bad = hours_ago in (5, 6, 7, 20, 40)
        recorded(key, hours_ago, failed=50 if is_bad else 0, ms=30_000 if is_bad else 100)
    recorded(key, 24 * 8, failed=100, ms=90_000)  # Before the week.
    thrice = "It would have fired 3 times in the last week, in 5 hours of it."
    never = "It would not have fired in the last week."
    note = " It counts invalid requests too, which the rule leaves out."
    assert preview(admin, kind="errors", bound="10") == thrice + note
    assert preview(admin, kind="errors", bound="10", factor="20") == never + note
    assert preview(admin, kind="errors", bound="10", model="other") == never + note
    assert preview(admin, kind="errors", bound="10", project=key.project_id) == thrice + note
    assert preview(admin, kind="ttft", bound="2000").startswith(thrice)
    assert preview(admin, kind="queue_wait", bound="5") == thrice
    assert preview(admin, kind="queue_wait", bound="60") == never
    assert "whether a worker had the model" in preview(admin, kind="no_worker", bound="5")
    budget = Budget.objects.create(project=key.project, unit="tokens", every="day", amount=10)
    for days, spent in ((1, 9), (2, 5), (3, 10), (20, 10)):
        start = timezone.now().date() - dt.timedelta(days=days)
        BudgetSpend.objects.create(budget=budget, start=start, spent=spent)
    assert preview(admin, kind="budget", bound="80").startswith("It would have fired 2 times")
    assert "so it would fire now" in preview(admin, kind="disk", bound="0")
    assert "The past is not recorded." in preview(admin, kind="redis_memory", bound="100")


def test_a_preview_of_a_wrong_rule_is_refused_and_one_of_an_existing_rule_is_not(
    admin: Client, staff: Callable[..., Client], rule: Rule
) -> None:
    for wrong in ({"bound": ""}, {"kind": "x"}, {"kind": "disk", "model": "m"}, {"bound": "-1"}):
        assert preview(admin, **wrong).startswith("Fill in a valid condition"), wrong
    assert preview(admin, bound="1") == "It would not have fired in the last week."
    assert Rule.objects.count() == 1
    assert staff().get(f"{RULES}preview/", form()).status_code == 403


def test_who_may_only_view_a_rule_is_not_asked_to_fill_it_in(
    admin: Client, staff: Callable[..., Client], rule: Rule
) -> None:
    address = f"{RULES}{rule.pk}/change/"
    assert "Fill in the condition" in admin.get(address).content.decode()
    shown = staff("alarms.view_rule").get(address).content.decode()
    assert "Fill in the condition" not in shown
    assert f"{rule.bound}" in shown


def test_two_rules_with_one_scope_and_bound_are_one_too_many(admin: Client, api_key: Key) -> None:
    of_key = form(api_key=api_key[0].pk, bound="77")
    assert admin.post(f"{RULES}add/", of_key).status_code == 302
    assert admin.post(f"{RULES}add/", of_key).status_code == 200
    assert admin.post(f"{RULES}add/", form(bound="77")).status_code == 302


def test_a_list_with_a_rule_that_was_deleted_meanwhile_says_so(admin: Client, rule: Rule) -> None:
    other = Rule.objects.create(kind=RuleKind.QUEUE_WAIT, bound=2)
    form: dict[str, object] = {"form-TOTAL_FORMS": 2, "form-INITIAL_FORMS": 2, "_save": "Save"}
    form |= {"form-0-id": rule.pk, "form-1-id": other.pk}
    other.delete()
    shown = admin.post(RULES, form).content.decode()
    assert "Nothing was saved: a rule was deleted meanwhile. Open the page again." in shown
    rule.refresh_from_db()
    assert rule.is_enabled


def test_a_list_of_rules_saves_only_what_was_changed_on_it(admin: Client, rule: Rule) -> None:
    other = Rule.objects.create(kind=RuleKind.QUEUE_WAIT, bound=2)
    page = admin.get(RULES)
    sent: dict[str, object] = {"form-TOTAL_FORMS": 2, "form-INITIAL_FORMS": 2, "_save": "Save"}
    for form in page.context["cl"].formset:
        enabled = form["is_enabled"]
        assert f'name="{enabled.html_initial_name}" value="True"' in page.content.decode()
        sent |= {form["id"].html_name: form.instance.pk, enabled.html_initial_name: "True"}
        if form.instance != other:
            sent |= {enabled.html_name: "on"}
    Rule.objects.filter(pk=rule.pk).update(is_enabled=False)
    assert admin.post(RULES, sent).status_code == 302
    assert not Rule.objects.filter(is_enabled=True).exists()


def test_a_rule_and_an_endpoint_are_deleted_with_what_they_have_sent(
    staff: Callable[..., Client], api_key: Key, rule: Rule
) -> None:
    """Nobody deletes an alarm or a message alone."""
    endpoint = Endpoint.objects.create(way="email", address="ops@example.org")
    wait_in_queue(api_key[0])
    assert fired().rule == rule
    assert Message.objects.count() == 1
    browser = staff("alarms.delete_rule", "outbox.delete_endpoint")
    for page in (f"{RULES}{rule.pk}/delete/", f"/admin/outbox/endpoint/{endpoint.pk}/delete/"):
        assert "don't have permission" not in unescape(browser.get(page).content.decode())
        assert browser.post(page, {"post": "yes"}).status_code == 302
    assert not Alarm.objects.exists()
    assert not Message.objects.exists()
