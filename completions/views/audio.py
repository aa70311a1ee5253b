"""Transcripts and speech: ``POST /v1/audio/transcriptions`` and the others beside it.

Source of the wire models: API reference, "Audio".
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from django.http import HttpResponse
from pydantic import BeforeValidator, ConfigDict, Field
from rest_framework.request import Request

from completions.assemblers.audio import (
    SPEECH,
    SPEECH_EVENTS,
    TRANSCRIPTION,
    TRANSLATION,
    AudioAssembly,
)
from inference_site.core.domain.request import AudioFile, GenerationRequest
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.multipart import FormParser, ending_of
from inference_site.gateway.api.payload import WireObject, WireRequest, parse
from inference_site.gateway.api.schema import documented
from inference_site.gateway.api.views import ApiView
from inference_site.gateway.request_fields.capabilities import require_fields
from inference_site.gateway.request_fields.wire import EndUser
from inference_site.gateway.submission.model_access import served_model
from inference_site.gateway.submission.submit import Submission, respond
from inference_site.runs.queue import new_id
from inference_site.runs.streams.request_documents import Document

SPEECH_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
"""Media types of speech by ``response_format``."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# The fields of a form are text.
_Number = Annotated[float, Field(strict=False, ge=0, le=1)]
_Switch = Annotated[bool, Field(strict=False)]
_Words = Annotated[list[str], Field(max_length=1000), BeforeValidator(_as_list)]
_Granularities = Annotated[list[Literal["word", "segment"]], BeforeValidator(_as_list)]
_Includes = Annotated[list[Literal["logprobs"]], BeforeValidator(_as_list)]


class TranslationRequest(WireRequest):
    """The form of ``POST /v1/audio/translations``."""

    file: Annotated[bytes, Field(min_length=1)]
    model: str
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    temperature: _Number | None = None
    user: EndUser | None = None


class VadChunking(WireRequest):
    """``chunking_strategy`` that cuts by voice activity."""

    type: Literal["server_vad"]
    prefix_padding_ms: Annotated[int, Field(strict=False)] | None = None
    silence_duration_ms: Annotated[int, Field(strict=False)] | None = None
    threshold: _Number | None = None


class TranscriptionRequest(WireRequest):
    """The form of ``POST /v1/audio/transcriptions``."""

    file: Annotated[bytes, Field(min_length=1)]
    model: str
    chunking_strategy: Literal["auto"] | VadChunking | None = None
    include: _Includes | None = None
    keywords: _Words | None = None
    known_speaker_names: Annotated[_Words, Field(max_length=4)] | None = None
    known_speaker_references: Annotated[_Words, Field(max_length=4)] | None = None
    language: str | None = None
    languages: _Words | None = None
    prompt: str | None = None
    response_format: (
        Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"] | None
    ) = None
    stream: _Switch | None = None
    temperature: _Number | None = None
    timestamp_granularities: _Granularities | None = None
    user: EndUser | None = None


class _OfTheServer(WireObject):
    """An object that the model's server wrote, and that may have more fields."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Transcript(_OfTheServer):
    """The answer."""

    text: str


class TranscriptEvent(_OfTheServer):
    """An event of a transcript: ``transcript.text.delta``, ``….segment`` and ``….done``."""

    type: str
    delta: str | None = None
    text: str | None = None


class VoiceId(WireRequest):
    """A voice by its id."""

    id: str


class SpeechRequest(WireRequest):
    """The body of ``POST /v1/audio/speech``."""

    input: Annotated[str, Field(min_length=1)]
    model: str
    voice: str | VoiceId
    instructions: str | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] | None = None
    speed: Annotated[float, Field(ge=0.25, le=4)] | None = None
    stream_format: Literal["sse", "audio"] | None = None
    user: EndUser | None = None


class SpeechEvent(_OfTheServer):
    """An event of a speech: ``speech.audio.delta`` with a piece in base64, then ``….done``."""

    type: str
    audio: str | None = None


_JSON, _TEXT = "application/json", "text/plain; charset=utf-8"
_NOT_FORWARDED = {"file", "input", "model", "stream", "stream_format", "user"}


class TranscriptionsView(ApiView):
    """``POST /v1/audio/transcriptions``."""

    parser_classes = (FormParser,)

    @documented(
        form=TranscriptionRequest,
        answer=Transcript,
        event=TranscriptEvent,
        texts=(_TEXT,),
        queued=True,
    )
    def post(self, request: Request) -> HttpResponse:
        """Transcribe an audio file."""
        body = parse(TranscriptionRequest, request.data)
        return _transcribe(request, body, "transcribe", streams=bool(body.stream))


class TranslationsView(ApiView):
    """``POST /v1/audio/translations``."""

    parser_classes = (FormParser,)

    @documented(form=TranslationRequest, answer=Transcript, texts=(_TEXT,), queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Translate the speech in an audio file to English text."""
        body = parse(TranslationRequest, request.data)
        return _transcribe(request, body, "translate", streams=False)


def _transcribe(
    request: Request,
    body: TranscriptionRequest | TranslationRequest,
    operation: Literal["transcribe", "translate"],
    *,
    streams: bool,
) -> HttpResponse:
    caller = caller_of(request)
    model = served_model(caller, body.model, body)
    kind = TRANSCRIPTION if operation == "transcribe" else TRANSLATION
    require_fields(model, kind, body)
    ending = ending_of(body.file)
    if ending is None:
        raise InvalidRequestError(
            "Invalid file format. Supported formats: flac, m4a, mp3, mp4, ogg, wav and webm.",
            param="file",
            code="invalid_value",
        )
    generation = GenerationRequest(
        model.spec.id,
        operation=operation,
        audio=AudioFile(base64.b64encode(body.file).decode(), ending),
        fields=_own_fields(body),
        streams=streams,
    )
    is_json = (body.response_format or "json").endswith("json")
    assembly = AudioAssembly(_JSON if is_json else _TEXT, streams)
    submission = Submission(
        kind,
        new_id("audio-"),
        caller,
        Document(generation, assembly),
        stream=streams,
        ignored_params=body.ignored_params,
        end_user=body.user or "",
    )
    return respond(request, submission)


class SpeechView(ApiView):
    """``POST /v1/audio/speech``."""

    @documented(
        body=SpeechRequest,
        answer=None,
        event=SpeechEvent,
        binaries=tuple(SPEECH_TYPES.values()),
        queued=True,
    )
    def post(self, request: Request) -> HttpResponse:
        """Turn a text into speech."""
        body = parse(SpeechRequest, request.data)
        caller = caller_of(request)
        model = served_model(caller, body.model, body)
        require_fields(model, "speech", body)
        has_events = body.stream_format == "sse"
        generation = GenerationRequest(
            model.spec.id,
            operation="speak",
            prompts=(body.input,),
            fields=_own_fields(body),
            streams=has_events,
        )
        media_type = SPEECH_TYPES[body.response_format or "mp3"]
        submission = Submission(
            SPEECH_EVENTS if has_events else SPEECH,
            new_id("audio-"),
            caller,
            Document(generation, AudioAssembly(media_type, has_events)),
            stream=True,
            ignored_params=body.ignored_params,
            end_user=body.user or "",
        )
        return respond(request, submission)


def _own_fields(body: WireRequest) -> dict[str, Any]:
    """Return the declared fields that were given and that the model's server is sent."""
    given = {name: getattr(body, name) for name in type(body).model_fields}
    return {
        name: _own_fields(value) if isinstance(value, WireRequest) else value
        for name, value in given.items()
        if value is not None and name not in _NOT_FORWARDED
    }
