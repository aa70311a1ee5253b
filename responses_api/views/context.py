"""Views that look at a context without answering it: how long it is, and what is left of it."""

from __future__ import annotations

import time
from functools import partial

from django.http import HttpResponse
from rest_framework.request import Request

from inference_site.api.authentication import caller_of
from inference_site.api.payload import parse
from inference_site.api.schema import documented
from inference_site.api.views import ApiView
from inference_site.generations.queue import new_id
from inference_site.request_fields.capabilities import require_fields
from inference_site.streams.request_documents import Assembly, Document
from inference_site.submission.context_bound import ContextBound
from inference_site.submission.model_access import served_model
from inference_site.submission.submit import Submission, respond
from responses_api.request.compaction import COMPACTION, CompactionAssembly, to_summary_request
from responses_api.request.counting import INPUT_TOKENS
from responses_api.request.mapping import to_counting_request
from responses_api.state.context import continued_by, resolve
from responses_api.state.history import Room
from responses_api.wire.request import CompactRequest, InputTokensRequest
from responses_api.wire.response import CompactedResponse, InputTokens


class ResponseInputTokensView(ApiView):
    """``POST /v1/responses/input_tokens``: counted by a worker of the model; nothing is stored."""

    @documented(body=InputTokensRequest, answer=InputTokens, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Count the tokens of an input."""
        body = parse(InputTokensRequest, request.data)
        caller = caller_of(request)
        continues = partial(continued_by, caller.project_id, body)
        model = served_model(caller, body.model, body, continues=continues)
        context = resolve(
            caller.project_id,
            body.input,
            body.previous_response_id,
            body.conversation_id,
            Room(ContextBound.of(model.spec)),
        )
        asked = to_counting_request(body, context.placed(), model, caller.project_id)
        submission = Submission(
            INPUT_TOKENS,
            new_id("tok-"),
            caller,
            Document(asked, Assembly()),
            ignored_params=body.ignored_params,
            subject="input",
        )
        return respond(request, submission)


class ResponseCompactView(ApiView):
    """``POST /v1/responses/compact``: what it answers can be the input of the next response."""

    @documented(body=CompactRequest, answer=CompactedResponse, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Compact a conversation."""
        body = parse(CompactRequest, request.data)
        caller = caller_of(request)
        continues = partial(continued_by, caller.project_id, body)
        model = served_model(caller, body.model, body, continues=continues)
        require_fields(model, "chat", body)
        room = Room(ContextBound.of(model.spec))
        context = resolve(caller.project_id, body.input, body.previous_response_id, None, room)
        items = [*context.before, *context.new]
        kept = [item.wire() for item in items if item.data.get("role") == "user"]
        assembly = CompactionAssembly(new_id("resp_"), int(time.time()), kept, caller.project_id)
        submission = Submission(
            COMPACTION,
            assembly.response_id,
            caller,
            Document(to_summary_request(body.instructions, items, model), assembly),
            ignored_params=body.ignored_params,
            subject="input",
        )
        return respond(request, submission)
