"""``/v1/audio``: transcripts and speech of another server, through the queue."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
import wave
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.keys import make_key
from tests.served_stack import ServedStack, wait_until
from tests.upstream_server import Answer, Talk, UpstreamServer, chunks

SPEECH = bytes(range(256)) * 300
SAY = {"model": "sounds", "voice": "alloy", "input": "x"}


def sound(seconds: float = 0.1) -> bytes:
    """A WAV file of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(8000)
        writer.writeframes(bytes(int(16_000 * seconds)))
    return file.getvalue()


def said(*pieces: bytes, then: str = "end", after_s: float = 0) -> Answer:
    """Answer with these pieces of a speech; then do this."""

    def answer(talk: Talk) -> None:
        talk.begin("audio/mpeg")
        for piece in pieces:
            talk.send(piece)
        time.sleep(after_s)
        getattr(talk, then)()

    return answer


def last_row(stack: ServedStack, kind: str) -> dict[str, Any]:
    """The newest generation of a kind."""
    [[public_id]] = stack.sql(
        "SELECT public_id FROM generations_generation WHERE kind = %s ORDER BY id DESC LIMIT 1",
        kind,
    )
    return stack.row(public_id)


def test_a_file_is_written_down(
    client: openai.OpenAI, stack: ServedStack, odd: UpstreamServer
) -> None:
    usage = {"type": "tokens", "input_tokens": 14, "output_tokens": 3, "total_tokens": 17}
    odd.answers = [lambda talk: talk.say(200, {"text": "Hello there.", "usage": usage})]
    content = sound()
    chunking: Any = {"type": "server_vad", "threshold": 0.5, "odd": 1}
    answer = client.audio.transcriptions.create(
        model="sounds",
        file=("../../etc/passwd.txt", content, "text/html"),
        language="en",
        temperature=0.2,
        timestamp_granularities=["word", "segment"],
        chunking_strategy=chunking,
        include=["logprobs"],
    )
    assert answer.text == "Hello there."
    assert answer.usage is not None
    asked = odd.asked[-1]
    assert asked.path == "/v1/audio/transcriptions"
    assert asked.body == {
        "model": "odd",
        "file": ("audio.wav", content),
        "language": "en",
        "temperature": "0.2",
        "timestamp_granularities[]": ["word", "segment"],
        "chunking_strategy[type]": "server_vad",
        "chunking_strategy[threshold]": "0.5",
        "include[]": ["logprobs"],
    }
    row = last_row(stack, "transcription")
    assert (row["status"], row["model"], row["streamed"]) == ("completed", "sounds", False)
    assert (row["input_tokens"], row["output_tokens"]) == (14, 3)
    assert float(row["cost"]) == pytest.approx((14 * 2 + 3 * 10) / 1e6)


@pytest.mark.parametrize("form", ["text", "srt", "vtt"])
def test_words_and_subtitles_are_text(
    client: openai.OpenAI, odd: UpstreamServer, form: Any
) -> None:
    odd.answers = [
        lambda talk: talk.say(200, "Grüße\n".encode(), Content_Type="text/plain; charset=utf-8")
    ]
    answer: Any = client.audio.transcriptions.with_raw_response.create(
        model="sounds", file=("a.wav", sound()), response_format=form
    )
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.parse() == "Grüße\n"
    assert odd.body["response_format"] == form


def test_a_translation_and_seconds_are_counted(
    http: httpx.Client, stack: ServedStack, odd: UpstreamServer
) -> None:
    """Without the official client, whose method is deprecated."""
    said_: dict[str, Any] = {"text": "Good day.", "duration": 2.5, "language": "german"}
    odd.answers = [lambda talk: talk.say(200, {**said_, "segments": []})]
    form = {"model": "sounds", "response_format": "verbose_json"}
    answer = http.post("/v1/audio/translations", data=form, files={"file": sound()})
    assert answer.json() == {**said_, "segments": []}
    assert odd.asked[-1].path == "/v1/audio/translations"
    row = last_row(stack, "translation")
    assert (row["input_tokens"], row["output_tokens"]) == (25, 3)


