"""Feedback on stored answers, by clients, users of the console and the playground."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.keys import make_key
from tests.e2e.scripts import script
from tests.served_stack import ServedStack

Answer = tuple[str, str]
"""The path of a stored answer, and its id."""


@pytest.fixture(params=["response", "completion"])
def answer(request: pytest.FixtureRequest, client: openai.OpenAI) -> Answer:
    """A stored answer of each API."""
    if request.param == "response":
        made = client.responses.create(model="scripted", input=script({"text": "Hi"}))
        return f"/v1/responses/{made.id}", made.id
    kept = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "Hi"}], store=True
    )
    return f"/v1/chat/completions/{kept.id}", kept.id


def test_feedback_is_given_changed_listed_and_withdrawn(stack: ServedStack, answer: Answer) -> None:
    path, answer_id = answer
    with stack.http() as http:
        assert http.get(f"{path}/feedback").json()["data"] == []
        given = http.post(f"{path}/feedback", json={"rating": "up"}).json()
        assert given["object"] == "feedback"
        assert (given["answer_id"], given["author"], given["note"]) == (answer_id, "client", "")
        changed = {"rating": "down", "note": "It is\0 wrong."}
        assert http.post(f"{path}/feedback", json=changed).status_code == 200
        (entry,) = http.get(f"{path}/feedback").json()["data"]
        assert (entry["rating"], entry["note"]) == ("down", "It is\ufffd wrong.")
        assert http.delete(f"{path}/feedback").json()["deleted"] is True
        assert http.delete(f"{path}/feedback").json()["deleted"] is False
        assert http.get(f"{path}/feedback").json()["data"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "rating"),
        ({"rating": "five stars"}, "rating"),
        ({"rating": "up", "note": 7}, "note"),
        ({"rating": "up", "note": "x" * 4_001}, "note"),
    ],
)
def test_bad_feedback_is_refused(
    stack: ServedStack, answer: Answer, body: dict[str, Any], param: str
) -> None:
    with stack.http() as http:
        refused = http.post(f"{answer[0]}/feedback", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param
        assert http.get(f"{answer[0]}/feedback").json()["data"] == []


def test_another_project_sees_no_answer_to_rate(stack: ServedStack, answer: Answer) -> None:
    with make_key(stack).http(stack) as other:
        for ask in (other.get, other.delete):
            assert ask(f"{answer[0]}/feedback").status_code == 404
        assert other.post(f"{answer[0]}/feedback", json={"rating": "up"}).status_code == 404


def test_ratings_at_the_same_time_leave_one_entry(stack: ServedStack, answer: Answer) -> None:
    def rate(number: int) -> httpx.Response:
        with stack.http() as http:
            body = {"rating": ("up", "down")[number % 2], "note": str(number)}
            return http.post(f"{answer[0]}/feedback", json=body)

    with ThreadPoolExecutor(8) as pool:
        assert {found.status_code for found in pool.map(rate, range(16))} == {200}
    with stack.http() as http:
        (entry,) = http.get(f"{answer[0]}/feedback").json()["data"]
    assert entry["rating"] == ("up", "down")[int(entry["note"]) % 2]


def test_feedback_goes_with_its_answer(stack: ServedStack, answer: Answer) -> None:
    path, _ = answer
    with stack.http() as http:
        http.post(f"{path}/feedback", json={"rating": "down", "note": "goes away"})
        assert http.delete(path).status_code == 200
        assert http.get(f"{path}/feedback").status_code == 404
        assert http.post(f"{path}/feedback", json={"rating": "up"}).status_code == 404
    found = stack.sql(
        "SELECT feedback::text FROM responses_api_storedresponse"
        " UNION ALL SELECT feedback::text FROM completions_storedcompletion"
    )
    assert not [text for (text,) in found if "goes away" in text]
