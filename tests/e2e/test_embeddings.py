"""``/v1/embeddings``: vectors of texts and tokens, in both encodings."""

from __future__ import annotations

import base64
import math
from array import array
from typing import Any

import openai
import pytest

from tests.served_stack import ServedStack

TEXTS = ["The capital of Japan", "The capital of Norway", "A pirate tells a story"]


def embed(client: openai.OpenAI, input_: Any, **fields: Any) -> Any:
    """The answer; floats unless another encoding is asked for (the client would ask for base64)."""
    return client.embeddings.create(
        **{"model": "demo-embedding", "encoding_format": "float", **fields}, input=input_
    )


def vectors(client: openai.OpenAI, input_: Any, **fields: Any) -> list[list[float]]:
    return [entry.embedding for entry in embed(client, input_, **fields).data]


def decoded(text: str) -> list[float]:
    return array("f", base64.b64decode(text)).tolist()


def near(one: list[float], other: list[float]) -> Any:
    """Whether they are equal but for what another batch rounds differently."""
    return one == pytest.approx(other, abs=1e-3)


def test_text_has_a_vector_of_length_one(client: openai.OpenAI) -> None:
    answer = embed(client, TEXTS[0])
    assert (answer.object, answer.model) == ("list", "demo-embedding")
    [entry] = answer.data
    assert (entry.object, entry.index) == ("embedding", 0)
    assert len(entry.embedding) == 192
    assert math.hypot(*entry.embedding) == pytest.approx(1, abs=1e-5)


def test_each_text_of_a_list_has_its_own_vector_in_order(client: openai.OpenAI) -> None:
    answer = embed(client, TEXTS)
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    alone = [vectors(client, text)[0] for text in TEXTS]
    for entry, vector in zip(answer.data, alone, strict=True):
        assert near(entry.embedding, vector)
    assert not near(alone[0], alone[2])


def test_more_texts_than_one_batch_holds_keep_their_order(client: openai.OpenAI) -> None:
    texts = [f"{TEXTS[n % 3]} {n}" for n in range(70)]
    answer = embed(client, texts)
    assert [entry.index for entry in answer.data] == list(range(70))
    assert near(answer.data[69].embedding, vectors(client, texts[69])[0])


def test_tokens_have_the_vector_of_their_text(client: openai.OpenAI, stack: ServedStack) -> None:
    with stack.http() as http:
        body = {"model": "demo-embedding", "prompt": TEXTS[0]}
        tokens = http.post("/v1/tokenize", json=body).json()["tokens"]
    [text], [one], many = vectors(client, TEXTS[0]), vectors(client, tokens), [tokens, tokens]
    assert near(one, text)
    assert all(near(vector, text) for vector in vectors(client, many))


@pytest.mark.parametrize("dimensions", [None, 64])
def test_base64_holds_the_same_floats(client: openai.OpenAI, dimensions: int | None) -> None:
    fields = {} if dimensions is None else {"dimensions": dimensions}
    encoded = vectors(client, TEXTS[0], encoding_format="base64", **fields)[0]
    assert isinstance(encoded, str)
    assert near(decoded(encoded), vectors(client, TEXTS[0], **fields)[0])


def test_client_that_says_nothing_of_the_encoding_gets_floats(client: openai.OpenAI) -> None:
    [entry] = client.embeddings.create(model="demo-embedding", input=TEXTS[0]).data
    assert near(entry.embedding, vectors(client, TEXTS[0])[0])


def test_fewer_dimensions_are_the_first_ones_at_length_one(client: openai.OpenAI) -> None:
    [whole], [short] = vectors(client, TEXTS[0]), vectors(client, TEXTS[0], dimensions=64)
    assert math.hypot(*short) == pytest.approx(1, abs=1e-5)
    length = math.hypot(*whole[:64])
    assert near(short, [value / length for value in whole[:64]])


def test_tokens_are_counted_and_accounted(stack: ServedStack, client: openai.OpenAI) -> None:
    alone = [embed(client, text).usage.prompt_tokens for text in TEXTS]
    raw = client.embeddings.with_raw_response.create(
        model="demo-embedding",
        input=TEXTS,
        user="ann",
        extra_headers={"x-request-id": "embedding-row"},
    )
    usage = raw.parse().usage
    assert usage.prompt_tokens == usage.total_tokens == sum(alone)
    [row] = stack.sql(
        "SELECT kind, status, input_tokens, output_tokens, end_user, first_token_at IS NOT NULL"
        " FROM generations_generation WHERE request_id = 'embedding-row'"
    )
    assert row == ("embedding", "completed", sum(alone), 0, "ann", True)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"dimensions": 193}, "dimensions", None),
        ({"dimensions": 0}, "dimensions", "integer_below_min_value"),
        ({"model": "demo"}, "model", "unsupported_model"),
        ({"model": "scripted"}, "model", "unsupported_model"),
        ({"input": "word " * 300}, "input", "context_length_exceeded"),
        ({"input": [TEXTS[0], "word " * 300]}, "input", "context_length_exceeded"),
        ({"input": []}, "input", None),
        ({"input": ""}, "input", None),
        ({"input": [[]]}, "input[0]", None),
        ({"input": [5, "text"]}, "input[1]", "invalid_type"),
        ({"input": [10_000_000]}, "input", None),
        ({"input": [2**40]}, "input[0]", None),
        ({"encoding_format": "hex"}, "encoding_format", "invalid_value"),
    ],
)
def test_what_cannot_be_embedded_is_400_and_names_the_parameter(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        embed(client, fields.pop("input", TEXTS[0]), **fields)
    assert caught.value.param == param
    if code:
        assert caught.value.code == code


def test_model_for_embeddings_does_not_chat(client: openai.OpenAI) -> None:
    for attempt in (
        lambda: client.chat.completions.create(
            model="demo-embedding", messages=[{"role": "user", "content": "Hello"}]
        ),
        lambda: client.completions.create(model="demo-embedding", prompt="Hello"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            attempt()
        assert (caught.value.param, caught.value.code) == ("model", "unsupported_model")
