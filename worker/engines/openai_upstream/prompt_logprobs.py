"""Log probabilities of a prompt's tokens, as vLLM tells them: never in a stream.

So they are asked for before the answer, with a request that generates one token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inference_site.domain.deltas import PromptTokens, RankedLogprob
from inference_site.domain.errors import GenerationFailed
from inference_site.domain.request import GenerationRequest
from worker.engines.base import Sink
from worker.engines.openai_upstream.client import Upstream

_UNREADABLE = (AttributeError, LookupError, TypeError, ValueError)
_OF_STREAMS = ("stream", "stream_options", "echo", "logprobs", "top_logprobs", "logprob_token_ids")


async def feed_prompt_logprobs(
    upstream: Upstream,
    path: str,
    payload: Mapping[str, Any],
    request: GenerationRequest,
    sink: Sink,
) -> None:
    """Feed the tokens of each prompt to each of its choices. Raise Cancelled or EngineError."""
    kept = {name: value for name, value in payload.items() if name not in _OF_STREAMS}
    asked = {**kept, "n": 1, "max_tokens": 1, "min_tokens": 0, "return_token_ids": True}
    asked["prompt_logprobs"] = request.prompt_logprobs
    answer = await upstream.post(lambda at: f"{at.base_url}{path}", asked, request, sink)
    # Of a chat they are those of the whole answer, of completions those of each choice.
    told = [answer] if request.operation == "chat" else answer.get("choices")
    try:
        for number, one in enumerate(told or ()):
            ids = tuple(one["prompt_token_ids"])
            ranked = tuple(_ranked(entry) for entry in one["prompt_logprobs"])
            for index in range(number * request.choices, (number + 1) * request.choices):
                sink.feed(PromptTokens(ids, index, ranked))
    except _UNREADABLE as exc:
        raise GenerationFailed("The model's server sent no log probabilities.") from exc


def _ranked(entry: dict[str, Any] | None) -> dict[int, RankedLogprob] | None:
    if entry is None:
        return None
    return {
        int(token): RankedLogprob(one["logprob"], one.get("rank"), one.get("decoded_token") or "")
        for token, one in entry.items()
    }
