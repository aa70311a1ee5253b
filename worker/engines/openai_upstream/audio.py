"""Requests for transcripts and speech, and their answers.

A transcript is one JSON object or text, a speech is bytes; both may come as events. Sources: API
reference, "Audio", and vLLM's speech-to-text API, whose streams have chunks of a completion.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
import orjson

from inference_site.core.domain.deltas import DataDelta, Finish, Usage
from inference_site.core.domain.errors import ConnectionLost, GenerationFailed
from inference_site.core.domain.request import GenerationRequest
from worker.engines.base import Sink
from worker.engines.openai_upstream.chunks import (
    CHARACTERS_PER_TOKEN,
    DONE,
    EventLines,
    NoEventStream,
    estimated_input,
)
from worker.engines.openai_upstream.client import MAX_ANSWER_BYTES
from worker.engines.openai_upstream.errors import UNREADABLE, ErrorReader
from worker.engines.openai_upstream.event_loop import Cancelled

_TOKENS_PER_SECOND = 10
"""Tokens of a second of sound: OpenAI's models count one for 100 ms. Source: "Realtime costs"."""
_LAST_EVENTS = ("transcript.text.done", "speech.audio.done")


class Form:
    """Makes the form of a request with a file, once for each attempt."""

    def __init__(self, request: GenerationRequest) -> None:
        assert request.audio is not None
        self._content = base64.b64decode(request.audio.content)
        self._name = f"audio.{request.audio.ending}"
        self._fields = {**request.fields, **({"stream": "true"} if request.streams else {})}

    def __call__(self, model: str) -> aiohttp.MultipartWriter:
        """Return the form for the model of this name."""
        form = aiohttp.MultipartWriter("form-data")
        for name, value in _entries({"model": model, **self._fields}):
            text = value if isinstance(value, str) else orjson.dumps(value).decode()
            form.append(text).set_content_disposition("form-data", name=name)
        part = form.append(self._content, {"Content-Type": "application/octet-stream"})
        part.set_content_disposition("form-data", name="file", filename=self._name)
        return form


