"""The form of a model: what it offers, what it says before it is saved, and what is in force."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.test import Client
from pytest_django.fixtures import Settings

from inference_site.catalogue.catalogue import DEMO_FILE, catalogue
from inference_site.catalogue.fleet.leases import Lease, LiveWorker, ModelReport
from inference_site.catalogue.model_store.entries import refresh_catalogue
from inference_site.catalogue.model_store.models import StoredModel
from inference_site.core.host import Device
from inference_site.core.storage.redis import site_client
from tests.console.test_queue import cells

ADD = "/admin/model_store/storedmodel/add/"
ESTIMATE = "/admin/model_store/storedmodel/estimate/"
WORKER = "host:1:form"


@pytest.fixture
def folder(settings: Settings, tmp_path: Path, db: None) -> Iterator[Path]:
    """A folder of models with one file, and a catalogue of it."""
    settings.MODELS_DIR = tmp_path / "models"
    (settings.MODELS_DIR / "owner").mkdir(parents=True)
    (settings.MODELS_DIR / "owner" / "demo.gguf").write_bytes(DEMO_FILE.read_bytes())
    (tmp_path / "secret.gguf").write_bytes(DEMO_FILE.read_bytes())
    catalogue.cache_clear()
    yield settings.MODELS_DIR
    catalogue.cache_clear()


@pytest.fixture
def worker() -> Iterator[Callable[[LiveWorker], None]]:
    """Announces a worker."""
    yield lambda described: Lease(WORKER, lambda: described).renew(ttl_s=60)
    site_client().delete(f"worker:{WORKER}")
    site_client().srem("workers", WORKER)


def said(browser: Client, **fields: str) -> str:
    answer = browser.post(ESTIMATE, {"engine": "llama_cpp", **fields})
    assert answer.status_code == 200, answer.status_code
    text: str = answer.content.decode()
    return text


def test_files_and_servers_are_offered(admin: Client, folder: Path, settings: Settings) -> None:
    settings.UPSTREAM_ALLOWED_HOSTS = ["vllm:8000"]
    (folder / "old.bin").write_bytes(b"x" * 2**20)
    entry = {"engine": "openai_upstream", "base_url": "https://u:p@h.example/v1"}
    StoredModel.objects.create(model_id="other", entry=entry)
    text = admin.get(ADD).content.decode()
    assert '<option value="owner/demo.gguf" label="owner/demo.gguf (' in text
    assert '<option value="old.bin" label="old.bin (1.0 MiB)">' in text
    assert '<option value="http://vllm:8000/v1"' in text
    assert "u:p@" not in text
    assert 'list="offered-files"' in text


def test_the_memory_is_estimated_before_the_model_is_saved(
    admin: Client, folder: Path, worker: Callable[[LiveWorker], None]
) -> None:
    devices = (Device("memory", 2**33, 2**20),)
    worker(LiveWorker(WORKER, host="big", devices=devices))
    text = said(admin, file="owner/demo.gguf", slots="3", context_length="1024")
    assert "3 slots of 1,024 tokens. It needs about" in text
    assert "weights 0." in text
    assert "No worker has that much free now. Free now: big memory 0.0 of 8.0 GiB." in text
    longer = said(admin, file="owner/demo.gguf", slots="30", context_length="2048")
    assert "cache" in longer
    assert longer != text
    assert not StoredModel.objects.exists()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"file": "typo.gguf"}, "typo.gguf does not exist on this host"),
        ({"file": "../secret.gguf"}, "not in the directory of models"),
        ({"file": "/etc/passwd"}, "not in the directory of models"),
        ({"file": "owner/demo.gguf", "slots": "-1"}, "greater than or equal to 1"),
        ({"file": "owner/demo.gguf", "more": "a: ["}, "more: it is not YAML"),
        ({"engine": "openai_upstream", "more": "api_key: (hidden)"}, "no memory is needed"),
        ({"engine": "ghost"}, "no memory is needed"),
    ],
)
def test_values_without_an_estimate_say_why(
    admin: Client, folder: Path, fields: dict[str, str], told: str
) -> None:
    assert told in said(admin, **fields)


def test_an_estimate_needs_the_permission_of_the_form(
    staff: Callable[..., Client], folder: Path
) -> None:
    asked = {"engine": "llama_cpp", "file": "owner/demo.gguf"}
    assert staff("generations.view_generation").post(ESTIMATE, asked).status_code == 403
    adder = staff("model_store.add_storedmodel")
    assert "It needs about" in said(adder, file="owner/demo.gguf")
    assert adder.get(ESTIMATE).status_code == 405


def test_a_server_has_a_field_and_may_still_be_written_as_yaml(
    admin: Client, settings: Settings, folder: Path
) -> None:
    settings.UPSTREAM_ALLOWED_HOSTS = ["127.0.0.1"]
    form = {"model_id": "far", "engine": "openai_upstream", "is_listed": "on"}
    url = "http://127.0.0.1:1/v1"
    twice = {**form, "base_url": url, "more": f"base_url: {url}"}
    assert "it has a field of its own above" in admin.post(ADD, twice).content.decode()
    assert admin.post(ADD, {**form, "base_url": url}).status_code == 302
    assert (
        admin.post(ADD, {**form, "model_id": "too", "more": f"base_url: {url}"}).status_code == 302
    )
    kept = dict(StoredModel.objects.values_list("model_id", "entry"))
    assert kept["far"]["base_url"] == kept["too"]["base_url"] == url


@pytest.mark.parametrize("more", [r'model: "a\0b"', r'api_key: "\ud800"', r'"\0": 1'])
def test_what_postgresql_cannot_store_is_refused(
    admin: Client, settings: Settings, folder: Path, more: str
) -> None:
    settings.UPSTREAM_ALLOWED_HOSTS = ["127.0.0.1"]
    form = {"model_id": "far", "engine": "openai_upstream", "base_url": "http://127.0.0.1:1/v1"}
    answer = admin.post(ADD, {**form, "more": more})
    assert "it has a NUL, or half of a character" in answer.content.decode()
    assert not StoredModel.objects.exists()


@pytest.mark.parametrize(
    "value", ["2024-01-01", ".nan", ".inf", "!!set {a}", "!!binary aGk=", "9" * 400]
)
def test_what_is_no_json_is_refused(
    admin: Client, settings: Settings, folder: Path, value: str
) -> None:
    """A number of 400 digits could be stored, and not be read again."""
    settings.UPSTREAM_ALLOWED_HOSTS = ["127.0.0.1"]
    form = {"model_id": "far", "engine": "openai_upstream", "base_url": "http://127.0.0.1:1/v1"}
    answer = admin.post(ADD, {**form, "more": f"chat_template_kwargs: {{a: {value}}}"})
    assert "a value cannot be stored as JSON" in answer.content.decode()
    assert not StoredModel.objects.exists()


def test_a_models_page_shows_what_is_set_beside_what_is_in_force(
    admin: Client, folder: Path, worker: Callable[[LiveWorker], None]
) -> None:
    entry = {"file": "owner/demo.gguf", "slots": 3}
    StoredModel.objects.create(model_id="mine", entry=entry)
    refresh_catalogue()
    worker(LiveWorker(WORKER, (ModelReport("mine", 2, 0, context_length=2048),)))
    text = cells(admin.get("/admin/fleet/models/mine/").content.decode())
    assert "Slots 3 2 A worker has another value than is set." in text
    assert "Context length not set 2,048" in text
    assert "GPU layers not set all that fit" in text
