"""Requests that nobody sends in good faith: the fault is theirs, never the server's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
NUL = "%00"
JSON = {"content-type": "application/json"}


def _nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def _ask(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": "hi", "max_tokens": 1, **fields}


@pytest.mark.parametrize(
    "path",
    [
        f"{CHAT}/{NUL}",
        f"{CHAT}/x{NUL}/messages",
        f"{CHAT}?after={NUL}",
        f"{CHAT}?model=demo{NUL}",
        f"{CHAT}?metadata[a]={NUL}",
        f"{CHAT}?metadata[{NUL}]=b",
        f"/v1/models/{NUL}",
    ],
)
def test_an_address_with_nul_is_refused(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 400


@pytest.mark.parametrize("token", ["", "a", "-1", "²", str(2**31), "9" * 30, "9" * 5000])
def test_a_biased_token_has_an_id(http: httpx.Client, token: str) -> None:
    answer = http.post(CHAT, json=_ask(logit_bias={token: 1}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")


@pytest.mark.parametrize("levels", [201, 500, 100_000])
def test_a_deep_body_is_refused(http: httpx.Client, levels: int) -> None:
    body = f'{{"model": "demo", "messages": "hi", "template_vars": {_nested(levels)}}}'
    answer = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400


@pytest.mark.parametrize("levels", [201, 500, 2_000, 100_000])
@pytest.mark.parametrize("kind", ["json_schema", "llguidance"])
def test_a_deep_grammar_in_a_text_is_refused(http: httpx.Client, kind: str, levels: int) -> None:
    grammar = {"type": kind, "value": _nested(levels)}
    answer = http.post(CHAT, json=_ask(grammar=grammar))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "grammar.value")


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": "root ::= " + "(" * 40_000 + '"a"' + ")" * 40_000},
        {
            "grammar": {
                "type": "json_schema",
                "value": {
                    "$ref": "#/$defs/d0",
                    "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(12_000)},
                },
            }
        },
    ],
    ids=["groups", "references"],
)
def test_a_grammar_that_would_end_the_worker_is_refused(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    assert http.post(CHAT, json=_ask(**fields)).status_code == 400
    assert http.post(CHAT, json=_ask()).status_code == 200


def test_a_deep_script_is_refused(http: httpx.Client) -> None:
    script = "[" * 100_000 + "]" * 100_000
    assert http.post(CHAT, json=_ask(model="scripted", messages=script)).status_code == 400


def test_metadata_with_nul_can_replace_other(http: httpx.Client) -> None:
    stored = http.post(CHAT, json=_ask(store=True)).json()["id"]
    changed = http.post(f"{CHAT}/{stored}", json={"metadata": {"a\0": "\0"}})
    assert (changed.status_code, changed.json()["metadata"]) == (200, {"a\ufffd": "\ufffd"})


ODD = [
    "",
    " ",
    "\0",
    "\ud800",
    "\u202e\u2028\x1b[31m",
    "9" * 40,
    "-1",
    "null",
    "../../../etc/passwd",
    "{{ 7 * 7 }}%s{0}",
    "'; DROP TABLE generations_generation; --",
    "é" * 1_000,
]
"""Strings that a program may take for something else."""
_CHAT_FIELDS = ["model", "messages", "user", "stop", "prompt_cache_key", "grammar", "lora"]
_RESPONSE_FIELDS = ["input", "instructions", "conversation", "previous_response_id", "tools"]


def _requests(odd: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Requests with this string in one place each."""
    said = {"model": "scripted", "max_tokens": 1}
    for field in _CHAT_FIELDS:
        yield "POST", CHAT, {"json": {**said, "messages": "hi", field: odd}}
    for field in _RESPONSE_FIELDS:
        yield "POST", "/v1/responses", {"json": {"model": "scripted", "input": "hi", field: odd}}
    tool = {"type": "function", "function": {"name": odd, "description": odd}}
    yield "POST", CHAT, {"json": {**said, "messages": "hi", "tools": [tool]}}
    yield "POST", "/v1/conversations", {"json": {"metadata": {odd: odd}}}
    for query in ("after", "q", "order", "status"):
        yield "GET", "/v1/responses", {"params": {query: odd.encode("utf-8", "replace").decode()}}


@pytest.mark.parametrize("text", ODD, ids=lambda text: ascii(text[:20]))
def test_an_odd_string_is_no_fault_of_the_server(http: httpx.Client, text: str) -> None:
    for method, path, sent in _requests(text):
        # As ASCII, so that half of a pair can be written.
        content = {"content": json.dumps(sent["json"]), "headers": JSON} if "json" in sent else sent
        answer = http.request(method, path, **content)
        assert answer.status_code < 500, (method, path, sent, answer.text)
        if not answer.is_success:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert http.post(CHAT, json=_ask()).status_code == 200