OPENAIS = (
    {"type": "transcript.text.delta", "delta": "Hello"},
    {"type": "transcript.text.delta", "delta": " there."},
    {
        "type": "transcript.text.done",
        "text": "Hello there.",
        "usage": {"type": "tokens", "input_tokens": 9, "output_tokens": 3, "total_tokens": 12},
    },
)
VLLMS = (
    {"object": "transcription.chunk", "choices": [{"delta": {"content": "Hello"}}]},
    {"object": "transcription.chunk", "choices": [{"delta": {"content": " there."}}]},
    {"object": "transcription.chunk", "choices": [], "usage": {"prompt_tokens": 9}},
)


@pytest.mark.parametrize(
    "answer",
    [
        chunks(*OPENAIS, done=False),
        chunks(*VLLMS),
        chunks(*OPENAIS[:2], f"data: {json.dumps(OPENAIS[2])}\n\n<html>\n".encode(), done=False),
        lambda talk: talk.say(200, {"text": "Hello there.", "usage": {"input_tokens": 9}}),
    ],
    ids=["openai", "vllm", "openai and more", "whole"],
)
def test_a_transcript_is_streamed_as_openai_does(
    client: openai.OpenAI, stack: ServedStack, odd: UpstreamServer, answer: Answer
) -> None:
    odd.answers = [answer]
    events = list(
        client.audio.transcriptions.create(model="sounds", file=("a.wav", sound()), stream=True)
    )
    assert odd.body["stream"] == "true"
    *deltas, done = events
    assert "".join(e.delta for e in deltas if e.type == "transcript.text.delta") == "Hello there."
    assert done.type == "transcript.text.done"
    assert done.text == "Hello there."
    assert done.usage is not None, "as the answer that is not streamed has it"
    assert (done.usage.type, done.usage.input_tokens) == ("tokens", 9)
    assert done.usage.total_tokens == 9 + done.usage.output_tokens
    row = last_row(stack, "transcription")
    assert (row["status"], row["streamed"], row["input_tokens"]) == ("completed", True, 9)


def test_a_speech_comes_as_its_bytes_while_it_is_made(
    client: openai.OpenAI, stack: ServedStack, odd: UpstreamServer
) -> None:
    goes_on = threading.Event()

    def answer(talk: Talk) -> None:
        talk.begin("audio/mpeg")
        talk.send(SPEECH[:1000])
        goes_on.wait(60)
        talk.send(SPEECH[1000:])
        talk.end()

    odd.answers = [answer]
    with client.audio.speech.with_streaming_response.create(
        model="sounds",
        voice={"id": "voice_1"},
        input="Say it.",
        response_format="wav",
        speed=1.5,
        instructions="Slowly.",
    ) as speech:
        assert speech.headers["content-type"] == "audio/wav"
        assert speech.headers["x-model"] == "sounds"
        pieces = speech.iter_bytes()
        got = next(pieces)
        assert SPEECH.startswith(got)
        goes_on.set()
        assert got + b"".join(pieces) == SPEECH
    assert odd.asked[-1].path == "/v1/audio/speech"
    assert odd.body == {
        "model": "odd",
        "input": "Say it.",
        "voice": {"id": "voice_1"},
        "response_format": "wav",
        "speed": 1.5,
        "instructions": "Slowly.",
    }
    wait_until(lambda: last_row(stack, "speech")["status"] == "completed", 30, "completed")
    assert last_row(stack, "speech")["input_tokens"] == 2


def test_a_speech_with_a_key_is_made_once(client: openai.OpenAI, odd: UpstreamServer) -> None:
    odd.answers = [said(SPEECH)]
    before = len(odd.asked)
    headers = {"Idempotency-Key": "speech-1"}
    first, second = (
        client.audio.speech.create(
            model="sounds", voice="alloy", input="x", response_format="flac", extra_headers=headers
        )
        for _ in range(2)
    )
    assert first.content == second.content == SPEECH
    assert second.response.headers["content-type"] == "audio/flac"
    assert len(odd.asked) == before + 1


