"""What responses build on: chains, input items, lists, counts, and what is not stored."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.keys import make_key
from tests.e2e.scripts import ENDLESS, dicts, respond, script, slow
from tests.served_stack import ServedStack


@pytest.fixture(scope="module")
def stranger(stack: ServedStack) -> openai.OpenAI:
    """The client of another project."""
    return stack.client(make_key(stack).secret)


def texts(client: openai.OpenAI, of: str) -> list[tuple[str, str]]:
    """The roles and texts of a response's input items, oldest first."""
    items = client.responses.input_items.list(of, order="asc", limit=100)
    return [(item["role"], item["content"][0]["text"]) for item in dicts(items)]


def test_chain_is_read_by_the_model(client: openai.OpenAI) -> None:
    first = client.responses.create(model="scripted", input="one two three")
    second = client.responses.create(model="scripted", input="four", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage is not None
    assert second.usage.input_tokens == 7  # One two three, its echo, and four.


def test_chain_forks_at_any_point(client: openai.OpenAI) -> None:
    ids: list[str | None] = [None]
    for n in range(4):
        made = client.responses.create(
            model="scripted", input=f"q{n}", previous_response_id=ids[-1]
        )
        ids.append(made.id)
    fork = client.responses.create(model="scripted", input="fork", previous_response_id=ids[2])
    assert texts(client, fork.id) == [
        ("user", "q0"),
        ("assistant", "q0"),
        ("user", "q1"),
        ("assistant", "q1"),
        ("user", "fork"),
    ]
    assert len(texts(client, str(ids[4]))) == 7


def test_instructions_are_not_inherited(client: openai.OpenAI) -> None:
    first = client.responses.create(model="scripted", input="a", instructions="b " * 50)
    assert first.usage is not None
    assert first.usage.input_tokens == 51
    second = client.responses.create(model="scripted", input="c", previous_response_id=first.id)
    assert second.instructions is None
    assert second.usage is not None
    assert second.usage.input_tokens == 3


def test_next_response_needs_no_input(client: openai.OpenAI) -> None:
    first = client.responses.create(model="scripted", input="again")
    second = client.responses.create(model="scripted", previous_response_id=first.id)
    assert second.output_text == "again"


def test_any_end_can_be_built_on_but_nothing_that_runs(client: openai.OpenAI) -> None:
    cut = respond(client, {"text": "a "}, {"text": "b"}, max_output_tokens=1)
    assert cut.status == "incomplete"
    runs = client.responses.create(model="scripted", input=ENDLESS, background=True)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="scripted", input="x", previous_response_id=runs.id)
    assert caught.value.param == "previous_response_id"
    client.responses.cancel(runs.id)
    for end in (cut.id, runs.id):
        made = client.responses.create(model="scripted", input="x", previous_response_id=end)
        assert made.status == "completed"


