"""Batches, with the official client."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.keys import make_budget, make_key
from tests.e2e.scripts import script, slow
from tests.served_stack import ServedStack
from tests.upstream_server import Talk, UpstreamServer, streamed
from tests.waiting import wait_until

CHAT: Any = "/v1/chat/completions"
DOCUMENT = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "no base64"},
}


def chat(custom_id: str, content: str, **fields: Any) -> dict[str, Any]:
    """A line with a chat of the scripted model."""
    messages = [{"role": "user", "content": content}]
    body = {"model": "scripted", "messages": messages, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def says(text: str) -> str:
    return script({"text": text})


def upload(client: openai.OpenAI, lines: Sequence[dict[str, Any] | str]) -> str:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    content = io.BytesIO("\n".join(texts).encode())
    return client.files.create(file=("requests.jsonl", content), purpose="batch").id


def begin(
    client: openai.OpenAI, lines: Sequence[dict[str, Any] | str], **fields: Any
) -> openai.types.Batch:
    asked: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h", **fields}
    return client.batches.create(input_file_id=upload(client, lines), **asked)


def ended(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    """The batch, once it has ended."""
    over = ("completed", "failed", "expired", "cancelled")
    wait_until(lambda: client.batches.retrieve(batch_id).status in over, timeout_s=60)
    return client.batches.retrieve(batch_id)


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of a file of results by their custom ids, each of which is there once."""
    if file_id is None:
        return {}
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def test_each_line_has_one_answer_in_the_order_of_the_lines(client: openai.OpenAI) -> None:
    lines = [chat(f"line {n}", says(f"answer {n}")) for n in range(30)]
    begun = begin(client, lines, metadata={"night": "1"})
    assert begun.status == "validating"
    batch = ended(client, begun.id)
    assert (batch.status, batch.errors, batch.model) == ("completed", None, "scripted")
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 30, "completed": 30, "failed": 0}
    assert batch.metadata == {"night": "1"}
    assert batch.error_file_id is None
    found = results(client, batch.output_file_id)
    assert list(found) == [line["custom_id"] for line in lines]
    for n, line in enumerate(found.values()):
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        answer = line["response"]["body"]
        assert answer["choices"][0]["message"]["content"] == f"answer {n}"
        assert answer["id"] == line["response"]["request_id"]
    assert batch.usage is not None
    tokens = sum(line["response"]["body"]["usage"]["total_tokens"] for line in found.values())
    assert batch.usage.total_tokens == tokens
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(int(at or 0) for at in times)
    file = client.files.retrieve(batch.output_file_id or "")
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")


def test_what_cannot_be_answered_is_in_the_file_of_errors(client: openai.OpenAI) -> None:
    failing = script({"text": "half"}, {"fail": "it breaks"})
    lines = [chat("good", says("yes")), chat("bad", failing)]
    batch = ended(client, begin(client, lines).id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 2, "completed": 1, "failed": 1}
    assert list(results(client, batch.output_file_id)) == ["good"]
    (failed,) = results(client, batch.error_file_id).values()
    assert failed["response"]["status_code"] == 500
    assert failed["response"]["body"]["error"]["code"] == "model_error"


def test_lines_that_their_server_refuses_for_now_are_tried_again(
    client: openai.OpenAI, odd: UpstreamServer
) -> None:
    def refuse(talk: Talk) -> None:
        talk.say(429, {"error": {"message": "Slow down"}}, Retry_After="1")

    odd.answers = [refuse, refuse, streamed("Yes")]
    lines = [chat(f"{n}", "Well?", model="odd") for n in range(3)]
    batch = ended(client, begin(client, lines).id)
    assert batch.status == "completed"
    assert batch.error_file_id is None
    answers = [line["response"]["body"] for line in results(client, batch.output_file_id).values()]
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == ["Yes"] * 3


INVALID: list[tuple[Any, str, str | None]] = [
    ("{", "invalid_json_line", None),
    ("[]", "invalid_json_line", None),
    (chat("", says("x")), "invalid_custom_id", "custom_id"),
    (chat("first", says("x")), "duplicate_custom_id", "custom_id"),
    ({**chat("a", says("x")), "method": "GET"}, "invalid_request", "method"),
    ({**chat("b", says("x")), "url": "/v1/responses"}, "mismatched_endpoint", "url"),
    (chat("c", says("x"), model="demo"), "mismatched_model", "body.model"),
    (chat("d", says("x"), model="none"), "model_not_found", "body.model"),
    (chat("e", says("x"), stream=True), "invalid_request", "body.stream"),
    (chat("f", says("x"), temperature=9), "decimal_above_max_value", "body.temperature"),
    ({"custom_id": "g", "method": "POST", "url": CHAT}, "invalid_request", "body"),
]