def test_a_speech_as_events(client: openai.OpenAI, stack: ServedStack, odd: UpstreamServer) -> None:
    usage = {"input_tokens": 5, "output_tokens": 70, "total_tokens": 75}
    events = [
        {"type": "speech.audio.delta", "audio": "AAAA"},
        {"type": "speech.audio.done", "usage": usage},
    ]
    odd.answers = [chunks(*events, done=False)]
    with client.audio.speech.with_streaming_response.create(
        model="sounds", voice="alloy", input="Say it.", stream_format="sse"
    ) as speech:
        assert speech.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in speech.iter_lines() if line]
    assert [json.loads(line[5:]) for line in lines[:-1]] == events
    assert lines[-1] == "data: [DONE]"
    assert odd.body["stream_format"] == "sse"
    row = last_row(stack, "speech.events")
    assert (row["input_tokens"], row["output_tokens"]) == (5, 70)


@pytest.mark.parametrize("then", ["cut", "reset"])
def test_a_server_that_dies_in_the_middle_does_not_look_like_an_end(
    client: openai.OpenAI,
    http: httpx.Client,
    stack: ServedStack,
    odd: UpstreamServer,
    then: str,
) -> None:
    odd.answers = [said(SPEECH, then=then, after_s=0.5)]
    got: list[bytes] = []
    with http.stream("POST", "/v1/audio/speech", json=SAY) as speech:
        assert speech.status_code == 200
        with pytest.raises(httpx.HTTPError):
            got.extend(speech.iter_bytes())
    assert SPEECH.startswith(b"".join(got))
    wait_until(lambda: last_row(stack, "speech")["status"] == "failed", 30, "failed")
    assert last_row(stack, "speech")["error_code"] == "model_error"
    transcript = chunks(OPENAIS[0], done=False)
    odd.answers = [transcript]
    with pytest.raises(openai.APIError):
        list(
            client.audio.transcriptions.create(model="sounds", file=("a.wav", sound()), stream=True)
        )


@pytest.mark.parametrize(
    "answer",
    [
        lambda talk: talk.say(200, {"error": "no voice"}),
        said(),
        lambda talk: talk.say(500, b"boom"),
    ],
    ids=["json", "nothing", "500"],
)
def test_a_speech_that_fails_before_its_first_byte_has_a_status(
    client: openai.OpenAI, odd: UpstreamServer, answer: Answer
) -> None:
    odd.answers = [answer]
    with pytest.raises(openai.InternalServerError) as caught:
        client.audio.speech.create(model="sounds", voice="alloy", input="x")
    assert caught.value.code == "model_error"


def test_a_speech_without_an_end_is_ended_at_its_bound(
    client: openai.OpenAI, stack: ServedStack, odd: UpstreamServer
) -> None:
    hung_up = threading.Event()

    def endless(talk: Talk) -> None:
        talk.begin("audio/mpeg")
        try:
            while True:
                talk.send(bytes(2**18))
        except OSError:
            hung_up.set()
            raise

    odd.answers = [endless]
    got: list[bytes] = []
    # A project of its own: the log of the speech counts for it while it is kept.
    with (
        make_key(stack).http(stack) as http,
        http.stream("POST", "/v1/audio/speech", json=SAY) as speech,
        pytest.raises(httpx.HTTPError),
    ):
        got.extend(speech.iter_bytes())
    assert sum(map(len, got)) <= 32 * 2**20
    assert hung_up.wait(30)
    wait_until(lambda: last_row(stack, "speech")["status"] == "failed", 30, "failed")
    odd.answers = [
        lambda talk: talk.say(200, b'{"text": "' + b"x" * 33 * 2**20 + b'"}'),
    ]
    with pytest.raises(openai.InternalServerError, match="more than 33554432 bytes"):
        client.audio.transcriptions.create(model="sounds", file=("a.wav", sound()))


