"""Which model of a route a request goes to.

It is decided once, when the request is admitted, from what is known then: which workers serve, how
long the queues are, and about how long the prompt is. What is queued stays with its model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inference_site.accounts.keys import Caller
from inference_site.api.payload import WireRequest
from inference_site.catalogue.routes import Route, Target
from inference_site.domain.model_spec import ModelSpec
from inference_site.fleet.leases import live_view
from inference_site.generations.models import Generation, ServiceClass
from inference_site.generations.queue_position import position_of, queue_counts

BYTES_PER_TOKEN = 3
"""The web process has no tokenizer. Rather too many tokens than too few: the prompt must fit."""
_KEYS = ("conversation_id", "prompt_cache_key", "safety_identifier", "user")
_PROMPT = {"messages", "instructions", "input", "prompt", "suffix", "tools"}
_MAY_CUT = ("truncate_sequence", "truncation")
_NO_TEXT = frozenset({"data", "encrypted_content", "file_data", "image_url"})


@dataclass(frozen=True, slots=True)
class Asked:
    """What a route heeds of a request.

    ``key`` is what requests of one conversation have in common. ``earlier`` is the model that
    answered the turn before. ``tokens`` are about those of its prompt, 0 if that may be cut to fit.
    """

    key: str = ""
    earlier: str = ""
    tokens: int = 0
    service_class: ServiceClass = ServiceClass.FOREGROUND


def asked_of(
    caller: Caller, body: WireRequest | None, continues: str, *, background: bool = False
) -> Asked:
    """Return what a route heeds of this request, which has the context of another generation."""
    if body is None:
        return Asked()
    keys = (getattr(body, name, None) for name in _KEYS)
    may_cut = any(getattr(body, name, None) in (True, "auto") for name in _MAY_CUT)
    is_late = background or getattr(body, "service_tier", None) == "flex"
    earlier, before = _before(caller, continues)
    new = _tokens_of(body.model_dump(include=_PROMPT, exclude_unset=True))
    return Asked(
        next((str(key) for key in keys if key), ""),
        earlier,
        0 if may_cut else before + new,
        ServiceClass.BACKGROUND if is_late else ServiceClass.FOREGROUND,
    )


def _tokens_of(parts: dict[str, Any]) -> int:
    """Return about how many tokens there are in a prompt, and of several in the longest."""
    total = 0
    for value in parts.values():
        match value:
            case [str() | list(), *_]:
                total += max(map(_tokens_in, value))
            case _:
                total += _tokens_in(value)
    return total


def _tokens_in(value: Any) -> int:
    size, tokens, left = 0, 0, [value]
    while left:
        match left.pop():
            case str(text):
                size += 0 if text.startswith("data:") else len(text.encode())
            case bool():
                pass
            case int():
                tokens += 1  # A token's id.
            case list(items):
                left.extend(items)
            case dict(fields):
                left.extend(held for name, held in fields.items() if name not in _NO_TEXT)
            case _:
                pass
    return tokens + -(-size // BYTES_PER_TOKEN)


def ranked(candidates: list[Target], route: Route, caller: Caller, asked: Asked) -> list[ModelSpec]:
    """Return the models that may answer, best first, and else in the order of the candidates.

    One that a worker serves goes before one without, then one whose context has room, then one
    whose queue is not too long. If a prompt is too long for all, the longest context has room. When
    one has all of this, it is the only one.
    """
    needed = min(asked.tokens, max(one.context_length for one in candidates))

    def demerits(one: Target) -> tuple[bool, bool, bool]:
        is_down = not live_view.serving_now(one.spec.id)
        is_crowded = not is_down and _is_crowded(one.spec.id, route, caller, asked)
        return is_down, one.context_length < needed, is_crowded

    known = []
    for one in candidates:
        found = demerits(one)
        if not any(found):
            return [one.spec]
        known.append((found, one.spec))
    return [spec for _, spec in sorted(known, key=lambda pair: pair[0])]


def _before(caller: Caller, continues: str) -> tuple[str, int]:
    """Return the model of the generation before, and the tokens of its prompt and answer."""
    if not continues:
        return "", 0
    rows = Generation.objects.filter(public_id=continues, project_id=caller.project_id)
    model, read, written = rows.values_list("model", "input_tokens", "output_tokens").first() or (
        *("", 0, 0),
    )
    return model, (read or 0) + (written or 0)


def _is_crowded(model: str, route: Route, caller: Caller, asked: Asked) -> bool:
    """Whether one more would find the queue full, or longer than the route allows."""
    parts = queue_counts.of(model).parts(caller.project_id, asked.service_class)
    if any(part.refusal for part in parts):
        return True
    if route.max_queue_s is None:
        return False
    wait_s = position_of(model, caller.project_id, asked.service_class).wait_s
    return wait_s is not None and wait_s > route.max_queue_s
