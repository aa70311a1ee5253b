"""Errors of servers, and what they become."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from inference_site.core.domain.errors import (
    AnswerTooLong,
    ContextLengthExceeded,
    EngineError,
    EngineUnavailable,
    GenerationFailed,
    InvalidRequest,
    RateLimited,
)
from inference_site.core.domain.request import AudioFile, Constraint, GenerationRequest, Message
from inference_site.core.errors.exceptions import api_error
from tests.sinks import RecordingSink
from tests.upstream_server import Talk, UpstreamServer, chunks, finish, text
from tests.worker.engines.openai_upstream.conftest import Load
from worker.engines.base import Engine
from worker.engines.openai_upstream.errors import retry_after_s

pytestmark = pytest.mark.slow  # Refusals are tried again after a pause.

HELLO = GenerationRequest("m", (Message("user", "Hello"),))


def refused(engine: Engine, request: GenerationRequest = HELLO) -> EngineError:
    """What the engine raises; nothing was fed before."""
    sink = RecordingSink()
    with pytest.raises(EngineError) as caught:
        engine.run(request, sink)
    assert sink.deltas == []
    return caught.value


def answer(status: int, body: Any, **headers: str) -> Callable[[Any], None]:
    """Answer with this status and body."""
    return lambda talk: talk.say(status, body, **headers)


@pytest.mark.parametrize(
    ("told", "param"), [("file", "file"), ("language", "language"), ("x", None)]
)
def test_the_field_of_a_form_is_kept(
    server: UpstreamServer, load: Load, told: str, param: str | None
) -> None:
    sound = GenerationRequest(
        "m", operation="transcribe", audio=AudioFile("AAAA", "wav"), fields={"language": "xx"}
    )
    server.answers = [answer(400, {"error": {"message": "It is bad.", "param": told}})]
    error = refused(load(), sound)
    assert isinstance(error, InvalidRequest)
    assert error.param == param


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"error": {"message": "It is bad.", "type": "BadRequestError", "code": 400}}),
        (413, {"object": "error", "message": "It is bad.", "type": "BadRequestError"}),
        (422, {"error": "It is bad.", "error_type": "validation"}),
        (400, {"detail": "It is bad."}),
        (400, b'[{"error": {"message": "It is bad.", "code": 400, "status": "INVALID"}}]'),
    ],
    ids=["OpenAI", "older vLLM", "TGI", "FastAPI", "Gemini"],
)
def test_a_refused_request_is_the_clients_fault_in_the_servers_words(
    server: UpstreamServer, engine: Engine, status: int, body: Any
) -> None:
    server.answers = [answer(status, body)]
    error = refused(engine)
    assert isinstance(error, InvalidRequest)
    assert (str(error), error.param) == ("It is bad.", None)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("cuda oom at /srv/x", "cuda oom at …"),
        ("see http://10.0.0.3:8000/v1?x=1, or ask", "see … or ask"),
        ("10.0.0.3:8000, [::1]:80 and localhost:1", "…, … and …"),
        ("~/models/a.gguf or ../x.bin", "… or …"),
        (r"C:\models\a.gguf", "…"),
        ("logprobs is not supported with tools + stream", "logprobs is not supported with tools"),
        ("top_k and/or </think> in [0, 1.5] of #/$defs/a", None),
        ("The regex a/b needs 3/4 of 1.2.3 (see param)", None),
    ],
)
def test_words_for_clients_have_no_addresses_and_paths(
    server: UpstreamServer, engine: Engine, said: str, told: str | None
) -> None:
    server.answers = [answer(400, {"error": {"message": said}})]
    assert str(refused(engine)) == (told or said)


@pytest.mark.parametrize("status", [200, 400, 404, 500])
@pytest.mark.parametrize(
    "body",
    [
        b"root:x:0:0",
        b"data: root:x:0:0",
        b'"root:x:0:0"',
        b'{"users": "root:x:0:0"}',
        b'["root:x"]',
    ],
)
def test_the_answer_of_a_service_that_is_no_model_server_is_not_repeated(
    server: UpstreamServer,
    engine: Engine,
    status: int,
    body: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.answers = [answer(status, body, Content_Type="text/plain")] * 3
    assert "root" not in str(refused(engine))
    if status != 200:
        assert "root:x" in caplog.text  # The owner of the host may read it.


@pytest.mark.parametrize(
    ("told", "param"),
    [
        ({"param": "temperature"}, "temperature"),
        ({"param": "tokens"}, "tokens"),  # Of the engine ctransformers.
        ({"param": "repeat_penalty"}, "repetition_penalty"),
        ({"param": "messages[0].content"}, "messages[0].content"),
        ({"param": "body.temperature"}, "temperature"),  # vLLM's validation.
        ({"param": "something_of_theirs"}, None),
        ({"param": 5}, None),
    ],
)
def test_the_parameter_is_kept_when_it_is_one_of_ours(
    server: UpstreamServer, load: Load, told: dict[str, Any], param: str | None
) -> None:
    server.answers = [answer(400, {"error": {"message": "Bad.", **told}})]
    error = refused(load(flavor="llama_cpp"))
    assert isinstance(error, InvalidRequest)
    assert error.param == param


@pytest.mark.parametrize(
    "said",
    [
        "Failed to transform json schema into a grammar: 1:1",
        "Grammar error: Invalid type: nope",
        "Invalid grammar specification.",
        "The provided JSON schema contains features not supported by xgrammar.",
    ],
)
def test_what_vllm_says_of_a_constraint_is_about_its_field(
    server: UpstreamServer, load: Load, said: str
) -> None:
    server.answers = [answer(400, {"error": {"message": said, "param": None, "code": 400}})]
    constraint = Constraint("json_schema", '{"type": "nope"}', "response_format")
    error = refused(load(flavor="vllm"), replace(HELLO, constraint=constraint))
    assert isinstance(error, InvalidRequest)
    assert error.param == "response_format"
    error = refused(load(flavor="vllm"))
    assert isinstance(error, InvalidRequest)
    assert error.param is None


def test_the_parameter_of_a_validation_is_kept(server: UpstreamServer, engine: Engine) -> None:
    found = [{"loc": ["body", "top_p"], "msg": "must be at most 1"}]
    server.answers = [answer(422, {"detail": found})]
    error = refused(engine)
    assert isinstance(error, InvalidRequest)
    assert (str(error), error.param) == ("top_p: must be at most 1", "top_p")


def test_the_parameter_of_a_constraint_is_the_requests(server: UpstreamServer, load: Load) -> None:
    told = {"message": "Bad grammar.", "param": "structured_outputs"}
    server.answers = [answer(400, {"error": told})]
    constraint = Constraint("regex", "[a-z]+", "grammar")
    asked = GenerationRequest("m", HELLO.messages, constraint=constraint)
    error = refused(load(flavor="vllm"), asked)
    assert isinstance(error, InvalidRequest)
    assert error.param == "grammar"


OVERFLOWS = [
    "This model's maximum context length is 4096 tokens. However, you requested 5100 tokens "
    "(5000 in the messages, 100 in the completion). Please reduce the length of the messages.",
    "This model's maximum context length is 4096 tokens. However, your request has 5000 input "
    "tokens. Please reduce the length of the input messages.",
    "This model's maximum context length is 4096 tokens. However, your messages resulted in 5000 "
    "tokens. Please reduce the length of the messages.",
    "You passed 5000 input tokens and requested 1 output tokens. However, the model's context "
    "length is only 4096 tokens.",
    "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
    "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    "Requested token count exceeds the model's maximum context length of 4096 tokens. You "
    "requested a total of 5100 tokens: 5000 tokens from the input messages and 100 tokens for "
    "the completion.",
    "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it",
    "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 "
    "`inputs` tokens and 100 `max_new_tokens`",
    "Input validation error: `inputs` must have less than 4096 tokens. Given: 5000",
    "prompt is too long: 5000 tokens > 4096 maximum",
    "This model's maximum prompt length is 4096 but the request contains 5000 tokens.",
    "The input token count (5000) exceeds the maximum number of tokens allowed (4096).",
    "Prompt contains 5000 tokens and 0 draft tokens, too large for model with 4096 maximum context "
    "length",
    "This model's maximum context length is 4096 tokens. However, your messages resulted in an "
    "estimated 5000 tokens. Please reduce the length of the messages.",
]


@pytest.mark.parametrize("message", OVERFLOWS)
def test_a_prompt_that_is_too_long_is_told_with_both_counts(
    server: UpstreamServer, engine: Engine, message: str
) -> None:
    server.answers = [answer(400, {"error": {"message": message, "code": 400}})]
    error = refused(engine)
    assert isinstance(error, ContextLengthExceeded)
    assert (error.context_length, error.input_tokens) == (4096, 5000)
    assert error.param == "messages"


def test_estimate_of_another_site_is_an_estimate(server: UpstreamServer, engine: Engine) -> None:
    message = OVERFLOWS[-1]
    server.answers = [answer(400, {"error": {"message": message}})]
    assert str(refused(engine)) == message


def test_code_without_numbers_says_that_a_prompt_is_too_long(
    server: UpstreamServer, engine: Engine
) -> None:
    """OpenAI's own models since 2025."""
    message = "Your input exceeds the context window of this model."
    told = {"message": message, "code": "context_length_exceeded", "param": "input"}
    server.answers = [answer(400, {"error": told})]
    error = api_error(refused(engine))
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")
    assert error.message == message


