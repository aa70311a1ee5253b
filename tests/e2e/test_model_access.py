"""Models that are for some projects only: for the others they do not exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.e2e.keys import make_key
from tests.served_stack import ServedStack

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def stranger(stack: ServedStack) -> openai.OpenAI:
    """A client of a project that the model ``tuned`` is not for."""
    return stack.client(make_key(stack).secret)


def test_project_sees_the_models_that_are_for_it(
    client: openai.OpenAI, stranger: openai.OpenAI
) -> None:
    own = {model.id for model in client.models.list()}
    assert own - {model.id for model in stranger.models.list()} == {"tuned"}
    assert client.models.retrieve("own-story").id == "tuned"
    with pytest.raises(openai.NotFoundError) as caught:
        stranger.models.retrieve("tuned")
    assert caught.value.code == "model_not_found"


USES: dict[str, Callable[[openai.OpenAI, str], Any]] = {
    "chat": lambda c, model: c.chat.completions.create(model=model, messages=HELLO),
    "completion": lambda c, model: c.completions.create(model=model, prompt="Hello"),
    "embedding": lambda c, model: c.embeddings.create(model=model, input="Hello"),
    "response": lambda c, model: c.responses.create(model=model, input="Hello"),
    "input tokens": lambda c, model: c.responses.input_tokens.count(model=model, input="Hello"),
    "tokenize": lambda c, model: c.post(
        "/tokenize", cast_to=object, body={"model": model, "prompt": "Hello"}
    ),
}


@pytest.mark.parametrize("name", ["tuned", "Own-Story", "tuned:latest"])
@pytest.mark.parametrize("use", USES)
def test_model_of_other_projects_cannot_be_told_from_one_that_is_not_there(
    stranger: openai.OpenAI, use: str, name: str
) -> None:
    errors = []
    for model in (name, "ghost"):
        with pytest.raises(openai.NotFoundError) as caught:
            USES[use](stranger, model)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        errors.append(caught.value.message.replace(model, "…"))
    assert errors[0] == errors[1]


def test_project_that_a_model_is_for_uses_it(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model="own-story", messages=HELLO, max_tokens=3)
    assert made.model == "tuned"
