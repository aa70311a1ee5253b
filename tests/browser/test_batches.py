"""The page of a batch: progress, cancel, results, and the failed lines once more."""

from __future__ import annotations

import io
import json
from typing import Any

import openai
from playwright.sync_api import Page, expect

from tests.browser.conftest import assert_usable, settled
from tests.e2e.scripts import script, slow
from tests.served_stack import ServedStack
from tests.waiting import wait_until

CHAT: Any = "/v1/chat/completions"


def begin(client: openai.OpenAI, *scripts: str) -> str:
    """Begin a batch with these scripts; return its id."""
    lines = [
        {
            "custom_id": f"line {n}",
            "method": "POST",
            "url": CHAT,
            "body": {"model": "scripted", "messages": [{"role": "user", "content": said}]},
        }
        for n, said in enumerate(scripts)
    ]
    content = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    asked: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h"}
    return client.batches.create(input_file_id=file.id, **asked).id


def address(stack: ServedStack, batch_id: str) -> str:
    [[pk]] = stack.sql("SELECT id FROM batches_batch WHERE public_id = %s", batch_id)
    return f"/admin/batches/batch/{pk}/change/"


def reach(client: openai.OpenAI, batch_id: str, status: str) -> None:
    wait_until(lambda: client.batches.retrieve(batch_id).status == status)


def test_failed_lines_are_counted_downloaded_and_run_again(
    page: Page, stack: ServedStack, client: openai.OpenAI
) -> None:
    failing = script({"fail": "it breaks"})
    batch_id = begin(client, script({"text": "yes"}), failing, failing)
    reach(client, batch_id, "completed")
    page.goto("/admin/batches/batch/")
    expect(page.get_by_text("3 of 3").first).to_be_visible()
    page.goto(address(stack, batch_id))
    settled(page)
    assert_usable(page)
    errors = page.get_by_role("row").filter(has_text="model_error")
    expect(errors.get_by_role("cell", name="2")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download errors").click()
    with open(download.value.path()) as file:
        assert [json.loads(line)["custom_id"] for line in file] == ["line 1", "line 2"]
    page.get_by_role("button", name="Run the failed lines again").click()
    expect(page.get_by_text("run again.")).to_be_visible()
    (newest, *_) = client.batches.list(limit=1)
    assert newest.id != batch_id
    reach(client, newest.id, "completed")
    counts = client.batches.retrieve(newest.id).request_counts
    assert counts is not None
    assert (counts.total, counts.failed) == (2, 2)


def test_a_running_batch_is_watched_and_cancelled(
    page: Page, stack: ServedStack, client: openai.OpenAI
) -> None:
    batch_id = begin(client, *[slow(80, 50)] * 30)
    reach(client, batch_id, "in_progress")
    page.goto(address(stack, batch_id))
    expect(page.get_by_text("0 of 30")).to_be_visible()
    settled(page)
    assert_usable(page)
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("cancelled", exact=True)).to_be_visible(timeout=30_000)
    reach(client, batch_id, "cancelled")


def test_invalid_lines_are_listed(page: Page, stack: ServedStack, client: openai.OpenAI) -> None:
    file = client.files.create(file=("lines.jsonl", b"{\n[]"), purpose="batch")
    asked: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h"}
    batch_id = client.batches.create(input_file_id=file.id, **asked).id
    reach(client, batch_id, "failed")
    page.goto(address(stack, batch_id))
    expect(page.get_by_role("row").filter(has_text="invalid_json_line")).to_have_count(2)
    settled(page)
    assert_usable(page)
