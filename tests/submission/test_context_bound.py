"""What is refused without counting its tokens."""

from __future__ import annotations

from typing import Any

import pytest

from inference_site.catalogue.catalogue import catalogue
from inference_site.domain.errors import ContextLengthExceeded
from inference_site.domain.messages import Message, TextPart
from inference_site.domain.request import GenerationRequest
from inference_site.submission.context_bound import refuse_too_long

BOUND = 512 * catalogue().models["demo"].context_length
LONG = "x" * (BOUND + 1)
HALF = LONG[: BOUND // 2 + 1]


def is_refused(**fields: Any) -> bool:
    try:
        refuse_too_long(GenerationRequest("demo", **fields))
    except ContextLengthExceeded:
        return True
    return False


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": (Message("user", LONG),)},
        {"messages": (Message("user", HALF), Message("assistant", HALF))},
        {"messages": (Message("user", None, parts=(TextPart(HALF), TextPart(HALF))),)},
        {"operation": "complete", "prompts": ("short", LONG)},
        {"operation": "embed", "prompts": (LONG,)},
    ],
)
def test_what_fits_in_no_vocabulary_is_refused(fields: dict[str, Any]) -> None:
    assert is_refused(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": (Message("user", LONG[1:]),)},
        {"messages": (Message("user", LONG),), "truncate": True},
        {"operation": "complete", "prompts": (HALF, HALF)},
        {"operation": "complete", "prompts": ((1, 2, 3),)},
        {"operation": "tokenize", "prompts": (LONG,)},
    ],
)
def test_what_may_fit_is_counted_by_the_worker(fields: dict[str, Any]) -> None:
    assert not is_refused(**fields)


def test_a_model_without_a_file_has_a_server_that_knows_its_context() -> None:
    remote = next(spec.id for spec in catalogue().models.values() if spec.file is None)
    refuse_too_long(GenerationRequest(remote, messages=(Message("user", LONG),)))


def test_the_field_of_the_request_is_named() -> None:
    for subject, param in (("", "messages"), ("input", "input")):
        with pytest.raises(ContextLengthExceeded) as caught:
            refuse_too_long(GenerationRequest("demo", messages=(Message("user", LONG),)), subject)
        assert caught.value.param == param