def test_input_items_are_normalised_ordered_and_paged(client: openai.OpenAI) -> None:
    given: Any = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    ]
    made = client.responses.create(model="scripted", input=given)
    newest_first = dicts(client.responses.input_items.list(made.id))
    assert [item["role"] for item in newest_first] == ["user", "assistant", "user", "developer"]
    assert newest_first[1]["content"] == [
        {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
    ]
    assert newest_first[3]["content"] == [{"type": "input_text", "text": "d"}]
    ids = [item["id"] for item in newest_first]
    assert len(set(ids)) == 4
    page = client.responses.input_items.list(made.id, limit=3)
    assert page.has_more
    assert [item.id for item in page] == ids  # The SDK turns the page.
    ascending = client.responses.input_items.list(made.id, order="asc", after=ids[2], limit=1)
    assert [item.id for item in ascending.data] == [ids[1]]
    before = client.responses.input_items.list(made.id, extra_query={"before": ids[2]}, limit=1)
    assert [item.id for item in before.data] == [ids[1]]
    assert before.has_more
    before = client.responses.input_items.list(made.id, extra_query={"before": ids[2]}, limit=2)
    assert [item.id for item in before.data] == ids[:2]
    assert not before.has_more


@pytest.mark.parametrize("query", [{"include": "logprobs"}, {"include[]": "logprobs"}])
def test_unknown_include_is_400(
    client: openai.OpenAI, http: httpx.Client, query: dict[str, str]
) -> None:
    made = client.responses.create(model="scripted", input="x")
    conversation = client.conversations.create()
    known: Any = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    assert client.responses.retrieve(made.id, include=known) == made
    for path in (
        f"responses/{made.id}",
        f"responses/{made.id}/input_items",
        f"conversations/{conversation.id}/items",
    ):
        error = http.get(f"/v1/{path}", params=query).json()["error"]
        assert (error["param"], error["code"]) == ("include[0]", "invalid_value")
    path, items = f"/v1/conversations/{conversation.id}/items", [{"role": "user", "content": "x"}]
    assert http.post(path, params=query, json={"items": items}).status_code == 400
    assert http.get(path).json()["data"] == []
    added = client.conversations.items.create(conversation.id, items=items)  # type: ignore[arg-type]  # It takes dicts.
    assert http.get(f"{path}/{added.data[0].id}", params=query).status_code == 400


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "101"}, {"order": "up"}, {"after": "msg_x"}]
)
def test_bad_page_is_400(client: openai.OpenAI, http: httpx.Client, query: dict[str, str]) -> None:
    made = client.responses.create(model="scripted", input="x")
    response = http.get(f"/v1/responses/{made.id}/input_items", params=query)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(query))


def test_item_can_be_referred_to(client: openai.OpenAI) -> None:
    first = client.responses.create(model="scripted", input="one two")
    [item] = client.responses.input_items.list(first.id)
    reference: Any = [{"type": "item_reference", "id": item.id}, {"id": first.output[0].id}]
    made = client.responses.create(model="scripted", input=[*reference, *reference[:1]])
    assert texts(client, made.id) == [
        ("user", "one two"),
        ("assistant", "one two"),
        ("user", "one two"),
    ]


