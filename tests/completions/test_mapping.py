"""From the wire to what the engine is asked."""

from __future__ import annotations

from typing import Any

import pytest

from completions.mapping import to_generation_request
from completions.wire.chat import ChatCompletionRequest
from inference_site.core.domain.messages import Message
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest, Sampling
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.payload import parse
from inference_site.gateway.submission.model_access import with_capabilities

# The catalogue asks Redis for the models of run time, and the database for their adapters.
pytestmark = [pytest.mark.redis, pytest.mark.django_db]

MODEL = ModelSpec("demo", "scripted")


def mapped(**fields: Any) -> GenerationRequest:
    body = {"model": "Demo", "messages": [{"role": "user", "content": "hi"}], **fields}
    return to_generation_request(parse(ChatCompletionRequest, body), with_capabilities(MODEL))


def test_what_is_not_given_is_left_to_the_model() -> None:
    assert mapped() == GenerationRequest(
        model="demo",
        messages=(Message("user", "hi"),),
        sampling=Sampling(),
        max_output_tokens=None,
        stop=(),
        ignore_eos=False,
    )


def test_the_model_is_named_as_the_catalogue_names_it() -> None:
    assert mapped(model="  DEMO ").model == "demo"


def test_an_explicit_zero_is_honoured() -> None:
    assert mapped(temperature=0, top_p=0, seed=0).sampling == Sampling(
        temperature=0.0, top_p=0.0, seed=0
    )


def test_every_sampling_field_reaches_the_engine() -> None:
    assert mapped(temperature=0.5, top_p=0.25, seed=-3).sampling == Sampling(
        temperature=0.5, top_p=0.25, seed=-3
    )


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
    ],
)
def test_the_newer_token_limit_wins(fields: dict[str, Any], limit: int) -> None:
    assert mapped(**fields).max_output_tokens == limit


@pytest.mark.parametrize(
    ("stop", "texts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), (None, ()), ([], ())],
)
def test_stop_is_one_text_or_several(stop: Any, texts: tuple[str, ...]) -> None:
    assert mapped(stop=stop).stop == texts


def test_the_conversation_keeps_its_order_and_developer_is_system() -> None:
    roles = ["developer", "system", "user", "assistant", "user"]
    messages = [{"role": role, "content": str(n)} for n, role in enumerate(roles)]
    assert mapped(messages=messages).messages == (
        Message("system", "0"),
        Message("system", "1"),
        Message("user", "2"),
        Message("assistant", "3"),
        Message("user", "4"),
    )


def test_text_parts_are_joined_as_they_are() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo "}]
    assert mapped(messages=[{"role": "user", "content": parts}]).messages[0].text == "Hello "


def test_ignore_eos_is_off_unless_asked_for() -> None:
    assert [mapped(ignore_eos=given).ignore_eos for given in (True, False, None)] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("stream", [False, None])
def test_stream_options_need_a_stream(stream: bool | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        mapped(stream=stream, stream_options={"include_usage": True})
    assert caught.value.param == "stream_options"
    mapped(stream=True, stream_options={"include_usage": True})
