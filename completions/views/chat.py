"""Views of chat completions, stored ones, completions and infill."""

from __future__ import annotations

import time
from dataclasses import replace
from operator import itemgetter

from django.conf import settings
from django.http import HttpResponse
from rest_framework.request import Request
from rest_framework.response import Response

from completions.assemblers.chat import CHAT, ChatAssembly
from completions.assemblers.completion import COMPLETION, INFILL, CompletionAssembly, InfillAssembly
from completions.mapping import (
    echoes,
    to_completion_request,
    to_generation_request,
    to_site_tools,
)
from completions.models import StoredCompletion
from completions.storage import (
    completions_of,
    find,
    replace_metadata,
    wire_completion,
    wire_messages,
)
from completions.wire.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    DeletedChatCompletion,
    MetadataUpdate,
    StoredChatCompletion,
    StoredMessage,
    StoredQuery,
)
from completions.wire.completion import Completion, CompletionRequest, Infill, InfillRequest
from inference_site.accounts.keys import Caller
from inference_site.core.errors.api_errors import NotFoundError
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.paging import (
    PageQuery,
    keep_position,
    list_object,
    parse_metadata,
    parse_page,
)
from inference_site.gateway.api.payload import parse
from inference_site.gateway.api.schema import ListObject, documented
from inference_site.gateway.api.views import ApiView
from inference_site.gateway.feedback_views import FeedbackView
from inference_site.gateway.request_fields.capabilities import ignored_fields, require_endpoint
from inference_site.gateway.request_fields.moderation import moderation_options
from inference_site.gateway.submission.admission import service_tier
from inference_site.gateway.submission.model_access import moderation_model, served_model
from inference_site.gateway.submission.submit import Submission, respond
from inference_site.runs.queue import new_id
from inference_site.runs.streams.request_documents import Document, ToStore, drop_document

_PATH = "chat/completions"


class ChatCompletionsView(ApiView):
    """``/v1/chat/completions``."""

    @documented(
        body=ChatCompletionRequest, answer=ChatCompletion, event=ChatCompletionChunk, queued=True
    )
    def post(self, request: Request) -> HttpResponse:
        """Create a chat completion."""
        body = parse(ChatCompletionRequest, request.data)
        return respond(request, chat_submission(caller_of(request), body))

    @documented(query=StoredQuery, answer=ListObject[StoredChatCompletion], errors=(NotFoundError,))
    def get(self, request: Request) -> Response:
        """List the stored chat completions of the project."""
        page = parse_page(request.query_params, "asc")
        project_id = caller_of(request).project_id
        rows = completions_of(project_id)
        if model := request.query_params.get("model"):
            rows = rows.filter(model=model)
        if metadata := parse_metadata(request.query_params):
            rows = rows.filter(metadata__contains=metadata)
        every = completions_of(project_id)  # The filters may leave out the cursor's entry.
        last = page.position(every, "chat completion", project_id, _PATH)
        entries = [wire_completion(stored) for stored in page.rows_of(rows, "pk", last)]
        return Response(list_object(entries, page))


