"""From the wire to the domain."""

from __future__ import annotations

from completions.wire.chat import ChatCompletionRequest, Content, RequestMessage
from inference_site.http.errors import InvalidRequestError
from worker.engines.base import ModelSpec
from worker.generation import GenerationRequest, Message, Role, Sampling

_ROLES: dict[str, Role] = {"developer": "system"}


def to_generation_request(body: ChatCompletionRequest, spec: ModelSpec) -> GenerationRequest:
    """Return what the engine is asked. Raise InvalidRequestError for fields that contradict."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
        )
    return GenerationRequest(
        model=spec.id,
        messages=tuple(_message(message) for message in body.messages),
        sampling=Sampling(body.temperature, body.top_p, body.seed),
        max_output_tokens=_max_output_tokens(body),
        stop=_stop(body.stop),
        ignore_eos=bool(body.ignore_eos),
    )


def _max_output_tokens(body: ChatCompletionRequest) -> int | None:
    """The newer field wins when both are given."""
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return body.max_tokens


def _message(message: RequestMessage) -> Message:
    role = _ROLES.get(message.role) or message.role
    return Message(role, _text(message.content))  # type: ignore[arg-type]  # "developer" is mapped.


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
