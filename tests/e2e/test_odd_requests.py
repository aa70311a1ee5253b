"""Requests that nobody sends in good faith: the fault is theirs, never the server's."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
NUL = "%00"


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
