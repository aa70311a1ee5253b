"""From a completion on the wire to the domain."""

from __future__ import annotations

from completions.mapping import require_stream_for_options
from completions.wire.completion import CompletionRequest, Prompt
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.request_fields.capabilities import require, require_endpoint
from inference_site.request_fields.constraint import from_grammar
from inference_site.request_fields.sampling import common_fields, to_choices, to_stop

_DEFAULT_MAX_TOKENS = 16  # API reference, "Completions".


def to_completion_request(body: CompletionRequest, spec: ModelSpec) -> GenerationRequest:
    """Return what the engine is asked. Raise InvalidRequestError for what cannot be done.

    With ``best_of`` the engine gives as many choices; the assembler picks the ``n`` best.
    """
    require_stream_for_options(body)
    require_endpoint("completions", spec)
    prompts = to_prompts(body.prompt)
    _refuse_contradictions(body, prompts)
    _require_all(body, spec)
    param = "n" if body.best_of is None else "best_of"
    choices = to_choices(body.best_of or body.n, spec, param)
    if len(prompts) * choices > 1:
        require("choices", "prompt", spec)
    return GenerationRequest(
        **common_fields(body, spec),
        operation="complete",
        prompts=prompts,
        suffix=body.suffix,
        max_output_tokens=body.max_tokens or _DEFAULT_MAX_TOKENS,
        stop=to_stop(body.stop),
        choices=choices,
        top_logprobs=0 if picks(body) and body.logprobs is None else body.logprobs,
        constraint=None if body.grammar is None else from_grammar(body.grammar),
    )


def picks(body: CompletionRequest) -> bool:
    """Whether only some of the choices are to be returned."""
    return body.best_of is not None and body.best_of > (body.n or 1)


def echoes(body: CompletionRequest, request: GenerationRequest) -> list[str]:
    """Return the text that each choice begins with: its prompt, or nothing."""
    texts = [prompt if body.echo and isinstance(prompt, str) else "" for prompt in request.prompts]
    return [text for text in texts for _ in range(request.choices)]


def to_prompts(prompt: Prompt) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts, each of which is text or token ids."""
    match prompt:
        case str(text):
            return (text,)
        case [int(), *_] as tokens:
            return (tuple(tokens),)  # type: ignore[arg-type]  # Validated: all are token ids.
        case prompts:
            return tuple(p if isinstance(p, str) else tuple(p) for p in prompts)  # type: ignore[arg-type]  # As above.


def _require_all(body: CompletionRequest, spec: ModelSpec) -> None:
    needs = {
        "logprobs": ("logprobs", body.logprobs is not None),
        "best_of": ("logprobs", picks(body)),
        "grammar": ("grammar", body.grammar is not None),
        "suffix": ("suffix", body.suffix is not None),
    }
    for param, (capability, is_needed) in needs.items():
        if is_needed:
            require(capability, param, spec)


def _refuse_contradictions(
    body: CompletionRequest, prompts: tuple[str | tuple[int, ...], ...]
) -> None:
    """Refuse what would otherwise be left out silently."""
    are_texts = all(isinstance(prompt, str) for prompt in prompts)
    refusals = {
        "best_of": {
            "it must not be less than 'n'": (body.best_of or 8) < (body.n or 1),
            "it cannot be streamed": bool(body.stream) and picks(body),
        },
        "echo": {
            "it has no log probabilities here": bool(body.echo) and body.logprobs is not None,
            "it needs prompts that are text": bool(body.echo) and not are_texts,
        },
        "suffix": {
            "it needs prompts that are text": body.suffix is not None and not are_texts,
            "it cannot be used together with 'echo'": body.suffix is not None and bool(body.echo),
        },
    }
    for param, reasons in refusals.items():
        for reason, is_so in reasons.items():
            if is_so:
                raise InvalidRequestError(f"Invalid '{param}': {reason}.", param=param)
