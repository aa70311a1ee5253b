"""The view of llama-server's ``/infill``, which editors call."""

from __future__ import annotations

from dataclasses import replace

from django.http import HttpResponse
from rest_framework.request import Request

from completions.assemblers.infill import INFILL, InfillAssembly
from completions.completion_mapping import to_completion_request
from completions.wire.completion import CompletionRequest
from completions.wire.infill import Infill, InfillRequest
from inference_site.api.authentication import caller_of
from inference_site.api.payload import parse
from inference_site.api.schema import documented
from inference_site.api.views import ApiView
from inference_site.generations.queue import new_id
from inference_site.request_fields.capabilities import ignored_fields
from inference_site.streams.request_documents import Document
from inference_site.submission.model_access import served_model
from inference_site.submission.submit import Submission, respond


class InfillView(ApiView):
    """``POST /infill``."""

    @documented(body=InfillRequest, answer=Infill, event=Infill, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Fill in between a prefix and a suffix; without ``model``, the site's default does it."""
        body = parse(InfillRequest, request.data)
        caller = caller_of(request)
        model = served_model(caller, body.model, body)
        official = {**body.to_completion(), "model": model.spec.id}
        completion = parse(CompletionRequest, official)
        asked = to_completion_request(completion, model)
        if completion.max_tokens is None:
            asked = replace(asked, max_output_tokens=None)
        stream = bool(body.stream)
        submission = Submission(
            INFILL,
            new_id("infill-"),
            caller,
            Document(asked, InfillAssembly(model.spec.id, stream)),
            stream=stream,
            ignored_params=[*body.ignored_params, *ignored_fields(model, completion, asked)],
        )
        return respond(request, submission)