def test_who_leaves_ends_the_speech_and_the_transcript(
    client: openai.OpenAI, stack: ServedStack, odd: UpstreamServer
) -> None:
    left = threading.Event()

    def waiting(talk: Talk) -> None:
        if "file" not in talk.body:
            talk.begin("audio/mpeg")
            talk.send(SPEECH)
        if talk.wait_for_hang_up():
            left.set()

    odd.answers = [waiting]
    with client.audio.speech.with_streaming_response.create(
        model="sounds", voice="alloy", input="x"
    ) as speech:
        next(speech.iter_bytes())
    assert left.wait(60)
    wait_until(lambda: last_row(stack, "speech")["status"] == "cancelled", 60, "cancelled")
    left.clear()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=2).audio.transcriptions.create(
            model="sounds", file=("a.wav", sound())
        )
    assert left.wait(60)
    wait_until(lambda: last_row(stack, "transcription")["status"] == "cancelled", 60, "cancelled")


FORM = "/v1/audio/transcriptions"


@pytest.mark.parametrize(
    ("fields", "file", "param", "code"),
    [
        ({}, None, "file", "missing_required_parameter"),
        ({"file": "no file"}, None, "file", None),
        ({}, b"", "file", None),
        ({}, b"<html>" + bytes(2000), "file", "invalid_value"),
        ({"model": ""}, sound(), "model", None),
        ({"temperature": "hot"}, sound(), "temperature", None),
        ({"temperature": "2"}, sound(), "temperature", "decimal_above_max_value"),
        ({"response_format": "mp3"}, sound(), "response_format", "invalid_value"),
        ({"stream": "maybe"}, sound(), "stream", None),
        ({"model": "demo"}, sound(), "model", "unsupported_model"),
        ({"timestamp_granularities[]": "year"}, sound(), "timestamp_granularities[0]", None),
    ],
)
def test_what_cannot_be_heard_is_refused(
    http: httpx.Client,
    odd: UpstreamServer,
    fields: dict[str, str],
    file: bytes | None,
    param: str,
    code: str | None,
) -> None:
    before = len(odd.asked)
    files: Any = {"x": ("x", b"x")} if file is None else {"file": ("a.wav", file, "audio/wav")}
    answer = http.post(FORM, data={"model": "sounds", **fields}, files=files)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    if code is not None:
        assert answer.json()["error"]["code"] == code
    assert len(odd.asked) == before


def test_a_content_type_that_lies_is_refused(http: httpx.Client) -> None:
    good = http.build_request("POST", FORM, data={"model": "sounds"}, files={"file": sound()})
    body, kind = good.read(), good.headers["content-type"]
    lies = {
        "application/json": 415,
        "audio/wav": 415,
        "multipart/form-data": 400,
        "multipart/form-data; boundary=other": 400,
        f"{kind.partition(';')[0]}; boundary=\xff": 400,
    }
    for lie, status in lies.items():
        answer = http.post(FORM, content=body, headers={b"Content-Type": lie.encode("latin-1")})
        assert answer.status_code == status, (lie, answer.text)
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert status == 400 or "multipart/form-data" in answer.json()["error"]["message"]
    answer = http.post("/v1/audio/speech", data=SAY)
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]


