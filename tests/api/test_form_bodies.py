"""Form-encoded bodies become what JSON would have been."""

from __future__ import annotations

import contextlib
import json
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_site.core.errors.api_errors import InvalidRequestError, UnsupportedMediaError
from inference_site.gateway.api.form_bodies import decode_form
from inference_site.gateway.api.payload import parse
from responses_api.wire.requests import ResponseRequest


def decoded(form: str | bytes) -> dict[str, Any]:
    return decode_form(form.encode() if isinstance(form, str) else form, ResponseRequest)


@pytest.mark.parametrize(
    ("form", "body"),
    [
        ("", {}),
        ("model=m&input=1+%2B+1", {"model": "m", "input": "1 + 1"}),
        ("input=5&user=true&stream=true", {"input": "5", "user": "true", "stream": True}),
        ("temperature=0.5&max_output_tokens=7", {"temperature": 0.5, "max_output_tokens": 7}),
        ("temperature=warm&n=", {"temperature": "warm", "n": ""}),
        ("store=null&instructions=null", {"store": None, "instructions": "null"}),
        ('metadata={"a":"b"}', {"metadata": {"a": "b"}}),
        ("metadata[0]=x&metadata[b]=2", {"metadata": {"0": "x", "b": "2"}}),
        ('tools=[{"type":"custom","name":"f"}]', {"tools": [{"type": "custom", "name": "f"}]}),
        (
            "tools[1][name]=g&tools[0][type]=function&tools[0][strict]=false",
            {"tools": [{"type": "function", "strict": False}, {"name": "g"}]},
        ),
        ("include=a&include=b", {"include": ["a", "b"]}),
        ("include=a", {"include": ["a"]}),
        ("include[]=a", {"include": ["a"]}),
        ("stop=a", {"stop": "a"}),
        ("stop=1&stop=2", {"stop": ["1", "2"]}),
        ('input=[{"role":"user"}]', {"input": '[{"role":"user"}]'}),
        (
            "input[0][role]=user&input[0][content]=7",
            {"input": [{"role": "user", "content": "7"}]},
        ),
        ("reasoning[effort]=low", {"reasoning": {"effort": "low"}}),
        ("conversation[id]=conv_1", {"conversation": {"id": "conv_1"}}),
        ("unknown=5&odd]name=x", {"unknown": "5", "odd]name": "x"}),
        ("template_vars[a]=1", {"template_vars": {"a": "1"}}),
    ],
)
def test_form_is_read_as_its_fields_are_declared(form: str, body: dict[str, Any]) -> None:
    assert decoded(quote(form, safe="=&+%")) == body


def test_every_scalar_field_survives_both_ways() -> None:
    body = {
        "model": "m",
        "input": "hello",
        "temperature": 0.25,
        "top_p": 1.0,
        "max_output_tokens": 5,
        "stream": False,
        "store": True,
        "service_tier": "flex",
        "truncation": "auto",
        "text": {"format": {"type": "json_object"}},
        "include": ["reasoning.encrypted_content"],
    }
    form = {k: v if isinstance(v, str) else json.dumps(v) for k, v in body.items()}
    assert parse(ResponseRequest, decoded(urlencode(form))) == parse(ResponseRequest, body)


@pytest.mark.parametrize(
    ("form", "param", "message"),
    [
        ("a=1&" * 100_000, None, "more than 2048 fields"),
        ("a" + "[b]" * 100_000 + "=1", None, "nested more than"),
        ("temperature=1&temperature=2", "temperature", "more than once"),
        ("metadata=x&metadata[a]=b", "metadata", "more than once"),
        ("metadata[a]=b&metadata=x", "metadata", "more than once"),
        ("a'b=x&a'b[c]=y", r"a\u0027b", "more than once"),
        ("a" * 65 + "=x&" + "a" * 65 + "[c]=y", "a" * 64 + "…", "more than once"),
        ("input=%ff", None, "could not parse the form"),
        (b"input=\xff", None, "could not parse the form"),
        ("metadata=" + "[" * 40_000, None, "holds more than"),
        ("metadata=" + "[" * 199 + "]" * 199 + "&" + "metadata" * 9, None, None),
        ("tools" + "[0]" * 31 + "=" + "[" * 199 + "]" * 199, None, None),
    ],
)
def test_hostile_form_is_refused(form: str | bytes, param: str | None, message: str | None) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        parse(ResponseRequest, decoded(form))
    if message is not None:
        assert refused.value.param == param


def test_json_that_says_it_is_a_form_is_told_of_the_header() -> None:
    with pytest.raises(UnsupportedMediaError, match="Content-Type: application/json"):
        decoded(' {"model": "m", "input": "Hello"}')


NAMES = st.sampled_from(["input", "tools", "metadata", "include", "text", "stop", "n", "x"])
STEPS = st.sampled_from(["", "[]", "[0]", "[1]", "[a]", "[type]", "[][a]", "[0][content][0][text]"])
TEXTS = st.sampled_from(["", "a", "1", "true", "null", "{}", "[]", '{"type":"message"}', "[1", "é"])


@given(st.lists(st.tuples(NAMES, STEPS, TEXTS), max_size=8))
def test_any_form_is_an_object_or_refused(fields: list[tuple[str, str, str]]) -> None:
    form = urlencode([(name + step, text) for name, step, text in fields])
    with contextlib.suppress(InvalidRequestError):
        parse(ResponseRequest, decoded(form))
