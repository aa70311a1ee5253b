"""Prompt templates: requests name one by its id, with values for its variables."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.e2e.keys import make_key
from tests.e2e.scripts import dicts
from tests.e2e.test_responses_websocket import Socket, open_socket
from tests.images import data_url, encoded
from tests.served_stack import ServedStack

ID = f"pmpt_{'a' * 48}"


@pytest.fixture(scope="module")
def prompt(stack: ServedStack) -> str:
    """A prompt of the project of the stack's key with three versions, the second the default."""
    [[project]] = stack.sql("SELECT project_id FROM accounts_apikey ORDER BY id LIMIT 1")
    [[template]] = stack.sql(
        "INSERT INTO responses_api_prompttemplate"
        " (public_id, project_id, name, default_version, created_at)"
        " VALUES (%s, %s, 'greeting', 2, now()) RETURNING id",
        ID,
        project,
    )
    versions = [
        ("Say {{what}}.", "", ""),
        ("Be {{ tone }} to {{name}}.", "Hello {{name}}, see {{thing}}!", "scripted"),
        ("Third.", "", "scripted"),
    ]
    for number, (developer, user, model) in enumerate(versions, 1):
        stack.sql(
            "INSERT INTO responses_api_promptversion"
            " (template_id, number, developer_message, user_message, model, created_at)"
            " VALUES (%s, %s, %s, %s, %s, now()) RETURNING id",
            *(template, number, developer, user, model),
        )
    return ID


VALUES: dict[str, Any] = {"tone": "kind", "name": "Ann", "thing": "this"}


def test_messages_of_the_default_version_come_with_their_values(
    client: openai.OpenAI, prompt: str
) -> None:
    made = client.responses.create(prompt={"id": prompt, "variables": VALUES})
    assert made.model == "scripted"
    assert made.instructions == "Be kind to Ann."
    assert made.output_text == "Hello Ann, see this!"
    assert made.prompt is not None
    assert made.prompt.to_dict() == {"id": prompt, "version": "2", "variables": VALUES}
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    [item] = dicts(client.responses.input_items.list(made.id))
    assert item["content"] == [{"type": "input_text", "text": "Hello Ann, see this!"}]
    third = client.responses.create(prompt={"id": prompt, "version": "3"}, input="mine")
    assert (third.instructions, third.output_text) == ("Third.", "mine")


def test_what_the_request_says_itself_counts(client: openai.OpenAI, prompt: str) -> None:
    made = client.responses.create(
        model="demo",
        prompt={"id": prompt, "variables": VALUES},
        instructions="Mine.",
        input="And mine.",
        max_output_tokens=1,
    )
    assert (made.model, made.instructions) == ("demo", "Mine.")
    assert len(client.responses.input_items.list(made.id).data) == 2


@pytest.mark.parametrize(
    "value", ["{{name}}", "{{ tone }}{{thing}}", "{% if x %}\\1\\g<0>{{{{", "$name {0} %s", "é\x01"]
)
def test_value_with_the_syntax_of_templates_stays_as_it_is(
    client: openai.OpenAI, prompt: str, value: str
) -> None:
    values = {**VALUES, "name": value, "thing": {"type": "input_text", "text": value}}
    made = client.responses.create(prompt={"id": prompt, "variables": values})
    assert made.instructions == f"Be kind to {value}."
    assert made.output_text == f"Hello {value}, see {value}!"


def test_image_is_a_part_of_the_user_message(client: openai.OpenAI, prompt: str) -> None:
    image: Any = {"type": "input_image", "image_url": data_url(encoded("PNG"))}
    variables = {**VALUES, "thing": image}
    with pytest.raises(openai.BadRequestError) as refused:  # The model sees nothing.
        client.responses.create(prompt={"id": prompt, "variables": variables})
    assert refused.value.param == "prompt.content[1].image_url"
    file: Any = {"type": "input_file", "file_data": "data:text/plain;base64,aGVsbG8="}
    made = client.responses.create(prompt={"id": prompt, "variables": {**VALUES, "thing": file}})
    [item] = dicts(client.responses.input_items.list(made.id))
    assert [part["type"] for part in item["content"]] == ["input_text", "input_file", "input_text"]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(prompt={"id": prompt, "variables": {**VALUES, "tone": image}})
    assert refused.value.param == "prompt.variables.tone"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"id": "pmpt_unknown"}, "prompt.id"),
        ({"id": "x" * 256}, "prompt.id"),
        ({"id": "a\0b"}, "prompt.id"),
        ({"version": "4"}, "prompt.version"),
        ({"version": "-1"}, "prompt.version"),
        ({"version": "٢"}, "prompt.version"),
        ({"version": 2}, "prompt.version"),
        ({"version": "9" * 5000}, "prompt.version"),
        ({"variables": None}, "prompt.variables.tone"),
        ({"variables": {"tone": "x", "name": "y"}}, "prompt.variables.thing"),
        ({"variables": {**VALUES, "more": "x"}}, "prompt.variables.more"),
        ({"variables": {**VALUES, "a'b\n": "x"}}, r"prompt.variables.a\u0027b\u000a"),
        ({"variables": {**VALUES, "m" * 65: "x"}}, f"prompt.variables.{'m' * 64}…"),
        ({"variables": {**VALUES, "tone": 5}}, "prompt.variables.tone"),
        ({"variables": {**VALUES, "tone": {"type": "output_text"}}}, "prompt.variables.tone.type"),
        ({"variables": {**VALUES, "name": "x" * 11_000_000}}, "prompt.variables"),
    ],
)
def test_what_a_prompt_lacks_is_named(
    http: httpx.Client, prompt: str, changes: dict[str, Any], param: str
) -> None:
    given = {"id": prompt, "variables": VALUES, **changes}
    answer = http.post("/v1/responses", json={"prompt": given})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_variable_that_is_a_number_is_no_text(http: httpx.Client, prompt: str) -> None:
    given = {"id": prompt, "variables": {**VALUES, "tone": 5}}
    error = http.post("/v1/responses", json={"prompt": given}).json()["error"]
    assert error["message"] == (
        "Invalid type for 'prompt.variables.tone': expected a string, but got an integer instead."
    )


def test_prompt_of_another_project_is_unknown(stack: ServedStack, prompt: str) -> None:
    with make_key(stack).http(stack) as other:
        answer = other.post("/v1/responses", json={"prompt": {"id": prompt, "variables": VALUES}})
    assert answer.json()["error"]["code"] == "prompt_not_found"


def test_over_a_socket_and_in_the_background_it_is_the_same(
    stack: ServedStack, client: openai.OpenAI, prompt: str
) -> None:
    asked: dict[str, Any] = {"prompt": {"id": prompt, "variables": VALUES}}
    with open_socket(stack, Authorization=f"Bearer {stack.key}") as connection:
        over_socket = Socket(connection).respond(**asked)
    assert over_socket["output"][0]["content"][0]["text"] == "Hello Ann, see this!"
    made = client.responses.create(**asked, background=True)
    while made.status in ("queued", "in_progress"):
        made = client.responses.retrieve(made.id)
    assert made.output_text == "Hello Ann, see this!"
