"""What a request is taken to use before anything is known of it."""

from __future__ import annotations

import base64
import io
import wave
from typing import Any

import pytest

from inference_site.accounts.keys import Caller, Limits
from inference_site.catalogue.catalogue import catalogue
from inference_site.core.domain.request import (
    AudioFile,
    GenerationRequest,
    Message,
    TextPart,
    Tool,
    ToolCall,
)
from inference_site.gateway.submission.admission import estimate_usage

BUDGETED = Caller(1, 1, has_budget=True)


def tokens(caller: Caller = BUDGETED, **fields: Any) -> int:
    return estimate_usage(caller, GenerationRequest("demo", **fields)).tokens


def test_nothing_is_estimated_where_nobody_counts_it() -> None:
    said = (Message("user", "x" * 300),)
    assert tokens(Caller(1, 1), messages=said) == 0
    assert tokens(Caller(1, 1, limits=(Limits("key", requests_per_minute=1),)), messages=said) == 0
    assert tokens(Caller(1, 1, limits=(Limits("project", tokens_per_minute=1),)), messages=said) > 0


@pytest.mark.parametrize(
    "said",
    [
        Message("user", "x" * 300),
        Message("user", "字" * 100),
        Message("user", None, parts=(TextPart("x" * 100), TextPart("x" * 200))),
        Message("assistant", "x" * 100, reasoning="x" * 200),
    ],
)
def test_the_prompt_is_estimated_from_its_bytes(said: Message) -> None:
    assert tokens(messages=(said,), max_output_tokens=7) == 10 + 100 + 7


def test_calls_and_tools_are_part_of_the_prompt() -> None:
    bare = tokens(messages=(Message("assistant", None),))
    call = ToolCall("id", "name", "x" * 300)
    assert tokens(messages=(Message("assistant", None, tool_calls=(call,)),)) >= bare + 100
    tool = Tool("name", "x" * 300, {})
    assert tokens(messages=(Message("assistant", None),), tools=(tool,)) >= bare + 100


def test_an_answer_without_a_bound_counts_as_the_setting_says(settings: Any) -> None:
    settings.RESERVED_OUTPUT_TOKENS = 1000
    assert tokens(messages=(Message("user", ""),), choices=3) == 10 + 3 * 1000


def test_no_answer_counts_as_more_than_the_context() -> None:
    context = catalogue().models["demo"].context_length
    assert tokens(messages=(Message("user", ""),), max_output_tokens=10**19) == 10 + context


def test_prompts_of_tokens_are_counted_and_embeddings_answer_nothing() -> None:
    assert tokens(operation="complete", prompts=((1, 2, 3), "xxx"), max_output_tokens=5) == 4 + 10
    assert tokens(operation="embed", prompts=((1, 2, 3),)) == 3


def test_what_is_beside_a_prompt_that_is_filled_in_is_counted() -> None:
    asked: dict[str, Any] = {"operation": "complete", "max_output_tokens": 1}
    asked |= {"prompts": ("x" * 300,) * 2, "suffix": "y" * 30}
    assert tokens(**asked) == 2 * (100 + 10 + 1)
    assert tokens(**asked, other_files=(("n" * 3, "z" * 60),)) == 2 * (100 + 10 + 1) + 1 + 20


@pytest.mark.parametrize("queries", [("x" * 30,), ("x" * 30,) * 3])
def test_a_query_is_part_of_each_pair(queries: tuple[str, ...]) -> None:
    assert tokens(operation="rank", prompts=("x" * 300,) * 3, queries=queries) == 3 * (
        100 + 10 + 10
    )


def test_a_guard_answers_for_each_text() -> None:
    texts = ("x" * 30, "y" * 30)
    assert tokens(operation="moderate", prompts=texts) == 20
    assert tokens(operation="moderate", prompts=texts, guard="llama_guard") == 20 + 2 * 100
    asked = (Message("user", "x" * 30),)
    assert tokens(operation="moderate", messages=asked, guard="llama_guard") == 10 + 10 + 100


def sound(seconds: int, rate: int = 8000) -> bytes:
    """A WAV file of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(bytes(2 * rate * seconds))
    return file.getvalue()


@pytest.mark.parametrize("operation", ["transcribe", "translate"])
@pytest.mark.parametrize(
    ("content", "ending", "seconds"),
    [
        (sound(10), "wav", 11),
        (sound(10, 44100), "wav", 11),
        (b"RIFF" + bytes(8) + b"WAVE" + bytes(1_000_000), "wav", 501),
        (sound(100)[:28] + b"\xff" * 4 + bytes(7_680_000), "wav", 11),
        (b"ID3" + bytes(1_000_000), "mp3", 501),
        (b"ID3", "mp3", 1),
    ],
    ids=["wav", "wav of music", "wav without a format", "wav that lies", "mp3", "short"],
)
def test_a_sound_is_estimated_from_its_size(
    operation: Any, content: bytes, ending: str, seconds: int
) -> None:
    audio = AudioFile(base64.b64encode(content).decode(), ending)
    assert tokens(operation=operation, audio=audio) == 15 * seconds


def test_a_speech_has_tokens_of_its_own_where_servers_report_them() -> None:
    assert tokens(operation="speak", prompts=("x" * 300,)) == 100
    assert tokens(operation="speak", prompts=("x" * 300,), streams=True) == 100 + 600
