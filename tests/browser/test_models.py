"""Models on a running site: an operator adds, tries, drains and unloads them, and reads reasons."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from playwright.sync_api import Locator, Page, expect

from inference_site.catalogue.catalogue import DEMO_FILE
from tests.browser.conftest import Watch, assert_usable, press, settled
from tests.browser.test_playground import message
from tests.e2e.scripts import slow
from tests.served_stack import ServedStack, wait_until

FLEET, ADD = "/admin/fleet/", "/admin/model_store/storedmodel/add/"


@pytest.fixture
def folder(stack: ServedStack) -> Iterator[Path]:
    """The folder of models, and no stored models at the end."""
    folder = stack.data_dir / "models"
    folder.mkdir(exist_ok=True)
    yield folder
    for file in folder.glob("*.gguf"):
        file.unlink()
    stack.sql("DELETE FROM model_store_storedmodel")


def add(page: Page, id_: str, engine: str, file: str = "") -> None:
    page.goto(ADD)
    form = page.locator("#storedmodel_form")
    form.get_by_label("ID").fill(id_)
    form.get_by_label("Engine").select_option(engine)
    form.get_by_label("File").fill(file)
    page.get_by_role("button", name="Save", exact=True).click()


def row(page: Page, model: str) -> Locator:
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=model, exact=True))


def test_a_wrong_path_and_a_broken_file_are_red_and_say_why(page: Page, folder: Path) -> None:
    (folder / "page.gguf").write_text("<html>not found</html>")
    add(page, "lost", "llama_cpp", "no/such.gguf")
    expect(page.get_by_text("not served unless a worker has its file")).to_be_visible()
    expect(row(page, "lost")).to_contain_text("missing no/such.gguf does not exist")
    expect(row(page, "lost").get_by_role("button")).to_have_count(0)
    files = page.locator("section").filter(has_text="Files that cannot be served")
    expect(files).to_contain_text("page.gguf broken page.gguf: it is not a GGUF file")
    settled(page)
    assert_usable(page)
    row(page, "lost").get_by_role("link").click()
    expect(page.locator(".status-missing")).to_be_visible()
    settled(page)
    assert_usable(page)
    add(page, "wrong", "llama_cpp", "page.gguf")
    expect(page.get_by_text("page.gguf: it is not a GGUF file.")).to_be_visible()


def test_a_model_is_tried_and_unloaded_from_its_page_once_it_is_said_what_that_interrupts(
    page: Page,
    folder: Path,
    client: openai.OpenAI,
    stack: ServedStack,
    window: tuple[Page, Watch],
) -> None:
    add(page, "desk", "scripted")
    expect(row(page, "desk")).to_contain_text("loaded")
    row(page, "desk").get_by_role("link").click()
    settled(page)
    assert_usable(page)
    page.get_by_role("link", name="Try").click()
    expect(page.get_by_label("Model", exact=True)).to_have_value("desk")
    expect(message(page)).to_be_visible()
    page.goto(f"{FLEET}models/desk/")
    with ThreadPoolExecutor() as pool:
        begun = pool.submit(client.responses.create, model="desk", input=slow(400))
        running = "SELECT 1 FROM generations_generation WHERE model = 'desk' AND status = 'running'"
        wait_until(lambda: stack.sql(running), 20, "the run")
        press(page, page.get_by_role("button", name="Unload"))
        expect(page.locator(".status-draining").first).to_be_visible()
        expect(
            page.get_by_text(re.compile("It takes no new work; 1 run of it ends first"))
        ).to_be_visible()
        question = window[1].asked[-1]
        assert "Unload desk from 1 worker? 1 request runs and has" in question
        assert begun.result(60).status == "completed"
    page.goto(f"{FLEET}models/desk/")
    expect(page.locator(".status-unloaded")).to_be_visible()
    expect(page.get_by_text("It was unloaded by an operator.")).to_be_visible()
    press(page, page.get_by_role("button", name="Load"))
    expect(page.get_by_text("Loading desk…")).to_be_visible()
    expect(page.locator(".status-ready")).to_be_visible()
    press(page, page.get_by_role("button", name="Drain worker"))
    expect(page.get_by_text("Its workers take no new work until Resume.")).to_be_visible()
    assert "It takes nothing new until Resume." in window[1].asked[-1]
    press(page, page.get_by_role("button", name="Resume worker"))
    expect(page.locator(".status-loaded")).to_be_visible()
    stack.wait_served("scripted")


def test_a_form_offers_files_and_shows_the_memory_before_it_is_saved(
    page: Page, folder: Path
) -> None:
    (folder / "tiny.gguf").write_bytes(DEMO_FILE.read_bytes())
    page.goto(ADD)
    form = page.locator("#storedmodel_form")
    expect(page.locator("#offered-files option")).to_have_attribute("value", "tiny.gguf")
    expect(page.get_by_text("Choose a file to see the memory")).to_be_visible()
    form.get_by_label("ID").fill("mine")
    form.get_by_label("File").fill("tiny.gguf")
    form.get_by_label("Slots").fill("2")
    expect(page.locator("#estimate")).to_contain_text("2 slots of 2,048 tokens. It needs about")
    form.get_by_label("Context length").fill("512")
    expect(page.locator("#estimate")).to_contain_text("2 slots of 512 tokens. It needs about")
    settled(page)
    assert_usable(page)
    page.get_by_role("button", name="Save", exact=True).click()
    expect(row(page, "mine")).to_contain_text("loaded")
    page.goto(f"{FLEET}models/mine/")
    in_force = page.get_by_role("region", name="Set and in force")
    expect(in_force.get_by_role("row", name="Context length")).to_contain_text(
        re.compile("512.*512")
    )
    settled(page)
    assert_usable(page)
