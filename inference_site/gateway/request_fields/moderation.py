"""``moderation`` of requests: a moderation model judges the input and the answer.

Source: API reference, "Responses" and "Chat", ``moderation``. The worker asks the model
(``worker.tools.moderation``): the input before the first turn of the answering model, the answer
after the last one. With the mode ``block``, what is flagged, or could not be judged, ends the
answer, and no text of the answer is sent before it was judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import orjson

from inference_site.core.domain.request import FilePart, GenerationRequest, ImagePart, Message
from inference_site.core.domain.site_tools import SiteCall, ToolResult
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.payload import WireObject, WireRequest

if TYPE_CHECKING:  # Workers import this module, and nothing of the submission.
    from inference_site.gateway.submission.model_access import ResolvedModel

MODERATION = "moderation"
"""The type of the options, and the function that judges."""
_TOP_LOGPROBS = 5
"""The likeliest tokens among which the verdicts of a guard are."""
_FIRST_NUMBER = 1_000_000
"""The number of the call that judges the input; the calls of tools are counted from 0."""


class ModerationConfig(WireRequest):
    """``moderation.policy.input`` and ``output``."""

    mode: Literal["score", "block"]


class ModerationPolicy(WireRequest):
    """``moderation.policy``; what is not named is scored."""

    input: ModerationConfig | None = None
    output: ModerationConfig | None = None


class ModerationParam(WireRequest):
    """``moderation`` of a request."""

    model: str
    policy: ModerationPolicy | None = None

    def blocks(self) -> list[str]:
        """Return which of ``input`` and ``output`` end the answer when they are flagged."""
        policy = self.policy or ModerationPolicy()
        named = {"input": policy.input, "output": policy.output}
        return [name for name, given in named.items() if given and given.mode == "block"]


class ModerationResultBody(WireObject):
    """The result for a text. The categories are those of the model."""

    type: Literal["moderation_result"] = "moderation_result"
    model: str
    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[Literal["text", "image"]]]


class ModerationErrorBody(WireObject):
    """Why there is no result."""

    type: Literal["error"] = "error"
    code: str
    message: str


Judged = ModerationResultBody | ModerationErrorBody


def guard_fields(model: ResolvedModel) -> dict[str, Any]:
    """Return how a moderation model is asked; a guard is asked in chats."""
    guard = str(model.spec.options.get("guard") or "")
    has_logprobs = bool(guard) and "logprobs" in model.capabilities
    return {"guard": guard, "top_logprobs": _TOP_LOGPROBS if has_logprobs else None}


def moderation_options(
    asked: ModerationParam | None, model: ResolvedModel | None, request: GenerationRequest
) -> list[dict[str, Any]]:
    """Return the options for the worker and for ``AnswerModeration``; empty without moderation.

    The input is what came since the last answer: its text, and the place of its images. ``model``
    is None if the catalogue does not have it any more. Raise InvalidRequestError for images that
    would pass unjudged.
    """
    if asked is None:
        return []
    new: list[Message] = []
    for message in reversed(request.messages):
        if message.role == "assistant":
            break
        new.insert(0, message)
    judged = [message for message in new if message.role != "system"]
    fields = {"guard": "", "top_logprobs": None} if model is None else guard_fields(model)
    sees = model is not None and "vision" in model.capabilities
    return [
        {
            "type": MODERATION,
            "model": asked.model if model is None else model.spec.id,
            "shown_model": asked.model,
            "input": "\n".join(message.all_text for message in judged),
            "judged_messages": len(new) if _has_judged_media(asked, model, judged) else 0,
            "sees_images": sees,
            "blocks": asked.blocks(),
            **fields,
        }
    ]


def _has_judged_media(
    asked: ModerationParam, model: ResolvedModel | None, judged: Sequence[Message]
) -> bool:
    """Whether the worker looks for images to judge in these messages; files may be images.

    Raise InvalidRequestError for images that may not pass unjudged, if the model sees none.
    """
    media = [part for message in judged for part in message.parts]
    media = [part for part in media if isinstance(part, ImagePart | FilePart)]
    if model is None or "vision" in model.capabilities or not media:
        return bool(media)
    if "input" not in asked.blocks():
        return False
    if any(isinstance(part, ImagePart) for part in media):
        param = "moderation.model"
        raise InvalidRequestError(
            f"Invalid '{param}': the model `{model.spec.id}` sees no images, and with the mode "
            "'block' of 'moderation.policy.input' images must be judged.",
            param=param,
        )
    return True


class AnswerModeration:
    """The moderation of one answer: which call of the site judges next, and what was judged."""

    def __init__(self, options: Mapping[str, Any], place: int) -> None:
        self._model, self._input = options["shown_model"], options["input"]
        self._blocks, self._place = options["blocks"], place
        self._has_images = bool(options.get("judged_messages"))
        self.judged: dict[str, list[Judged]] = {}

    @classmethod
    def of(cls, site_tools: Sequence[Mapping[str, Any]]) -> AnswerModeration | None:
        """Return the moderation that the options of the site's tools contain, if any."""
        for place, options in enumerate(site_tools):
            if options["type"] == MODERATION:
                return cls(options, place)
        return None

    @property
    def is_blocked(self) -> bool:
        """Whether the answer ends because of what was judged, or could not be judged."""
        return any(
            name in self._blocks and (isinstance(one, ModerationErrorBody) or one.flagged)
            for name, judged in self.judged.items()
            for one in judged
        )

    def withholds(self, answers: int = 1) -> bool:
        """Whether no text of the answers may be sent: some were not judged, or one is blocked."""
        is_judged = len(self.judged.get("output", ())) == answers
        return "output" in self._blocks and (self.is_blocked or not is_judged)

    def input_calls(self) -> list[SiteCall]:
        """Return the call that judges the input, unless it was judged."""
        if "input" in self.judged:
            return []
        with_images = {"with_images": True} if self._has_images else {}
        return [self._call(_FIRST_NUMBER, self._input, **with_images)]

    def output_calls(self, texts: Sequence[str]) -> list[SiteCall]:
        """Return the calls that judge the answers that were not judged yet."""
        done = len(self.judged.get("output", ()))
        numbered = list(enumerate(texts, _FIRST_NUMBER + 1))[done:]
        return [self._call(number, text) for number, text in numbered]

    def _call(self, number: int, text: str, **more: bool) -> SiteCall:
        arguments = orjson.dumps({"text": text, **more}).decode()
        return SiteCall(number, self._place, MODERATION, arguments)

    def take(self, result: ToolResult) -> None:
        """Take the result of the next call, first that of the input."""
        judged: Judged
        if (found := result.fields.get("result")) is not None:
            judged = ModerationResultBody(model=self._model, **found)
        else:
            error = result.fields.get("error") or {"code": "server_error", "message": result.output}
            judged = ModerationErrorBody(**error)
        name = "output" if "input" in self.judged else "input"
        self.judged.setdefault(name, []).append(judged)

    def shown(self, name: str) -> list[Judged]:
        """Return the results for the input or the answers; an error if it was not judged."""
        message = f"The {name} was not judged: the answer ended first."
        return self.judged.get(name) or [ModerationErrorBody(code="not_judged", message=message)]
