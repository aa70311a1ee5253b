"""The admin of stored chat completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from completions.admin import bubbles
from completions.models import StoredCompletion
from inference_site.accounts.models import Project

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'},
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "a secret question"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
ANSWER = {"role": "assistant", "content": "a secret answer", "reasoning_content": "Hm."}


@pytest.fixture
def stored(project: Project) -> StoredCompletion:
    """A chat completion that was kept."""
    return StoredCompletion.objects.create(
        public_id="chatcmpl-1",
        project=project,
        model="m",
        metadata={"team": "north"},
        messages=MESSAGES,
        completion={"choices": [{"index": 0, "message": ANSWER}]},
    )


def page(browser: Client, stored: StoredCompletion) -> str:
    response = browser.get(f"/admin/completions/storedcompletion/{stored.pk}/change/")
    assert response.status_code == 200
    return response.content.decode()


def test_prompts_and_answers_need_their_permission(
    staff: Callable[..., Client], stored: StoredCompletion
) -> None:
    view, content = "completions.view_storedcompletion", "responses_api.view_content"
    hidden, shown = page(staff(view), stored), page(staff(view, content), stored)
    assert "secret" not in hidden
    assert "north" in hidden
    assert "a secret question" in shown
    assert "a secret answer" in shown


def test_a_chat_is_shown_with_calls_and_their_results() -> None:
    found = bubbles([*MESSAGES, ANSWER])
    assert [bubble.kind for bubble in found] == [
        *("message", "message", "call"),
        *("reasoning", "message"),
    ]
    call = found[2]
    assert call.name == "get_weather"
    assert call.result is not None
    assert call.result[0].text == "rain"


def test_parts_that_are_no_text_are_named_and_not_fetched() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ]
    (bubble,) = bubbles([{"role": "user", "content": parts}])
    assert [piece.kind for piece in bubble.pieces] == ["note", "image", "note"]


def test_calls_of_the_older_functions_are_shown_with_their_results() -> None:
    called = {"name": "get_weather", "arguments": '{"city":"Oslo"}'}
    found = bubbles(
        [
            {"role": "function", "name": "get_time", "content": "noon"},
            {"role": "assistant", "content": None, "function_call": called},
            {"role": "function", "name": "get_weather", "content": "rain"},
            {"role": "assistant", "content": None, "function_call": called},
            {"role": "function", "name": "get_weather", "content": None},
        ]
    )
    assert [bubble.kind for bubble in found] == ["result", "call", "call"]
    alone, call, last = found
    assert alone.pieces[0].text == "noon"
    assert (call.name, call.pieces[0].text) == ("get_weather", '{\n  "city": "Oslo"\n}')
    assert call.result is not None
    assert call.result[0].text == "rain"
    assert last.result == []
