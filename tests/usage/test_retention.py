"""Retention: each kind is kept as its project says, or else the site; the usage stays true."""

from __future__ import annotations

import datetime as dt
import io
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import OperationalError, transaction
from django.test import Client
from django.utils import timezone

from completions.models import StoredCompletion
from inference_site.accounts.models import (
    ApiKey,
    Budget,
    BudgetSpend,
    Project,
    retention_cutoffs,
)
from inference_site.batches import models as batches
from inference_site.batches.models import Batch, BatchLine, BatchStatus
from inference_site.core.site_settings import models as site_settings
from inference_site.core.site_settings.models import SiteSettings
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.files import storage
from inference_site.files.models import StoredFile, Upload, UploadStatus
from inference_site.runs.models import Generation, Status
from inference_site.runs.request_log.models import Refusal
from inference_site.runs.tool_calls.models import ToolCall
from inference_site.runs.usage import accounting, pruning
from inference_site.runs.usage.accounting import account
from inference_site.runs.usage.models import Period, UsageRollup
from inference_site.runs.usage.pruning import prune_generations, prune_old
from responses_api import deletion
from responses_api.models import Conversation, Item, McpApproval, ResponseStatus, StoredResponse
from tests.generations.rows import create_generation
from tests.waiting import wait_for_a_wait

pytestmark = pytest.mark.django_db(transaction=True)

Key = tuple[ApiKey, str]
Make = Callable[[ApiKey, str, dt.datetime], Any]


@pytest.fixture(autouse=True)
def fresh(folder: Path) -> Iterator[None]:
    site_settings.forget()
    yield
    site_settings._last = SiteSettings()
    site_settings.forget()


def set_site(**fields: Any) -> None:
    SiteSettings.objects.update_or_create(pk=1, defaults=fields)
    site_settings.forget()


def old(days: float) -> dt.datetime:
    return timezone.now() - dt.timedelta(days=days)


def response(key: ApiKey, name: str, at: dt.datetime, **fields: Any) -> None:
    StoredResponse.objects.create(
        public_id=name,
        project=key.project,
        model="m",
        status=ResponseStatus.COMPLETED,
        created_at=at,
        **fields,
    )


def conversation(key: ApiKey, name: str, at: dt.datetime) -> None:
    Conversation.objects.create(public_id=name, project=key.project, created_at=at)


def completion(key: ApiKey, name: str, at: dt.datetime) -> None:
    StoredCompletion.objects.create(
        public_id=name,
        project=key.project,
        model="m",
        messages=[],
        completion={},
        created_at=at,
    )


def file(key: ApiKey, name: str, at: dt.datetime) -> None:
    row = StoredFile(
        public_id=name,
        project=key.project,
        filename=name,
        purpose="user_data",
        size_bytes=3,
        created_at=at,
    )
    storage.store(row, io.BytesIO(b"abc"))


def batch(key: ApiKey, name: str, at: dt.datetime, **fields: Any) -> Batch:
    row = {"status": BatchStatus.COMPLETED, "window_s": 1, "expires_at": at, **fields}
    return Batch.objects.create(
        public_id=name, project=key.project, api_key=key, endpoint="/v1/embeddings", **row
    )


def generation(key: ApiKey, name: str, at: dt.datetime, **fields: Any) -> Generation:
    row = {
        "status": Status.COMPLETED,
        "claimed_at": at,
        "first_token_at": at,
        "finished_at": at + dt.timedelta(seconds=1),
        "output_tokens": 7,
        "cost": Decimal("0.5"),
        **fields,
    }
    return create_generation(key, public_id=name, created_at=at, **row)


def refusal(key: ApiKey, name: str, at: dt.datetime) -> None:
    Refusal.objects.create(status=400, request_id=name, project=key.project, created_at=at)


KINDS: dict[str, tuple[Make, Any, str, str]] = {
    "responses_days": (response, StoredResponse, "public_id", "responses_days"),
    "conversations_days": (conversation, Conversation, "public_id", "conversations_days"),
    "completions_days": (completion, StoredCompletion, "public_id", "completions_days"),
    "files_days": (file, StoredFile, "public_id", "files_days"),
    "batches_days": (batch, Batch, "public_id", "batches_days"),
    "generations_days": (generation, Generation, "public_id", "usage_log_days"),
    "refusals_days": (refusal, Refusal, "request_id", "refusals_days"),
}


