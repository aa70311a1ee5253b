"""Creates stored responses like the API, without a worker."""

from __future__ import annotations

from typing import Any

from django.utils import timezone

from inference_site.accounts.models import ApiKey
from inference_site.core.domain.deltas import Delta, Finish, TextDelta
from inference_site.core.domain.errors import GenerationFailed
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.gateway.submission.context_bound import ContextBound
from inference_site.runs.models import Generation, Status
from inference_site.runs.queue import new_id
from responses_api.context import HistoryLimit, resolve
from responses_api.models import StoredResponse
from responses_api.storage import accept, store_result
from responses_api.stored_responses import current_response, new_response
from responses_api.wire.requests import ResponseRequest
from tests.generations.rows import create_generation
from tests.responses_api.deltas import begun, new_assembler

STOP = Finish("stop")
LIMIT = HistoryLimit(ContextBound.of(ModelSpec("m", "scripted")))


class Chain:
    """Creates the responses of one key."""

    def __init__(self, api_key: ApiKey) -> None:
        self._api_key, self.project_id = api_key, api_key.project_id

    def accept(self, text: str | list[dict[str, str]], **fields: Any) -> StoredResponse:
        """An accepted response."""
        body = ResponseRequest.model_validate({"model": "m", "input": text, **fields})
        context = resolve(
            self.project_id, body.input, body.previous_response_id, body.conversation_id, LIMIT
        )
        response = new_response(
            body,
            response_id=new_id("resp_"),
            created_at=1_700_000_000,
            model="m",
            previous_response_id=context.previous_response_id,
            conversation_id=context.conversation.public_id if context.conversation else None,
            metadata=body.metadata or {},
        ).model_dump()
        accept(self.project_id, response, body, context)
        create_generation(
            self._api_key,
            public_id=response["id"],
            kind="response",
            background=bool(body.background),
        )
        return StoredResponse.objects.get(public_id=response["id"])

    def settle(
        self, stored: StoredResponse, *deltas: Delta, end: str = "complete"
    ) -> tuple[StoredResponse, list[bytes]]:
        """The ended response, and its stream."""
        assembler = new_assembler(
            current_response(stored).model_dump(),
            compacts_for=self.project_id,
        )
        frames = begun(assembler, deltas)
        match end:
            case "complete":
                ending, status = assembler.complete(), Status.COMPLETED
            case "cancel":
                ending, status = assembler.cancel(), Status.CANCELLED
            case _:
                ending, status = assembler.fail(GenerationFailed(end)), Status.FAILED
        end_generation(stored, status)
        store_result(stored.public_id, status, assembler, None)
        found = StoredResponse.objects.select_related("previous", "conversation")
        return found.get(pk=stored.pk), [*frames, *ending.frames]

    def turn(self, text: str, answer: str = "ok", **fields: Any) -> StoredResponse:
        """A completed response."""
        return self.settle(self.accept(text, **fields), TextDelta(answer), STOP)[0]


def end_generation(of: StoredResponse, status: Status) -> None:
    row = Generation.objects.filter(public_id=of.public_id)
    row.update(status=status, finished_at=timezone.now())
