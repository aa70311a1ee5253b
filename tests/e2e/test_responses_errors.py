"""Responses that fail, and requests that are refused."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.e2e.scripts import events, respond, script, stream_raw, types
from tests.served_stack import ServedStack


def test_failure_keeps_what_was_said(client: openai.OpenAI, stack: ServedStack) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        respond(client, {"text": "half "}, {"fail": "boom"}, metadata={"case": "half"})
    error: Any = caught.value.body
    assert error["code"] == "model_error"
    partial = error["partial_response"]
    assert partial["status"] == "failed"
    assert partial["error"] == {"code": "server_error", "message": error["message"]}
    assert partial["output"][0]["content"][0]["text"] == "half "
    assert partial["output"][0]["status"] == "incomplete"
    stored = client.responses.retrieve(partial["id"])
    assert stored.status == "failed"
    assert stored.output_text == "half "
    assert stored.to_dict() == partial
    row = stack.row(partial["id"])
    assert (row["status"], row["error_code"]) == ("failed", "model_error")


def test_failure_of_a_stream_is_an_error_and_a_failed_response(http: httpx.Client) -> None:
    raw = stream_raw(http, input=script({"text": "half "}, {"sleep_ms": 50}, {"fail": "boom"}))
    assert types(raw)[-2:] == ["error", "failed"]
    error, failed = events(raw)[-2:]
    assert error["code"] == error["error"]["code"] == "model_error"
    assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
    assert failed["response"]["output"][0]["content"][0]["text"] == "half "
    again = http.get(f"/v1/responses/{failed['response']['id']}").json()
    assert again == failed["response"]


def test_client_raises_the_failure_of_a_stream(client: openai.OpenAI) -> None:
    stream = respond(client, {"text": "half"}, {"sleep_ms": 50}, {"fail": "boom"}, stream=True)
    with pytest.raises(openai.APIError, match="boom"):
        list(stream)


@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_word_is_a_status(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        respond(client, {"fail": "boom"}, stream=stream)
    assert caught.value.code == "model_error"


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"model": "none"}, 404, "model", "model_not_found"),
        ({"model": None}, 400, "model", "missing_required_parameter"),
        ({"input": None}, 400, "input", "missing_required_parameter"),
        ({"input": []}, 400, "input", None),
        ({"input": 1}, 400, "input", "invalid_type"),
        ({"input": [{"type": 1}]}, 400, "input[0]", "invalid_type"),
        ({"input": [{"role": "x", "content": ""}]}, 400, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user"}]}, 400, "input[0].content", "missing_required_parameter"),
        ({"temperature": 3}, 400, "temperature", "decimal_above_max_value"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens", "integer_below_min_value"),
        ({"top_logprobs": 21}, 400, "top_logprobs", "integer_above_max_value"),
        ({"include": ["x"]}, 400, "include[0]", "invalid_value"),
        ({"n": 2}, 400, "n", "integer_above_max_value"),
        ({"truncation": "x"}, 400, "truncation", "invalid_value"),
        ({"max_tokens": 0}, 400, "max_tokens", "integer_below_min_value"),
        ({"max_tokens": 1, "max_output_tokens": 2}, 400, "max_tokens", None),
        ({"response_format": {"type": "x"}}, 400, "response_format.type", "invalid_value"),
        ({"response_format": {"type": "text"}, "text": {"format": {"type": "json_object"}}}, 400,
         "response_format", None),
        ({"logprobs": False, "include": ["message.output_text.logprobs"]}, 400, "logprobs", None),
        ({"text": {"format": {"type": "x"}}}, 400, "text.format.type", "invalid_value"),
        ({"stream_options": {"x": 1}, "stream": False}, 400, "stream_options", None),
        ({"background": True, "store": False}, 400, "background", None),
        ({"background_options": {"completion_window": "9h"}}, 400,
         "background_options.completion_window", "invalid_value"),
        ({"background_options": {"completion_window": "2h"}}, 400,
         "background_options.completion_window", None),
        ({"background_options": {"completion_window": "8h"}, "background": True,
          "service_tier": "flex"}, 400, "background_options.completion_window", None),
        ({"metadata": {"k" * 65: "v"}}, 400, "metadata", None),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata.k", None),
        ({"metadata": {str(n): "v" for n in range(17)}}, 400, "metadata", None),
        ({"metadata": {"k": 1}}, 400, "metadata.k", "invalid_type"),
        ({"previous_response_id": "resp_" + "0" * 32}, 400, "previous_response_id",
         "previous_response_not_found"),
        ({"previous_response_id": "x"}, 400, "previous_response_id", "invalid_value"),
        ({"reasoning": {"effort": "low"}}, 400, "reasoning.effort", "unsupported_parameter"),
        ({"text": {"verbosity": "low"}}, 400, "text.verbosity", "unsupported_parameter"),
        ({"conversation": "x"}, 400, "conversation", "invalid_value"),
        ({"conversation": {"id": "conv_" + "0" * 32}}, 404, "conversation", None),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, 400,
         "previous_response_id", "mutually_exclusive_parameters"),
        ({"input": [{"id": "msg_" + "0" * 32}]}, 404, "input[0].id", None),
        ({"input": [{"id": "msg_\0"}]}, 400, "input[0].id", None),
        ({"previous_response_id": "resp_\0"}, 400, "previous_response_id", None),
        ({"conversation": {"id": "conv_\0"}}, 400, "conversation", None),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}, "grammar": "a"},
         400, "grammar", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_bad_request_is_refused_before_anything_runs(
    http: httpx.Client,
    body: dict[str, Any],
    status: int,
    param: str,
    code: str | None,
    stream: bool,
) -> None:
    body = {"model": "scripted", "input": "hi", "stream": stream, **body}
    response = http.post("/v1/responses", json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(param), error
    if code is not None:
        assert error["code"] == code


def test_input_that_does_not_fit_is_refused_unless_it_may_be_cut(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "word " * 4000}, {"role": "assistant", "content": "yes"}]
    items: Any = [*long, *long, {"role": "user", "content": script({"text": "kept"})}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="scripted", input=items)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    cut = client.responses.create(model="scripted", input=items, truncation="auto")
    assert cut.output_text == "kept"
    assert cut.usage is not None
    assert cut.usage.input_tokens < 5000