def key_of(name: str, **fields: Any) -> ApiKey:
    project = Project.objects.create(name=name, **fields)
    return ApiKey.objects.create(project=project, name=name, prefix="sk-test")


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_kept_as_its_project_says_or_else_the_site(kind: str, settings: Any) -> None:
    make, model, name, site_field = KINDS[kind]
    settings.REFUSALS_DAYS = settings.USAGE_LOG_DAYS = 0
    keys = {
        "site": key_of("site"),
        "longer": key_of("longer", **{kind: 50}),
        "shorter": key_of("shorter", **{kind: 3}),
        "forever": key_of("forever", **{kind: 0}),
    }
    for days in (60, 40, 20, 5, 1):
        for owner, key in keys.items():
            make(key, f"{owner}-{days}", old(days))
    account()
    set_site(**{site_field: 10})

    prune_old(threading.Event())

    kept = {
        *("site-5", "site-1", "shorter-1"),
        *("longer-40", "longer-20", "longer-5", "longer-1"),
        *("forever-60", "forever-40", "forever-20", "forever-5", "forever-1"),
    }
    assert set(model.objects.values_list(name, flat=True)) == kept


@pytest.mark.parametrize(
    "kind", ["responses_days", "conversations_days", "completions_days", "files_days"]
)
def test_imported_objects_are_deleted_behind_younger_ones(kind: str) -> None:
    make, model, name, _ = KINDS[kind]
    key = key_of("a", **{kind: 10})
    for days in (5, 4, 3, 2, 60):
        make(key, f"{days}", old(days))
    prune_old(threading.Event())
    assert set(model.objects.values_list(name, flat=True)) == {"5", "4", "3", "2"}


def test_a_conversation_that_is_continued_while_it_is_about_to_be_deleted_stays() -> None:
    key = key_of("a", conversations_days=10)
    conversation(key, "old", old(60))

    def prune() -> None:
        with release_connection_after():
            deletion.prune(time.monotonic() + 60)

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            found = Conversation.objects.select_for_update().get()
            deleting = pool.submit(prune)
            wait_for_a_wait()
            response(key, "new", timezone.now(), conversation=found)
        deleting.result(60)
    assert Conversation.objects.get().deleted_at is None


@pytest.mark.parametrize(
    ("kind", "prune"),
    [
        ("responses_days", deletion.prune),
        ("conversations_days", deletion.prune),
        ("batches_days", batches.prune),
    ],
)
def test_what_takes_all_of_the_time_to_be_found_is_deleted(
    kind: str, prune: Callable[[float], int]
) -> None:
    """It was found again and again, and never deleted."""
    make, model, _, _ = KINDS[kind]
    make(key_of("a", **{kind: 10}), "old", old(60))
    assert prune(time.monotonic()) == 1
    assert not model.objects.exists()


def test_a_kind_that_fails_keeps_no_other_from_being_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = key_of("a", batches_days=10, responses_days=10)
    make_response, *_ = KINDS["responses_days"]
    make_response(key, "old", old(60))
    batch(key, "old", old(60))

    def fail(_: float) -> int:
        raise OperationalError("a statement took too long")

    for first, other in ((batches, StoredResponse), (deletion, Batch)):
        with monkeypatch.context() as failing:
            failing.setattr(first, "prune", fail)
            with pytest.raises(ExceptionGroup, match="pruning"):
                prune_old(threading.Event())
        assert not other.objects.exists()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "batches_days"])
def test_without_a_setting_nothing_is_deleted(kind: str, settings: Any) -> None:
    make, model, name, _ = KINDS[kind]
    settings.REFUSALS_DAYS = settings.USAGE_LOG_DAYS = 0
    make(key_of("a"), "old", old(5000))
    account()
    prune_old(threading.Event())
    assert model.objects.filter(**{name: "old"}).exists()


def test_batches_are_kept_for_thirty_days_without_a_setting_and_while_they_go_on() -> None:
    key = key_of("a", batches_days=None)
    for days in (31, 29):
        batch(key, f"ended-{days}", old(days))
        batch(key, f"running-{days}", old(days), status=BatchStatus.IN_PROGRESS)
    lines = batch(key, "has-lines", old(31))
    BatchLine.objects.create(batch=lines, number=1, custom_id="a", request="{}")
    prune_old(threading.Event())
    kept = set(Batch.objects.values_list("public_id", flat=True))
    assert kept == {"ended-29", "running-29", "running-31"}
    assert not BatchLine.objects.exists()


def test_ended_uploads_go_with_the_files_of_their_days() -> None:
    key = key_of("a", files_days=3)
    for status in (UploadStatus.COMPLETED, UploadStatus.PENDING):
        Upload.objects.create(
            public_id=f"upload_{status}",
            project=key.project,
            filename="name of a person.pdf",
            purpose="user_data",
            content_type="a/b",
            size_bytes=3,
            status=status,
            created_at=old(4),
            expires_at=timezone.now() + dt.timedelta(hours=1),
        )
    prune_old(threading.Event())
    assert [upload.status for upload in Upload.objects.all()] == [UploadStatus.PENDING]


