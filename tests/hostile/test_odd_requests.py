"""Requests that nobody sends in good faith: the fault is theirs, never the server's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.hostile.test_login import log_in
from tests.served_stack import ServedStack

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
    param = answer.json()["error"]["param"]
    assert (answer.status_code, param[:60]) == (400, f"logit_bias.{token}"[:60])
    assert len(param) < 200


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
    file = {"role": "user", "content": [{"type": "file", "file": {"file_id": odd}}]}
    yield "POST", CHAT, {"json": {**said, "messages": [file]}}
    for part in ("input_file", "input_image"):
        item = {"role": "user", "content": [{"type": part, "file_id": odd}]}
        yield "POST", "/v1/responses", {"json": {"model": "scripted", "input": [item]}}
    for named in (odd, [odd], {"id": odd}):
        answer = {"type": "mcp_approval_response", "approval_request_id": named, "approve": True}
        yield "POST", "/v1/responses", {"json": {"model": "scripted", "input": [answer]}}
    batch = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": odd}
    yield "POST", "/v1/batches", {"json": batch}
    upload = {"bytes": 1, "filename": "a", "purpose": "user_data", "mime_type": odd}
    yield "POST", "/v1/uploads", {"json": upload}
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


NUMBERS = (
    f'1e30,-1e30,1e308,5e-324,-0,-0.0,{"9" * 40},{2**64},-{2**63},{{"a":{"[" * 90}1e30{"]" * 90}}}'
)
"""PostgreSQL writes some of them in other digits than they came in."""


@pytest.fixture
def browser(stack: ServedStack) -> Iterator[httpx.Client]:
    """A browser in which the administrator is logged in."""
    password = re.search(r"password: (\S+)", stack.text())
    assert password
    with httpx.Client(base_url=stack.url, timeout=120) as opened:
        assert log_in(opened, "admin", password[1]).status_code == 302
        yield opened


def test_a_number_that_is_stored_can_be_read_everywhere(
    http: httpx.Client, stack: ServedStack, browser: httpx.Client
) -> None:
    def post(path: str, body: str) -> str:
        answer = http.post(path, content=body, headers=JSON)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def key_of(table: str, public_id: str) -> int:
        statement = f"SELECT id FROM {table} WHERE public_id = %s"  # noqa: S608
        [(found,)] = stack.sql(statement, public_id)
        return int(found)

    schema = f'{{"type":"object","properties":{{"x":{{"maximum":1e30,"enum":[{NUMBERS}]}}}}}}'
    function = f'"name":"f","parameters":{schema}'
    response_id = post(
        "/v1/responses",
        f'{{"model":"scripted","input":"hi","tools":[{{"type":"function",{function}}}]}}',
    )
    call = '{"id":"c","type":"function","function":{"name":"f","arguments":"[1e30]"},"x":1e30}'
    completion_id = post(
        CHAT,
        '{"model":"scripted","store":true,"messages":[{"role":"user","content":"hi","x":1e30},'
        f'{{"role":"assistant","tool_calls":[{call}]}},'
        '{"role":"tool","tool_call_id":"c","content":"x"}],'
        f'"tools":[{{"type":"function","function":{{{function}}}}}]}}',
    )
    for path in (
        f"/v1/responses/{response_id}",
        f"/v1/responses/{response_id}?stream=true",
        f"/v1/responses/{response_id}/input_items",
        "/v1/responses?limit=5",
        f"{CHAT}/{completion_id}",
        f"{CHAT}/{completion_id}/messages",
        f"{CHAT}?limit=5",
    ):
        answer = http.get(path)
        assert answer.status_code == 200, (path, answer.text)
    follow_up = {"model": "scripted", "input": "hi", "previous_response_id": response_id}
    assert http.post("/v1/responses", json=follow_up).status_code == 200
    responses, completions = "responses_api/storedresponse", "completions/storedcompletion"
    own, chat = (
        key_of(page.replace("/", "_"), public_id)
        for page, public_id in ((responses, response_id), (completions, completion_id))
    )
    for path in (
        f"/admin/{responses}/{own}/change/",
        f"/admin/{completions}/{chat}/change/",
        f"/admin/playground/open/{response_id}",
        f"/admin/playground/open/{completion_id}",
    ):
        assert browser.get(path).status_code == 200, path
    exported = browser.get(f"/admin/{responses}/export/")
    assert response_id in [json.loads(line)["id"] for line in exported.text.split("\n") if line]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "9" * 400])
def test_a_number_that_is_none_is_refused_in_json_within_json_too(
    http: httpx.Client, number: str
) -> None:
    schema = f'{{"type":"object","properties":{{"x":{{"maximum":{number}}}}}}}'
    refused = http.post(CHAT, json=_ask(grammar={"type": "json_schema", "value": schema}))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "grammar.value")
    body = f'{{"model":"demo","messages":"hi","tools":[{schema}]}}'
    assert http.post(CHAT, content=body, headers=JSON).status_code == 400
