"""What operators read of a model that is not served, and what they are asked before an action."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from pytest_django.fixtures import Settings

from inference_site.accounts.models import ApiKey
from inference_site.catalogue.catalogue import DEMO_FILE, catalogue
from inference_site.catalogue.fleet.leases import (
    Lease,
    LiveWorker,
    ModelReport,
    ModelState,
    live_view,
)
from inference_site.catalogue.model_store.entries import refresh_catalogue
from inference_site.catalogue.model_store.models import StoredModel
from inference_site.console import model_states
from inference_site.core.storage.redis import site_client
from inference_site.runs.models import Status
from tests.console.test_queue import cells
from tests.generations.rows import create_generation

FLEET, ADD = "/admin/fleet/", "/admin/model_store/storedmodel/add/"
WORKER = "host:1:abcdef"
QUESTION = f"{FLEET}question/"


@pytest.fixture
def folder(settings: Settings, tmp_path: Path, db: None) -> Iterator[Path]:
    """An empty folder of models, and a catalogue of it."""
    settings.MODELS_DIR = tmp_path
    catalogue.cache_clear()
    yield tmp_path
    catalogue.cache_clear()


@pytest.fixture
def announce() -> Iterator[Callable[..., None]]:
    """Announces a worker with these models."""

    def renew(*models: ModelReport, **facts: Any) -> None:
        described = LiveWorker(WORKER, models, host="gpu-1", **facts)
        Lease(WORKER, lambda: described).renew(ttl_s=60)
        live_view.forget()

    yield renew
    site_client().delete(f"worker:{WORKER}")
    site_client().srem("workers", WORKER)


def add(id_: str, file: str) -> None:
    StoredModel.objects.create(model_id=id_, entry={"file": file})
    refresh_catalogue()


def shown(browser: Client, address: str = FLEET) -> str:
    return cells(browser.get(address).content.decode())


def test_a_model_whose_file_nobody_has_is_missing(
    admin: Client, folder: Path, announce: Callable[..., None]
) -> None:
    add("lost", "no/such.gguf")
    announce()
    text = shown(admin)
    assert "lost missing no/such.gguf does not exist, and no worker has it. llama_cpp" in text
    page = admin.get(f"{FLEET}models/lost/").content.decode()
    assert "status-missing" in page
    assert "no/such.gguf does not exist" in page
    assert 'value="load"' not in page
    announce(loadable=("lost",))
    page = admin.get(f"{FLEET}models/lost/").content.decode()
    assert "status-unloaded" in page
    assert "No worker was told to load it." in page
    assert 'value="load"' in page


def test_broken_files_are_shown_with_the_reason(
    admin: Client, folder: Path, announce: Callable[..., None]
) -> None:
    (folder / "page.gguf").write_bytes(b"<html>404</html>")
    (folder / "sub").mkdir()
    (folder / "sub" / "<b>.gguf").write_bytes(b"GGUF")
    (folder / "half.gguf").write_bytes(DEMO_FILE.read_bytes()[:-1000])
    catalogue.cache_clear()
    announce(loadable=("half",))
    text = admin.get(FLEET).content.decode()
    assert "page.gguf broken page.gguf: it is not a GGUF file" in cells(text)
    assert "sub/&lt;b&gt;.gguf broken sub/&lt;b&gt;.gguf: it is cut short" in cells(text)
    # The last one has a whole header, so it is a model; its page says what is wrong with it.
    assert "half broken half.gguf: it is cut short: it has" in cells(text)
    (folder / "page.gguf").write_bytes(DEMO_FILE.read_bytes())
    assert "page.gguf broken" not in shown(admin)


def test_a_model_of_a_broken_file_is_refused_by_the_form(admin: Client, folder: Path) -> None:
    (folder / "half.gguf").write_bytes(DEMO_FILE.read_bytes()[:-1000])
    form = {"model_id": "mine", "engine": "llama_cpp", "file": "half.gguf", "is_listed": "on"}
    answer = admin.post(ADD, form)
    assert "half.gguf: it is cut short" in answer.content.decode()
    assert not StoredModel.objects.exists()
    answer = admin.post(ADD, {**form, "file": "typo.gguf"}, follow=True)
    assert "not served unless a worker has its file: typo.gguf" in answer.content.decode()


@pytest.mark.parametrize(
    ("report", "facts", "said"),
    [
        (ModelReport("demo", 4, 2, ModelState.DRAINING), {}, "draining It takes no new work; 2"),
        (ModelReport("demo", 4, 0), {"is_draining": True}, "draining Its workers take no new"),
        (
            ModelReport("demo", 4, 0, ModelState.LOADING, progress=0.42, expected_s=3),
            {},
            "loading 42% of its file is read. In about 3 s.",
        ),
        (
            ModelReport("demo", 4, 0, ModelState.FAILED, reason="no room: 9 GiB of 8 GiB"),
            {},
            "failed no room: 9 GiB of 8 GiB",
        ),
        (ModelReport("demo", 4, 0, ModelState.SLEEPING), {}, "unloaded Its server sleeps"),
        (ModelReport("x", 4, 0), {"unloaded": ("demo",)}, "unloaded It was unloaded by an"),
        (ModelReport("x", 4, 0), {"is_draining": True}, "unloaded All workers are draining."),
    ],
)
def test_a_state_has_its_reason(
    admin: Client,
    folder: Path,
    announce: Callable[..., None],
    report: ModelReport,
    facts: dict[str, Any],
    said: str,
) -> None:
    announce(report, **facts)
    assert f"demo {said}" in shown(admin)
    assert said in shown(admin, f"{FLEET}models/demo/")


def test_a_question_counts_what_the_action_interrupts(
    admin: Client,
    api_key: tuple[ApiKey, str],
    announce: Callable[..., None],
    settings: Settings,
) -> None:
    announce(ModelReport("demo", 4, 1))

    def question(action: str, target: str) -> str:
        return admin.get(QUESTION, {"action": action, "target": target}).content.decode()

    assert question("unload", "demo") == "Unload demo from 1 worker? No request runs or waits."
    create_generation(api_key[0], model="demo", status=Status.RUNNING, worker=WORKER)
    for _ in range(2):
        create_generation(api_key[0], model="demo")
    said = question("unload", "demo")
    limit = f"{settings.DRAIN_TIMEOUT_S} s"
    assert f"1 request runs and has {limit} to end before it is stopped." in said
    assert "2 requests wait until a worker loads it again." in said
    said = question("drain", WORKER)
    assert "1 request on it ends first." in said
    assert "2 requests wait for models that no other worker serves." in said
    assert admin.get(QUESTION, {"action": "load", "target": "demo"}).status_code == 404
    assert "from 0 workers" in question("unload", "\x01<b>")


def test_the_question_before_a_stop_says_whose_request_it_is(
    admin: Client, api_key: tuple[ApiKey, str]
) -> None:
    waiting = create_generation(api_key[0])
    text = admin.get("/admin/queue/").content.decode()
    assert f"Stop {waiting.public_id} of owner, key test? It has waited for 0 s" in text


def test_a_user_with_view_permission_only_gets_no_actions_on_a_models_page(
    staff: Callable[..., Client], announce: Callable[..., None]
) -> None:
    announce(ModelReport("demo", 4, 1), loadable=("demo-embedding",))
    looker = staff("generations.view_generation")
    assert looker.get(QUESTION, {"action": "unload", "target": "demo"}).status_code == 403
    for model in ("demo", "demo-embedding"):
        page = looker.get(f"{FLEET}models/{model}/").content.decode()
        assert "fleet-action" not in page
        assert 'name="action"' not in page


def test_an_action_on_a_models_page_leads_back_to_it(
    admin: Client, announce: Callable[..., None]
) -> None:
    announce(ModelReport("demo", 4, 1))
    posted = {"action": "drain", "target": WORKER, "model": "demo"}
    assert admin.post(f"{FLEET}action/", posted)["Location"] == f"{FLEET}models/demo/"
    posted["model"] = "//evil.example/"
    assert admin.post(f"{FLEET}action/", posted)["Location"] == FLEET


def test_many_files_do_not_hold_a_page_up(
    admin: Client, folder: Path, announce: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of all files at once would take minutes; the rest is checked by the next pages."""
    for number in range(300):
        (folder / f"{number:03}.gguf").write_bytes(b"no model")

    def slow(path: Path, is_gguf: bool = True) -> str:
        time.sleep(0.01)
        return f"{path}: broken"

    monkeypatch.setattr(model_states, "file_error", slow)
    announce()
    started = time.monotonic()
    first = admin.get(FLEET).content.decode().count("status-broken")
    assert time.monotonic() - started < 3
    assert 0 < first < 300
    for _ in range(12):
        admin.get(FLEET)
    assert admin.get(FLEET).content.decode().count("status-broken") == 300