def test_list_is_filtered_and_paged(client: openai.OpenAI, http: httpx.Client) -> None:
    conversation = client.conversations.create()
    began = int(time.time())
    ids = [
        client.responses.create(model="scripted", input="x", metadata={"run": "l", "n": str(n)}).id
        for n in range(4)
    ]
    child = client.responses.create(
        model="scripted", input="x", previous_response_id=ids[0], metadata={"run": "l"}
    ).id
    talk = client.responses.create(
        model="scripted", input="x", conversation=conversation.id, metadata={"run": "l"}
    ).id

    def listed(**query: str) -> list[str]:
        query = {"metadata[run]": "l", **query}
        found = http.get("/v1/responses", params=query)
        assert found.status_code == 200, found.text
        return [response["id"] for response in found.json()["data"]]

    everything = [*ids, child, talk]
    assert listed() == everything[::-1]
    assert listed(order="asc") == everything
    assert listed(order="asc", limit="2", after=ids[1]) == ids[2:4]
    assert listed(limit="2", after=ids[2]) == ids[1::-1]
    assert listed(**{"metadata[n]": "2"}) == [ids[2]]
    assert listed(previous_response_id=ids[0]) == [child]
    assert listed(conversation=conversation.id) == [talk]
    assert listed(model="demo") == []
    assert listed(status="completed", model="scripted") == everything[::-1]
    assert listed(status="failed") == []
    assert listed(created_after=str(began - 1)) == everything[::-1]
    assert listed(created_before=str(began - 1)) == []
    assert listed(q="unheardof") == []
    page = http.get("/v1/responses", params={"metadata[run]": "l", "limit": "2"}).json()
    assert (page["has_more"], page["first_id"], page["last_id"]) == (True, talk, child)
    assert page["data"][0] == http.get(f"/v1/responses/{talk}").json()
    assert http.get("/v1/responses", params={"status": "x"}).status_code == 400
    refused = http.get("/v1/responses", params={"after": "resp_none"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")


def test_responses_are_found_by_their_words(
    client: openai.OpenAI, http: httpx.Client, stranger: openai.OpenAI
) -> None:
    """What was asked and what was answered, of the project's own that are not deleted."""
    asked = client.responses.create(model="scripted", input="A zyzzyva sat\non a quokka.")
    answered = respond(client, {"text": "Zyzzy"}, {"text": "va!"}, metadata={"n": "1"})
    deleted = respond(client, {"text": "zyzzyva"})
    client.responses.delete(deleted.id)
    stranger.responses.create(model="scripted", input="zyzzyva")
    unstored = respond(client, {"text": "zyzzyva"}, store=False)

    def found(words: str, **query: str) -> list[str]:
        listed = http.get("/v1/responses", params={"q": words, **query}).json()["data"]
        return [entry["id"] for entry in listed]

    assert unstored.id not in found("zyzzyva")
    assert found("zyzzyva") == [answered.id, asked.id]
    assert found("Quokka zyzzyva") == [asked.id]
    assert found('"sat on a"') == [asked.id]
    assert found("zyzzyva -quokka") == [answered.id]
    assert found("zyzzyva", order="asc", limit="1") == [asked.id]
    assert found("zyzzyva", after=answered.id) == [asked.id]
    assert found("zyzzyva", **{"metadata[n]": "1"}) == [answered.id]
    assert found("zyzzyva", status="failed") == []
    assert found("zyzzyva", created_before="1") == []
    assert found("zyzzyva platypus") == []
    assert found("completed input_text") == []  # Words of the form, which nobody said.
    assert found(" ")[:2] == [answered.id, asked.id]  # Nothing to search for.
    refused = http.get("/v1/responses", params={"q": "a" * 501})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "q")


def test_input_tokens_are_those_of_the_usage(client: openai.OpenAI, stack: ServedStack) -> None:
    tool: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    asked: dict[str, Any] = {
        "model": "demo",
        "input": [{"role": "user", "content": "What is the capital of Japan?"}],
        "instructions": "Be terse.",
        "tools": [tool],
    }
    stored = stack.sql("SELECT count(*) FROM responses_api_item")
    counted = client.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    assert stack.sql("SELECT count(*) FROM responses_api_item") == stored
    made = client.responses.create(**asked, max_output_tokens=5)
    assert made.usage is not None
    assert counted.input_tokens == made.usage.input_tokens
    more: Any = {"model": "demo", "input": "And of Norway?", "previous_response_id": made.id}
    again = client.responses.create(**more, max_output_tokens=5)
    assert again.usage is not None
    assert client.responses.input_tokens.count(**more).input_tokens == again.usage.input_tokens


def test_compaction_is_taken_back_as_it_is(client: openai.OpenAI, stranger: openai.OpenAI) -> None:
    made = client.responses.create(model="scripted", input="My name is Ann.")
    compacted = client.responses.compact(
        model="scripted", previous_response_id=made.id, input="And I live in Oslo."
    )
    assert compacted.object == "response.compaction"
    items: Any = [item.to_dict(warnings=False) for item in compacted.output]
    assert [item["type"] for item in items] == ["message", "message", "compaction"]
    assert compacted.usage.output_tokens > 0
    question: Any = {"role": "user", "content": "x"}
    answer = client.responses.create(model="scripted", input=[*items, question])
    assert answer.usage is not None
    assert answer.usage.input_tokens > 20  # The summary is an echo of what was to be summarised.
    sealed = items[-1]["encrypted_content"]
    for content in (sealed[:-2] + "AA", "x", "ä"):
        tampered: Any = [{"type": "compaction", "encrypted_content": content}, question]
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="scripted", input=tampered)
        assert caught.value.param == "input[0].encrypted_content"
    with pytest.raises(openai.BadRequestError):
        stranger.responses.create(model="scripted", input=[items[-1], question])


