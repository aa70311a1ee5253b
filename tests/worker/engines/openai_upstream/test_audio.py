"""Transcripts and speech of servers with unusual answers; the usual ones are in tests/e2e."""

from __future__ import annotations

from typing import Any

import pytest

from inference_site.core.domain.deltas import DataDelta
from inference_site.core.domain.errors import EngineError, GenerationFailed, InvalidRequest
from inference_site.core.domain.request import AudioFile, GenerationRequest
from tests.sinks import RecordingSink
from tests.upstream_server import UpstreamServer
from worker.engines.base import Engine

HEARD = GenerationRequest("m", operation="transcribe", audio=AudioFile("AAAA", "wav"))
TEXT = GenerationRequest(
    "m",
    operation="transcribe",
    audio=AudioFile("AAAA", "wav"),
    fields={"response_format": "text"},
)
SPOKEN = GenerationRequest("m", operation="speak", prompts=("x",))
PAGE = b"\n<!DOCTYPE html><title>Log in</title>"


def answered(
    server: UpstreamServer, engine: Engine, request: GenerationRequest, body: Any, kind: str
) -> bytes:
    """The bytes of the answer, if the server sends this body of this content type."""
    server.answers = [lambda talk: talk.say(200, body, Content_Type=kind)]
    sink = RecordingSink()
    engine.run(request, sink)
    assert sink.finishes == ["stop"]
    return b"".join(delta.data for delta in sink.deltas if isinstance(delta, DataDelta))


def test_transcript_as_json_of_another_content_type_ends_once(
    server: UpstreamServer, engine: Engine
) -> None:
    body = b'{"text":"Hello"}'
    for kind in ("text/plain", "Application/JSON; charset=utf-8"):
        assert answered(server, engine, HEARD, body, kind) == body


@pytest.mark.parametrize("request_", [HEARD, TEXT, SPOKEN], ids=["json", "text", "speech"])
def test_page_is_no_answer(
    server: UpstreamServer,
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
    request_: GenerationRequest,
) -> None:
    with pytest.raises(GenerationFailed, match="page of HTML"):
        answered(server, engine, request_, PAGE, "Text/HTML; charset=utf-8")
    assert "Log in" in caplog.text


def test_bytes_and_words_may_have_the_content_type_of_a_page(
    server: UpstreamServer, engine: Engine
) -> None:
    """It is the default of some frameworks."""
    for request, body in ((TEXT, b"Hello"), (SPOKEN, b"ID3")):
        assert answered(server, engine, request, body, "text/html; charset=utf-8") == body


@pytest.mark.parametrize("request_", [HEARD, TEXT, SPOKEN], ids=["json", "text", "speech"])
def test_error_with_the_status_200_is_an_error(
    server: UpstreamServer, engine: Engine, request_: GenerationRequest
) -> None:
    refusal = {"error": {"message": "No such voice.", "code": 400}}
    with pytest.raises(InvalidRequest, match="No such voice"):
        answered(server, engine, request_, refusal, "application/json")


@pytest.mark.parametrize(
    ("body", "kind"),
    [({"text": "Hello"}, "application/json"), ({"title": "Busy"}, "application/problem+json"),
     (b"no json", "application/json")],
)  # fmt: skip
def test_json_is_no_speech(server: UpstreamServer, engine: Engine, body: Any, kind: str) -> None:
    with pytest.raises(EngineError, match="speech"):
        answered(server, engine, SPOKEN, body, kind)
