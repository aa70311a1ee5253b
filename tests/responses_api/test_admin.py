"""The admin of responses and conversations: what it shows, to whom, and what it does."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import redis.exceptions
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.db.models import BooleanField
from django.db.models.expressions import RawSQL
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from inference_site.accounts.keys import create_key, revoke_key
from inference_site.accounts.models import ApiKey, Project
from inference_site.core.admin_pages import base_admin
from inference_site.core.domain.compaction import CompactedContext
from inference_site.core.domain.deltas import (
    CompactionDelta,
    Delta,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from inference_site.core.domain.request import Message
from inference_site.core.site_settings.models import forget
from inference_site.runs.models import Generation, Status
from inference_site.runs.queue import new_id
from inference_site.runs.tool_calls.models import CallStatus, ToolCall
from responses_api import search
from responses_api.admin import responses
from responses_api.admin.responses import request_body
from responses_api.admin.thread import tree, turns
from responses_api.models import Conversation, Item, StoredResponse
from responses_api.search import SearchTooBroad
from tests.responses_api.chains import STOP, Chain

pytestmark = pytest.mark.django_db
Key = tuple[ApiKey, str]
LIST = "/admin/responses_api/storedresponse/"
VIEW, CONTENT = "responses_api.view_storedresponse", "responses_api.view_content"


@pytest.fixture
def chain(api_key: Key) -> Chain:
    return Chain(api_key[0])


def page(browser: Client, stored: StoredResponse) -> str:
    response = browser.get(f"{LIST}{stored.pk}/change/")
    assert response.status_code == 200
    return response.content.decode()


def listed(browser: Client, **query: Any) -> list[int]:
    text = browser.get(LIST, query).content.decode()
    return [int(pk) for pk in re.findall(rf'href="{LIST}(\d+)/change/', text)]


def call(name: str, arguments: str) -> list[Delta]:
    return [ToolCallDelta(0, arguments, "call_1", name), Finish("tool_calls")]


def test_the_page_shows_the_conversation_up_to_the_response(admin: Client, chain: Chain) -> None:
    first = chain.turn("the first question", "the first answer", instructions="Be kind.")
    accepted = chain.accept("why?", previous_response_id=first.public_id)
    second, _ = chain.settle(accepted, ReasoningDelta("I ponder."), TextDelta("Because."), STOP)
    text = page(admin, second)
    said = ["Be kind.", "the first question", "the first answer", "why?", "I ponder.", "Because."]
    places = [text.index(part) for part in said]
    assert places == sorted(places)
    assert "the second" not in page(admin, first)


def test_a_call_is_shown_with_what_the_tool_answered(chain: Chain) -> None:
    asked, _ = chain.settle(chain.accept("weather?"), *call("get_weather", '{"city":"Oslo"}'))
    output = {"type": "function_call_output", "call_id": "call_1", "output": '{"sky":"rain"}'}
    told = chain.settle(
        chain.accept("", input=[output], previous_response_id=asked.public_id),
        TextDelta("Rain."),
        STOP,
    )[0]
    first, second = turns(told)
    (bubble,) = [one for one in first.bubbles if one.kind == "call"]
    assert bubble.name == "get_weather"
    assert bubble.pieces[0].text == '{\n  "city": "Oslo"\n}'
    assert bubble.result is not None
    assert bubble.result[0].text == '{\n  "sky": "rain"\n}'
    assert [one.kind for one in second.bubbles] == ["message"]
    (alone,) = [one for one in turns(asked)[0].bubbles if one.kind == "call"]
    assert alone.result is None


def test_compaction_is_shown_and_can_be_left(admin: Client, chain: Chain) -> None:
    first = chain.turn("the long story", "told")
    accepted = chain.accept("go on", previous_response_id=first.public_id)
    context = CompactedContext("A story was told.", (), (Message("user", "go on"),))
    second, _ = chain.settle(accepted, CompactionDelta(context), TextDelta("More."), STOP)
    text = page(admin, second)
    said = ["the long story", "told", "go on", "A story was told.", "More."]
    places = [text.index(part) for part in said]
    assert places == sorted(places)
    assert f"playground/?open={first.public_id}" in text
    assert "before the compaction" not in page(admin, first)
    # With another key of the site, the page says so.
    item = second.items.get(data__type="compaction")
    item.data["encrypted_content"] = "context.x"
    item.save()
    assert "its content is sealed" in page(admin, second)


def test_calls_that_the_site_has_run_are_listed_with_their_times(
    admin: Client, staff: Callable[..., Client], chain: Chain
) -> None:
    stored = chain.turn("x", "y")
    now = timezone.now()
    ToolCall.objects.create(
        generation_id=stored.public_id,
        number=0,
        type="mcp",
        name="look_up",
        arguments_hash="0123456789abcdef",
        status=CallStatus.DONE,
        attempt=1,
        output_bytes=2048,
        sent_at=now,
        finished_at=now + timedelta(milliseconds=1500),
    )
    card = page(admin, stored).partition("<h2>Tool calls</h2>")[2].partition("</section>")[0]
    assert '<th scope="row">look_up</th>' in card
    shown = ("done", "1 time", "1.50 s", "2.0\xa0KB")
    assert [one for one in shown if f">{one}</td>" not in card] == []
    Item.objects.create(
        public_id="mcp_1",
        project=stored.project,
        response=stored,
        position=9,
        is_output=True,
        data={"type": "mcp_call", "name": "look_up", "arguments": "{}", "output": "found it"},
    )
    assert "found it" in page(admin, stored)
    looker = staff(VIEW)
    card = page(looker, stored).partition("<h2>Tool calls</h2>")[2]
    assert "look_up" in card
    assert "found it" not in card


def test_searches_of_the_site_are_shown_with_what_each_has_found(
    admin: Client, chain: Chain
) -> None:
    stored = chain.turn("x", "y")
    hosted = {"call_id": None, "execution": "server", "status": "completed"}
    items: list[dict[str, Any]] = []
    for name in ("weather", "customers"):
        items += [
            {"type": "tool_search_call", **hosted, "arguments": {"paths": [name]}},
            {"type": "tool_search_output", **hosted, "tools": [{"type": "function", "name": name}]},
        ]
    found = [{"filename": "a.txt", "text": "A passage."}]
    items.append({"type": "file_search_call", "queries": ["a query"], "results": found})
    for place, data in enumerate(items):
        Item.objects.create(
            public_id=f"item_{place}",
            project=stored.project,
            response=stored,
            position=10 + place,
            is_output=True,
            data=data,
        )
    for number, name in enumerate(("tool_search", "tool_search", "file_search")):
        ToolCall.objects.create(
            generation_id=stored.public_id,
            number=number,
            type=name,
            name=name,
            arguments_hash="0123456789abcdef",
            status=CallStatus.DONE,
        )
    card = page(admin, stored).partition("<h2>Tool calls</h2>")[2].partition("</section>")[0]
    shown = ("weather", "Loaded: weather", "Loaded: customers", "a query", "a.txt: A passage.")
    assert [one for one in shown if one not in card] == []
    calls = [one for one in turns(stored)[0].bubbles if one.name == "tool_search"]
    results = [one.result and one.result[0].text for one in calls]
    assert results == ["Loaded: weather", "Loaded: customers"]


def test_who_may_not_change_responses_or_see_content_answers_no_approval(
    staff: Callable[..., Client], chain: Chain
) -> None:
    stored = chain.turn("x", "y")
    change = "responses_api.change_storedresponse"
    for rights in ((VIEW, CONTENT), (VIEW, change)):
        answer = staff(*rights).post(f"/admin/responses_api/mcpapproval/of/{stored.pk}/answer/")
        assert answer.status_code == 403


def test_content_cannot_become_markup(admin: Client, chain: Chain) -> None:
    text = page(admin, chain.turn("<script>alert(1)</script>{{ 7*7 }}", "<img src=x onerror=y>"))
    assert "<script>alert(1)" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "<img src=x" not in text


def test_without_the_permission_there_are_only_metadata(
    staff: Callable[..., Client],
    chain: Chain,
) -> None:
    stored = chain.turn("a secret question", "a secret answer", metadata={"team": "north"})
    text = page(staff(VIEW), stored)
    assert "secret" not in text
    assert "north" in text
    assert stored.public_id in text
    assert "a secret answer" in page(staff(VIEW, CONTENT), stored)


def test_the_list_previews_input_and_output_for_those_who_may_read_them(
    staff: Callable[..., Client], chain: Chain
) -> None:
    text = {"type": "input_text", "text": "a question in a part"}
    parts = [{"role": "user", "content": [text]}]
    chain.turn("", "the answer\n to it", input=parts)
    chain.turn("w" * 500, "short")
    shown = html.unescape(staff(VIEW, CONTENT).get(LIST).content.decode())
    for preview in ("a question in a part", "the answer to it", f"{'w' * 90}…", "short"):
        assert preview in shown
    hidden = staff(VIEW).get(LIST).content.decode()
    assert "question" not in hidden
    assert "www" not in hidden


def badges(text: str) -> list[str]:
    return re.findall(r'<span class="status status-(\w+)">', text)


def test_a_response_that_has_not_ended_has_the_status_of_its_generation(
    admin: Client, chain: Chain
) -> None:
    chain.turn("ended")
    waiting, running = chain.accept("waits", background=True), chain.accept("runs")
    Generation.objects.filter(public_id=running.public_id).update(
        status=Status.RUNNING, claimed_at=timezone.now()
    )
    assert badges(admin.get(LIST).content.decode()) == ["in_progress", "queued", "completed"]
    assert listed(admin, status="queued") == [waiting.pk]
    assert listed(admin, status="in_progress") == [running.pk]
    text = page(admin, running)
    assert badges(text)[0] == "in_progress"
    assert '<span class="tree-status">in progress</span>' in text
    assert "still waiting" not in text
    assert "still waiting" in page(admin, waiting)


def test_a_failure_is_shown_before_the_conversation(admin: Client, chain: Chain) -> None:
    failed, _ = chain.settle(chain.accept("a long prompt"), end="the engine broke")
    text = page(admin, failed)
    assert text.index("the engine broke") < text.index("a long prompt")


def test_metadata_may_have_any_name(admin: Client, chain: Chain) -> None:
    text = page(admin, chain.turn("a", metadata={"items": "abc"}))
    assert "<dt>items</dt><dd>abc</dd>" in text


@pytest.mark.parametrize("text", ["[" * 300 + "]" * 300, '{"id":123456789012345678901234567890}'])
def test_json_that_would_not_be_kept_is_shown_as_it_came(
    admin: Client, chain: Chain, text: str
) -> None:
    shown = page(admin, chain.turn(text))
    assert f'<div class="bubble-text">{text.replace(chr(34), "&quot;")}</div>' in shown


def test_words_are_searched_for_by_those_who_may_read_them(
    staff: Callable[..., Client],
    chain: Chain,
) -> None:
    wanted = chain.turn("about penguins")
    chain.turn("about cats")
    assert listed(staff(VIEW, CONTENT), q="penguins") == [wanted.pk]
    assert listed(staff(VIEW), q="penguins") == []


def test_responses_are_found_by_id_metadata_conversation_and_key(
    admin: Client,
    chain: Chain,
    api_key: Key,
) -> None:
    other_key, _ = create_key(api_key[0].project, "second")
    conversation = Conversation.objects.create(public_id=new_id("conv_"), project=other_key.project)
    plain = chain.turn("a")
    tagged = chain.turn("b", metadata={"team": "north"})
    talked = Chain(other_key).turn("c", conversation=conversation.public_id)
    assert listed(admin, q=plain.public_id) == [plain.pk]
    assert listed(admin, q="team=north") == [tagged.pk]
    assert listed(admin, q=conversation.public_id) == [talked.pk]
    assert listed(admin, api_key=other_key.pk) == [talked.pk]
    assert listed(admin) == [talked.pk, tagged.pk, plain.pk]


def test_the_tree_has_forks_and_what_builds_on_them(chain: Chain) -> None:
    root = chain.turn("root")
    here = chain.turn("here", previous_response_id=root.public_id)
    fork = chain.turn("fork", previous_response_id=root.public_id)
    child = chain.turn("child", previous_response_id=here.public_id)
    grandchild = chain.turn("grandchild", previous_response_id=child.public_id)
    found = tree(here)
    assert found.response == root
    assert {node.response for node in found.children} == {here, fork}
    (current,) = [node for node in found.children if node.is_current]
    assert current.children[0].response == child
    assert current.children[0].children[0].response == grandchild


def test_a_deep_chain_costs_no_more_queries_than_a_flat_one(
    admin: Client,
    chain: Chain,
) -> None:
    last = chain.turn("0")
    taken = []
    for depth in range(1, 31):
        last = chain.turn(str(depth), previous_response_id=last.public_id)
        if depth in (8, 30):
            forget()  # They are asked for every two seconds.
            with CaptureQueriesContext(connection) as captured:
                text = page(admin, last)
            taken.append(len(captured))
    assert taken[0] == taken[1]
    assert "Earlier turns" in text


def test_the_command_for_a_shell_asks_the_same(admin: Client, chain: Chain) -> None:
    stored = chain.turn("it's", temperature=0.5, metadata={"a": "b"})
    body = request_body(stored)
    assert body["temperature"] == 0.5
    assert body["metadata"] == {"a": "b"}
    assert body["input"][0]["content"][0]["text"] == "it's"
    assert "curl http://testserver/v1/responses" in page(admin, stored)


def test_one_that_waits_is_stopped_and_the_audit_log_knows(admin: Client, chain: Chain) -> None:
    stored = chain.accept("a", background=True)
    assert admin.post(f"{LIST}{stored.pk}/stop/").status_code == 302
    stored.refresh_from_db()
    assert stored.status == "cancelled"
    assert Generation.objects.get(public_id=stored.public_id).status == Status.CANCELLED
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.change_message) == (str(stored.pk), "Stopped.")
    assert "The response had already ended." in _followed(admin, f"{LIST}{stored.pk}/stop/")


def test_who_may_only_look_neither_stops_nor_repeats(
    staff: Callable[..., Client],
    chain: Chain,
) -> None:
    stored = chain.accept("a", background=True)
    looker = staff(VIEW, CONTENT)
    for act in ("stop", "again"):
        assert looker.post(f"{LIST}{stored.pk}/{act}/").status_code == 403
        assert looker.get(f"{LIST}{stored.pk}/{act}/").status_code == 405
    assert ">Stop<" not in page(looker, stored)
    assert Generation.objects.get().status == Status.QUEUED


def test_a_response_of_a_revoked_key_is_not_run_again(
    admin: Client,
    chain: Chain,
    api_key: Key,
) -> None:
    stored = chain.turn("a")
    revoke_key(api_key[0])
    assert "is not accepted any more" in _followed(admin, f"{LIST}{stored.pk}/again/")
    assert StoredResponse.objects.count() == 1


def test_a_response_that_the_log_has_forgotten_is_not_run_again(
    admin: Client, chain: Chain
) -> None:
    stored = chain.turn("a")
    assert "Run again" in page(admin, stored)
    Generation.objects.all().delete()
    assert "Run again" not in page(admin, stored)
    assert "does not have the response any more" in _followed(admin, f"{LIST}{stored.pk}/again/")
    assert StoredResponse.objects.count() == 1


def test_without_redis_nothing_is_run_again(
    admin: Client, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise redis.exceptions.ConnectionError

    stored = chain.turn("a")
    monkeypatch.setattr("responses_api.admin.responses.run_again", fail)
    assert "It could not be run again" in _followed(admin, f"{LIST}{stored.pk}/again/")


def test_the_export_has_every_response_with_what_it_was_sent(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [chain.turn(f"question {number}", f"answer {number}") for number in range(7)]
    monkeypatch.setattr(responses, "_EXPORT_BATCH", 3)
    lines: list[bytes] = []
    before: int | None = None
    while True:
        some, before = responses._read_batch(StoredResponse.objects.all(), before)
        lines += some.splitlines()
        assert len(some.splitlines()) <= 3
        if before is None:
            break
    rows = [json.loads(line) for line in lines]
    assert [row["id"] for row in rows] == [stored.public_id for stored in reversed(made)]
    assert rows[0]["input"][0]["content"][0]["text"] == "question 6"
    assert rows[0]["output"][0]["content"][0]["text"] == "answer 6"


def test_an_export_by_what_no_filter_knows_leads_back_to_the_list(
    admin: Client, api_key: Key
) -> None:
    Project.objects.create(name="another")  # The filter is shown from two on.
    response = admin.get(f"{LIST}export/?project__id__exact=x")
    assert response.status_code == 302
    assert response.headers["Location"] == f"{LIST}?e=1"


def test_the_export_needs_the_permission(staff: Callable[..., Client]) -> None:
    assert staff(VIEW).get(f"{LIST}export/").status_code == 403


def test_the_audit_log_knows_of_an_export_but_not_the_words(admin: Client, chain: Chain) -> None:
    wanted = chain.turn("about penguins")
    chain.turn("about cats")
    query = {"q": "penguins", "status": "completed", "before": "9"}
    response = admin.get(f"{LIST}export/", query)
    assert response.status_code == 200
    entry = LogEntry.objects.get()
    assert entry.change_message == "Exported: status=completed, a search."
    assert entry.object_repr == "Responses"
    lines, _ = responses._read_batch(StoredResponse.objects.filter(pk=wanted.pk), None)
    assert json.loads(lines)["id"] == wanted.public_id
    admin.get(f"{LIST}export/")
    assert LogEntry.objects.latest("pk").change_message == "Exported: all."
    assert "Exported: all." in admin.get("/admin/admin/logentry/").content.decode()


def test_a_search_that_is_slow_shows_a_part_and_goes_on(
    admin: Client, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = chain.turn("about penguins")
    for number in range(9):
        chain.turn(f"about cat {number}")
    monkeypatch.setattr(search, "_MAX_ESTIMATE", -1)
    monkeypatch.setattr(base_admin, "_FIRST_WINDOW", 2)
    monkeypatch.setattr(base_admin, "_TIME_LIMIT_S", -1)
    text, pages = admin.get(LIST, {"q": "penguins"}).content.decode(), 1
    while f"/{wanted.pk}/change/" not in text:
        assert "Nothing found yet" in text
        (older,) = re.findall(r'rel="next" href="([^"]+)"', text)
        text = admin.get(f"{LIST}{html.unescape(older)}").content.decode()
        pages += 1
    assert pages > 2
    assert "Nothing found yet" not in text
    monkeypatch.setattr(base_admin, "_TIME_LIMIT_S", 60)
    assert "Nothing matches the search" in admin.get(LIST, {"q": "resp_none"}).content.decode()


def test_an_export_that_would_search_too_much_is_not_begun(
    admin: Client, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def no_time() -> Iterator[None]:
        raise SearchTooBroad
        yield

    chain.turn("about penguins")
    monkeypatch.setattr("responses_api.admin.responses.search_timeout", no_time)
    response = admin.get(f"{LIST}export/", {"q": "penguins", "status": "completed"})
    assert response.status_code == 302
    assert response["Location"] == f"{LIST}?status=completed"
    assert "Too much would have to be searched" in admin.get(response["Location"]).content.decode()
    assert not LogEntry.objects.exists()


def test_an_export_searches_no_longer_than_a_list(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain.turn("a")
    monkeypatch.setattr(search, "_LIST_MS", 50)
    slow = RawSQL("pg_sleep(30) IS NOT NULL", [], output_field=BooleanField())
    with pytest.raises(SearchTooBroad):
        responses._read_batch(StoredResponse.objects.filter(slow), None)


def test_a_conversation_shows_its_items_a_page_at_a_time(
    admin: Client,
    staff: Callable[..., Client],
    chain: Chain,
    api_key: Key,
) -> None:
    conversation = Conversation.objects.create(
        public_id=new_id("conv_"), project=api_key[0].project
    )
    for number in range(30):
        chain.turn(f"question {number}.", "ok", conversation=conversation.public_id)
    address = f"/admin/responses_api/conversation/{conversation.pk}/change/"
    newest = admin.get(address).content.decode()
    assert "question 29." in newest
    assert "question 4." not in newest
    earlier = re.search(r"\?before=(\d+)", newest)
    assert earlier is not None
    assert "question 4." in admin.get(f"{address}{earlier.group()}").content.decode()
    looker = staff("responses_api.view_conversation")
    assert "question 29." not in looker.get(address).content.decode()


def _followed(browser: Client, address: str) -> str:
    text: str = browser.post(address, follow=True).content.decode()
    return text