def test_refusals_of_unknown_keys_are_kept_as_the_site_says(settings: Any) -> None:
    settings.REFUSALS_DAYS = 30
    for days in (31, 20, 1):
        Refusal.objects.create(status=401, request_id=f"r{days}", created_at=old(days))
    prune_old(threading.Event())
    assert Refusal.objects.count() == 2
    set_site(refusals_days=10)
    prune_old(threading.Event())
    assert [row.request_id for row in Refusal.objects.all()] == ["r1"]


def test_calls_of_tools_go_with_their_generation() -> None:
    key = key_of("a", generations_days=3)
    for name, days in (("old", 4), ("new", 2)):
        generation(key, name, old(days))
        ToolCall.objects.create(generation_id=name, number=0, type="mcp", name="f")
    account()
    prune_old(threading.Event())
    assert [call.generation_id for call in ToolCall.objects.all()] == ["new"]


def test_generations_that_run_or_are_not_accounted_stay() -> None:
    key = key_of("a", generations_days=1)
    create_generation(key, public_id="waits", created_at=old(9))
    generation(key, "not accounted", old(9))
    prune_old(threading.Event())
    assert Generation.objects.count() == 2
    account()
    prune_old(threading.Event())
    assert [row.public_id for row in Generation.objects.all()] == ["waits"]


def usage(*arguments: str) -> str:
    out = StringIO()
    call_command("usage", *arguments, stdout=out, stderr=StringIO())
    return out.getvalue()


def test_usage_and_budgets_stay_true_when_the_log_of_one_project_is_deleted(api_key: Key) -> None:
    keeps, deletes = api_key[0], key_of("deletes", generations_days=1)
    budgets = [
        Budget.objects.create(project=key.project, unit="cost", every="month", amount=9)
        for key in (keeps, deletes)
    ]
    for days in (40, 3.5, 2.5, 0):
        for key in (keeps, deletes):
            generation(key, f"{key.pk}-{days}", old(days), model=f"m{days:.0f}")
    account()
    # As if all had been spent in this month, which may have begun today.
    BudgetSpend.objects.update(spent=2)
    days_of_usage = UsageRollup.objects.filter(period=Period.DAY)
    before = list(days_of_usage.order_by("pk").values_list("project_id", "start", "cost"))
    assert len(before) == 8

    prune_old(threading.Event())

    assert Generation.objects.filter(project=deletes.project).count() == 1
    assert Generation.objects.filter(project=keeps.project).count() == 4
    usage("--rebuild")
    assert "add up to the usage log" in usage("--check")
    after = list(days_of_usage.order_by("pk").values_list("project_id", "start", "cost"))
    assert sorted(after) == sorted(before)
    spent = [budget.spends.latest("start").spent for budget in budgets]
    assert spent[1] == 2, "the log does not have it any more"
    assert spent[0] < 2, "the log has all of it"


def test_nothing_is_deleted_from_the_log_while_usage_is_rebuilt_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = key_of("a", generations_days=1)
    generation(key, "old", old(5))
    account()
    before = list(UsageRollup.objects.values_list("period", "start", "cost").order_by("pk"))
    pruning_thread = threading.Thread(target=in_its_connection, args=(prune_generations, 9e9))
    rewrite, has_waited = accounting._rewrite, list[bool]()

    def rewrite_slowly(*arguments: Any) -> None:
        if not pruning_thread.ident:
            pruning_thread.start()
        pruning_thread.join(0.1)
        has_waited.append(pruning_thread.is_alive())
        rewrite(*arguments)

    monkeypatch.setattr(accounting, "_rewrite", rewrite_slowly)
    accounting.rebuild()
    assert all(has_waited)
    pruning_thread.join()
    assert not Generation.objects.exists()
    after = UsageRollup.objects.values_list("period", "start", "cost")
    assert sorted(after) == sorted(before)


def in_its_connection(act: Callable[[float], int], until: float) -> None:
    with release_connection_after():
        act(until)


def test_a_log_that_was_deleted_whole_leaves_its_usage() -> None:
    key = key_of("quiet", generations_days=1)
    generation(key, "only", old(5))
    account()
    prune_old(threading.Event())
    assert not Generation.objects.exists()
    assert "add up to the usage log" in usage("--check")
    usage("--rebuild")
    assert UsageRollup.objects.filter(period=Period.DAY).count() == 1
    # Longer from now on: what was deleted before stays deleted, and the usage of it true.
    Project.objects.update(generations_days=None)
    assert "add up to the usage log" in usage("--check")


