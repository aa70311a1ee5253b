"""Grammars that would keep a model busy are refused, and who uses it meanwhile notices nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.e2e.keys import MadeKey, make_key
from tests.e2e.scripts import script
from tests.served_stack import ServedStack

CHAT = "/v1/chat/completions"
AMBIGUOUS = (
    "root ::= w w w\nw ::= [^\\x00] | [^\\x00] w | [^\\x00] w w | [^\\x00] w w w"  # 70 bytes
)
VALUES = [f"value-{n}" for n in range(300_000)]
REFERENCES = {
    "$ref": "#/$defs/d0",
    "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(7_000)},
}
LOOP = {"type": "object", "allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}}
"""A schema at which llama.cpp's server calls itself without end."""
ALTERNATIVES = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/d0"}},
    "$defs": {
        **{f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)},
        "d40": {"type": "string"},
    },
}
"""A schema of which llama.cpp's server tries 2**40 alternatives."""
BRANCHES = {
    "$ref": "#/$defs/d0",
    "$defs": {
        **{f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)},
        "d60": {"type": "object"},
    },
}
"""A schema that is followed 2**60 times."""
ESCAPED = json.dumps(REFERENCES).replace("$ref", "\\u0024ref")
LONGEST_GAP_S = 30
"""Between two pieces of a stream beside the attack: usually milliseconds, minutes when frozen."""


def _chain(rule: str, count: int) -> str:
    links = "\n".join(f"{rule}{n}: {rule}{n + 1}" for n in range(count))
    return f'start: {rule}0\n{links}\n{rule}{count}: "x"'


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def _tool(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


ATTACKS: dict[str, tuple[dict[str, Any], str]] = {
    "ambiguous": ({"grammar": AMBIGUOUS}, "grammar"),
    "ambiguous Lark": (
        {"grammar": {"type": "lark", "value": "start: w w\nw: /./ | /./ w | /./ w w | w w /./"}},
        "grammar",
    ),
    "optional": ({"grammar": "root ::= " + "[^\\x00]? " * 2_000}, "grammar"),
    "alternatives": ({"grammar": "root ::= " + '"a" | ' * 300_000 + '"b"'}, "grammar"),
    "groups": ({"grammar": "root ::= " + "(" * 40_000 + '"a"' + ")" * 40_000}, "grammar"),
    "rules": ({"grammar": {"type": "lark", "value": _chain("r", 4_000)}}, "grammar"),
    "terminals": ({"grammar": {"type": "lark", "value": _chain("R", 900)}}, ""),
    "values": ({"response_format": _schema({"enum": VALUES})}, "response_format"),
    "values of tools": (
        {"tools": _tool({"enum": VALUES})},
        "tools[0].function.parameters",
    ),
    "references": ({"response_format": _schema(REFERENCES)}, "response_format"),
    "references in Lark": (
        {
            "grammar": {
                "type": "llguidance",
                "value": {"grammars": [{"lark_grammar": f"start: %json {json.dumps(REFERENCES)}"}]},
            }
        },
        "grammar",
    ),
    "escaped references": (
        {"grammar": {"type": "lark", "value": f"start: %json {ESCAPED[:60_000]}"}},
        "grammar",
    ),
    "states": ({"grammar": {"type": "regex", "value": "((a{100}){100}){100}"}}, "grammar"),
    "loop": ({"tools": _tool(LOOP)}, "tools[0].function.parameters"),
    "alternatives of tools": (
        {"tools": _tool(ALTERNATIVES)},
        "tools[0].function.parameters",
    ),
    "call in a text": (
        {
            "model": "scripted",
            "messages": script({"text": '{"name":"f","arguments":{}}'}),
            "tools": _tool(BRANCHES),
        },
        "",
    ),
}
"""What is asked for, and the parameter that is named; empty where it may be answered as well."""


@pytest.fixture(scope="module")
def bystander(stack: ServedStack) -> MadeKey:
    """The key of another project."""
    return make_key(stack)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_grammar_is_refused_and_harms_nobody(
    stack: ServedStack, http: httpx.Client, bystander: MadeKey, attack: str
) -> None:
    fields, param = ATTACKS[attack]
    worker = stack.pid_of("worker")
    with bystander.http(stack) as neighbour, _Watched(neighbour) as stream:
        for _ in range(2):  # The second time it may be known.
            answer = http.post(CHAT, json=_ask(**fields))
            if param:
                assert answer.status_code == 400, answer.text
                assert answer.json()["error"]["param"] == param
        assert neighbour.post(CHAT, json=_ask()).status_code == 200
    assert stream.longest_gap_s < LONGEST_GAP_S
    assert stream.text.endswith("data: [DONE]\n\n")
    assert stack.pid_of("worker") == worker


def _ask(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": "Once", "max_tokens": 5, **fields}


class _Watched:
    """A stream of another project that runs from before the attack until it is over."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._over = threading.Event()
        self._begun = threading.Event()
        self.text, self._arrivals = "", [0.0]

    def __enter__(self) -> _Watched:
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._begun.wait(120)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(120)
        assert not self._thread.is_alive()

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two pieces, in seconds."""
        return max(later - earlier for earlier, later in pairwise(self._arrivals))

    def _read(self) -> None:
        while not self._over.is_set():
            self._arrivals = [time.monotonic()]
            self.text = "".join(self._pieces())

    def _pieces(self) -> Iterator[str]:
        body = _ask(stream=True, ignore_eos=True, max_tokens=150)
        with self._client.stream("POST", CHAT, json=body) as answer:
            assert answer.status_code == 200
            for piece in answer.iter_text():
                self._arrivals.append(time.monotonic())
                self._begun.set()
                yield piece
