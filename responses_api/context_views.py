"""Views that look at a context without answering it: how long it is, and what is left of it."""

from __future__ import annotations

import time

from django.http import HttpResponse
from rest_framework.request import Request

from inference_site.api.authentication import caller_of
from inference_site.api.payload import parse
from inference_site.api.schema import documented
from inference_site.api.views import ApiView
from inference_site.generations.queue import new_id
from inference_site.request_fields.capabilities import require_endpoint
from inference_site.submission.model_access import served_model
from inference_site.submission.submit import Job, submit
from responses_api.compaction import COMPACTION, to_summary_request
from responses_api.context import resolve
from responses_api.counting import INPUT_TOKENS
from responses_api.mapping import to_counting_request
from responses_api.wire.request import CompactRequest, InputTokensRequest
from responses_api.wire.response import CompactedResponse, InputTokens


class ResponseInputTokensView(ApiView):
    """``POST /v1/responses/input_tokens``: counted by a worker of the model; nothing is stored."""

    @documented(body=InputTokensRequest, answer=InputTokens, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Count the tokens of an input."""
        body = parse(InputTokensRequest, request.data)
        project_id = caller_of(request).project_id
        spec = served_model(caller_of(request), body.model)
        context = resolve(project_id, body.input, body.previous_response_id, body.conversation_id)
        asked = to_counting_request(body, context.placed(), spec, project_id)
        ignored = body.ignored_params
        job = Job(INPUT_TOKENS, new_id("tok-"), asked, {}, stream=False, ignored_params=ignored)
        return submit(request, job)


class ResponseCompactView(ApiView):
    """``POST /v1/responses/compact``: what it answers can be the input of the next response."""

    @documented(body=CompactRequest, answer=CompactedResponse, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Compact a conversation."""
        body = parse(CompactRequest, request.data)
        project_id = caller_of(request).project_id
        spec = served_model(caller_of(request), body.model)
        require_endpoint("chat", spec)
        context = resolve(project_id, body.input, body.previous_response_id, None)
        items = [*context.before, *context.new]
        kept = [item.wire() for item in items if item.data.get("role") == "user"]
        response_id = new_id("resp_")
        assembly = {
            "response_id": response_id,
            "created_at": int(time.time()),
            "kept": kept,
            "project_id": project_id,
        }
        job = Job(
            COMPACTION,
            response_id,
            to_summary_request(body.instructions, items, spec),
            assembly,
            stream=False,
            ignored_params=body.ignored_params,
        )
        return submit(request, job)
