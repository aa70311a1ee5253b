"""Views of scores: ``POST /v1/rerank``, ``/v2/rerank``, ``/v1/score`` and ``/v1/moderations``."""

from __future__ import annotations

import time

from django.http import HttpResponse
from rest_framework.request import Request

from completions.assemblers.scores import (
    MODERATION,
    RERANK,
    SCORE,
    ModerationAssembly,
    RankingAssembly,
)
from completions.wire.scores import (
    ModerationList,
    ModerationRequest,
    Ranking,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from inference_site.accounts.keys import Caller
from inference_site.core.domain.request import GenerationRequest, Message, Part
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.payload import parse
from inference_site.gateway.api.schema import documented
from inference_site.gateway.api.views import ApiView
from inference_site.gateway.request_fields.capabilities import require_fields, require_media
from inference_site.gateway.request_fields.mapping import join_parts, to_part
from inference_site.gateway.request_fields.moderation import guard_fields
from inference_site.gateway.submission.model_access import ResolvedModel, served_model
from inference_site.gateway.submission.submit import Submission, respond
from inference_site.runs.queue import new_id
from inference_site.runs.streams.request_documents import Document


class RerankView(ApiView):
    """``POST /v1/rerank`` as Jina and vLLM have it, and ``POST /v2/rerank`` as Cohere has it."""

    @documented(body=RerankRequest, answer=Ranking, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Order documents by how well they answer a query."""
        body = parse(RerankRequest, request.data)
        model, texts = served_model(caller_of(request), body.model, body), body.texts
        assembly = RankingAssembly(
            new_id("rerank-"),
            model.name_in_answer(body.model),
            top_n=body.top_n,
            documents=() if body.return_documents is False else texts,
            subject=_longer(query=(body.query,), documents=texts),
        )
        return _rank(request, body, model, RERANK, (body.query,), texts, assembly)


class ScoreView(ApiView):
    """``POST /v1/score``, as vLLM has it."""

    @documented(body=ScoreRequest, answer=ScoreList, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Score pairs of texts."""
        body = parse(ScoreRequest, request.data)
        model = served_model(caller_of(request), body.model, body)
        shown_name = model.name_in_answer(body.model)
        assembly = RankingAssembly(
            new_id("score-"),
            shown_name,
            created=int(time.time()),
            subject=_longer(text_1=body.firsts, text_2=body.seconds),
        )
        return _rank(request, body, model, SCORE, body.firsts, body.seconds, assembly)


def _longer(**fields: tuple[str, ...]) -> str:
    """Return the field with the longest text: errors of a pair that is too long name it."""
    return max(fields, key=lambda field: max(map(len, fields[field])))


def _rank(
    request: Request,
    body: RerankRequest | ScoreRequest,
    model: ResolvedModel,
    kind: str,
    queries: tuple[str, ...],
    texts: tuple[str, ...],
    assembly: RankingAssembly,
) -> HttpResponse:
    require_fields(model, "rerank", body)
    generation = GenerationRequest(model.spec.id, operation="rank", prompts=texts, queries=queries)
    submission = Submission(
        kind,
        assembly.id,
        caller_of(request),
        Document(generation, assembly),
        ignored_params=body.ignored_params,
        end_user=body.user or "",
        subject=assembly.subject,
    )
    return respond(request, submission)


class ModerationsView(ApiView):
    """``POST /v1/moderations``."""

    @documented(body=ModerationRequest, answer=ModerationList, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Say whether texts or images are harmful."""
        body = parse(ModerationRequest, request.data)
        return respond(request, moderation_submission(caller_of(request), body))


def moderation_submission(caller: Caller, body: ModerationRequest) -> Submission:
    """Return the submission of a moderation. Raise ApiError."""
    model = served_model(caller, body.model, body)
    require_fields(model, "moderation", body)
    prompts, messages = to_inputs(body)
    require_media(model, messages)
    generation = GenerationRequest(
        model.spec.id,
        messages,
        operation="moderate",
        prompts=prompts,
        **guard_fields(model),
    )
    assembly = ModerationAssembly(new_id("modr-"), model.name_in_answer(body.model))
    return Submission(
        MODERATION,
        assembly.id,
        caller,
        Document(generation, assembly),
        ignored_params=body.ignored_params,
        end_user=body.user or "",
        subject="input",
    )


def to_inputs(body: ModerationRequest) -> tuple[tuple[str, ...], tuple[Message, ...]]:
    """Return the texts to judge, or the one message that the parts are. Raise InvalidRequestError.

    Parts that are all text are one text.
    """
    if isinstance(body.input, str):
        return (body.input,), ()
    parts: list[Part] = []
    texts: list[str] = []
    for number, given in enumerate(body.input):
        if isinstance(given, str):
            texts.append(given)
        else:
            parts.append(to_part(given, f"input[{number}]"))
    if texts:
        return tuple(texts), ()
    text, media = join_parts(parts)
    return ((text,), ()) if text is not None else ((), (Message("user", None, parts=media),))
