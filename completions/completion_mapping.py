"""From a completion on the wire to the domain."""

from __future__ import annotations

from dataclasses import replace

from completions.wire.completion import CompletionRequest, Prompt
from inference_site.domain.request import GenerationRequest
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.request_fields.capabilities import require_endpoint, require_fields
from inference_site.request_fields.constraint import response_format_constraint, to_constraint
from inference_site.request_fields.mapping import (
    require_stream_for_options,
    to_choices,
    to_sampled_request,
    to_stop,
    with_token_report,
)
from inference_site.submission.model_access import ResolvedModel

_DEFAULT_MAX_TOKENS = 16  # API reference, "Completions".


def to_completion_request(body: CompletionRequest, model: ResolvedModel) -> GenerationRequest:
    """Return what the engine is asked. Raise InvalidRequestError for what cannot be done.

    With ``best_of`` the engine gives as many choices; the assembler picks the ``n`` best.
    """
    require_stream_for_options(body.stream_options, body.stream)
    require_endpoint(model, "completions")
    prompts = to_prompts(body.prompt)
    _refuse_contradictions(body, prompts)
    require_fields(model, "completions", body)
    asked = replace(
        to_sampled_request(body, model.spec),
        operation="complete",
        prompts=prompts,
        suffix=body.suffix,
        max_output_tokens=_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        stop=to_stop(body.stop),
        choices=to_choices(
            body.best_of or body.n, model.spec, "n" if body.best_of is None else "best_of"
        ),
        top_logprobs=0 if body.picks and body.logprobs is None else body.logprobs,
        constraint=to_constraint(body, response_format_constraint(body.response_format)),
        echo=body.reads_prompt,
        running_usage=bool(body.stream_options and body.stream_options.continuous_usage),
    )
    return with_token_report(asked, body, stream=bool(body.stream))


def echoes(body: CompletionRequest, request: GenerationRequest) -> list[str]:
    """Return the text that each choice begins with: its prompt, or nothing.

    Where the engine tells the prompt, it is a part of the answer.
    """
    repeats = bool(body.echo) and not request.echo
    texts = [p if repeats and isinstance(p, str) else "" for p in request.prompts]
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


def _refuse_contradictions(
    body: CompletionRequest, prompts: tuple[str | tuple[int, ...], ...]
) -> None:
    """Refuse what would otherwise be left out silently."""
    are_texts = all(isinstance(prompt, str) for prompt in prompts)
    refusals = {
        "best_of": {
            "it must not be less than 'n'": (body.best_of or 8) < (body.n or 1),
            "it cannot be streamed": bool(body.stream) and body.picks,
            "it cannot be used together with 'echo' and 'logprobs'": body.picks
            and body.reads_prompt,
        },
        "max_tokens": {"0 needs 'echo'": body.max_tokens == 0 and not body.echo},
        "suffix": {
            "it needs prompts that are text": body.suffix is not None and not are_texts,
            "it cannot be used together with 'echo'": body.suffix is not None and bool(body.echo),
        },
    }
    for param, reasons in refusals.items():
        for reason, is_so in reasons.items():
            if is_so:
                raise InvalidRequestError(f"Invalid '{param}': {reason}.", param=param)