def test_invalid_lines_fail_the_batch_before_anything_runs(client: openai.OpenAI) -> None:
    lines = [chat("first", says("x")), *(line for line, *_ in INVALID)]
    batch = ended(client, begin(client, lines).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    found = [(error.line, error.code, error.param) for error in batch.errors.data]
    assert found == [(n, code, param) for n, (_, code, param) in enumerate(INVALID, 2)]
    assert batch.output_file_id is None
    assert batch.in_progress_at is None


def test_a_file_without_lines_fails(client: openai.OpenAI) -> None:
    batch = ended(client, begin(client, ["", ""]).id)
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.code for error in batch.errors.data] == ["empty_file"]


ENDPOINTS: list[tuple[str, dict[str, Any], Callable[[dict[str, Any]], Any]]] = [
    (
        "/v1/responses",
        {"model": "scripted", "input": says("yes"), "store": False},
        lambda body: body["output"][0]["content"][0]["text"] == "yes",
    ),
    (
        "/v1/completions",
        {"model": "scripted", "prompt": says("yes")},
        lambda body: body["choices"][0]["text"] == "yes",
    ),
    (
        "/v1/embeddings",
        {"model": "demo-embedding", "input": "yes"},
        lambda body: len(body["data"][0]["embedding"]) > 8,
    ),
]


@pytest.mark.parametrize(("url", "body", "is_answer"), ENDPOINTS)
def test_every_endpoint(
    client: openai.OpenAI,
    url: Any,
    body: dict[str, Any],
    is_answer: Callable[[dict[str, Any]], Any],
) -> None:
    line = {"custom_id": "one", "method": "POST", "url": url, "body": body}
    batch = ended(client, begin(client, [line], endpoint=url).id)
    assert batch.status == "completed", batch.errors
    (answer,) = results(client, batch.output_file_id).values()
    assert is_answer(answer["response"]["body"])


def test_a_stored_response_of_a_batch_is_stored(client: openai.OpenAI) -> None:
    body = {"model": "scripted", "input": says("yes"), "background": True}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/responses", "body": body}
    refused = ended(client, begin(client, [line], endpoint="/v1/responses").id)
    assert refused.status == "failed"
    del body["background"]
    batch = ended(client, begin(client, [line], endpoint="/v1/responses").id)
    (answer,) = results(client, batch.output_file_id).values()
    stored = client.responses.retrieve(answer["response"]["body"]["id"])
    assert stored.output_text == "yes"


def test_responses_whose_requests_redis_has_lost_run_once(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    """Their answers were stored, but not taken for the lines, which ran again."""
    said = script({"sleep_ms": 1000}, {"text": "yes"})
    body = {"model": "scripted", "input": said}
    line = {"method": "POST", "url": "/v1/responses", "body": body}
    lines = [{**line, "custom_id": f"{n}"} for n in range(8)]
    begun = begin(client, lines, endpoint="/v1/responses")
    runs = (
        "SELECT public_id FROM generations_generation WHERE status = %s AND request_id LIKE %s",
        f"batch_req_{begun.id.removeprefix('batch_')}_%",
    )
    wait_until(lambda: stack.sql(runs[0], "queued", runs[1]))
    with stack.redis() as redis:
        for (id_,) in stack.sql(runs[0], "queued", runs[1]):
            redis.delete(f"{{{id_}}}:document")
    batch = ended(client, begun.id)
    assert len(results(client, batch.output_file_id)) == len(lines)
    assert len(stack.sql(runs[0], "completed", runs[1])) == len(lines)


@pytest.fixture
def other(stack: ServedStack) -> Iterator[openai.OpenAI]:
    """The client of another project."""
    with stack.client(make_key(stack).secret) as client:
        yield client


def test_a_cancel_lets_what_runs_end_and_skips_the_rest(other: openai.OpenAI) -> None:
    lines = [chat(f"{n}", slow(60, 50)) for n in range(40)]
    begun = begin(other, lines)

    def in_progress() -> bool:
        return other.batches.retrieve(begun.id).status == "in_progress"

    wait_until(in_progress)
    assert other.batches.cancel(begun.id).status == "cancelling"
    batch = ended(other, begun.id)
    assert batch.status == "cancelled"
    answers, errors = (results(other, id_) for id_ in (batch.output_file_id, batch.error_file_id))
    assert len(answers) + len(errors) == len(lines)
    assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
    for line in answers.values():
        assert line["response"]["body"]["choices"][0]["finish_reason"] == "stop"
    assert other.batches.cancel(begun.id).status == "cancelled"


def test_another_projects_batch_and_file_are_unknown(
    client: openai.OpenAI, other: openai.OpenAI
) -> None:
    begun = begin(client, [chat("one", says("x"))])
    with pytest.raises(openai.NotFoundError):
        other.batches.retrieve(begun.id)
    with pytest.raises(openai.NotFoundError):
        other.batches.cancel(begun.id)
    assert not [batch for batch in other.batches.list() if batch.id == begun.id]
    with pytest.raises(openai.BadRequestError) as refused:
        other.batches.create(
            input_file_id=begun.input_file_id, endpoint=CHAT, completion_window="24h"
        )
    assert refused.value.param == "input_file_id"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"completion_window": "1 day"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
)
def test_a_bad_request_names_the_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    file_id = upload(client, [chat("one", says("x"))])
    asked: Any = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(**{**asked, **fields})
    assert refused.value.param == param