def test_a_hundred_megabytes_are_refused_before_they_are_sent(stack: ServedStack) -> None:
    head = (
        f"POST {FORM} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stack.key}\r\n"
        "Content-Type: multipart/form-data; boundary=x\r\n{}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", stack.port)) as connection:
        connection.sendall(head.replace("{}", f"Content-Length: {100 * 2**20}").encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    with socket.create_connection(("127.0.0.1", stack.port)) as connection:
        connection.sendall(head.replace("{}", "Transfer-Encoding: chunked").encode())
        piece = b"100000\r\n" + bytes(2**20) + b"\r\n"
        sent, began = 0, time.monotonic()
        connection.settimeout(0.01)
        answer = b""
        while not answer and sent < 100 and time.monotonic() - began < 60:
            try:
                connection.settimeout(10)
                connection.sendall(piece)
                sent += 1
                connection.settimeout(0.01)
                answer = connection.recv(100)
            except TimeoutError:
                continue
            except OSError:
                break
        if not answer:
            connection.settimeout(30)
            answer = connection.recv(100)
    assert answer.startswith(b"HTTP/1.1 413")
    assert sent < 30


def test_the_organization_api_counts_sounds_apart(stack: ServedStack, odd: UpstreamServer) -> None:
    admin = make_key(stack, "admin").secret
    usage = stack.client(admin).with_options(admin_api_key=admin).admin.organization.usage
    key = make_key(stack)
    client, project = stack.client(key.secret), f"proj_{key.project_id}"
    odd.answers = [lambda talk: talk.say(200, {"text": "x", "usage": {"seconds": 61}})]
    client.audio.transcriptions.create(model="sounds", file=("a.wav", sound()))
    with key.http(stack) as http:
        files = {"file": ("a.wav", sound())}
        made = http.post("/v1/audio/translations", data={"model": "sounds"}, files=files)
        assert made.status_code == 200
    odd.answers = [said(SPEECH)]
    client.audio.speech.create(model="sounds", voice="alloy", input="y" * 400).read()
    asked: Any = {
        "start_time": int(time.time()) - 3600,
        "project_ids": [project],
        "group_by": ["project_id", "api_key_id", "model"],
    }

    def results(of: Any, **other: Any) -> list[Any]:
        return [one for bucket in of(**asked, **other).data for one in bucket.results]

    wait_until(lambda: bool(results(usage.audio_speeches)), 20, "speech is accounted")
    (one,) = results(usage.audio_speeches)
    assert one.to_dict() == {
        "object": "organization.usage.audio_speeches.result",
        "characters": 400,
        "num_model_requests": 1,
        "project_id": project,
        "user_id": None,
        "api_key_id": f"key_{key.id}",
        "model": "sounds",
        "cost": 0.0002,
        "num_failed_requests": 0,
        "num_cancelled_requests": 0,
    }
    (one,) = results(usage.audio_transcriptions)
    assert (one.object, one.seconds, one.num_model_requests) == (
        "organization.usage.audio_transcriptions.result",
        122,
        2,
    )
    # Of two texts with a character each: a token each.
    assert (one.output_tokens, one.cost) == (2, pytest.approx((1220 * 2 + 2 * 10) / 1e6))
    assert results(usage.audio_transcriptions, models=["other"]) == []
    assert results(usage.audio_transcriptions, user_ids=["user_1"]) == []
    assert results(usage.audio_speeches, api_key_ids=["key_0"]) == []
    assert results(usage.completions) == []


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        (
            "images",
            {"group_by": ["size", "source"], "sizes": ["256x256"], "sources": ["image.edit"]},
        ),
        ("vector_stores", {"group_by": ["project_id"]}),
        ("code_interpreter_sessions", {"group_by": ["project_id"], "limit": 2}),
    ],
)
def test_what_the_site_never_counts_has_empty_buckets(
    stack: ServedStack, name: str, asked: Any
) -> None:
    admin = make_key(stack, "admin").secret
    usage = stack.client(admin).with_options(admin_api_key=admin).admin.organization.usage
    now = int(time.time())
    page = getattr(usage, name)(start_time=now - 3 * 86_400, end_time=now, **asked)
    assert len(page.data) == asked.get("limit", 4)
    assert page.has_more == ("limit" in asked)
    assert all(bucket.results == [] for bucket in page.data)
    with pytest.raises(openai.BadRequestError):
        getattr(usage, name)(start_time=now, group_by=["colour"])
