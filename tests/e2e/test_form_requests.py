"""Form-encoded requests for responses."""

from __future__ import annotations

import httpx

from tests.e2e.scripts import script


def test_form_has_the_same_fields_and_errors(http: httpx.Client) -> None:
    form = {
        "model": "scripted",
        "input": script({"text": "from a form"}),
        "max_output_tokens": "50",
        "metadata[a]": "b",
        "stream": "false",
    }
    answer = http.post("/v1/responses", data=form)
    assert answer.json()["output"][0]["content"][0]["text"] == "from a form"
    assert answer.json()["metadata"] == {"a": "b"}
    wrong = {"model": "scripted", "input": "x", "max_output_tokens": "fifty"}
    as_json, as_form = (
        http.post("/v1/responses", json=wrong),
        http.post("/v1/responses", data=wrong),
    )
    assert as_form.json() == as_json.json()
    assert as_form.json()["error"]["param"] == "max_output_tokens"
    hostile = {f"field-{number}": "x" for number in range(100_000)}
    assert http.post("/v1/responses", data=hostile).status_code == 400
    streamed = http.post("/v1/responses", data={**form, "stream": "true"})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert http.post("/v1/chat/completions", data=form).status_code == 415
    keyed = {"Idempotency-Key": "of-a-form"}
    first, second = (http.post("/v1/responses", data=form, headers=keyed) for _ in range(2))
    assert first.json()["id"] == second.json()["id"]