def test_an_answer_that_is_too_long_is_not_the_prompts_fault(
    server: UpstreamServer, engine: Engine
) -> None:
    message = OVERFLOWS[0].replace("5000", "100").replace("100 in the comp", "5000 in the comp")
    server.answers = [answer(400, {"error": {"message": message}})]
    error = refused(engine)
    assert isinstance(error, AnswerTooLong)
    assert (error.param, error.left) == ("max_tokens", 3996)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_platform_is_the_operators_matter_and_keeps_its_key(
    server: UpstreamServer, load: Load, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"error": {"message": "Incorrect API key provided: sk-very-secret"}}
    server.answers = [answer(status, body)]
    with caplog.at_level(logging.ERROR):
        error = refused(load(api_key="sk-very-secret"))
    assert type(error) is EngineUnavailable
    told = str(error) + caplog.text + str(api_error(error).envelope)
    assert "sk-very-secret" not in told
    assert server.url in caplog.text
    assert "Incorrect API key" in caplog.text
    assert server.url not in str(error)
    assert api_error(error).status == 503


@pytest.mark.parametrize("status", [500, 502, 504, 418, 302])
def test_every_other_status_is_a_failure(
    server: UpstreamServer, engine: Engine, status: int
) -> None:
    server.answers = [answer(status, b"<html>Oh no</html>")]
    error = refused(engine)
    assert isinstance(error, GenerationFailed)
    assert api_error(error).status == 500
    assert "<html>" not in str(error)
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [400, 500])
def test_an_error_whose_body_is_cut_off_counts_by_its_status_and_is_not_tried_again(
    server: UpstreamServer, engine: Engine, status: int
) -> None:
    def cut_off(talk: Talk) -> None:
        talk.begin("application/json", status)
        talk.send(b'{"error": {"mess')
        talk.cut()

    server.answers = [cut_off]
    expected = InvalidRequest if status == 400 else GenerationFailed
    assert type(refused(engine)) is expected
    assert len(server.asked) == 1


