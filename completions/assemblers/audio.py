"""From the data of a model's server to transcripts and speech."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference_site.core.domain.deltas import DataDelta, Delta
from inference_site.core.domain.errors import Cancelled
from inference_site.core.errors.exceptions import api_error
from inference_site.runs.kinds import DONE, Assembler, cancelled, error_ending, failure
from inference_site.runs.streams.batches import Ending
from inference_site.runs.streams.request_documents import Assembly

SPEECH, SPEECH_EVENTS = "speech", "speech.events"
TRANSCRIPTION, TRANSLATION = "transcription", "translation"
"""Names of these kinds of generations."""


@dataclass(frozen=True)
class AudioAssembly(Assembly):
    """How an answer of audio, or a transcript, is written for its client.

    ``media_type`` is that of the answer; where it ``streams``, that of what the events carry.
    """

    media_type: str
    streams: bool = False


class TranscriptAssembler(Assembler):
    """Passes a transcript on: whole, or as events (see ``runs.kinds.Assembler``)."""

    def __init__(self, assembly: AudioAssembly) -> None:
        self._assembly = assembly
        self._whole = b""

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta."""
        if not isinstance(delta, DataDelta):
            return ()
        if self._assembly.streams:
            return (b"data: " + delta.data + b"\n\n",)
        self._whole += delta.data
        return ()

    def complete(self) -> Ending:
        if self._assembly.streams:
            return Ending([DONE], 200, b"", finish_reason="stop")
        media_type = self._assembly.media_type
        return Ending((), 200, self._whole, finish_reason="stop", media_type=media_type)

    def cancel(self) -> Ending:
        return cancelled(self.fail(Cancelled()))

    def fail(self, error: Exception) -> Ending:
        return failure(error)


class SpeechAssembler(Assembler):
    """Passes the bytes of a speech on, after a first frame with their media type."""

    def __init__(self, assembly: AudioAssembly) -> None:
        self._head = [assembly.media_type.encode()]

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta."""
        if not isinstance(delta, DataDelta):
            return ()
        head, self._head = self._head, []
        return (*head, delta.data)

    def complete(self) -> Ending:
        return Ending((), 200, b"", finish_reason="stop")

    def cancel(self) -> Ending:
        return cancelled(self.fail(Cancelled()))

    def fail(self, error: Exception) -> Ending:
        return speech_failure(error)


def speech_failure(error: Exception, *, first: int = 0) -> Ending:
    """Return the ending of a speech that failed, which has no frames (see ``Failure``)."""
    answer = api_error(error)
    return error_ending(answer, answer.body, ())
