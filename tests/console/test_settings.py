"""The page of settings, and what the settings do."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.utils import timezone
from django.utils.html import escape
from pytest_django.fixtures import Settings

from completions.models import StoredCompletion
from completions.storage import prune as prune_completions
from inference_site.accounts.models import Project
from inference_site.console.settings_page import variables_by_section
from inference_site.core import environment
from inference_site.core.site_settings import models
from inference_site.core.site_settings.models import SiteSettings
from responses_api.deletion import prune as prune_responses
from responses_api.models import Conversation, ResponseStatus, StoredResponse

PAGE = "/admin/settings/"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    models.forget()
    yield
    models._last = SiteSettings()
    models.forget()


def set_site(**fields: Any) -> None:
    SiteSettings.objects.update_or_create(pk=1, defaults=fields)
    models.forget()


def test_settings_are_changed_and_the_audit_log_has_old_and_new_values(admin: Client) -> None:
    form = {"disconnect_grace_s": "5", "responses_days": "30", "show_content": "on"}
    text = admin.post(PAGE, form, follow=True).content.decode()
    assert "Saved." in text
    assert models.disconnect_grace_s(None) == 5
    assert models.disconnect_grace_s(7) == 7
    entry = LogEntry.objects.get()
    assert entry.change_message == "disconnect_grace_s: empty → 5; responses_days: empty → 30"
    admin.post(PAGE, form)
    assert LogEntry.objects.count() == 1, "nothing has changed"
    text = admin.get(PAGE).content.decode()
    labels = re.findall(r'<label for="id_(\w+)">(.*?)</label>', text)
    changed = [name for name, label in labels if ">changed</span>" in label]
    assert changed == ["disconnect_grace_s", "responses_days"]
    assert re.findall("<h3>(.*?)</h3>", text)[:4] == ["Clients", "Retention", "Usage", "Content"]


@pytest.mark.parametrize("days", ["0", "-1", "99999", "x", "9" * 30])
def test_a_wrong_retention_is_refused(admin: Client, days: str) -> None:
    text = admin.post(PAGE, {"responses_days": days}).content.decode()
    assert 'class="reason"' in text
    for described in re.findall(r'aria-describedby="([^"]+)"', text):
        assert all(f'id="{one}"' in text for one in described.split())
    assert not SiteSettings.objects.exists()


def test_metadata_keys_of_usage_are_a_short_list(admin: Client) -> None:
    text = admin.post(PAGE, {"usage_tags": "team, cost center"}, follow=True).content.decode()
    assert "Saved." in text
    assert 'value="team,cost center"' in text
    assert models.site_settings().usage_tags == ["team", "cost center"]
    assert LogEntry.objects.get().change_message.startswith("usage_tags: empty → team, cost center")
    for wrong in ("a=b", "user_id", "k" * 65, "a,b,c,d,e,f,g,h,i", "team,team"):
        assert 'class="reason"' in admin.post(PAGE, {"usage_tags": wrong}).content.decode()
    assert SiteSettings.objects.get().usage_tags == ["team", "cost center"]


def test_the_environment_is_shown_without_secrets(
    admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_LIMIT", "77")
    for name in ("METRICS_TOKEN", "DATABASE_URL", "EVENT_LOG_URLS", "SECRET_KEY", "NEW_PASSWORD"):
        monkeypatch.setenv(name, "hush-hush")
        environment.text(name)
    environment.number("QUEUE_LIMIT", 1)
    text = admin.get(PAGE).content.decode()
    assert "hush" not in text
    assert ">77 <" in text
    assert "default: 2000" in text
    assert "environment" in text
    assert "EVENT_LOG_TTL_S" in text


def test_who_may_only_look_cannot_save(staff: Callable[..., Client]) -> None:
    looker = staff("site_settings.view_sitesettings")
    text = looker.get(PAGE).content.decode()
    assert "Save</button>" not in text
    assert looker.post(PAGE, {"responses_days": "1"}).status_code == 403
    assert staff().get(PAGE).status_code == 403
    assert not SiteSettings.objects.exists()


def test_content_that_is_shown_to_nobody_is_not_shown_to_administrators(
    admin: Client, project: Project
) -> None:
    stored = StoredCompletion.objects.create(
        public_id="chatcmpl-1",
        project=project,
        model="demo",
        messages=[{"role": "user", "content": "the secret plan"}],
        completion={"choices": []},
    )
    address = f"/admin/completions/storedcompletion/{stored.pk}/change/"
    responses = "/admin/responses_api/storedresponse/"
    assert "the secret plan" in admin.get(address).content.decode()
    assert "Export JSONL" in admin.get(responses).content.decode()
    set_site(show_content=False)
    assert "Export JSONL" not in admin.get(responses).content.decode()
    assert "the secret plan" not in admin.get(address).content.decode()
    watched = admin.get("/console/responses/resp_1/events")
    assert watched.status_code == 403


def test_the_usage_log_is_kept_as_the_page_says_or_else_the_environment(
    db: None, settings: Settings
) -> None:
    settings.USAGE_LOG_DAYS = 10
    assert models.retention_days("generations_days") == 10
    set_site(usage_log_days=3)
    assert models.retention_days("generations_days") == 3


def old(days: float) -> dt.datetime:
    return timezone.now() - dt.timedelta(days=days)


def completion(project: Project, id_: str, days: float) -> None:
    StoredCompletion.objects.create(
        public_id=id_, project=project, model="m", messages=[], completion={}, created_at=old(days)
    )


def test_completions_are_kept_as_their_project_says_or_else_the_site(project: Project) -> None:
    other = Project.objects.create(name="longer", completions_days=50)
    for days in (40, 20, 5):
        completion(project, f"mine-{days}", days)
        completion(other, f"other-{days}", days)
    assert prune_completions(math.inf) == 0, "without a setting they are kept for ever"
    set_site(completions_days=10)
    assert prune_completions(0.0) == 0, "there is no time"
    assert prune_completions(math.inf) == 2
    kept = set(StoredCompletion.objects.values_list("public_id", flat=True))
    assert kept == {"mine-5", "other-40", "other-20", "other-5"}


def response(project: Project, id_: str, days: float, **fields: Any) -> StoredResponse:
    given = {"status": ResponseStatus.COMPLETED, "created_at": old(days), **fields}
    return StoredResponse.objects.create(public_id=id_, project=project, model="m", **given)


def test_responses_go_when_they_are_old_but_for_what_runs_and_what_is_built_on(
    project: Project,
) -> None:
    root = response(project, "resp_root", 40)
    response(project, "resp_child", 2, previous=root)
    response(project, "resp_old", 40)
    response(project, "resp_runs", 40, status=ResponseStatus.QUEUED)
    project.responses_days = 30
    project.save()
    assert prune_responses(math.inf) == 2
    shown = StoredResponse.objects.filter(deleted_at=None).values_list("public_id", flat=True)
    assert set(shown) == {"resp_child", "resp_runs"}
    root.refresh_from_db()
    assert root.deleted_at is not None, "hidden, because another builds on it"
    assert prune_responses(math.inf) == 0


def test_conversations_go_when_nothing_was_said_for_so_long(project: Project) -> None:
    set_site(conversations_days=30)
    talks = {
        name: Conversation.objects.create(public_id=name, project=project, created_at=old(40))
        for name in ("quiet", "alive")
    }
    response(project, "resp_1", 40, conversation=talks["quiet"])
    response(project, "resp_2", 2, conversation=talks["alive"])
    assert prune_responses(math.inf) == 1
    shown = Conversation.objects.filter(deleted_at=None).values_list("public_id", flat=True)
    assert list(shown) == ["alive"]


def test_variables_stand_in_the_sections_of_their_document_with_its_words(
    admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that no document names is shown too."""
    monkeypatch.setenv("QUEUE_LIMIT", "77")
    environment.number("QUEUE_LIMIT", 1)
    environment.text("NOT_IN_THE_DOCUMENT")
    sections = dict(variables_by_section())
    limit = next(row for row in sections["API and queue"] if row.name == "QUEUE_LIMIT")
    assert (limit.value, limit.source) == ("77", "environment")
    assert "NOT_IN_THE_DOCUMENT" in {row.name for row in sections["Others"]}
    undocumented = [row for rows in sections.values() for row in rows if not row.meaning]
    assert {row.name for row in sections["Others"]} == {row.name for row in undocumented}
    text = admin.get(PAGE).content.decode()
    assert "`" not in limit.meaning
    assert escape(limit.meaning) in text
    assert text.index(">Site</h3>") < text.index(">API and queue</h3>")
