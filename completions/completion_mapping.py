"""From a completion on the wire to the domain."""

from __future__ import annotations

from completions.constraint import from_grammar
from completions.mapping import (
    require,
    require_stream_for_options,
    to_choices,
    to_sampling,
    to_stop,
)
from completions.wire.completion import CompletionRequest
from inference_site.http.errors import InvalidRequestError
from worker.engines.base import ModelSpec
from worker.generation import GenerationRequest

_DEFAULT_MAX_TOKENS = 16  # API reference, "Completions".


def to_completion_request(body: CompletionRequest, spec: ModelSpec) -> GenerationRequest:
    """Return what the engine is asked. Raise InvalidRequestError for what cannot be done."""
    require_stream_for_options(body)
    _refuse_unsupported(body, spec)
    if body.logprobs is not None:
        require("logprobs", "logprobs", spec)
    if body.grammar is not None:
        require("grammar", "grammar", spec)
    prompts = _prompts(body)
    choices = to_choices(body.n, spec)
    if len(prompts) * choices > 1:
        require("choices", "prompt", spec)
    return GenerationRequest(
        model=spec.id,
        prompts=prompts,
        sampling=to_sampling(body),
        max_output_tokens=body.max_tokens or _DEFAULT_MAX_TOKENS,
        stop=to_stop(body.stop),
        ignore_eos=bool(body.ignore_eos),
        choices=choices,
        top_logprobs=body.logprobs,
        constraint=None if body.grammar is None else from_grammar(body.grammar),
    )


def echoes(body: CompletionRequest, request: GenerationRequest) -> list[str]:
    """Return the text that each choice begins with: its prompt, or nothing."""
    texts = [prompt if body.echo and isinstance(prompt, str) else "" for prompt in request.prompts]
    return [text for text in texts for _ in range(request.choices)]


def _prompts(body: CompletionRequest) -> tuple[str | tuple[int, ...], ...]:
    match body.prompt:
        case str(text):
            return (text,)
        case [int(), *_] as tokens:
            return (tuple(tokens),)  # type: ignore[arg-type]  # Validated: all are token ids.
        case prompts:
            return tuple(p if isinstance(p, str) else tuple(p) for p in prompts)  # type: ignore[arg-type]  # As above.


def _refuse_unsupported(body: CompletionRequest, spec: ModelSpec) -> None:
    """Refuse what would otherwise be left out silently."""
    if body.suffix:
        require("suffix", "suffix", spec)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError(
            "Unsupported value: 'best_of' must equal 'n' here.",
            param="best_of",
            code="unsupported_value",
        )
    if body.echo and body.logprobs is not None:
        raise InvalidRequestError(
            "Unsupported parameter: 'echo' has no log probabilities here.",
            param="echo",
            code="unsupported_parameter",
        )
    if body.echo and not all(isinstance(prompt, str) for prompt in _prompts(body)):
        raise InvalidRequestError(
            "Unsupported parameter: 'echo' needs prompts that are text.",
            param="echo",
            code="unsupported_parameter",
        )