class CompletionsView(ApiView):
    """``POST /v1/completions``."""

    @documented(body=CompletionRequest, answer=Completion, event=Completion, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Create a completion of a text or of tokens."""
        body = parse(CompletionRequest, request.data)
        return respond(request, completion_submission(caller_of(request), body))


def chat_submission(caller: Caller, body: ChatCompletionRequest) -> Submission:
    """Return the submission of a chat completion. Raise ApiError."""
    model = served_model(caller, body.model, body)
    generation = to_generation_request(body, model)
    site_tools = to_site_tools(body, generation)
    is_unsearched = body.web_search_options is not None and not site_tools
    judge = None
    if body.moderation is not None:
        judge = moderation_model(caller, body.moderation.model)
    site_tools += moderation_options(body.moderation, judge, generation)
    to_store = None
    if body.store:
        messages = [m.model_dump(mode="json", exclude_unset=True) for m in body.messages]
        to_store = ToStore(caller.project_id, body.metadata or {}, messages)
    # Last: a request that is refused takes no priority.
    tier = service_tier(caller, body.service_tier)
    assembly = ChatAssembly(
        new_id("chatcmpl-"),
        int(time.time()),
        model.spec.id,
        stream=bool(body.stream),
        include_usage=_includes_usage(body),
        continuous_usage=generation.running_usage,
        choices=generation.choices,
        logprobs=generation.top_logprobs is not None,
        is_legacy=body.functions is not None,
        repeats_calls=settings.TOOL_CALLS_IN_CHOICES,
        service_tier=tier.name,
        timings=bool(body.timings),
        records=bool(body.store),
        token_ids=generation.token_ids,
        prompt_logprobs=generation.prompt_logprobs is not None,
        site_tools=site_tools,
    )
    return Submission(
        CHAT,
        assembly.completion_id,
        caller,
        Document(generation, assembly, to_store),
        stream=assembly.stream,
        is_replayable=assembly.is_replayable or (not assembly.stream and bool(body.store)),
        ignored_params=[
            *ignored_fields(model, body, generation),
            *(["web_search_options"] if is_unsearched else []),
        ],
        service_class=tier.service_class,
        end_user=body.safety_identifier or body.user or "",
        metadata=body.metadata,
        cache_key=body.prompt_cache_key or "",
    )


def completion_submission(caller: Caller, body: CompletionRequest) -> Submission:
    """Return the submission of a completion. Raise ApiError."""
    model = served_model(caller, body.model, body)
    generation = to_completion_request(body, model)
    assembly = CompletionAssembly(
        new_id("cmpl-"),
        int(time.time()),
        model.spec.id,
        stream=bool(body.stream),
        include_usage=_includes_usage(body),
        continuous_usage=generation.running_usage,
        echoes=echoes(body, generation),
        logprobs=body.logprobs is not None,
        n=body.n or 1 if body.picks else None,
        best_of=generation.choices,
        timings=bool(body.timings),
        token_ids=generation.token_ids,
        prompt_logprobs=generation.prompt_logprobs is not None,
    )
    return Submission(
        COMPLETION,
        assembly.completion_id,
        caller,
        Document(generation, assembly),
        stream=assembly.stream,
        ignored_params=ignored_fields(model, body, generation),
        end_user=body.user or "",
    )


def _includes_usage(body: ChatCompletionRequest | CompletionRequest) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


class StoredCompletionView(ApiView):
    """``/v1/chat/completions/{id}``."""

    counts_writes = True

    @documented(answer=StoredChatCompletion)
    def get(self, request: Request, completion_id: str) -> Response:
        """Get a stored chat completion."""
        return Response(wire_completion(find(caller_of(request).project_id, completion_id)))

    @documented(body=MetadataUpdate, answer=StoredChatCompletion)
    def post(self, request: Request, completion_id: str) -> Response:
        """Replace the metadata of a stored chat completion."""
        stored = find(caller_of(request).project_id, completion_id)
        replace_metadata(stored, self.parse(MetadataUpdate, request.data).metadata or {})
        return Response(wire_completion(stored))

    @documented(answer=DeletedChatCompletion)
    def delete(self, request: Request, completion_id: str) -> Response:
        """Delete a stored chat completion."""
        stored = find(caller_of(request).project_id, completion_id)
        keep_position(stored.project_id, _PATH, completion_id, stored.pk)
        drop_document(completion_id)  # A request with the same ``Idempotency-Key`` would get it.
        stored.delete()
        return Response(DeletedChatCompletion(id=completion_id).model_dump())


class StoredCompletionFeedbackView(FeedbackView[StoredCompletion]):
    """``/v1/chat/completions/{id}/feedback``."""

    def find(self, project_id: int, answer_id: str) -> StoredCompletion:
        """Return a stored completion. Raise NotFoundError."""
        return find(project_id, answer_id)


class StoredMessagesView(ApiView):
    """``GET /v1/chat/completions/{id}/messages``."""

    @documented(query=PageQuery, answer=ListObject[StoredMessage])
    def get(self, request: Request, completion_id: str) -> Response:
        """List the messages that a stored chat completion answered."""
        page = parse_page(request.query_params, "asc")
        messages = wire_messages(find(caller_of(request).project_id, completion_id))
        if page.order == "desc":
            messages.reverse()
        shown = page.entries_of(messages, itemgetter("id"), "message")
        return Response(list_object(shown, page))


class InfillView(ApiView):
    """``POST /infill``."""

    @documented(body=InfillRequest, answer=Infill, event=Infill, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Fill in between a prefix and a suffix; without ``model``, by the site's default."""
        body = parse(InfillRequest, request.data)
        caller = caller_of(request)
        model = served_model(caller, body.model, body)
        require_endpoint(model, "suffix")
        completion = parse(CompletionRequest, {**body.to_completion(), "model": model.spec.id})
        generation = to_completion_request(completion, model)
        generation = replace(generation, other_files=body.other_files, truncate=True)
        if completion.max_tokens is None:
            generation = replace(generation, max_output_tokens=None)
        stream = bool(body.stream)
        ignored = [*body.ignored_params, *ignored_fields(model, completion, generation)]
        submission = Submission(
            INFILL,
            new_id("infill-"),
            caller,
            Document(generation, InfillAssembly(model.spec.id, stream)),
            stream=stream,
            ignored_params=list(dict.fromkeys(ignored)),
        )
        return respond(request, submission)
