"""Views of embeddings, tokens and rendered prompts: requests that sample no tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from django.http import HttpResponse
from rest_framework.request import Request
from rest_framework.response import Response

from completions.assemblers.tokens import EMBEDDING, TOKENS, EmbeddingAssembly, TokenAssembly
from completions.mapping import to_generation_request, to_prompts
from completions.wire.chat import ChatCompletionRequest
from completions.wire.tokens import (
    ChatPrompt,
    DetokenizeRequest,
    EmbeddingList,
    EmbeddingRequest,
    Text,
    TokenizeRequest,
    TokenizerInfo,
    TokenizerQuery,
    Tokens,
)
from inference_site.accounts.keys import Caller
from inference_site.accounts.models import Scope
from inference_site.catalogue.fleet.fleet import context_of
from inference_site.catalogue.gguf_files import chat_template, tokenizer_facts
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest
from inference_site.core.errors.api_errors import InvalidRequestError, NotFoundError
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.payload import WireRequest, parse, parse_query
from inference_site.gateway.api.schema import documented
from inference_site.gateway.api.views import ApiView
from inference_site.gateway.request_fields.capabilities import require_endpoint, require_fields
from inference_site.gateway.submission.model_access import served_model
from inference_site.gateway.submission.submit import Submission, respond
from inference_site.runs.queue import new_id
from inference_site.runs.streams.request_documents import Document

_CLASSES = {
    "llama": "LlamaTokenizerFast",
    "gpt2": "GPT2TokenizerFast",
    "bert": "BertTokenizerFast",
    "t5": "T5TokenizerFast",
}
"""Hugging Face's tokenizer classes by GGUF's names of the algorithms."""


class EmbeddingsView(ApiView):
    """``POST /v1/embeddings``."""

    @documented(body=EmbeddingRequest, answer=EmbeddingList, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Embed texts or tokens."""
        body = parse(EmbeddingRequest, request.data)
        return respond(request, embedding_submission(caller_of(request), body))


def embedding_submission(caller: Caller, body: EmbeddingRequest) -> Submission:
    """Return the submission of embeddings. Raise ApiError."""
    model = served_model(caller, body.model, body)
    require_fields(model, "embeddings", body)
    generation = GenerationRequest(model.spec.id, operation="embed", prompts=to_inputs(body))
    assembly = EmbeddingAssembly(
        model.spec.id,
        body.encoding_format or "float",
        body.dimensions,
        may_shorten="dimensions" in model.capabilities,
    )
    return Submission(
        EMBEDDING,
        new_id("embd-"),
        caller,
        Document(generation, assembly),
        ignored_params=body.ignored_params,
        end_user=body.user or "",
    )


def to_inputs(body: EmbeddingRequest) -> tuple[str | tuple[int, ...], ...]:
    """Return the inputs to embed. Raise InvalidRequestError for an empty text."""
    inputs = to_prompts(body.input)
    if "" in inputs:
        raise InvalidRequestError("Invalid 'input': a text must not be empty.", param="input")
    return inputs


class TokenizeView(ApiView):
    """``POST /v1/tokenize``: of a text, or of a chat through the model's template."""

    @documented(body=TokenizeRequest | ChatCompletionRequest, answer=Tokens, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Turn a text, or the messages of a chat, into tokens."""
        if isinstance(request.data, dict) and "messages" in request.data:
            return _render(request, "tokens")
        body = parse(TokenizeRequest, request.data)
        model = served_model(caller_of(request), body.model, body)
        require_fields(model, "tokens", body)
        generation = GenerationRequest(
            model.spec.id,
            operation="tokenize",
            prompts=(body.prompt,),
            add_special_tokens=body.add_special_tokens is not False,
            token_texts=bool(body.return_token_strs),
        )
        return _submit(request, body, model.spec, generation, "tokens")


class DetokenizeView(ApiView):
    """``POST /v1/detokenize``."""

    @documented(body=DetokenizeRequest, answer=Text, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Turn tokens into a text."""
        body = parse(DetokenizeRequest, request.data)
        model = served_model(caller_of(request), body.model, body)
        require_fields(model, "tokens", body)
        prompts = (tuple(body.tokens),)
        generation = GenerationRequest(model.spec.id, operation="detokenize", prompts=prompts)
        return _submit(request, body, model.spec, generation, "text")


class TokenizerInfoView(ApiView):
    """``GET /tokenizer_info``, as in vLLM, for models with a file of this site."""

    @documented(query=TokenizerQuery, answer=TokenizerInfo, errors=(NotFoundError,))
    def get(self, request: Request) -> Response:
        """Get the tokenizer settings in a model's file."""
        query = parse_query(TokenizerQuery, request.query_params.dict())
        model = served_model(caller_of(request), query.model)
        spec = model.spec
        facts = tokenizer_facts(spec.file) if spec.file else None
        if facts is None:
            raise InvalidRequestError(
                f"The tokenizer of the model `{spec.id}` is not known here: it has no GGUF file.",
                param="model",
                code="unsupported_model",
            )
        assert spec.file is not None
        info = TokenizerInfo(
            tokenizer_class=_CLASSES.get(facts.kind, "PreTrainedTokenizerFast"),
            model_max_length=context_of(spec),
            bos_token=facts.special.get("bos"),
            eos_token=facts.special.get("eos"),
            unk_token=facts.special.get("unknown"),
            pad_token=facts.special.get("padding"),
            add_bos_token=facts.adds_bos,
            add_eos_token=facts.adds_eos,
            # Only the worker can read a template that the entry names.
            chat_template=None if "chat_template" in spec.options else chat_template(spec.file),
        )
        return Response(info.model_dump(exclude_none=True))


class RenderView(ApiView):
    """``POST /v1/chat/render``: the prompt of a chat completion."""

    scope = Scope.DEBUG

    @documented(body=ChatCompletionRequest, answer=ChatPrompt, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Render the messages of a chat as a prompt."""
        return _render(request, "prompt")


def _render(request: Request, answer: Literal["tokens", "prompt"]) -> HttpResponse:
    body = parse(ChatCompletionRequest, request.data)
    model = served_model(caller_of(request), body.model, body)
    require_endpoint(model, "render")
    generation = replace(to_generation_request(body, model), operation="render", choices=1)
    return _submit(request, body, model.spec, generation, answer)


def _submit(
    request: Request,
    body: WireRequest,
    spec: ModelSpec,
    generation: GenerationRequest,
    answer: Literal["tokens", "text", "prompt"],
) -> HttpResponse:
    submission = Submission(
        TOKENS,
        new_id("tok-"),
        caller_of(request),
        Document(generation, TokenAssembly(answer, spec.id, context_of(spec))),
        ignored_params=body.ignored_params,
    )
    return respond(request, submission)
