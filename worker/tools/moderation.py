"""The tool ``moderation``: what a moderation model says of a request or of its answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import django.db
import orjson
import redis.exceptions

from inference_site.core.domain.errors import EngineError
from inference_site.core.domain.request import GenerationRequest, ImagePart, Message, TextPart
from inference_site.core.domain.site_tools import ToolResult
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.runs.inner_runs import NoBudget, NotPossible, run_and_wait
from inference_site.runs.kinds import kind_of
from inference_site.runs.models import Generation
from inference_site.runs.queue import new_id
from inference_site.runs.streams.request_documents import Document
from worker.tools.base import CallContext, ToolCancelled

logger = logging.getLogger(__name__)

_KIND = "moderation"


def create(options: Mapping[str, Any]) -> Moderation:
    """Return the tool with the options of ``gateway.request_fields.moderation``.

    The run has put the ``images`` of the input there (``worker.media``).
    """
    return Moderation(
        options["model"],
        options["guard"],
        options["top_logprobs"],
        options["shown_model"],
        tuple(options.get("images", ())),
        sees_images=options.get("sees_images", False),
    )


@dataclass(frozen=True, slots=True)
class Moderation:
    """See ``SiteTool``. The result of a call has ``result`` or ``error`` in its ``fields``.

    ``shown_model`` is the name by which the request chose it, which may be that of a route.
    ``images`` are those of the input. They must not pass if the model does not see images.
    """

    model: str
    guard: str
    top_logprobs: int | None
    shown_model: str
    images: tuple[ImagePart, ...] = ()
    sees_images: bool = False

    def is_idempotent(self, name: str) -> bool:
        """Judging a text again changes nothing."""
        return True

    def call(self, name: str, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        """Judge the argument ``text``, perhaps with the images (see ``SiteTool.call``)."""
        images = self.images if arguments.get("with_images") else ()
        if images and not self.sees_images:
            return _error("image_not_judged", "The moderation model sees no images.")
        try:
            return self._judged(str(arguments["text"]), images, context)
        except TimeoutError:
            if context.is_cancelled():
                raise ToolCancelled from None
            return _error("timeout", "The moderation model has not answered in time.")
        except (NoBudget, NotPossible) as exc:
            return _error("server_error", str(exc))
        except (EngineError, django.db.Error, redis.exceptions.RedisError) as exc:
            logger.warning("moderation: %s", exc)
            return _error("server_error", "The moderation model cannot be asked now.")

    def _judged(self, text: str, images: tuple[ImagePart, ...], context: CallContext) -> ToolResult:
        with release_connection_after():
            payer = Generation.objects.get(public_id=context.generation_id)
        if payer.api_key_id is None:
            raise NotPossible("The API key does not exist any more.")
        id_ = new_id("modr-")
        said = (TextPart(text),) if text else ()
        request = GenerationRequest(
            self.model,
            operation="moderate",
            messages=(Message("user", None, parts=(*said, *images)),) if images else (),
            prompts=() if images else (text,),
            guard=self.guard,
            top_logprobs=self.top_logprobs,
        )
        ending = run_and_wait(
            id_,
            _KIND,
            Document(request, kind_of(_KIND).assembly(id_, self.model)),
            payer.api_key_id,
            size_bytes=len(text.encode()),
            timeout_s=context.timeout_s,
            is_cancelled=context.is_cancelled,
            request_id=payer.request_id,
            end_user=payer.end_user,
            tags=payer.tags,
            route=self.shown_model,
        )
        if ending.error_code or not ending.body:
            code = ending.error_code or "server_error"
            return _error(code, f"The moderation model could not judge the text: {code}.")
        [result] = orjson.loads(ending.body)["results"]
        return ToolResult("flagged" if result["flagged"] else "passed", {"result": result})


def _error(code: str, message: str) -> ToolResult:
    return ToolResult(message, {"error": {"code": code, "message": message}}, is_error=True)
