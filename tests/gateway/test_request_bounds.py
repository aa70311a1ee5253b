"""Bounds on what a request may hold, whatever it asks for."""

from __future__ import annotations

import io

import orjson
import pytest
from django.http import QueryDict

from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.json_bodies import JsonParser
from inference_site.gateway.api.paging import parse_page


def _nested(levels: int) -> bytes:
    return b'{"a":' * (levels - 1) + b'["innermost"]' + b"}" * (levels - 1)


def test_a_body_may_be_deep() -> None:
    assert JsonParser().parse(io.BytesIO(_nested(200)))


@pytest.mark.parametrize("levels", [201, 100_000])
def test_a_body_that_could_not_be_encoded_again_is_refused(levels: int) -> None:
    with pytest.raises(InvalidRequestError):
        JsonParser().parse(io.BytesIO(_nested(levels)))


def test_a_body_may_hold_many_objects_beside_each_other() -> None:
    assert len(JsonParser().parse(io.BytesIO(b"[" + b"{}," * 999 + b"{}]"))) == 1000


@pytest.mark.parametrize("entry", [b"{}", b"[]", b'{"a":0}', b'{"[":[]}', b"[[[]]]"])
def test_a_body_of_too_many_containers_is_refused(entry: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="holds more than"):
        JsonParser().parse(io.BytesIO(b"[" + b",".join([entry] * 30_001) + b"]"))


@pytest.mark.parametrize("entry", [b"0", b'""'])
def test_a_body_of_too_many_values_is_refused(entry: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="holds more than"):
        JsonParser().parse(io.BytesIO(b"[" + b",".join([entry] * 1_000_002) + b"]"))


def test_brackets_in_a_text_are_no_containers() -> None:
    text = '{"[\\"' * 40_000 + "\\"
    body = orjson.dumps({"a": text, "b": [1]})
    assert JsonParser().parse(io.BytesIO(body)) == {"a": text, "b": [1]}


def test_what_is_in_a_long_text_is_counted_too() -> None:
    few = b'{"a":"' + b"x" * 100_000 + b'","b":%s}'
    assert JsonParser().parse(io.BytesIO(few % b"[[0]]"))["b"] == [[0]]
    for inner in (
        b"[" * 201 + b"]" * 201,
        b"[" + b"[]," * 30_000 + b"[]]",
        b"[%s0]" % (b"0," * 1_000_001),
    ):
        with pytest.raises(InvalidRequestError, match=r"nested more than|holds more than"):
            JsonParser().parse(io.BytesIO(few % inner))


@pytest.mark.parametrize("number", [b"1e999999", b"-1e999999", b"9" * 1_000_000])
def test_a_number_that_none_can_hold_is_refused(number: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        JsonParser().parse(io.BytesIO(b'{"seed":' + number + b"}"))


@pytest.mark.parametrize("limit", ["", "0", "101", "-1", "1.5", "²", "00000000101", "9" * 5000])
def test_a_page_has_1_to_100_entries(limit: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parse_page(QueryDict(f"limit={limit}"), "asc")
    assert refused.value.param == "limit"
