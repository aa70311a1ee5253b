"""``moderation`` of responses and chats: a moderation model judges the input and the answers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.e2e.keys import make_budget, make_key
from tests.e2e.scripts import call, script
from tests.image_server import ImageServer
from tests.images import PNG, data_url
from tests.served_stack import ServedStack
from tests.upstream_server import Talk, UpstreamServer, streamed
from tests.waiting import wait_until

HARMFUL = script({"text": "a g"}, {"text": "un"})
"""The answer is "a gun"; the input has no such word."""
HARMLESS = script({"text": "a c"}, {"text": "at"})
RED = data_url(PNG)


def judged(talk: Talk) -> None:
    """Flag what has "gun" or a red image in it, as a server with moderations does."""
    given = talk.body["input"]
    inputs = given if isinstance(given[0], str) else [json.dumps(given)]
    flags = ["gun" in each or RED in each for each in inputs]
    results = [
        {
            "flagged": flagged,
            "categories": {"violence": flagged},
            "category_scores": {"violence": 0.75 if flagged else 0.25},
        }
        for flagged in flags
    ]
    talk.say(200, {"id": "modr-1", "model": "odd", "results": results})


@pytest.fixture(autouse=True)
def judge(odd: UpstreamServer) -> UpstreamServer:
    """The server of the moderation model."""
    odd.answers = [judged]
    odd.asked.clear()
    return odd


def policy(**modes: str) -> Any:
    blocks = {name: {"mode": mode} for name, mode in modes.items()}
    return {"model": "judge", "policy": blocks}


def ask(client: openai.OpenAI, said: str, moderation: Any, **fields: Any) -> Any:
    return client.responses.create(model="scripted", input=said, moderation=moderation, **fields)


def flags(response: Any) -> list[bool]:
    return [response.moderation.input.flagged, response.moderation.output.flagged]


def test_input_and_output_are_scored(
    client: openai.OpenAI, stack: ServedStack, judge: UpstreamServer
) -> None:
    made = ask(client, HARMFUL, {"model": "omni-moderation-latest"})
    assert made.output_text == "a gun"
    assert flags(made) == [False, True]
    assert made.moderation.output.to_dict() == {
        "type": "moderation_result",
        "model": "omni-moderation-latest",
        "flagged": True,
        "categories": {"violence": True},
        "category_scores": {"violence": 0.75},
        "category_applied_input_types": {"violence": ["text"]},
    }
    assert [asked.body["input"] for asked in judge.asked] == [[HARMFUL], ["a gun"]]
    stored = client.responses.retrieve(made.id)
    assert stored.moderation == made.moderation
    rows = stack.sql(
        "SELECT kind, status FROM generations_generation WHERE model = 'judge' "
        "ORDER BY id DESC LIMIT 2"
    )
    assert rows == [("moderation", "completed")] * 2
    assert client.responses.create(model="scripted", input=HARMLESS).moderation is None


def test_judgements_are_forgotten_with_the_end_user_of_their_request(
    client: openai.OpenAI, stack: ServedStack
) -> None:
    """Where content is kept for some hours, that of a judgement is what the user has said."""
    ask(client, HARMFUL, {"model": "judge"}, safety_identifier="judged-user")
    rows = "SELECT count(*) FROM generations_generation WHERE end_user = 'judged-user'"
    assert stack.sql(rows) == [(3,)]
    assert "3 generations" in stack.manage("forget", "--user", "judged-user")


def test_only_the_new_input_is_judged(client: openai.OpenAI, judge: UpstreamServer) -> None:
    first = ask(client, HARMFUL, {"model": "judge"})
    second = ask(client, HARMLESS, {"model": "judge"}, previous_response_id=first.id)
    assert flags(second) == [False, False]
    assert judge.asked[-2].body["input"] == [HARMLESS]


def test_a_stream_ends_with_what_was_judged(client: openai.OpenAI) -> None:
    events = list(ask(client, HARMFUL, policy(input="block", output="score"), stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "a gun"
    assert events[0].response.moderation is None
    assert flags(events[-1].response) == [False, True]
    again = list(client.responses.retrieve(events[0].response.id, stream=True))
    assert again == events


def test_a_flagged_input_is_not_answered(client: openai.OpenAI, stack: ServedStack) -> None:
    made = ask(client, script({"text": "a gun"}), policy(input="block"))
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "content_filter")
    assert made.output == []
    assert made.moderation.input.flagged
    assert made.moderation.output.type == "error"
    assert made.moderation.output.code == "not_judged"
    assert stack.row(made.id)["output_tokens"] == 0
    assert client.responses.retrieve(made.id).moderation == made.moderation


@pytest.mark.parametrize("stored", [True, False])
def test_of_a_flagged_answer_nothing_is_sent(client: openai.OpenAI, stored: bool) -> None:
    events = list(ask(client, HARMFUL, policy(output="block"), stream=True, store=stored))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == [0, 1, 2]
    final = events[-1].response
    assert (final.incomplete_details.reason, final.output) == ("content_filter", [])
    assert flags(final) == [False, True]
    if stored:
        assert client.responses.retrieve(final.id).output == []
        assert list(client.responses.retrieve(final.id, stream=True)) == events


def test_an_answer_that_passes_is_sent_whole(client: openai.OpenAI) -> None:
    events = list(ask(client, HARMLESS, policy(output="block"), stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "a cat"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"


def test_a_cancelled_answer_shows_nothing_that_was_not_judged(client: openai.OpenAI) -> None:
    slow = script({"repeat": 2000, "steps": [{"text": "x "}, {"sleep_ms": 20}]})
    made = ask(client, slow, policy(output="block"), background=True)
    wait_until(lambda: client.responses.retrieve(made.id).status == "in_progress", timeout_s=20)
    ended = client.responses.cancel(made.id)
    assert (ended.status, ended.output) == ("cancelled", [])


def test_in_the_background(client: openai.OpenAI) -> None:
    made = ask(client, HARMFUL, {"model": "judge"}, background=True)
    wait_until(lambda: client.responses.retrieve(made.id).status == "completed", timeout_s=20)
    assert flags(client.responses.retrieve(made.id)) == [False, True]


def test_the_arguments_of_calls_are_judged(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "name": "buy", "parameters": {"type": "object"}}]
    said = script(call("buy", '{"what": "a g', 'un"}'))
    made = ask(client, said, {"model": "judge"}, tools=tools)
    assert made.output[0].type == "function_call"
    assert made.moderation.output.flagged


def test_a_model_that_fails_is_an_error_and_blocks_what_must_be_judged(
    client: openai.OpenAI, judge: UpstreamServer
) -> None:
    judge.answers = [lambda talk: talk.say(400, {"error": {"message": "no"}})]
    made = ask(client, HARMLESS, {"model": "judge"})
    assert (made.status, made.output_text) == ("completed", "a cat")
    assert made.moderation.input.type == made.moderation.output.type == "error"
    assert made.moderation.input.code
    blocked = ask(client, HARMLESS, policy(output="block"))
    assert (blocked.status, blocked.output) == ("incomplete", [])


@pytest.mark.parametrize(
    ("moderation", "param"),
    [
        ({"model": "none"}, "moderation.model"),
        ({"model": ""}, "moderation.model"),
        ({"model": "scripted"}, "moderation.model"),
        ({}, "moderation.model"),
        ({"model": "judge", "policy": {"input": {"mode": "x"}}}, "moderation.policy.input.mode"),
        ({"model": "judge", "policy": {"output": {}}}, "moderation.policy.output.mode"),
    ],
)
def test_what_cannot_be_is_refused(client: openai.OpenAI, moderation: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, HARMLESS, moderation)
    assert caught.value.param == param


def test_a_key_needs_the_moderation_model_too(stack: ServedStack) -> None:
    key = make_key(stack, allowed_models=["scripted"])
    with (
        stack.client(key.secret) as other,
        pytest.raises(openai.PermissionDeniedError),
    ):
        ask(other, HARMLESS, {"model": "judge"})


def test_what_the_judge_is_given_is_data(client: openai.OpenAI, judge: UpstreamServer) -> None:
    """A text with quotes and control characters reaches the model as it is."""
    said = script({"text": 'he said "\u0007\\ \ud83d\ude00"'})
    made = ask(client, said, {"model": "judge"})
    assert judge.asked[-1].body["input"] == [json.loads(said)[0]["text"]]
    assert made.moderation.output.flagged is False


# --- Chat completions ----------------------------------------------------------------------------


def chat(client: openai.OpenAI, said: str, moderation: Any, **fields: Any) -> Any:
    messages = [{"role": "user", "content": said}]
    return client.chat.completions.create(
        **{"model": "scripted", "messages": messages, "moderation": moderation, **fields}
    )


def chat_flags(completion: Any) -> list[list[bool]]:
    judged = (completion.moderation.input, completion.moderation.output)
    return [[one.flagged for one in each.results] for each in judged]


def test_the_input_and_each_choice_of_a_chat_are_scored(
    client: openai.OpenAI, judge: UpstreamServer, stack: ServedStack
) -> None:
    made = chat(client, HARMFUL, {"model": "omni-moderation-latest"}, store=True)
    [choice] = made.choices
    assert (choice.message.content, choice.finish_reason) == ("a gun", "stop")
    assert chat_flags(made) == [[False], [True]]
    assert made.moderation.output.to_dict()["results"][0] == {
        "type": "moderation_result",
        "model": "omni-moderation-latest",
        "flagged": True,
        "categories": {"violence": True},
        "category_scores": {"violence": 0.75},
        "category_applied_input_types": {"violence": ["text"]},
    }
    assert (made.moderation.input.type, made.moderation.input.model) == (
        "moderation_results",
        "omni-moderation-latest",
    )
    assert [asked.body["input"] for asked in judge.asked] == [[HARMFUL], ["a gun"]]
    stored = client.chat.completions.retrieve(made.id)
    assert stored.moderation == made.moderation
    assert "moderation" not in chat(client, HARMLESS, None).to_dict()
    two = chat(client, "Say something.", policy(output="block"), model="demo", n=2, max_tokens=5)
    assert chat_flags(two) == [[False], [False, False]]
    said = [choice.message.content for choice in two.choices]
    assert all(said)
    asked = [one.body["input"][0] for one in judge.asked[-2:]]
    assert sorted(asked) == sorted(said)  # They are judged at the same time.


def test_only_the_new_messages_of_a_chat_are_judged(
    client: openai.OpenAI, judge: UpstreamServer
) -> None:
    messages = [
        {"role": "user", "content": "a gun"},
        {"role": "assistant", "content": "a gun"},
        {"role": "user", "content": HARMLESS},
    ]
    made = chat(client, "", {"model": "judge"}, messages=messages)
    assert chat_flags(made) == [[False], [False]]
    assert judge.asked[0].body["input"] == [HARMLESS]


def test_a_chunk_before_the_last_ones_has_what_was_said_of_a_chat(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    chunks = list(chat(client, HARMFUL, policy(input="block"), stream=True, stream_options=options))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "a gun"
    told = [chunk.moderation is not None for chunk in chunks]
    assert (told[-2:], any(told[:-2])) == ([True, False], False)
    judged, counted = chunks[-2:]
    assert (judged.choices, counted.choices, counted.usage is None) == ([], [], False)
    assert chat_flags(judged) == [[False], [True]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("blocked", ["input", "output"])
def test_of_a_blocked_chat_nothing_is_sent(
    client: openai.OpenAI, stack: ServedStack, blocked: str, stream: bool
) -> None:
    said = script({"text": "a gun"}) if blocked == "input" else HARMFUL
    made = chat(client, said, policy(**{blocked: "block"}), stream=stream)
    if stream:
        chunks = list(made)
        ends = [(c.choices[0].index, c.choices[0].finish_reason) for c in chunks if c.choices]
        assert [end for end in ends if end[1]] == [(0, "content_filter")]
        assert not any(c.choices[0].delta.content for c in chunks if c.choices)
        made = chunks[-1]
    else:
        assert [choice.finish_reason for choice in made.choices] == ["content_filter"]
        assert not any(choice.message.content for choice in made.choices)
    row = stack.row(made.id)
    if blocked == "input":
        assert made.moderation.input.results[0].flagged
        assert (made.moderation.output.type, made.moderation.output.code) == ("error", "not_judged")
        assert row["output_tokens"] == 0
    else:
        assert chat_flags(made) == [[False], [True]]
        assert row["output_tokens"] > 0
    assert (row["status"], row["finish_reason"]) == ("completed", "content_filter")


def test_a_chat_that_passes_is_sent_whole(client: openai.OpenAI) -> None:
    chunks = list(chat(client, HARMLESS, policy(output="block"), stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "a cat"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chat_flags(chunks[-1]) == [[False], [False]]


def test_a_chat_that_fails_shows_nothing_that_was_not_judged(client: openai.OpenAI) -> None:
    said = script({"text": "a gun"}, {"fail": "It broke."})
    for modes, shown in (({"output": "score"}, True), ({"output": "block"}, False)):
        with pytest.raises(openai.InternalServerError) as caught:
            chat(client, said, policy(**modes))
        assert ("a gun" in caught.value.response.text) == shown
        with pytest.raises(openai.APIError) as broken:
            list(chat(client, said, policy(**modes), stream=True))
        assert ("a gun" in json.dumps(broken.value.body)) == shown


def test_the_calls_of_a_chat_are_judged(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "buy", "parameters": {"type": "object"}}}]
    said = script(call("buy", '{"what": "a g', 'un"}'))
    made = chat(client, said, {"model": "judge"}, tools=tools)
    assert made.choices[0].finish_reason == "tool_calls"
    assert chat_flags(made) == [[False], [True]]


def test_a_judge_that_fails_is_an_error_of_a_chat(
    client: openai.OpenAI, judge: UpstreamServer
) -> None:
    judge.answers = [lambda talk: talk.say(400, {"error": {"message": "no"}})]
    made = chat(client, HARMLESS, {"model": "judge"})
    assert made.choices[0].message.content == "a cat"
    assert made.moderation.input.type == made.moderation.output.type == "error"
    blocked = chat(client, HARMLESS, policy(output="block"))
    assert blocked.choices[0].finish_reason == "content_filter"


@pytest.mark.parametrize(
    ("moderation", "param"),
    [
        ({"model": "none"}, "moderation.model"),
        ({"model": "scripted"}, "moderation.model"),
        ({"model": "judge", "policy": {"input": {"mode": "x"}}}, "moderation.policy.input.mode"),
    ],
)
def test_what_cannot_be_is_refused_in_chats(
    client: openai.OpenAI, moderation: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, HARMLESS, moderation)
    assert caught.value.param == param


def test_a_key_needs_the_moderation_model_of_a_chat_too(stack: ServedStack) -> None:
    key = make_key(stack, allowed_models=["scripted"])
    with stack.client(key.secret) as other, pytest.raises(openai.PermissionDeniedError):
        chat(other, HARMLESS, {"model": "judge"})


# --- Images --------------------------------------------------------------------------------------


def seen(talk: Talk) -> None:
    """Answer chats with "a cat"."""
    if "messages" in talk.body:
        streamed("a cat")(talk)
    else:
        judged(talk)


def asked_about(client: openai.OpenAI, api: str, url: str, moderation: Any, **fields: Any) -> Any:
    """Ask what an image shows."""
    asked: dict[str, Any] = {"model": "seeing", "moderation": moderation, **fields}
    if api == "chat":
        image: Any = {"type": "image_url", "image_url": {"url": url}}
        content = [{"type": "text", "text": "What is it?"}, image]
        return client.chat.completions.create(
            messages=[{"role": "user", "content": content}], **asked
        )
    image = {"type": "input_image", "image_url": url, "detail": "auto"}
    content = [{"type": "input_text", "text": "What is it?"}, image]
    return client.responses.create(input=[{"role": "user", "content": content}], **asked)


def of_input(made: Any) -> Any:
    """What was said of the input of a response or a chat."""
    found = made.moderation.input
    return found.results[0] if found.type == "moderation_results" else found


def types_of(made: Any) -> list[list[str]]:
    """The types of the input that were judged, for each category."""
    return list(of_input(made).to_dict()["category_applied_input_types"].values())


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_the_images_of_the_input_are_judged_with_its_text(
    client: openai.OpenAI, judge: UpstreamServer, api: str
) -> None:
    judge.answers = [seen]
    made = asked_about(client, api, RED, {"model": "judge"})
    assert of_input(made).flagged
    assert types_of(made) == [["text", "image"]]
    first, _, last = (asked.body for asked in judge.asked)
    assert first["input"] == [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": RED}},
    ]
    assert last["input"] == ["a cat"]
    judge.asked.clear()
    blocked = asked_about(client, api, RED, policy(input="block"))
    assert of_input(blocked).flagged
    assert len(judge.asked) == 1  # It is not answered.


def test_only_the_new_images_are_judged(client: openai.OpenAI, judge: UpstreamServer) -> None:
    judge.answers = [seen]
    first = asked_about(client, "responses", RED, {"model": "judge"})
    judge.asked.clear()
    made = client.responses.create(
        model="seeing",
        input="And?",
        previous_response_id=first.id,
        moderation=policy(input="block"),
    )
    assert made.output_text == "a cat"
    assert judge.asked[0].body["input"] == ["And?"]


def test_the_image_behind_a_url_that_was_judged_is_the_one_that_is_answered(
    client: openai.OpenAI, judge: UpstreamServer
) -> None:
    judge.answers = [seen]
    with ImageServer().running() as web:
        url = web.give("/red.png", PNG)
        made = asked_about(client, "responses", url, {"model": "judge"})
        assert web.asked == ["/red.png"]
    assert of_input(made).flagged
    first, answered, _ = (asked.body for asked in judge.asked)
    assert first["input"][1] == answered["messages"][-1]["content"][1]


def test_an_image_that_is_a_file_is_judged(client: openai.OpenAI, judge: UpstreamServer) -> None:
    judge.answers = [seen]
    id_ = client.files.create(file=("red.png", PNG), purpose="vision").id
    part = {"type": "input_image", "file_id": id_, "detail": "auto"}
    asked: dict[str, Any] = {"model": "seeing", "input": [{"role": "user", "content": [part]}]}
    made = client.responses.create(**asked, moderation={"model": "judge"})
    assert of_input(made).flagged
    assert judge.asked[0].body["input"] == [{"type": "image_url", "image_url": {"url": RED}}]
    judge.asked.clear()
    blocks: Any = {**policy(input="block"), "model": "guard"}
    unseen = client.responses.create(**asked, moderation=blocks)
    assert (unseen.output, of_input(unseen).code) == ([], "image_not_judged")
    assert judge.asked == []


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_a_model_that_sees_no_images_says_so_and_lets_none_pass(
    client: openai.OpenAI, judge: UpstreamServer, api: str
) -> None:
    judge.answers = [streamed("safe")]
    made = asked_about(client, api, RED, {"model": "guard"})
    assert set(map(tuple, types_of(made))) == {("text",)}
    assert judge.asked[0].body["messages"] == [{"role": "user", "content": "What is it?"}]
    judge.asked.clear()
    with pytest.raises(openai.BadRequestError, match="sees no images") as caught:
        asked_about(client, api, RED, {**policy(input="block"), "model": "guard"})
    assert caught.value.param == "moderation.model"
    assert judge.asked == []


def test_a_guard_that_sees_is_shown_the_images(
    client: openai.OpenAI, judge: UpstreamServer
) -> None:
    judge.answers = [streamed("unsafe\n", "S12")]
    moderation = {**policy(input="block"), "model": "seeing-guard"}
    made = asked_about(client, "responses", RED, moderation)
    assert of_input(made).categories["sexual"]
    assert set(map(tuple, types_of(made))) == {("text", "image")}
    [asked] = judge.asked
    [message] = asked.body["messages"]
    assert [part["type"] for part in message["content"]] == ["text", "image_url"]
    assert message["content"][1]["image_url"]["url"] == RED


def test_a_route_that_the_key_allows_judges(stack: ServedStack) -> None:
    key = make_key(stack, allowed_models=["scripted", "judges"])
    client = stack.client(key.secret)
    assert flags(ask(client, HARMFUL, {"model": "judges"})) == [False, True]
    with pytest.raises(openai.PermissionDeniedError):
        ask(client, HARMFUL, {"model": "judge"})


@pytest.mark.parametrize("has_budget", [False, True])
def test_judgements_count_for_the_limit_of_tokens(stack: ServedStack, has_budget: bool) -> None:
    """As what they have used: an estimate that nothing had counted was taken off again."""
    key, estimate = make_key(stack, tokens_per_minute=10_000), 12
    if has_budget:
        make_budget(stack, key, 1e6)
    ask(stack.client(key.secret), script({"text": "x" * 600}), {"model": "judge"})

    def is_counted() -> bool:
        query = (
            "SELECT bool_and(is_accounted), sum(input_tokens + output_tokens), count(*) FILTER "
            "(WHERE model = 'judge') FROM generations_generation WHERE project_id = %s"
        )
        [(is_accounted, used, judged_count)] = stack.sql(query, key.project_id)
        assert judged_count == 2
        if not is_accounted:
            return False
        with key.http(stack) as http:
            body = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}
            answer = http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
        return left == 10_000 - int(used) - estimate

    wait_until(is_counted, 30)