def test_a_nul_in_metadata_or_in_an_error_is_replaced(client: openai.OpenAI) -> None:
    """PostgreSQL cannot store it. The error could not be stored either, and was made again and
    again.
    """
    unknown = chat("one", says("x"))
    unknown["body"]["model"] = "no\0ne"
    batch = ended(client, begin(client, [unknown], metadata={"night": "\0"}).id)
    assert (batch.status, batch.metadata) == ("failed", {"night": "\ufffd"})
    assert batch.errors is not None
    assert batch.errors.data is not None
    [error] = batch.errors.data
    assert (error.code, error.param) == ("model_not_found", "body.model")
    assert "no\ufffdne" in (error.message or "")


def test_a_file_of_another_purpose_is_refused(client: openai.OpenAI) -> None:
    file = client.files.create(file=("a.txt", b"x"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="user_data"):
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def test_batches_are_listed_page_by_page(other: openai.OpenAI) -> None:
    file_id = upload(other, [chat("one", says("x"))])
    made = [
        other.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h").id
        for _ in range(3)
    ]
    assert [batch.id for batch in other.batches.list(limit=2)] == made[::-1]


def test_a_batch_whose_window_is_over_expires(stack: ServedStack, other: openai.OpenAI) -> None:
    lines = [chat("short", says("x")), *(chat(f"{n}", slow(2000, 50)) for n in range(8))]
    begun = begin(other, lines)

    def has_first() -> bool:
        counts = other.batches.retrieve(begun.id).request_counts
        return counts is not None and counts.completed == 1

    wait_until(has_first)
    stack.sql("UPDATE batches_batch SET expires_at = now() WHERE public_id = %s", begun.id)
    batch = ended(other, begun.id)
    assert batch.status == "expired"
    assert list(results(other, batch.output_file_id)) == ["short"]
    errors = results(other, batch.error_file_id)
    assert len(errors) == 8
    assert {line["error"]["code"] for line in errors.values()} == {"batch_expired"}


def test_the_lines_of_an_ended_batch_are_deleted(stack: ServedStack, other: openai.OpenAI) -> None:
    """Their content is in the files of the results alone."""
    begun = begin(other, [chat("one", says("a rare word"))])
    assert ended(other, begun.id).status == "completed"
    left = "SELECT count(*) FROM batches_batchline WHERE batch_id = "
    left += "(SELECT id FROM batches_batch WHERE public_id = %s)"
    wait_until(lambda: stack.sql(left, begun.id) == [(0,)])


@pytest.fixture
def claude(stack: ServedStack) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client of another project."""
    key = make_key(stack).secret
    with anthropic.Anthropic(base_url=stack.url, api_key=key, max_retries=0) as opened:
        yield opened


def message(custom_id: str, content: str, **fields: Any) -> Any:
    said = [{"role": "user", "content": content}]
    params = {"model": "scripted", "max_tokens": 100, "messages": said, **fields}
    return {"custom_id": custom_id, "params": params}


def messages_ended(claude: anthropic.Anthropic, batch_id: str) -> Any:
    def is_over() -> bool:
        return claude.messages.batches.retrieve(batch_id).processing_status == "ended"

    wait_until(is_over, timeout_s=60)
    return claude.messages.batches.retrieve(batch_id)


def test_a_batch_of_messages_with_anthropics_client(claude: anthropic.Anthropic) -> None:
    requests = [
        *(message(f"m{n}", says(f"answer {n}")) for n in range(5)),
        message("wrong", says("x"), max_tokens=-1),
        message("deep", "x", messages=[{"role": "user", "content": [DOCUMENT]}]),
        message("failing", script({"fail": "it breaks"})),
        message("streamed", says("x"), stream=True),
    ]
    begun = claude.messages.batches.create(requests=requests)
    assert (begun.type, begun.processing_status) == ("message_batch", "in_progress")
    assert begun.request_counts.processing == len(requests)
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.batches.delete(begun.id)
    batch = messages_ended(claude, begun.id)
    counts = {"processing": 0, "succeeded": 5, "errored": 4, "canceled": 0, "expired": 0}
    assert batch.request_counts.to_dict() == counts
    found: Any = {each.custom_id: each.result for each in claude.messages.batches.results(begun.id)}
    assert list(found) == [request["custom_id"] for request in requests]
    for n in range(5):
        assert found[f"m{n}"].message.content[0].text == f"answer {n}"
    assert found["wrong"].error.error.type == "invalid_request_error"
    assert found["wrong"].error.error.message.startswith("max_tokens: ")
    assert found["deep"].error.error.message.startswith("messages.0.content.0.source.data: ")
    assert found["failing"].error.error.type == "api_error"
    assert found["streamed"].error.error.message.startswith("stream: ")
    assert [each.id for each in claude.messages.batches.list(limit=1)] == [begun.id]
    assert claude.messages.batches.delete(begun.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.batches.retrieve(begun.id)
    assert list(claude.messages.batches.list(after_id=begun.id)) == []  # A client pages on from it.


def test_lines_of_one_conversation_wait_for_each_other(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    said = [slow(20, 40), says("two"), says("three")]
    lines = [
        {
            "custom_id": f"turn {n}",
            "method": "POST",
            "url": "/v1/responses",
            "body": {"model": "scripted", "input": text, "conversation": conversation.id},
        }
        for n, text in enumerate(said)
    ]
    batch = ended(client, begin(client, lines, endpoint="/v1/responses").id)
    assert results(client, batch.error_file_id) == {}
    assert len(results(client, batch.output_file_id)) == len(lines)
    items = client.conversations.items.list(conversation.id, limit=20)
    shown: list[Any] = [one.to_dict() for one in items]
    answers = {one["content"][0]["text"] for one in shown if one["role"] == "assistant"}
    assert answers == {"x " * 20, "two", "three"}


def test_the_limits_of_batches_of_messages_are_in_anthropics_headers(stack: ServedStack) -> None:
    key = make_key(stack, requests_per_minute=2).secret
    with anthropic.Anthropic(base_url=stack.url, api_key=key, max_retries=0) as claude:
        requests = [message("a", says("x"))]
        made = claude.messages.batches.with_raw_response.create(requests=requests)
        assert made.headers["anthropic-ratelimit-requests-limit"] == "2"
        assert made.headers["anthropic-ratelimit-requests-remaining"] == "1"
        assert made.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
        claude.messages.batches.cancel(made.parse().id)
        with pytest.raises(anthropic.RateLimitError) as refused:
            claude.messages.batches.create(requests=requests)
    headers = refused.value.response.headers
    assert headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert int(headers["retry-after"]) > 0


def test_a_cancelled_batch_of_messages_says_so_for_each(claude: anthropic.Anthropic) -> None:
    requests = [message(f"m{n}", slow(60, 50)) for n in range(30)]
    begun = claude.messages.batches.create(requests=requests)
    assert claude.messages.batches.cancel(begun.id).processing_status == "canceling"
    batch = messages_ended(claude, begun.id)
    kinds = [each.result.type for each in claude.messages.batches.results(begun.id)]
    assert len(kinds) == len(requests)
    assert set(kinds) <= {"succeeded", "canceled"}
    assert kinds.count("canceled") == batch.request_counts.canceled > 0
    assert batch.cancel_initiated_at is not None


@pytest.mark.parametrize(
    ("requests", "where"),
    [
        ([message("a b", says("x"))], "requests.0.custom_id"),
        ([message("a", says("x")), message("a", says("x"))], "requests.1.custom_id"),
        ([], "requests"),
    ],
)
def test_a_bad_batch_of_messages_names_the_field(
    claude: anthropic.Anthropic, requests: list[Any], where: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.batches.create(requests=requests)
    assert where in str(refused.value.body)


def test_an_end_user_over_their_budget_holds_up_no_line_of_another(stack: ServedStack) -> None:
    key = make_key(stack)
    make_budget(stack, key, 1, each="user")
    lines = [chat(f"{n}", says("Yes"), user=user) for n, user in enumerate(["ann", "ann", "bob"])]
    client = stack.client(key.secret)
    begun = begin(client, lines)
    wait_until(lambda: done(client, begun.id) == 2, timeout_s=30)
    assert client.batches.retrieve(begun.id).status == "in_progress"
    stack.sql("UPDATE accounts_budget SET amount = 1000000 WHERE project_id = %s", key.project_id)
    stack.sql("UPDATE batches_batchline SET resume_at = now() WHERE resume_at > now()")
    assert len(results(client, ended(client, begun.id).output_file_id)) == 3


def done(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return 0 if counts is None else counts.completed
