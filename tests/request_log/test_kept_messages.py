"""What is kept of the message of a refused request: its words, and nothing of the request."""

from __future__ import annotations

import pytest

from inference_site.runs.request_log.refusals import kept_message, kept_param

SECRET = "giraffe"


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        (
            "Invalid value: 'giraffe'. Supported values are: 'asc' and 'desc'.",
            "Invalid value: ….",
        ),
        ("Invalid type for 'top_p': expected a number.", "Invalid type for …: expected a number."),
        ("Rate limit reached: 60 requests a minute of this key. Try again in 3 s.", None),
        ("No such batch: giraffe", "No such batch: …"),
        ("You don't have a giraffe_7 or a/b.c", "You don't have a … or …"),
        ("Incorrect API key provided: sk-AbCd***wXyZ.", "Incorrect API key provided: …."),
        ("The model failed: giraffe ran away.", "The model failed: …"),
        ("Invalid value: \"it's a 'giraffe' and\". Do better.", "Invalid value: …. Do better."),
        ("Invalid value: 'giraffe", "Invalid value: …"),
        ("Mail giraffe@example.org about it", "Mail … about it"),
    ],
)
def test_values_are_taken_out_and_words_stay(message: str, kept: str | None) -> None:
    assert kept_message(message) == (message if kept is None else kept)


@pytest.mark.parametrize("quote", ["'", '"', "`"])
@pytest.mark.parametrize(
    "value",
    [
        "giraffe",
        "a' giraffe 'b",
        'a" giraffe "b',
        "model' giraffe 'model",
        "'model' giraffe",
        "giraffe 'model",
        "line\nbreak giraffe",
        "\ue0000\ue000 giraffe \ue000",
        "giraffe" * 900,
        "‘giraffe’ “giraffe”",
    ],
)
def test_no_value_talks_its_way_into_the_log(value: str, quote: str) -> None:
    kept = kept_message(f"Invalid 'model': {quote}{value}{quote} is not known here.")
    assert SECRET not in kept
    assert kept.startswith("Invalid")
    assert "\ue000" not in kept
    assert len(kept) <= 500


def test_a_long_message_is_bounded() -> None:
    assert len(kept_message("word " * 1_000)) == 500


def test_a_parameter_is_a_name_of_a_field() -> None:
    assert kept_param("messages[3].content[0].text") == "messages[3].content[0].text"
    assert kept_param("metadata.my secret") == ""
    assert kept_param("x" * 200) == ""
    assert kept_param(None) == ""