def _entries(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a form: lists are ``name[]``, objects ``name[key]``."""
    for name, value in fields.items():
        match value:
            case list():
                yield from ((f"{name}[]", each) for each in value)
            case dict():
                yield from ((f"{name}[{key}]", each) for key, each in value.items())
            case _:
                yield name, value


def speaking_fields(request: GenerationRequest) -> dict[str, Any]:
    """Return the body of a request to say the prompt."""
    [text] = request.prompts
    stream_format = {"stream_format": "sse"} if request.streams else {}
    return {"input": text, **request.fields, **stream_format}


class AudioReader:
    """Reads the answer of one run into its sink (see ``client.AnswerReader``)."""

    def __init__(self, request: GenerationRequest, sink: Sink, errors: ErrorReader) -> None:
        self.request, self._sink, self._errors = request, sink, errors
        self.begun = False
        self._speaks = request.operation == "speak"
        self._usage: Usage | None = None
        self._reported: dict[str, Any] = {}  # The usage in tokens, as events have it.
        self.restart()

    @property
    def cancelled(self) -> bool:
        """Whether to stop reading: the run was cancelled, or its answer is complete."""
        return self._is_done or self._sink.cancelled

    @property
    def is_complete(self) -> bool:
        """Whether the last event has come. The end of bytes is that of the connection."""
        return self._is_done

    @property
    def lacks_usage(self) -> bool:
        """False: few servers report the tokens of sounds."""
        return False

    def restart(self) -> None:
        """Discard the state of a failed attempt."""
        self._lines, self._text = EventLines(), bytearray()
        self._size, self._is_done, self._has_chunks = 0, False, False

    def feed(self, data: bytes) -> None:
        """Take a piece of the answer. Raise Cancelled, or EngineError if it cannot be read."""
        if self._sink.cancelled:
            raise Cancelled
        self._size += len(data)
        if self._size > MAX_ANSWER_BYTES:
            raise GenerationFailed(
                f"The model's server sent an answer of more than {MAX_ANSWER_BYTES} bytes."
            )
        if not self.request.streams:
            if self._speaks:
                self._send(data)
            else:
                self._text += data
            return
        try:
            for event in self._lines.feed(data):
                self._take(event)
                if self._is_done:  # What follows is no part of the answer.
                    return
        except NoEventStream as exc:
            raise GenerationFailed(f"The model's server sent no events ({exc}).") from exc

    def whole(self, body: bytes) -> None:
        """Take a transcript as JSON; for a server that does not stream, also in place of events."""
        try:
            answer = orjson.loads(body)
            if error := answer.get("error"):
                raise self._errors.in_stream(error, self.request)
            if self._speaks:
                raise GenerationFailed("The model's server sent JSON instead of speech.")
            text = answer["text"]
            self._note_usage(answer, text)
        except UNREADABLE as exc:
            what = "speech" if self._speaks else "transcript"
            raise GenerationFailed(f"The model's server sent no {what}.") from exc
        form = self.request.fields.get("response_format", "json")
        if self.request.streams:
            self._send(_event("delta", delta=text))
            body = _event("done", text=text, **self._reported)
        elif form == "text":
            body = text.encode()
        elif not form.endswith("json"):
            raise GenerationFailed("The model's server sent JSON instead of subtitles.")
        self._send(body)
        self._finish()

    def end(self) -> None:
        """Take the end of the answer. Raise EngineError if it came too early."""
        if self._is_done:
            return
        if self.request.streams:
            self.feed(b"\n")  # The last line may have no line break.
            if not self._is_done:
                raise ConnectionLost("The model's server ended the stream before the answer.")
            return
        if not self._speaks:  # A transcript of the type ``text/plain``: words, or subtitles.
            try:
                self._text.decode()
            except UnicodeDecodeError as exc:
                raise GenerationFailed("The model's server sent no transcript.") from exc
            if self.request.fields.get("response_format", "json").endswith("json"):
                self.whole(bytes(self._text))  # Under another content type.
                return
            self._send(bytes(self._text))
        elif not self.begun:
            raise GenerationFailed("The model's server sent no speech.")
        self._finish()

    def account(self) -> None:
        """Feed the usage: what the server reports, else an estimate by the texts."""
        if self._usage is not None or self.begun:
            written = -(-len(self._text) // CHARACTERS_PER_TOKEN)
            estimate = Usage(estimated_input(self.request), output_tokens=written)
            self._sink.feed(self._usage or estimate)

    def _take(self, encoded: bytes) -> None:
        if self._is_done:
            return
        if encoded == DONE:
            if self._has_chunks:
                self._send(_event("done", text=self._text.decode(), **self._reported))
            if not self.begun:
                raise GenerationFailed("The model's server ended the stream without an answer.")
            self._finish()
            return
        try:
            event = orjson.loads(encoded)
            if error := event.get("error"):
                raise self._errors.in_stream(error, self.request)
            if choices := event.get("choices"):  # vLLM.
                self._has_chunks = True
                if text := str((choices[0].get("delta") or {}).get("content") or ""):
                    self._text += text.encode()
                    self._send(_event("delta", delta=text))
            kind = str(event.get("type", ""))
            if event.get("usage") or kind in _LAST_EVENTS:
                self._note_usage(event, str(event.get("text", "")))
        except UNREADABLE as exc:
            raise GenerationFailed("The model's server sent an event that cannot be read.") from exc
        if kind:
            self._send(encoded)
        if kind in _LAST_EVENTS:
            self._finish()

    def _note_usage(self, answer: dict[str, Any], text: str) -> None:
        """Take the usage of an answer or event. Raise TypeError or ValueError for malformed ones.

        Seconds, which Whisper models report, count as tokens of sound.
        """
        usage = answer.get("usage") or {}
        if "text" in answer:
            self._text = bytearray(text.encode())
        if (tokens := usage.get("input_tokens", usage.get("prompt_tokens"))) is not None:
            output = usage.get("output_tokens", usage.get("completion_tokens"))
            self._usage = used = Usage(int(tokens), output_tokens=int(output or 0)).bounded()
            counts = {"input_tokens": used.input_tokens, "output_tokens": used.output_tokens}
            counts["total_tokens"] = used.input_tokens + used.output_tokens
            self._reported = {"usage": {"type": "tokens", **counts}}
        elif seconds := usage.get("seconds", answer.get("duration")):
            written = -(-len(self._text) // CHARACTERS_PER_TOKEN)
            heard = round(float(seconds) * _TOKENS_PER_SECOND)
            self._usage = Usage(heard, output_tokens=written)

    def _send(self, data: bytes) -> None:
        if data:
            self.begun = True
            self._sink.feed(DataDelta(data))

    def _finish(self) -> None:
        self._is_done = True
        self._sink.feed(Finish("stop"))


def _event(name: str, **fields: Any) -> bytes:
    """Return an event of a transcript, as OpenAI's API has it."""
    return orjson.dumps({"type": f"transcript.text.{name}", **fields})
