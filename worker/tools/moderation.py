"""The tool ``moderation``: what a moderation model says of a text of a request or of its answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import django.db
import orjson
import redis.exceptions

from inference_site.core.domain.errors import EngineError
from inference_site.core.domain.request import GenerationRequest
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.runs.inner_runs import NoBudget, NotPossible, run_and_wait
from inference_site.runs.kinds import kind_of
from inference_site.runs.models import Generation
from inference_site.runs.queue import new_id
from inference_site.runs.streams.request_documents import Document
from worker.tools.base import CallContext, ToolCancelled, ToolResult

logger = logging.getLogger(__name__)

_KIND = "moderation"


def create(options: Mapping[str, Any]) -> Moderation:
    """Return the tool with the options of ``gateway.request_fields.moderation``."""
    return Moderation(options["model"], options["guard"], options["top_logprobs"])


@dataclass(frozen=True, slots=True)
class Moderation:
    """See ``SiteTool``. The result of a call has ``result`` or ``error`` in its ``fields``."""

    model: str
    guard: str
    top_logprobs: int | None

    def is_idempotent(self, name: str) -> bool:
        """Judging a text again changes nothing."""
        return True

    def call(self, name: str, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        """Judge the argument ``text`` (see ``SiteTool.call``)."""
        try:
            return self._judged(str(arguments["text"]), context)
        except TimeoutError:
            if context.is_cancelled():
                raise ToolCancelled from None
            return _error("timeout", "The moderation model has not answered in time.")
        except (NoBudget, NotPossible) as exc:
            return _error("server_error", str(exc))
        except (EngineError, django.db.Error, redis.exceptions.RedisError) as exc:
            logger.warning("moderation: %s", exc)
            return _error("server_error", "The moderation model cannot be asked now.")

    def _judged(self, text: str, context: CallContext) -> ToolResult:
        with release_connection_after():
            payer = Generation.objects.get(public_id=context.generation_id)
        if payer.api_key_id is None:
            raise NotPossible("The API key does not exist any more.")
        id_ = new_id("modr-")
        request = GenerationRequest(
            self.model,
            operation="moderate",
            prompts=(text,),
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
        )
        if ending.error_code or not ending.body:
            code = ending.error_code or "server_error"
            return _error(code, f"The moderation model could not judge the text: {code}.")
        [result] = orjson.loads(ending.body)["results"]
        return ToolResult("flagged" if result["flagged"] else "passed", {"result": result})


def _error(code: str, message: str) -> ToolResult:
    return ToolResult(message, {"error": {"code": code, "message": message}}, is_error=True)
