"""The messages of a WebSocket: what a client may send, and what an event or error becomes."""

from __future__ import annotations

from typing import Any

import orjson

from inference_site.api.json_bodies import decode_json
from inference_site.api.payload import parse
from inference_site.errors.api_errors import ApiError, InvalidRequestError
from responses_api.output.events import payload
from responses_api.wire.request import ResponseRequest

_ENVELOPE = ("type", "stream", "stream_options", "stream_id")


def decoded(message: str | bytes) -> dict[str, Any]:
    """Return a message. Raise InvalidRequestError for what is no JSON object.

    The server takes no message that is larger than a body may be.
    """
    try:
        decoded = decode_json(message.encode() if isinstance(message, str) else message)
    except InvalidRequestError as exc:
        raise InvalidRequestError(exc.message, code="invalid_json") from exc
    if not isinstance(decoded, dict):
        raise InvalidRequestError("The message must be a JSON object.", code="invalid_json")
    return decoded


def to_request(message: dict[str, Any]) -> ResponseRequest:
    """Return the request of a message; it is always streamed."""
    fields = {name: value for name, value in message.items() if name not in _ENVELOPE}
    if fields.pop("background", None):
        raise InvalidRequestError(
            "Invalid 'background': it cannot be used over a WebSocket.", param="background"
        )
    return parse(ResponseRequest, {**fields, "stream": True})


def event_message(frame: bytes, stream_id: object) -> str:
    """Return the message of an event, with the ``stream_id`` of its request if that has one."""
    event = payload(frame)
    if stream_id is not None:
        event = event[:-1] + b',"stream_id":' + orjson.dumps(stream_id) + b"}"
    return event.decode()


def error_message(error: ApiError, stream_id: object = None) -> str:
    """Return the message of an error."""
    detail = {**error.envelope["error"], "code": error.code or error.type}
    event: dict[str, Any] = {"type": "error", "status": error.status, "error": detail}
    if stream_id is not None:
        event["stream_id"] = stream_id
    return orjson.dumps(event).decode()
