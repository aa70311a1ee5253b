"""Views of transcripts and speech: ``POST /v1/audio/transcriptions`` and the others beside it."""

from __future__ import annotations

import base64
from typing import Literal

from django.http import HttpResponse
from rest_framework.request import Request

from completions.assemblers.audio import (
    SPEECH,
    SPEECH_EVENTS,
    TRANSCRIPTION,
    TRANSLATION,
    AudioAssembly,
)
from completions.wire.audio import (
    SPEECH_TYPES,
    SpeechEvent,
    SpeechRequest,
    Transcript,
    TranscriptEvent,
    TranscriptionRequest,
    TranslationRequest,
)
from inference_site.core.domain.request import AudioFile, GenerationRequest
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.multipart import FormParser, ending_of
from inference_site.gateway.api.payload import parse
from inference_site.gateway.api.schema import documented
from inference_site.gateway.api.views import ApiView
from inference_site.gateway.request_fields.capabilities import require_fields
from inference_site.gateway.submission.model_access import served_model
from inference_site.gateway.submission.submit import Submission, respond
from inference_site.runs.queue import new_id
from inference_site.runs.streams.request_documents import Document

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
        """Write down what is said in a file."""
        body = parse(TranscriptionRequest, request.data)
        return _heard(request, body, "transcribe", streams=bool(body.stream))


class TranslationsView(ApiView):
    """``POST /v1/audio/translations``."""

    parser_classes = (FormParser,)

    @documented(form=TranslationRequest, answer=Transcript, texts=(_TEXT,), queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Write down in English what is said in a file."""
        body = parse(TranslationRequest, request.data)
        return _heard(request, body, "translate", streams=False)


def _heard(
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
        fields=body.model_dump(exclude=_NOT_FORWARDED, exclude_none=True, include=_own(body)),
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
        """Say a text."""
        body = parse(SpeechRequest, request.data)
        caller = caller_of(request)
        model = served_model(caller, body.model, body)
        require_fields(model, "speech", body)
        has_events = body.stream_format == "sse"
        generation = GenerationRequest(
            model.spec.id,
            operation="speak",
            prompts=(body.input,),
            fields=body.model_dump(exclude=_NOT_FORWARDED, exclude_none=True, include=_own(body)),
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


def _own(body: TranscriptionRequest | TranslationRequest | SpeechRequest) -> set[str]:
    """Return the names of the declared fields."""
    return set(type(body).model_fields)
