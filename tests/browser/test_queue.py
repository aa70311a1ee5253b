"""The page of the queue on a running site: positions, estimates, previews, many stopped at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from statistics import median

import openai
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Watch, assert_usable, press, settled
from tests.e2e.scripts import slow
from tests.served_stack import ServedStack, wait_until

QUEUE = "/admin/queue/"
_ROW = """rows => rows.map((row) => [
    row.querySelector("[name='chosen']").value,
    row.querySelector("[data-label='Position']").textContent,
    row.querySelector("[data-label='Starts in about']").textContent,
])"""


@pytest.fixture
def quiet(stack: ServedStack) -> Iterator[None]:
    """Nothing runs or waits before and after."""
    active = "SELECT 1 FROM generations_generation WHERE finished_at IS NULL"
    wait_until(lambda: not stack.sql(active), 60, "an idle site")
    yield
    wait_until(lambda: not stack.sql(active), 60, "an idle site")


def begin(client: openai.OpenAI, words: int, count: int) -> list[str]:
    """Send background responses; each says its number of words, one in 20 ms. Return their ids."""
    made = [
        client.responses.create(model="scripted", input=slow(words), background=True, store=True)
        for _ in range(count)
    ]
    return [one.id for one in made]


def test_40_positions_are_the_order_of_claims_and_estimates_are_near(
    page: Page, client: openai.OpenAI, stack: ServedStack, quiet: None
) -> None:
    """The runs before those that are looked at tell the site how long a run takes: about 1 s."""

    def is_known() -> bool:
        (report,) = stack.model_reports("scripted")
        return bool(0.7 < report["run_s"] < 1.6)

    for _ in range(6):  # Runs of earlier tests, which count for a while, took minutes or no time.
        sent = begin(client, 50, 12)
        wait_until(lambda sent=sent: stack.row(sent[-1])["finished_at"], 60, "the first runs")
        with suppress(AssertionError):
            wait_until(is_known, 3, "the announced time of a run")
            break
    sent = begin(client, 50, 44)
    waiting = page.get_by_role("region", name="Next in line")
    page.goto(QUEUE)
    [[looked_at]] = stack.sql("SELECT clock_timestamp()")
    found = waiting.locator("tbody tr").evaluate_all(_ROW)
    assert len(found) >= 30
    assert [int(position) for _, position, _ in found] == list(range(1, len(found) + 1))
    expect(waiting.locator("[data-label='Prompt']").first).to_contain_text("steps")
    settled(page)
    assert_usable(page)
    wait_until(lambda: stack.row(sent[-1])["finished_at"], 90, "all runs")
    order = [pk for pk, _, _ in found]
    claims = dict(stack.sql("SELECT id::text, claimed_at FROM generations_generation"))
    claimed = {pk: (claims[pk] - looked_at).total_seconds() for pk in order}
    assert sorted(order, key=claimed.__getitem__) == order
    estimates = {pk: int(re.sub(r"\D", "", about)) for pk, _, about in found}
    ratio = median(estimates[pk] / max(claimed[pk], 0.1) for pk in order)
    print(f"median of estimated / true wait: {ratio:.2f}")
    assert 0.5 <= ratio <= 2


def test_chosen_requests_are_stopped_after_one_question(
    page: Page,
    client: openai.OpenAI,
    stack: ServedStack,
    window: tuple[Page, Watch],
    quiet: None,
) -> None:
    sent = begin(client, 4000, 7)
    late = sent[-2:]
    page.goto(QUEUE)
    for id_ in late:
        page.get_by_label(f"Choose {id_}").check()
    row = page.get_by_role("row").filter(has_text=sent[0][:18])
    page.wait_for_timeout(3500)  # The page has not refreshed itself and lost the choice.
    expect(page.get_by_label(f"Choose {late[0]}")).to_be_checked()
    assert_usable(page)
    press(page, page.get_by_role("button", name="Stop chosen").first)
    expect(page.get_by_text("Stopping 2 requests…")).to_be_visible()
    assert window[1].asked[-1].startswith("Stop 2 chosen? They will not run")
    assert [stack.row(id_)["status"] for id_ in late] == ["cancelled", "cancelled"]
    expect(row).to_be_visible()
    for id_ in sent[:-2]:
        client.responses.cancel(id_)
