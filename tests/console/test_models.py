"""The pages of models: what they show, the form, and who may use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test import Client
from django.utils import timezone
from pytest_django.fixtures import Settings

from inference_site.accounts.models import ApiKey
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet.leases import HostState, Lease, LiveWorker, ModelReport
from inference_site.catalogue.model_store.entries import decrypt_secrets
from inference_site.catalogue.model_store.models import Pull, PullState, StoredModel
from inference_site.core.host import Device
from inference_site.core.storage.redis import site_client
from inference_site.runs.models import Status
from tests.generations.rows import create_generation

FLEET, MODELS = "/admin/fleet/", "/admin/model_store/storedmodel/"
ADD = f"{MODELS}add/"
PULL = "/admin/model_store/pull/add/"
FORM = {"model_id": "upstream", "engine": "openai_upstream", "is_listed": "on", "slots": "3"}
URL = "base_url: http://127.0.0.1:1/v1\napi_key: sk-secret"


@pytest.fixture(autouse=True)
def _allowed(settings: Settings) -> None:
    """Let entries name the server that is not there."""
    settings.UPSTREAM_ALLOWED_HOSTS = ["127.0.0.1"]


def shown(browser: Client, address: str) -> str:
    answer = browser.get(address)
    assert answer.status_code == 200, answer.status_code
    text: str = answer.content.decode()
    return text


def test_the_page_of_a_model_shows_what_it_is_where_it_runs_and_what_failed(
    admin: Client, api_key: tuple[ApiKey, str]
) -> None:
    failed = {"status": Status.FAILED, "finished_at": timezone.now(), "error_code": "model_error"}
    create_generation(api_key[0], **{"model": "demo", **failed})
    report = ModelReport("demo", 4, 1, size_bytes=2**30, quantisation="Q4_K_M", context_length=4321)
    gpu = Device("H100 0", 80 * 2**30, 20 * 2**30, temperature_c=61, busy_percent=7)
    host = HostState("EPYC", 64, 3.5, Device("memory", 2**34, 2**33), (gpu,), "3.13")
    worker = LiveWorker("gpu:1", (report,), host="gpu", release="1.2.3", state=host)
    Lease("gpu:1", lambda: worker).renew(ttl_s=60)  # A first page takes long on a busy machine.
    try:
        text, fleet = shown(admin, f"{FLEET}models/demo/"), shown(admin, FLEET)
    finally:
        site_client().delete("worker:gpu:1")
        site_client().srem("workers", "gpu:1")
    for part in (
        "gpu:1",
        "1 / 4",
        "Q4_K_M",
        "1.00 GiB",
        "4,321 tokens",
        "no price set",
        "model_error",
    ):
        assert part in text, part
    for part in ("64 × EPYC", "20.0 of 80.0 GiB, 7 % busy, 61 °C", "1.2.3"):
        assert part in fleet, part
    assert admin.get(f"{FLEET}models/none/").status_code == 404


def test_a_model_is_added_changed_and_removed_and_the_audit_log_tells(admin: Client) -> None:
    answer = admin.post(ADD, {**FORM, "price_input": "1.5", "more": URL}, follow=True)
    assert "Added the model upstream." in answer.content.decode()
    kept = StoredModel.objects.get()
    assert kept.entry["base_url"] == "http://127.0.0.1:1/v1"
    assert kept.entry["price"] == {"input": 1.5}
    address = f"/admin/model_store/storedmodel/{kept.pk}/change/"
    text = shown(admin, address)
    assert "sk-secret" not in text
    changed = {**FORM, "slots": "5", "more": URL.replace("sk-secret", "(hidden)")}
    answer = admin.post(address, changed)
    assert answer.status_code == 302, answer.context["adminform"].form.errors
    kept.refresh_from_db()
    assert (kept.entry["slots"], decrypt_secrets(kept.entry)["api_key"]) == (5, "sk-secret")
    with connection.cursor() as cursor:
        cursor.execute("SELECT entry::text FROM model_store_storedmodel")
        assert "sk-secret" not in cursor.fetchone()[0]
    assert "slots: 3 → 5" in LogEntry.objects.latest("pk").change_message
    assert "sk-secret" not in str(LogEntry.objects.values_list("change_message"))
    admin.post(address.replace("change", "delete"), {"post": "yes"})
    assert not StoredModel.objects.exists()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model_id": "demo"}, "the product has a model of this ID"),
        ({"model_id": "Demo"}, "This is a name of the model demo"),
        ({"aliases": "a, DEMO"}, "DEMO is a name of the model demo"),
        ({"more": ""}, "the address of a server"),
        ({"more": "a: ["}, "it is not YAML"),
        ({"more": f"{URL}\nslots: 4"}, "it has a field of its own above"),
        ({"engine": "llama_cpp", "file": "../../x"}, "not in the directory of models"),
        ({"slots": "0"}, "greater than or equal to 1"),
        ({"more": "base_url: http://10.0.0.1/v1"}, "10.0.0.1 has an address that is not public"),
        ({"engine": "ctransformers", "file": "a.bin", "more": "lib: a.so"}, "Input should be"),
        ({"engine": "llama_cpp", "more": "chat_template: /etc/passwd"}, "Could not find"),
        ({"engine": "ghost"}, "not one of the available choices"),
    ],
)
def test_a_form_that_is_wrong_says_what_is(
    admin: Client, fields: dict[str, str], told: str
) -> None:
    catalogue.cache_clear()
    answer = admin.post(ADD, {**FORM, "more": URL, **fields})
    assert answer.status_code == 200
    assert told in answer.content.decode().replace("&#x27;", "'")
    assert not StoredModel.objects.exists()


def test_the_form_of_an_entry_that_another_model_replaces_says_so(admin: Client) -> None:
    """As after the owner of the site has added a model of its ID to the models file."""
    catalogue.cache_clear()
    stored = StoredModel.objects.create(model_id="demo", entry={"engine": "scripted"})
    form = {**FORM, "engine": "scripted"}
    answer = admin.post(f"/admin/model_store/storedmodel/{stored.pk}/change/", form)
    assert "the product has a model of this ID" in answer.content.decode()


def test_the_form_of_a_pull_has_one_button(admin: Client) -> None:
    text = admin.get("/admin/model_store/pull/add/").content.decode()
    assert 'name="_save"' in text
    assert "Save and" not in text


def test_a_pull_is_asked_for_seen_and_stopped(admin: Client) -> None:
    refused = admin.post(PULL, {"reference": "no model", "revision": "main"})
    assert "is no model" in refused.content.decode()
    refused = admin.post(PULL, {"reference": "org/repo/evil.so", "revision": "main"})
    assert "evil.so is no model file" in refused.content.decode()
    asked = {"reference": "org/repo:Q8_0", "revision": "main", "model_id": "", "host": ""}
    text = admin.post(PULL, asked, follow=True).content.decode()
    assert "Pulling org/repo:Q8_0…" in text
    pull = Pull.objects.get()
    Pull.objects.filter(pk=pull.pk).update(
        state=PullState.RUNNING, worker="w", have_bytes=25, size_bytes=100
    )
    assert 'max="100" value="25"' in shown(admin, FLEET)
    told = admin.post(f"{FLEET}pulls/{pull.pk}/stop/", follow=True).content.decode()
    assert "Stopping the pull of org/repo:Q8_0…" in told
    pull.refresh_from_db()
    assert pull.state == PullState.CANCELLED
    assert LogEntry.objects.latest("pk").change_message == "Stopped."
    told = admin.post(f"{FLEET}pulls/{pull.pk}/stop/", follow=True).content.decode()
    assert "has ended" in told


def test_pulls_that_have_ended_hide_none_that_runs(admin: Client) -> None:
    running = Pull.objects.create(reference="org/large", state=PullState.RUNNING, worker="w")
    for number in range(12):
        Pull.objects.cancel(Pull.objects.create(reference=f"org/no-{number}").pk)
    text = shown(admin, FLEET)
    assert f"{FLEET}pulls/{running.pk}/stop/" in text
    assert "org/no-11" in text


def test_who_may_only_look_has_the_list_without_links_to_forms(
    admin: Client, staff: Callable[..., Client]
) -> None:
    stored = StoredModel.objects.create(model_id="kept", entry={"file": "kept.gguf"})
    looker, form = staff("model_store.view_storedmodel"), f"{MODELS}{stored.pk}/change/"
    assert f'href="{form}' in shown(admin, MODELS)
    listed = shown(looker, MODELS)
    assert "kept" in listed
    assert form not in listed
    assert looker.get(form).status_code == 403


def test_who_may_only_look_can_neither_add_nor_pull(staff: Callable[..., Client]) -> None:
    looker = staff("generations.view_generation", "model_store.view_pull")
    pull = Pull.objects.create(reference="org/repo", error="<script>alert(1)</script>")
    Pull.objects.cancel(pull.pk)
    text = shown(looker, FLEET)
    assert "&lt;script&gt;" in text
    assert ADD not in text
    assert PULL not in text
    posts: list[tuple[str, Any]] = [
        (ADD, FORM),
        (PULL, {"reference": "a/b", "revision": "main"}),
        (f"{FLEET}pulls/{pull.pk}/stop/", {}),
    ]
    assert [looker.post(address, form).status_code for address, form in posts] == [403] * 3
    assert Pull.objects.count() == 1