def test_a_large_purge_goes_on_until_it_is_done_or_is_stopped(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.REFUSALS_DAYS = 0
    monkeypatch.setattr(pruning, "BATCH", 1)
    monkeypatch.setattr(pruning, "_SLICE_S", 0.2)
    key = key_of("a", refusals_days=1)
    Refusal.objects.bulk_create(
        Refusal(status=400, project=key.project, created_at=old(2)) for _ in range(1_000)
    )
    stopped, prune_refusals = threading.Event(), pruning.prune_refusals

    def stop_and_prune(until: float) -> int:
        stopped.set()
        return prune_refusals(until)

    with monkeypatch.context() as stopping:
        stopping.setattr(pruning, "prune_refusals", stop_and_prune)
        prune_old(stopped)
    assert 0 < Refusal.objects.count() < 1_000
    prune_old(threading.Event())
    assert not Refusal.objects.exists()


def test_no_project_follows_when_the_time_is_over() -> None:
    """Twenty thousand took seconds of beat's processor time, in which nothing was deleted."""
    Project.objects.bulk_create(Project(name=f"p{n}", refusals_days=9) for n in range(3))
    assert len([*retention_cutoffs("refusals_days", time.monotonic() + 60)]) == 3
    assert len([*retention_cutoffs("refusals_days", time.monotonic())]) == 1


def test_many_projects_leave_time_for_what_is_deleted_beside_them(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.REFUSALS_DAYS = 30
    monkeypatch.setattr(pruning, "_SLICE_S", 0.3)
    days = dict.fromkeys(("responses_days", "generations_days", "refusals_days", "files_days"), 9)
    Project.objects.bulk_create(Project(name=f"p{n}", **days) for n in range(3000))
    key = key_of("a", conversations_days=3)
    conversation(key, "old", old(4))
    Refusal.objects.create(status=401, request_id="of an unknown key", created_at=old(31))
    budget = Budget.objects.create(
        project=key.project, unit="tokens", every="day", amount=9, each="user"
    )
    BudgetSpend.objects.create(budget=budget, start=old(4).date(), value="ann", spent=5)
    file(key, "deleted", old(1))
    StoredFile.objects.hide()

    prune_old(threading.Event())
    assert not Refusal.objects.exists()
    assert not BudgetSpend.objects.exists()
    assert not StoredFile.objects.exists()
    for _ in range(20):  # It shares its time with the responses, in a random order.
        if Conversation.objects.exists():
            prune_old(threading.Event())
    assert not Conversation.objects.exists()


def test_the_page_of_a_project_has_each_kind_with_the_default_of_the_site(admin: Client) -> None:
    set_site(files_days=45)
    project = Project.objects.create(name="a")
    text = admin.get(f"/admin/accounts/project/{project.pk}/change/").content.decode()
    for kind in KINDS:
        assert f'name="{kind}"' in text
    assert "now 45 days" in text
    assert "now 30 days" in text, "batches"
    assert "now until they are deleted" in text


def test_old_chains_are_deleted_whole_or_hidden_while_others_build_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deletion, "_BATCH", 7)  # Chains go on in the next batch.
    key = key_of("a", responses_days=3)
    ends = {"all-old": 9.0, "goes-on": 1.0}
    for chain, newest in ends.items():
        previous = None
        for number in range(10):
            at = newest if number == 9 else 10 - number / 10
            response(key, f"{chain}-{number}", old(at))
            row = StoredResponse.objects.get(public_id=f"{chain}-{number}")
            row.previous = previous
            row.rating, row.feedback = "up", [{"note": "by whom"}]
            row.save()
            item = Item.objects.create(
                public_id=f"item-{chain}-{number}", project=key.project, response=row, data={}
            )
            McpApproval.objects.create(item=item, project=key.project, server_label="a", name="b")
            previous = row
    prune_old(threading.Event())
    rows = StoredResponse.objects
    assert set(rows.filter(deleted_at=None).values_list("public_id", flat=True)) == {"goes-on-9"}
    assert list(rows.exclude(feedback=[]).values_list("public_id", "rating")) == [
        ("goes-on-9", "up")
    ]
    assert rows.filter(public_id__startswith="all-old").count() == 0
    assert rows.count() == Item.objects.count() == McpApproval.objects.count() == 10
    rows.filter(public_id="goes-on-9").update(created_at=old(9))
    prune_old(threading.Event())
    assert not rows.exists()
    assert not Item.objects.exists()
