"""What is refused, or cut, without counting its tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from inference_site.catalogue.catalogue import catalogue
from inference_site.core.domain.errors import ContextLengthExceeded
from inference_site.core.domain.request import GenerationRequest, Message, TextPart, Tool, ToolCall
from inference_site.gateway.submission.context_bound import ContextBound, fit_to_context

DEMO = catalogue().models["demo"]
BOUND = ContextBound.of(DEMO).size
MESSAGE = 32
LONG = "x" * (BOUND - MESSAGE + 1)
HALF = LONG[: BOUND // 2 + 1]
ACCENTS = "e" + "\u0301" * (BOUND // 2)


def is_refused(**fields: Any) -> bool:
    try:
        fit_to_context(GenerationRequest("demo", **fields))
    except ContextLengthExceeded:
        return True
    return False


def user(text: str) -> Message:
    return Message("user", text)


def test_the_bound_is_in_bytes_and_far_below_the_longest_token_times_the_context() -> None:
    assert BOUND == 65_536 < 512 * DEMO.context_length
    assert is_refused(messages=(user(ACCENTS),))
    assert not is_refused(messages=(user(ACCENTS[: BOUND // 2 - MESSAGE]),))


@pytest.mark.parametrize("operation", ["chat", "render"])
@pytest.mark.parametrize(
    "fields",
    [
        {"messages": (user(LONG),)},
        {"messages": (user(HALF), Message("assistant", HALF))},
        {"messages": (Message("user", None, parts=(TextPart(HALF), TextPart(HALF))),)},
        {"messages": (Message("assistant", "", tool_calls=(ToolCall("c", "f", LONG),)),)},
        {"messages": (user("x"),) * (BOUND // MESSAGE)},
        {"messages": (user(""),) * (BOUND // MESSAGE + 1)},
        {"messages": (user("x"),), "response_prefix": LONG},
    ],
)
def test_messages_that_cannot_fit_are_refused(operation: Any, fields: dict[str, Any]) -> None:
    assert is_refused(operation=operation, **fields)


@pytest.mark.parametrize("operation", ["complete", "embed", "tokenize"])
def test_a_prompt_that_cannot_fit_is_refused(operation: Any) -> None:
    assert is_refused(operation=operation, prompts=("short", "x" * (BOUND + 1)))
    assert not is_refused(operation=operation, prompts=("x" * BOUND, HALF))


def test_a_suffix_counts_with_each_prompt() -> None:
    assert is_refused(operation="complete", prompts=("x" * (BOUND // 2),), suffix=HALF)


def test_tokens_are_counted() -> None:
    context = DEMO.context_length
    for operation in ("complete", "embed"):
        assert not is_refused(operation=operation, prompts=((1,) * context,))
        assert is_refused(operation=operation, prompts=((1,) * (context + 1),))
    assert not is_refused(operation="detokenize", prompts=((1,) * 65_536,))
    with pytest.raises(ContextLengthExceeded) as caught:
        fit_to_context(GenerationRequest("demo", operation="detokenize", prompts=((1,) * 65_537,)))
    assert caught.value.param == "tokens"


def test_what_the_assistant_thought_does_not_count() -> None:
    thought = Message("assistant", "Yes.", reasoning=LONG)
    assert not is_refused(messages=(user("x"), thought, user("y")))


def test_the_oldest_turns_go_where_the_request_allows_it() -> None:
    told = Message("system", "Be brief.")
    turns = [message for n in range(2_000) for message in (user(str(n)), Message("assistant", "x"))]
    given = GenerationRequest("demo", messages=(told, *turns, user("last")), truncate=True)
    kept = fit_to_context(given).messages
    assert (kept[0], kept[1].role, kept[-1].text) == (told, "user", "last")
    assert kept[1:] == given.messages[-len(kept) + 1 :]
    assert BOUND // MESSAGE * 0.9 < len(kept) <= BOUND // MESSAGE
    with pytest.raises(ContextLengthExceeded):  # The last turn stays.
        fit_to_context(GenerationRequest("demo", messages=(*turns, user(LONG)), truncate=True))


def test_a_text_to_be_filled_in_keeps_what_is_nearest_to_its_gap() -> None:
    for end in ("suffix" * 5, "\u0301" * BOUND):
        given = GenerationRequest(
            "demo", operation="complete", prompts=(LONG + "prefix",), suffix=end, truncate=True
        )
        kept = fit_to_context(given)
        [prefix] = kept.prompts
        assert isinstance(prefix, str)
        assert prefix.endswith("xprefix")
        assert kept.suffix
        assert end.startswith(kept.suffix)
        assert BOUND - 4 < len(prefix) + len(kept.suffix.encode()) <= BOUND


def test_other_files_are_left_out_before_the_text_around_the_gap() -> None:
    files = tuple((f"{n}.py", "x" * (BOUND // 4)) for n in range(5))
    asked: dict[str, Any] = {"operation": "complete", "prompts": ("before",), "suffix": "after"}
    given = GenerationRequest("demo", **asked, other_files=files, truncate=True)
    assert fit_to_context(given) == replace(given, other_files=files[2:])
    with pytest.raises(ContextLengthExceeded):
        fit_to_context(replace(given, truncate=False))
    named = replace(given, other_files=(("x" * BOUND, ""), ("b.py", "")))
    assert fit_to_context(named) == replace(named, other_files=(("b.py", ""),))


def test_what_fits_stays_as_it_is() -> None:
    given = GenerationRequest("demo", messages=(user("a"), user("b")), truncate=True)
    assert fit_to_context(given) is given


def test_a_model_without_a_file_has_a_server_that_knows_its_context() -> None:
    remote = next(spec.id for spec in catalogue().models.values() if spec.file is None)
    fit_to_context(GenerationRequest(remote, messages=(user(LONG * 100),)))
    with pytest.raises(ContextLengthExceeded):  # More than a million tokens.
        fit_to_context(GenerationRequest(remote, messages=(user("x" * 2**24),)))


def test_the_field_of_the_request_is_named_and_the_numbers() -> None:
    for subject, param in (("", "messages"), ("input", "input")):
        with pytest.raises(ContextLengthExceeded, match=r"2048 .* an estimated \d{5} ") as caught:
            fit_to_context(GenerationRequest("demo", messages=(user(LONG),)), subject)
        assert caught.value.param == param
    tool = Tool("f", LONG, {"type": "object"})
    with pytest.raises(ContextLengthExceeded) as caught:
        fit_to_context(GenerationRequest("demo", messages=(user("x"),), tools=(tool,)))
    assert caught.value.param == "tools"
