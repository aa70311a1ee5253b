"""Requests of real agents, as ``python -m tests.clients --write`` has recorded them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.scripts import events, frames

BODIES = Path(__file__).parent / "bodies"


def recorded() -> Iterator[Any]:
    for file in sorted(BODIES.glob("*.json")):
        sent = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(sent, dict):  # The body alone, with texts as long as they were.
            sent = [{"path": "/v1/responses", "headers": {}, "body": sent}]
        for turn, request in enumerate(sent, 1):
            yield pytest.param(request, id=f"{file.stem}, turn {turn}")


@pytest.mark.parametrize("sent", list(recorded()))
def test_request_of_an_agent_is_answered_to_its_end(
    http: httpx.Client, sent: dict[str, Any]
) -> None:
    body = {**sent["body"], "model": "scripted"}
    with http.stream("POST", sent["path"], json=body, headers=sent["headers"]) as answer:
        assert answer.status_code == 200, answer.read()
        raw = frames(answer)
    seen = events(raw)
    if sent["path"] == "/v1/chat/completions":
        assert raw[-1] == "data: [DONE]"
        reasons = [choice["finish_reason"] for event in seen for choice in event["choices"]]
        assert reasons[-1] == "stop"
    else:
        assert seen[-1]["type"] in ("response.completed", "message_stop")
