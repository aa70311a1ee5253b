"""Transcripts and speech on the wire. Source: API reference, "Audio"."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from inference_site.gateway.api.payload import WireObject, WireRequest
from inference_site.gateway.request_fields.wire import EndUser

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
