"""What the playground opens of stored requests, and to whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.test import Client

from completions.models import StoredCompletion
from inference_site.accounts.models import ApiKey
from inference_site.console.playground import views
from inference_site.core.site_settings import models
from inference_site.core.site_settings.models import SiteSettings
from inference_site.runs.models import Generation
from responses_api.models import Conversation, Item
from tests.responses_api.chains import Chain

CONTENT = "responses_api.view_content"
RESPONSES, CHATS = "responses_api.view_storedresponse", "completions.view_storedcompletion"
PICTURE = "data:image/png;base64,iVBORw0KGgo="


def opened(browser: Client, public_id: str) -> Any:
    return browser.get(f"/admin/playground/open/{public_id}")


def texts(found: Any) -> list[tuple[str, str]]:
    return [
        (item["role"], item["content"][0]["text"])
        for item in found["items"]
        if item["type"] == "message"
    ]


def test_a_response_is_opened_with_its_settings_and_all_before_it(
    staff: Callable[..., Client], other_key: ApiKey
) -> None:
    first = Chain(other_key).turn("Hello", "Hi")
    second = Chain(other_key).turn(
        "And?",
        "Nothing",
        previous_response_id=first.public_id,
        instructions="Be short.",
        temperature=0.5,
        background=True,
        metadata={"a": "b"},
        user="a customer",
    )
    found = opened(staff(RESPONSES, CONTENT), second.public_id).json()
    request = found["request"]
    assert (request["model"], request["instructions"]) == ("m", "Be short.")
    assert request["temperature"] == 0.5
    assert not {"background", "metadata", "user", "input", "previous_response_id"} & set(request)
    said = [("user", "Hello"), ("assistant", "Hi"), ("user", "And?"), ("assistant", "Nothing")]
    assert texts(found) == said
    assert found["is_cut"] is False


def test_a_chat_completion_is_opened_as_items(
    staff: Callable[..., Client], other_key: ApiKey
) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "sky", "arguments": "{}"}}
    picture = {"type": "image_url", "image_url": {"url": PICTURE}}
    answer = {"role": "assistant", "content": "Rain.", "reasoning_content": "A tool knew."}
    StoredCompletion.objects.create(
        public_id="chatcmpl-1",
        project=other_key.project,
        model="demo",
        messages=[
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "The sky?"}, picture]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": ""},
        ],
        completion={"choices": [{"message": answer}]},
    )
    found = opened(staff(CHATS, CONTENT), "chatcmpl-1").json()
    assert found["request"] == {"model": "demo"}
    assert texts(found) == [("system", "Be short."), ("user", "The sky?"), ("assistant", "Rain.")]
    assert found["items"][1]["content"][1]["image_url"] == PICTURE
    kinds = [item["type"] for item in found["items"]]
    called = ["message", "message", "function_call", "function_call_output"]
    assert kinds == [*called, "reasoning", "message"]


def test_of_a_long_conversation_the_newest_items_are_opened(
    staff: Callable[..., Client], other_key: ApiKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "MAX_ITEMS", 2)
    project = other_key.project
    conversation = Conversation.objects.create(public_id="conv_1", project=project)
    for place, text in enumerate("abc"):
        content = [{"type": "input_text", "text": text}]
        Item.objects.create(
            public_id=f"msg_{place}",
            project=project,
            conversation=conversation,
            conversation_position=place,
            data={"type": "message", "role": "user", "content": content},
        )
    browser = staff("responses_api.view_conversation", CONTENT)
    found = opened(browser, "conv_1").json()
    assert texts(found) == [("user", "b"), ("user", "c")]
    assert found["is_cut"] is True


def test_content_is_opened_only_to_those_who_may_see_it(
    staff: Callable[..., Client], other_key: ApiKey
) -> None:
    answer = Chain(other_key).turn("a secret").public_id
    for permissions in ((), (RESPONSES,), (CONTENT,), (CHATS, CONTENT)):
        refused = opened(staff(*permissions), answer)
        assert refused.status_code == 403, permissions
        assert "secret" not in refused.content.decode()
    allowed = staff(RESPONSES, CONTENT)
    assert opened(allowed, answer).status_code == 200
    assert opened(Client(), answer).status_code == 401


@pytest.fixture
def hidden(db: None) -> Iterator[None]:
    """The site shows content to nobody."""
    SiteSettings.objects.update_or_create(pk=1, defaults={"show_content": False})
    models.forget()
    yield
    models.forget()


def test_content_that_is_shown_to_nobody_is_not_opened(
    admin: Client, other_key: ApiKey, hidden: None
) -> None:
    refused = opened(admin, Chain(other_key).turn("a secret").public_id)
    assert refused.json()["error"]["code"] == "content_hidden"


@pytest.mark.parametrize("public_id", ["resp_no", "chatcmpl-no", "conv_no", "x"])
def test_what_is_not_stored_is_a_404(admin: Client, public_id: str) -> None:
    assert opened(admin, public_id).status_code == 404


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        {"role": "function", "name": "f", "content": "x"},
        {"role": "tool", "content": "x"},
    ],
)
def test_messages_that_responses_do_not_have_are_a_400(
    admin: Client, other_key: ApiKey, message: dict[str, Any]
) -> None:
    StoredCompletion.objects.create(
        public_id="chatcmpl-1",
        project=other_key.project,
        model="demo",
        messages=[message],
        completion={"choices": []},
    )
    refused = opened(admin, "chatcmpl-1")
    assert refused.status_code == 400
    assert "cannot be opened" in refused.json()["error"]["message"]


def test_pages_of_what_is_stored_lead_to_the_playground(admin: Client, other_key: ApiKey) -> None:
    answer = Chain(other_key).turn("Hello")
    conversation = Conversation.objects.create(public_id="conv_1", project=other_key.project)
    chat = StoredCompletion.objects.create(
        public_id="chatcmpl-1",
        project=other_key.project,
        model="demo",
        messages=[{"role": "user", "content": "Hello"}],
        completion={"choices": []},
    )
    pages = {
        answer.public_id: f"/admin/responses_api/storedresponse/{answer.pk}/change/",
        conversation.public_id: f"/admin/responses_api/conversation/{conversation.pk}/change/",
        chat.public_id: f"/admin/completions/storedcompletion/{chat.pk}/change/",
    }
    for public_id, page in pages.items():
        link = f'href="/admin/playground/?open={public_id}"'
        assert link in admin.get(page).content.decode()
    pk = Generation.objects.get(public_id=answer.public_id).pk
    panel = admin.get(f"/admin/requests/accepted/{pk}/").content.decode()
    assert f"/admin/playground/?open={answer.public_id}" in panel
