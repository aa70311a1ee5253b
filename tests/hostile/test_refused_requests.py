"""Refused requests are in the request log: whose they were, what they asked for, and no secret."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.e2e.keys import make_key
from tests.served_stack import ServedStack, wait_until

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}]}


def test_each_refusal_is_logged_with_its_reason_key_and_model(stack: ServedStack) -> None:
    key, revoked, reader = make_key(stack), make_key(stack), make_key(stack, "usage:read")
    limited = make_key(stack, requests_per_minute=1)
    stack.sql("UPDATE accounts_apikey SET revoked_at = now() WHERE id = %s", revoked.id)
    with key.http(stack) as http, revoked.http(stack) as dead, limited.http(stack) as slow:
        asked = [
            http.post(CHAT, json={**HELLO, "model": "no-such-model"}),
            http.post(CHAT, json={**HELLO, "temperature": "giraffe"}),
            http.post(CHAT, content=b"{", headers={"content-type": "application/json"}),
            http.post(CHAT, content=b"x", headers={"content-type": "text/plain"}),
            http.get("/v1/no/such/path"),
            dead.post(CHAT, json=HELLO),
        ]
        with reader.http(stack) as other:
            asked.append(other.post(CHAT, json=HELLO))
        slow.post(CHAT, json=HELLO)
        asked.append(slow.post(CHAT, json=HELLO))
    ids = [answer.headers["x-request-id"] for answer in asked]

    def rows() -> list[Any]:
        return stack.sql(
            "SELECT status, error_code, model, api_key_id, request_id, r::text "
            "FROM request_log_refusal r WHERE request_id = ANY(%s)",
            ids,
        )

    wait_until(lambda: len(rows()) == len(ids), 120, "all are stored")
    found = {row[4]: row[:4] for row in rows()}
    assert [found[id_] for id_ in ids] == [
        (404, "model_not_found", "no-such-model", key.id),
        (400, "invalid_type", "", key.id),
        (400, "invalid_request_error", "", key.id),
        (415, "unsupported_content_type", "", key.id),
        (404, "invalid_request_error", "", key.id),
        (401, "invalid_api_key", "", revoked.id),
        (403, "insufficient_scope", "", reader.id),
        (429, "rate_limit_exceeded", "scripted", limited.id),
    ]
    everything = " ".join(row[5] for row in rows())
    assert "Hello" not in everything
    assert "giraffe" not in everything
    [[param, message]] = stack.sql(
        "SELECT param, message FROM request_log_refusal WHERE request_id = %s", ids[1]
    )
    assert param == "temperature"
    assert message.startswith("Invalid type for …")
    assert revoked.secret[10:20] not in everything


def test_a_flood_of_refusals_is_counted_and_other_requests_go_on(stack: ServedStack) -> None:
    counted = (
        "SELECT coalesce(sum(count), 0), count(*) FROM request_log_refusal "
        "WHERE status = 401 AND api_key_id IS NULL"
    )
    before, rows_before = stack.sql(counted)[0]
    began_at = time.monotonic()
    key = make_key(stack)
    with httpx.Client(base_url=stack.url, timeout=60) as stranger, ThreadPoolExecutor(8) as pool:
        stranger.headers["Authorization"] = "Bearer sk-not-one-of-ours"
        flood = [pool.submit(stranger.get, "/v1/models") for _ in range(300)]
        with key.http(stack) as http:
            assert http.get("/v1/models").status_code == 200
        assert {answer.result().status_code for answer in flood} == {401}
    wait_until(lambda: stack.sql(counted)[0][0] - before == 300, 120, "all are counted")
    took_s = time.monotonic() - began_at
    rows = stack.sql(counted)[0][1] - rows_before
    assert rows <= 60 * (2 + took_s // 60) + took_s, "60 a minute, and one a second"
    assert rows < 300 or took_s > 60