def test_a_long_error_page_is_cut(server: UpstreamServer, engine: Engine) -> None:
    server.answers = [answer(500, b"x" * 1_000_000)]
    assert len(str(refused(engine))) < 2000


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ({"error": {"message": "Boom.", "code": 500}}, GenerationFailed),
        ({"error": {"message": "Boom."}}, GenerationFailed),
        ({"error": "Boom."}, GenerationFailed),
        ({"error": {"message": "Boom.", "code": "internal"}}, GenerationFailed),
        ({"error": {"message": "Boom.", "code": 400}}, InvalidRequest),
        ({"error": {"message": "Boom.", "code": 429}}, RateLimited),
        ({"error": {"message": "Boom.", "code": 503}}, EngineUnavailable),
        ({"object": "error", "message": "Boom.", "code": 400}, InvalidRequest),
        ({"object": "error", "message": "Boom.", "code": 50001}, GenerationFailed),
        (b'error: {"message": "Boom.", "code": 500}\n\n', GenerationFailed),
        (b'event: error\ndata: {"error": {"message": "Boom."}}\n\n', GenerationFailed),
        (b'event: error\ndata: {"message": "Boom.", "code": 400}\n\n', InvalidRequest),
        (b'event: error\ndata: "Boom."\n\n', GenerationFailed),
        (b"event: error\ndata: Boom.\n\n", GenerationFailed),
    ],
)
@pytest.mark.parametrize("before", [[], [text("a")]], ids=["at once", "later"])
def test_an_error_in_the_stream_is_mapped_as_a_status_is(
    server: UpstreamServer,
    engine: Engine,
    told: Any,
    kind: type[EngineError],
    before: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.answers = [chunks(*before, told)]
    with pytest.raises(kind) as caught:
        engine.run(HELLO, RecordingSink())
    assert ("Boom" in str(caught.value)) is (kind is InvalidRequest)
    assert kind is InvalidRequest or "Boom" in caplog.text


@pytest.mark.parametrize("data", ["{}", "null", '""'])
def test_an_event_named_error_without_words_is_an_error(
    server: UpstreamServer, engine: Engine, data: str
) -> None:
    nameless = f"event: error\ndata: {data}\n\n".encode()
    server.answers = [chunks(text("a"), nameless, finish())]
    with pytest.raises(GenerationFailed, match="failed"):
        engine.run(HELLO, RecordingSink())


def test_an_error_with_the_status_200_is_an_error(server: UpstreamServer, engine: Engine) -> None:
    server.answers = [answer(200, {"error": {"message": "Boom.", "code": 400}})]
    assert isinstance(refused(engine), InvalidRequest)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("5", 5), ("0.2", 1), ("-3", 0), ("1e9", 3600), ("nan", None), ("soon", None), ("", None)],
)
def test_retry_after_is_read_within_bounds(value: str, seconds: int | None) -> None:
    assert retry_after_s({"retry-after": value}) == seconds


def test_retry_after_may_be_a_date() -> None:
    soon = datetime.now(UTC) + timedelta(seconds=30)
    seconds = retry_after_s({"retry-after": format_datetime(soon, usegmt=True)})
    assert seconds is not None
    assert 28 <= seconds <= 30