def test_compaction_needs_a_model_and_something_to_compact(http: httpx.Client) -> None:
    for body, param in (({"input": "x"}, "model"), ({"model": "scripted"}, "input")):
        response = http.post("/v1/responses/compact", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_to_be_stored_leaves_no_content(
    stack: ServedStack, client: openai.OpenAI, stream: bool
) -> None:
    marker = f"marker{time.time_ns()}"
    answer: Any = client.responses.create(
        model="scripted",
        input=script({"text": marker}),
        instructions=marker,
        metadata={"k": marker},
        store=False,
        stream=stream,
    )
    final = list(answer)[-1].response if stream else answer
    assert final.output_text == marker
    assert final.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(final.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="scripted", input="x", previous_response_id=final.id)
    assert caught.value.code == "previous_response_not_found"
    tables = stack.sql(
        "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
    )
    assert len(tables) > 10
    for (table,) in tables:
        rows = stack.sql(f'SELECT t::text FROM "{table}" t WHERE t::text LIKE %s', f"%{marker}%")  # noqa: S608  # A name of the catalogue.
        assert rows == [], table


def test_stored_content_is_found_by_the_same_search(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    """So that the search above proves something."""
    marker = f"marker{time.time_ns()}"
    client.responses.create(model="scripted", input=marker)
    rows = stack.sql(
        "SELECT t::text FROM responses_api_item t WHERE t::text LIKE %s", f"%{marker}%"
    )
    assert len(rows) == 2


def test_another_project_sees_nothing(
    stack: ServedStack, client: openai.OpenAI, stranger: openai.OpenAI
) -> None:
    made = client.responses.create(model="scripted", input=slow(2), background=True)
    conversation = client.conversations.create(items=[{"role": "user", "content": "x"}])
    [item] = client.conversations.items.list(conversation.id)
    attempts: list[Any] = [
        lambda: stranger.responses.retrieve(made.id),
        lambda: stranger.responses.retrieve(made.id, stream=True),
        lambda: stranger.responses.cancel(made.id),
        lambda: stranger.responses.delete(made.id),
        lambda: stranger.responses.input_items.list(made.id),
        lambda: stranger.conversations.retrieve(conversation.id),
        lambda: stranger.conversations.update(conversation.id, metadata={}),
        lambda: stranger.conversations.delete(conversation.id),
        lambda: stranger.conversations.items.list(conversation.id),
        lambda: stranger.conversations.items.create(
            conversation.id, items=[{"role": "user", "content": "x"}]
        ),
        lambda: stranger.conversations.items.retrieve(
            str(item.id), conversation_id=conversation.id
        ),
        lambda: stranger.conversations.items.delete(str(item.id), conversation_id=conversation.id),
        lambda: stranger.responses.create(
            model="scripted", input="x", conversation=conversation.id
        ),
        lambda: stranger.responses.create(
            model="scripted", input=[{"type": "item_reference", "id": str(item.id)}]
        ),
    ]
    for attempt in attempts:
        with pytest.raises(openai.NotFoundError):
            attempt()
    with pytest.raises(openai.BadRequestError) as caught:
        stranger.responses.create(model="scripted", input="x", previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_found"
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        headers = {"Authorization": f"Bearer {stranger.api_key}"}
        listed = http.get("/v1/responses", headers=headers).json()
    assert made.id not in json.dumps(listed)


def test_response_is_deleted_while_others_continue_it(stack: ServedStack) -> None:
    """Each continuation is told that it is gone, or wins and keeps what it builds on."""
    with stack.http() as http, ThreadPoolExecutor(4) as threads:
        for n in range(12):
            asked = {"model": "scripted", "input": f"q{n}"}
            made = http.post("/v1/responses", json=asked).json()
            together = threading.Barrier(4)
            further = {**asked, "previous_response_id": made["id"]}

            def post(further: dict[str, Any] = further, b: threading.Barrier = together) -> Any:
                b.wait()
                return http.post("/v1/responses", json=further)

            def delete(id_: str = made["id"], b: threading.Barrier = together) -> Any:
                b.wait()
                return http.delete(f"/v1/responses/{id_}")

            *posted, deleted = [threads.submit(act) for act in (post, post, post, delete)]
            assert deleted.result().status_code == 200, deleted.result().text
            for answer in (request.result() for request in posted):
                if answer.status_code == 200:
                    path = f"/v1/responses/{answer.json()['id']}/input_items"
                    assert len(http.get(path).json()["data"]) == 3
                else:
                    assert answer.status_code == 400, answer.text
                    assert answer.json()["error"]["code"] == "previous_response_not_found"
            assert http.get(f"/v1/responses/{made['id']}").status_code == 404
