"""What the playground keeps and how a conversation branches, is compared, saved and opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from playwright.sync_api import Locator, Page, Request, Route, expect

from tests.browser.conftest import Watch, assert_fits, assert_usable, faults, resize
from tests.browser.test_playground import message, say, settings, usage
from tests.e2e.scripts import call, respond, slow
from tests.images import PNG, data_url, encoded
from tests.served_stack import ServedStack, wait_until
from tests.upstream_server import UpstreamServer, streamed

PAGE = "/admin/playground/"


@pytest.fixture
def playground(page: Page) -> Page:
    """The page of the playground with the scripted model."""
    page.goto(PAGE)
    expect(page.get_by_role("heading", name="Playground")).to_be_visible()
    settings(page).get_by_label("Model", exact=True).select_option("scripted")
    return page


def ask(page: Page, text: str) -> None:
    message(page).fill(text)
    page.keyboard.press("Enter")


def body_of(request: Request) -> dict[str, Any]:
    body: dict[str, Any] = request.post_data_json or {}
    return body


def answers(page: Page) -> Locator:
    return page.locator(".answer .bubble-text")


NEWEST = "SELECT public_id, status FROM generations_generation ORDER BY id DESC LIMIT 1"
BUILT_ON = """
SELECT before.public_id FROM responses_api_storedresponse this
JOIN responses_api_storedresponse before ON before.id = this.previous_id
ORDER BY this.id DESC LIMIT 1
"""


def newest(stack: ServedStack) -> tuple[str, str]:
    """The id and the status of the newest generation."""
    ((public_id, status),) = stack.sql(NEWEST)
    return public_id, status


def test_a_reload_keeps_the_conversation_the_settings_and_what_is_written(
    playground: Page,
) -> None:
    page = playground
    settings(page).get_by_label("Temperature").fill("0.5")
    text = "<img src=x onerror=alert(1)> <b>bold</b>"
    say(page, {"text": text})
    expect(usage(page, 0)).to_contain_text("completed")
    message(page).fill("not sent yet")
    page.reload()
    expect(answers(page)).to_have_text(text)  # As text: nothing of a model is HTML.
    expect(usage(page, 0)).to_contain_text("no price set")
    expect(message(page)).to_have_value("not sent yet")
    expect(settings(page).get_by_label("Temperature")).to_have_value("0.5")
    expect(settings(page).get_by_label("Model", exact=True)).to_have_value("scripted")
    page.get_by_role("button", name="Delete", exact=True).first.scroll_into_view_if_needed()
    page.locator("#forget").click()
    expect(page.locator(".bubble")).to_have_count(0)
    page.reload()
    expect(page.locator("#talks option")).to_have_text(["New conversation"])


def test_another_user_of_the_browser_does_not_see_the_conversations(playground: Page) -> None:
    page = playground
    say(page, {"text": "a secret"})
    expect(usage(page, 0)).to_contain_text("completed")
    expect(page.locator("#talks option")).to_have_count(1)

    def as_another(route: Route) -> None:
        answer = route.fetch()
        body = answer.text().replace('data-user="', 'data-user="9')
        route.fulfill(response=answer, body=body)

    page.route(f"**{PAGE}", as_another)
    page.reload()
    expect(page.locator("#talks option")).to_have_text(["New conversation"])
    expect(page.locator(".bubble")).to_have_count(0)
    page.unroute_all()
    page.reload()  # They are gone for good: the other one could have read them.
    expect(page.locator("#talks option")).to_have_text(["New conversation"])


def test_an_answer_that_runs_during_a_reload_is_shown_as_far_as_it_came(
    playground: Page, stack: ServedStack
) -> None:
    page = playground
    ask(page, slow(4000))
    expect(answers(page)).to_contain_text("x x x")
    page.reload()
    expect(usage(page, 0)).to_contain_text("cancelled")
    expect(answers(page)).to_contain_text("x x x")
    wait_until(lambda: newest(stack)[1] == "cancelled", 120, "leaving has stopped it")


def test_an_edited_message_makes_a_branch_and_one_can_go_back(
    playground: Page, stack: ServedStack
) -> None:
    page = playground
    ask(page, "first words")
    expect(usage(page, 0)).to_contain_text("completed")
    first, _ = newest(stack)
    ask(page, "second words")
    expect(usage(page, 1)).to_contain_text("completed")
    expect(answers(page)).to_have_text(["first words", "second words"])
    page.get_by_role("button", name="Edit").last.click()
    edited = page.get_by_role("textbox", name="Edited message")
    expect(edited).to_have_value("second words")
    edited.fill("other words")
    page.get_by_role("button", name="Send as a branch").click()
    expect(answers(page)).to_have_text(["first words", "other words"])
    expect(usage(page, 1)).to_contain_text("completed")
    assert stack.sql(BUILT_ON) == [(first,)]
    page.get_by_role("button", name="Regenerate").last.click()
    expect(page.get_by_text("3 of 3")).to_be_visible()
    expect(usage(page, 1)).to_contain_text("completed")
    page.reload()
    expect(page.get_by_text("3 of 3")).to_be_visible()
    for _ in range(2):
        page.get_by_role("button", name="Previous branch").click()
    expect(page.get_by_text("1 of 3")).to_be_visible()
    expect(answers(page)).to_have_text(["first words", "second words"])
    assert_usable(page)


def test_two_models_answer_the_same_side_by_side_each_with_its_settings(playground: Page) -> None:
    page = playground
    say(page, call("get_story", "{}"))
    expect(usage(page, 0)).to_contain_text("completed")
    columns = page.get_by_role("group", name="Columns")
    columns.get_by_role("button", name="Add column").click()
    settings(page).get_by_label("Model", exact=True).select_option("demo")
    settings(page).get_by_label("Max output tokens").fill("8")
    settings(page).get_by_label("Temperature").fill("0.2")
    columns.get_by_role("button", name="1: scripted").click()
    expect(settings(page).get_by_label("Temperature")).to_have_value("")
    columns.get_by_role("button", name="2: demo").click()
    expect(settings(page).get_by_label("Temperature")).to_have_value("0.2")
    page.get_by_label("Result of get_story").fill("A cat.")
    ask(page, "Tell me a story")
    prices = (("scripted", "no price set"), ("demo", "USD"))
    for number, (model, cost) in enumerate(prices, start=1):
        answer = page.get_by_role("group", name=f"Answer of {model}").last
        expect(answer.locator(".usage")).to_contain_text("first token")
        expect(answer.locator(".usage")).to_contain_text("tokens/s")
        expect(usage(page, number)).to_contain_text(cost)
    left, right = (page.locator(".answer").nth(number).bounding_box() for number in (1, 2))
    assert left is not None
    assert right is not None
    assert left["y"] == right["y"]
    assert left["x"] < right["x"]
    sent: list[Request] = []

    def note(request: Request) -> None:
        sent.append(request)

    page.on("request", note)
    ask(page, "And then?")
    expect(usage(page, 4)).to_contain_text("tokens/s")
    page.remove_listener("request", note)
    asked = [body for body in map(body_of, sent) if "model" in body]
    assert len({body["previous_response_id"] for body in asked}) == 2
    assert [(body["model"], body.get("temperature")) for body in asked] == [
        ("scripted", None),
        ("demo", 0.2),
    ]
    page.reload()
    expect(columns.get_by_role("button")).to_have_text(
        ["1: scripted", "2: demo", "Add column", "Remove column"]
    )
    resize(page, "phone")
    assert_fits(page)
    assert faults(page) == []


def test_a_column_goes_on_with_its_own_answers_when_the_first_one_is_removed(
    playground: Page, stack: ServedStack
) -> None:
    page = playground
    columns = page.get_by_role("group", name="Columns")
    columns.get_by_role("button", name="Add column").click()
    settings(page).get_by_label("Model", exact=True).select_option("demo")
    settings(page).get_by_label("Max output tokens").fill("8")
    ask(page, "Tell me a story")
    for number in range(2):
        expect(usage(page, number)).to_contain_text("tokens/s")
    columns.get_by_role("button", name="1: scripted").click()
    columns.get_by_role("button", name="Remove column").click()
    with page.expect_request("**/console/playground/responses") as sent:
        ask(page, "And then?")
    expect(usage(page, 2)).to_contain_text("tokens/s")
    before = body_of(sent.value)["previous_response_id"]
    model = "SELECT model FROM responses_api_storedresponse WHERE public_id = %s"
    assert stack.sql(model, before) == [("demo",)]


MARKDOWN = """# The *plan*

