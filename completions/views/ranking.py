"""Views that compare texts: ``POST /v1/rerank``, ``POST /v2/rerank`` and ``POST /v1/score``."""

from __future__ import annotations

import time

from django.http import HttpResponse
from rest_framework.request import Request

from completions.assemblers.ranking import RERANK, SCORE, RankingAssembly
from completions.wire.ranking import Ranking, RerankRequest, ScoreList, ScoreRequest
from inference_site.core.domain.request import GenerationRequest
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.payload import parse
from inference_site.gateway.api.schema import documented
from inference_site.gateway.api.views import ApiView
from inference_site.gateway.request_fields.capabilities import require_fields
from inference_site.gateway.submission.model_access import served_model
from inference_site.gateway.submission.submit import Submission, respond
from inference_site.runs.queue import new_id
from inference_site.runs.streams.request_documents import Document


class RerankView(ApiView):
    """``POST /v1/rerank`` as Jina and vLLM have it, and ``POST /v2/rerank`` as Cohere has it."""

    @documented(body=RerankRequest, answer=Ranking, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Order documents by how well they answer a query."""
        body = parse(RerankRequest, request.data)
        texts = body.texts
        assembly = RankingAssembly(
            new_id("rerank-"),
            body.model,
            top_n=body.top_n,
            documents=() if body.return_documents is False else texts,
        )
        return _compared(request, body, RERANK, (body.query,), texts, assembly)


class ScoreView(ApiView):
    """``POST /v1/score``, as vLLM has it."""

    @documented(body=ScoreRequest, answer=ScoreList, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Score pairs of texts."""
        body = parse(ScoreRequest, request.data)
        assembly = RankingAssembly(new_id("score-"), body.model, created=int(time.time()))
        return _compared(request, body, SCORE, body.firsts, body.seconds, assembly)


def _compared(
    request: Request,
    body: RerankRequest | ScoreRequest,
    kind: str,
    queries: tuple[str, ...],
    texts: tuple[str, ...],
    assembly: RankingAssembly,
) -> HttpResponse:
    caller = caller_of(request)
    model = served_model(caller, body.model, body)
    require_fields(model, "rerank", body)
    generation = GenerationRequest(model.spec.id, operation="rank", prompts=texts, queries=queries)
    submission = Submission(
        kind,
        assembly.id,
        caller,
        Document(generation, assembly),
        ignored_params=body.ignored_params,
        end_user=body.user or "",
    )
    return respond(request, submission)