| step | days |
|---|---|
| dig | 2 |

1. Read [the page](https://example.org/a).
2. Not [this](javascript:alert(1)), nor ![pixel](https://example.org/pixel?q=secret)

```python
def answer() -> int:
    return 42
```

<script>window.hurt = 1</script> <b onclick="window.hurt = 1">bold</b>
"""


def test_an_answer_is_shown_as_markdown_without_its_html_and_its_images(playground: Page) -> None:
    page = playground
    fetched: list[str] = []

    def note(request: Request) -> None:
        fetched.append(request.url)

    page.on("request", note)
    steps: list[dict[str, object]] = [{"text": part} for part in MARKDOWN.splitlines(keepends=True)]
    say(page, *steps)
    expect(usage(page, 0)).to_contain_text("completed")
    answer = answers(page)
    expect(answer.get_by_role("heading", name="The plan", level=3)).to_be_visible()
    expect(answer.get_by_role("cell", name="dig")).to_be_visible()
    expect(answer.get_by_role("link", name="the page")).to_have_attribute(
        "rel", "noopener noreferrer nofollow"
    )
    expect(answer.locator("a:not([href^=https]), img, script, b")).to_have_count(0)
    expect(answer.get_by_text("<script>window.hurt = 1</script>")).to_be_visible()
    expect(answer.get_by_role("link", name="pixel")).to_have_count(1)
    expect(answer.locator(".hljs-keyword").first).to_have_text("def")
    answer.get_by_role("button", name="Copy this python block").click()
    expect(answer.get_by_role("button", name="Copy this python block")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == (
        "def answer() -> int:\n    return 42\n"
    )
    assert not [url for url in fetched if "example.org" in url]
    assert page.evaluate("window.hurt") is None
    assert_fits(page)
    assert faults(page) == []
    plain = page.get_by_role("button", name="Plain text")
    plain.click()
    assert answer.text_content() == MARKDOWN
    plain.click()
    expect(answer.get_by_role("cell", name="dig")).to_be_visible()
    page.reload()
    expect(answer.get_by_role("cell", name="dig")).to_be_visible()
    expect(answer.locator(".hljs-keyword").first).to_have_text("def")


def test_json_is_laid_out_and_two_answers_are_compared(playground: Page) -> None:
    page = playground
    say(page, {"text": '{"sky":["rain",'}, {"text": '"wind"]}'})
    expect(answers(page).locator(".hljs-string").first).to_have_text('"rain"')
    page.get_by_role("button", name="New conversation").click()
    columns = page.get_by_role("group", name="Columns")
    columns.get_by_role("button", name="Add column").click()
    settings(page).get_by_label("System prompt", exact=True).fill("Two.")
    say(page, {"text": "The sky is grey today"})
    expect(usage(page, 1)).to_contain_text("completed")
    show = page.get_by_role("button", name="Show differences")
    show.click()
    expect(page.locator(".bubble-diff")).to_contain_text("The sky is grey today")
    expect(page.locator(".bubble-diff :is(ins, del)")).to_have_count(0)
    assert faults(page) == []
    show.click()
    expect(page.locator(".bubble-diff")).to_have_count(0)
    columns.get_by_role("button", name="Remove column").click()
    expect(columns.get_by_role("button")).to_have_text(["scripted", "Add column"])


def test_answers_are_rated_in_the_playground_and_shown_on_their_page(
    playground: Page, stack: ServedStack
) -> None:
    page = playground
    say(page, {"text": "Hi"})
    expect(usage(page, 0)).to_contain_text("completed")
    page.get_by_role("button", name="Bad", exact=True).click()
    expect(page.get_by_role("button", name="Bad", exact=True)).to_have_attribute(
        "aria-pressed", "true"
    )
    note = page.get_by_role("textbox", name="Note")
    note.fill("It is rude.")
    note.blur()
    response_id, _ = newest(stack)
    wait_until(
        lambda: (
            stack.sql(
                "SELECT feedback -> 0 ->> 'note' FROM responses_api_storedresponse"
                " WHERE public_id = %s",
                response_id,
            )
            == [("It is rude.",)]
        ),
        10,
        "the note",
    )
    assert faults(page) == []
    page.goto(f"/admin/responses_api/storedresponse/?q={response_id}")
    page.get_by_role("link", name=response_id[:13]).click()
    expect(page.locator("#feedback")).to_contain_text("It is rude.")
    page.get_by_role("button", name="Good answer").click()
    expect(page.locator("#feedback .status")).to_have_text("good")
    assert_fits(page)
    assert faults(page) == []


def test_images_are_offered_only_where_a_model_takes_them(playground: Page) -> None:
    page = playground
    add = page.get_by_role("button", name="Add images")
    settings(page).get_by_label("Model", exact=True).select_option("demo")
    expect(add).to_be_hidden()
    settings(page).get_by_label("Model", exact=True).select_option("seeing")
    expect(add).to_be_visible()


BUSY = """() => new Promise((busy) => {
  const opening = indexedDB.open("playground", 1);
  opening.onsuccess = () => {
    const talks = opening.result.transaction(["talks", "titles"], "readwrite").objectStore("talks");
    const goOn = () => { talks.get("none").onsuccess = goOn; };
    goOn();
    busy();
  };
})"""
"""Holds the browser's database until the page is left."""


def test_a_reload_while_it_is_being_saved_keeps_what_is_written(playground: Page) -> None:
    page = playground
    say(page, {"text": "Hi"})
    expect(usage(page, 0)).to_contain_text("completed")
    page.evaluate(BUSY)
    message(page).fill("not sent yet")
    page.wait_for_timeout(1000)  # Its save has begun, and waits.
    page.reload()
    expect(message(page)).to_have_value("not sent yet")
    assert_usable(page)


def add_images(page: Page, *files: Path) -> None:
    """Choose them as files: megabytes that Playwright sends keep a processor busy for seconds."""
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add images").click()
    chooser.value.set_files(files)


def test_a_model_that_sees_is_sent_the_image_in_this_turn_and_the_next(
    playground: Page, seeing: UpstreamServer, tmp_path: Path
) -> None:
    page = playground
    (tmp_path / "red.png").write_bytes(PNG)
    settings(page).get_by_label("Model", exact=True).select_option("seeing")
    seeing.answers = [streamed("A red ", "picture.")]
    add_images(page, tmp_path / "red.png")
    expect(page.get_by_role("img", name="Image 1")).to_be_visible()
    ask(page, "What is this?")
    expect(answers(page)).to_have_text("A red picture.")
    expect(usage(page, 0)).to_contain_text("completed")
    text = {"type": "text", "text": "What is this?"}
    image = {"type": "image_url", "image_url": {"url": data_url(PNG)}}
    assert seeing.body["messages"] == [{"role": "user", "content": [text, image]}]
    expect(page.locator(".sent img")).to_be_visible()
    ask(page, "And its colour?")
    expect(usage(page, 1)).to_contain_text("completed")
    assert seeing.body["messages"][0]["content"] == [text, image]
    assert_usable(page)


def test_images_are_sent_within_limits_and_errors_are_told_as_the_api_tells_them(
    playground: Page, window: tuple[Page, Watch], tmp_path: Path
) -> None:
    page = playground
    contents = {"a.txt": b"x", "b.png": b"x" * (16 * 2**20)}
    contents |= dict.fromkeys(("c.png", "d.png"), encoded("PNG"))
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    model = settings(page).get_by_label("Model", exact=True)
    model.select_option("seeing")
    add_images(page, tmp_path / "a.txt")
    expect(page.locator("#complaint")).to_contain_text("only PNG, JPEG, WebP and GIF")
    add_images(page, tmp_path / "b.png")
    expect(page.locator("#complaint")).to_contain_text("b.png: the images of a message may have")
    add_images(page, tmp_path / "c.png", tmp_path / "d.png")
    expect(page.get_by_role("img", name="Image")).to_have_count(2)
    page.get_by_role("button", name="Remove image 2").click()
    model.select_option("scripted")  # It takes no images; the server says so.
    assert faults(page) == []
    with page.expect_request("**/console/playground/responses") as asked:
        ask(page, "What is this?")
    (sent,) = body_of(asked.value)["input"]
    assert [part["type"] for part in sent["content"]] == ["input_text", "input_image"]
    expect(page.locator(".bubble-error")).to_contain_text("image")
    expect(page.locator(".bubble-error")).to_contain_text("req_")
    expect(page.locator("#as-curl")).to_contain_text("data:image/png;base64,...")
    (complaint,) = window[1].told()
    assert "status of 400" in complaint
    page.reload()
    expect(page.get_by_role("img", name="Image in the request")).to_be_visible()
    ask(page, "Never mind.")  # What was refused is not part of the conversation.
    expect(answers(page).last).to_have_text("Never mind.")


def test_presets_are_saved_on_the_server_shared_and_deleted(
    playground: Page, stack: ServedStack, window: tuple[Page, Watch]
) -> None:
    page = playground
    form = settings(page)
    form.get_by_text("Tools", exact=True).click()
    for label, list_, text in (
        ("System prompt", "Saved system prompts", "Answer in verse."),
        ("A JSON list of functions", "Saved tools", "[]"),
    ):
        form.get_by_label(label, exact=True).fill(text)
        part = form.locator(".presets").filter(has=page.get_by_label(list_))
        part.get_by_role("button", name="Save…").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Name").fill("Mine")
        dialog.get_by_label("Share with all staff").check()
        assert faults(page) == []
        dialog.get_by_role("button", name="Save").click()
        expect(page.get_by_text("Saved Mine.")).to_be_visible()
        expect(dialog).to_be_hidden()
    page.get_by_role("button", name="New conversation").click()
    form.get_by_label("System prompt", exact=True).fill("")
    page.reload()
    form.get_by_label("Saved system prompts").select_option("Mine (shared)")
    expect(form.get_by_label("System prompt", exact=True)).to_have_value("Answer in verse.")
    part = form.locator(".presets").first
    part.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("Deleted Mine.")).to_be_visible()
    assert window[1].asked[-1] == "Delete the preset Mine?"
    assert stack.sql("SELECT kind FROM playground_preset") == [("tools",)]


def test_a_stored_response_is_opened_continued_and_asked_again(
    page: Page, client: openai.OpenAI
) -> None:
    first = respond(client, {"text": "A cat."}, instructions="Be short.", temperature=0.25)
    told = client.responses.create(
        model="scripted", input="Which cat?", previous_response_id=first.id, temperature=0.25
    )
    page.goto(f"/admin/responses_api/storedresponse/?q={told.id}")
    page.get_by_role("link", name=told.id[:13]).click()
    page.get_by_role("link", name="Open in playground").click()
    expect(page.get_by_text(f"Opened {told.id}.")).to_be_visible()
    expect(answers(page)).to_have_text(["A cat.", "Which cat?"])
    expect(settings(page).get_by_label("Temperature")).to_have_value("0.25")
    with page.expect_request("**/console/playground/responses") as asked:
        ask(page, "A grey one")
    body = body_of(asked.value)
    assert "previous_response_id" not in body
    assert len(body["input"]) == 5
    expect(usage(page, 2)).to_contain_text("completed")
    expect(answers(page).last).to_have_text("A grey one")
    with page.expect_request("**/console/playground/responses") as asked:
        ask(page, "Or black")
    assert body_of(asked.value)["previous_response_id"].startswith("resp_")
    expect(usage(page, 3)).to_contain_text("completed")
    page.get_by_role("button", name="Regenerate").nth(1).click()
    expect(page.get_by_text("2 of 2")).to_be_visible()
    expect(usage(page, 1)).to_contain_text("completed")


def test_copying_an_answer_says_that_it_was_copied(playground: Page) -> None:
    ask(playground, "to be copied")
    expect(usage(playground, 0)).to_contain_text("completed")
    playground.locator(".answer-foot").get_by_role("button", name="Copy").click()
    expect(playground.get_by_role("button", name="Copied")).to_be_visible()
    assert playground.evaluate("navigator.clipboard.readText()") == "to be copied"


def test_stop_takes_what_waits_out_of_the_queue(
    playground: Page, client: openai.OpenAI, stack: ServedStack
) -> None:
    busy = [
        client.responses.create(model="scripted", input=slow(4000), background=True).id
        for _ in range(4)
    ]
    running = "SELECT count(*) FROM generations_generation WHERE status = 'running'"
    wait_until(lambda: stack.sql(running)[0][0] == 4, 120, "all slots are busy")
    ask(playground, "I wait")
    wait_until(lambda: newest(stack)[1] == "queued", 120, "it waits")
    playground.get_by_role("button", name="Stop").click()
    expect(usage(playground, 0)).to_contain_text("cancelled")
    wait_until(lambda: newest(stack)[1] == "cancelled", 120, "it is out of the queue")
    for id_ in busy:
        client.responses.cancel(id_)


BOUNDED = """async () => {
  const store = await import("/static/playground/store.js");
  const { addTurn, message, newTalk } = await import("/static/playground/talk.js");
  const { user } = document.getElementById("playground").dataset;
  const large = newTalk({});
  const image = `data:image/png;base64,${"x".repeat(9_000_000)}`;
  for (const text of ["first", "second"]) addTurn(large, large.leaf, [message(text, [image])]);
  await store.save(user, large);
  const kept = await store.load(user, large.id);
  const images = Object.values(kept.turns).map(({ input: [{ content }] }) =>
    content.filter((part) => part.type === "input_image").length);
  const inAnotherTab = structuredClone(kept);
  await store.save(user, large);
  await store.save(user, inAnotherTab);
  const titles = (await store.titles(user)).map((one) => one.title)
    .filter((title) => title !== "New conversation");
  for (let made = 0; made < 35; made += 1) await store.save(user, newTalk({}));
  return { images, titles, count: (await store.titles(user)).length };
}"""


def test_what_a_browser_keeps_is_bounded_and_no_tab_overwrites_another(playground: Page) -> None:
    found = playground.evaluate(BOUNDED)
    assert found["images"] == [0, 1], "the oldest image goes first"
    assert found["titles"] == ["first", "first"]
    assert found["count"] == 30
