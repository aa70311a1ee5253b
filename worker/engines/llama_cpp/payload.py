"""Request bodies for a llama.cpp server that this worker has started.

They differ from those for other servers because the model's entry is known: its modalities, its
LoRA adapters and its stop texts. Constraints are llguidance's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from inference_site.catalogue.engines.llama_cpp import FillInMarks, marks, modalities
from inference_site.core.domain.errors import EngineUnavailable, InvalidRequest
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import (
    AudioPart,
    Constraint,
    GenerationRequest,
    ImagePart,
    objects_in,
)
from worker.engines.chat.template import FAMILIES, wire_tool
from worker.engines.chat.tools import call_schema, plain_schema
from worker.engines.grammars import check_schemas, knows_pattern
from worker.engines.llama_cpp.constraints import (
    constraint_fields,
    fields_of_tokens,
    fields_without_llguidance,
    schema_fields,
)
from worker.engines.openai_upstream.payload import Payloads
from worker.engines.openai_upstream.server import Server

ALLOWED, BANNED = "allowed_token_ids", "bad_words"
"""Fields of vLLM's API. The engine replaces the words by the ids of their tokens."""
_FORCING_BIAS = 1e6
"""A logit bias greater than the distance between any two logits."""


class LlamaCppPayloads(Payloads):
    """Builds the request bodies for one model (see ``Payloads``).

    ``may_think``: the model's template supports reasoning. ``stop_texts`` are the template's own.
    ``has_llguidance``: the server's build takes llguidance's grammars. ``vocabulary`` is the number
    of the model's tokens.
    """

    def __init__(
        self,
        spec: ModelSpec,
        server: Server,
        *,
        may_think: bool,
        stop_texts: Sequence[str],
        has_llguidance: bool = True,
        vocabulary: int = 0,
    ) -> None:
        super().__init__(spec, server)
        self._spec, self._may_think, self._has_llguidance = spec, may_think, has_llguidance
        self._vocabulary = vocabulary
        self.takes_one_text = "mmproj" in spec.options
        """Whether llama.cpp's completions take one prompt, a text: with a projector they do."""
        family = FAMILIES.get(spec.options.get("chat_template", ""))
        entry_stops = spec.options.get("stop_texts", ())
        self._stops = (*(family.stop if family else ()), *entry_stops, *stop_texts)

    def chat(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the payload of a chat. Raise InvalidRequest for what the server cannot do."""
        inputs = modalities(self._spec)
        for part in (part for message in request.messages for part in message.parts):
            if isinstance(part, ImagePart) and "vision" not in inputs:
                raise InvalidRequest(f"The model '{self._spec.id}' takes no images.", part.param)
            if isinstance(part, AudioPart) and "audio" not in inputs:
                raise InvalidRequest(f"The model '{self._spec.id}' takes no audio.", part.param)
        if request.reasoning_budget == 0 and request.has_parts:
            # With 0 llama.cpp leaves out the first token of the end of begun thoughts, so they do
            # not end. Other chats have them ended in their prompts.
            request = replace(request, reasoning_budget=1)
        payload = {**super().chat(request), "return_progress": True}
        if stops := [*(() if self.finds_stops(request) else request.stop), *self._stops]:
            payload["stop"] = stops
        return payload

    def complete(self, request: GenerationRequest, shown: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the payload of a completion. Raise InvalidRequest as ``chat`` does.

        ``shown`` are texts of special tokens that the output includes.
        """
        top = self._top_logprobs(request)
        shared = self._shared(request)
        if request.constraint and "response_format" in shared:  # Only chats have this field.
            raise InvalidRequest(
                "Invalid schema: it has keywords that only chat completions can be bound to here.",
                request.constraint.param,
            )
        prompts = [list(p) if isinstance(p, tuple) else p for p in request.prompts]
        if self.takes_one_text and len(prompts) > 1:
            raise InvalidRequest(
                f"The model '{self._spec.id}' has a projector: it takes one prompt in a request.",
                request.subject,
            )
        payload = {
            **shared,
            **({"logprobs": top["top_logprobs"]} if top else {}),
            "prompt": prompts[0] if self.takes_one_text else prompts,
            "preserved_tokens": shown,
            "return_progress": request.return_progress,
        }
        if not request.token_ids:
            return payload
        if request.answers > 1:  # llama.cpp returns the tokens of the first answer only.
            raise InvalidRequest(
                "The tokens of one answer can be returned, not those of several.",
                "return_token_ids",
            )
        # A stream leaves out the ids of tokens without a text of their own.
        return {**payload, "stream": False, "verbose": True, "return_tokens": True}

    def token(
        self, request: GenerationRequest, prompt: Sequence[int], token: int, top: int
    ) -> dict[str, Any]:
        """Return the payload that makes the model sample this token after the prompt.

        It is for llama.cpp's own ``/completion``, which takes tokens beside a projector too.
        """
        return {
            "prompt": prompt,
            "n_predict": 1,
            "temperature": 0,
            "logit_bias": [[token, _FORCING_BIAS]],
            "n_probs": max(1, top),
            "response_fields": ["completion_probabilities"],
            **self._lora(request),
        }

    def needs_text(self, request: GenerationRequest) -> bool:
        """Whether tokens of a prompt must become a text, which ``complete`` can send."""
        return self.takes_one_text and any(isinstance(p, tuple) for p in request.prompts)

    def with_whole_prompts(self, request: GenerationRequest) -> GenerationRequest:
        """Return the completion with its suffix and other files inside the prompts.

        They stand between the model's marks. ``complete`` takes only requests without a suffix.
        """
        if (suffix := request.suffix) is None:
            return request
        fim = marks(self._spec) or FillInMarks("", "")
        files = request.other_files
        prompts = (
            p if isinstance(p, tuple) else fim.around(p, suffix, files) for p in request.prompts
        )
        return replace(request, prompts=tuple(prompts), suffix=None, other_files=())

    def _shared(self, request: GenerationRequest) -> dict[str, Any]:
        payload = {**super()._shared(request), **self._lora(request)}
        for token, _ in request.sampling.logit_bias:
            if 0 < self._vocabulary <= token:  # llama.cpp would ignore it.
                raise InvalidRequest(
                    f"Invalid 'logit_bias.{token}': it is no token of this model.",
                    f"logit_bias.{token}",
                )
        if request.max_output_tokens is not None:
            # llama.cpp refuses integers above 2**31, and no answer is longer than the context.
            payload["max_tokens"] = min(request.max_output_tokens, self._context_length)
        if banned := request.extensions.get(BANNED):
            biases = payload.get("logit_bias", {})
            # Where a grammar leaves only banned tokens, llama.cpp would leave the grammar.
            is_bound = bool(request.constraint or request.tools or ALLOWED in request.extensions)
            ban = -_FORCING_BIAS if is_bound else False
            payload["logit_bias"] = {**biases, **dict.fromkeys(map(str, banned), ban)}
        return payload

    def _constraint(self, request: GenerationRequest) -> dict[str, Any]:
        if allowed := request.extensions.get(ALLOWED):
            self._check_allowed(request)
            if len(set(allowed)) == 1:
                # llguidance follows what a grammar forces to its end, and would give up here.
                return {"logit_bias": {str(allowed[0]): _FORCING_BIAS}}
            return fields_of_tokens(allowed)
        is_chat = request.operation in ("chat", "render")
        offers = bool(request.tools) and not request.must_call
        from_start = not is_chat or not (self.thinks(request) or offers)
        return self._bound(request.constraint, from_start=from_start, is_chat=is_chat)

    def has_grammar(self, request: GenerationRequest) -> bool:
        """Whether a chat is sent with a grammar, which binds thoughts too."""
        return "grammar" in self._constraint(request) | self._tools(request)

    def _check_allowed(self, request: GenerationRequest) -> None:
        """Raise InvalidRequest for unknown ids, and for what excludes a list of allowed tokens.

        llama.cpp drops the grammar if an id is unknown. It takes one grammar only, and its budget
        of reasoning inserts tokens that may not be allowed.
        """
        if not self._has_llguidance:
            raise InvalidRequest(
                f"'{ALLOWED}' needs a build of llama.cpp with llguidance.", ALLOWED
            )
        if max(request.extensions[ALLOWED]) >= self._vocabulary:
            raise InvalidRequest(
                f"Invalid '{ALLOWED}': it holds an id that is no token of this model.", ALLOWED
            )
        if set(request.extensions[ALLOWED]) <= set(request.extensions.get(BANNED, ())):
            raise InvalidRequest(f"'{BANNED}' forbids all tokens of '{ALLOWED}'.", BANNED)
        others = {
            "a forced call": request.must_call,
            "a constraint": request.constraint is not None,
            "a budget of reasoning": request.reasoning_budget is not None,
        }
        if other := next((name for name, is_set in others.items() if is_set), None):
            raise InvalidRequest(
                f"'{ALLOWED}' cannot be combined with {other} on this model.", ALLOWED
            )

    def _bound(
        self, constraint: Constraint | None, *, from_start: bool, is_chat: bool = True
    ) -> dict[str, Any]:
        if self._has_llguidance:
            return constraint_fields(constraint, from_start=from_start, is_chat=is_chat)
        return fields_without_llguidance(constraint)

    def thinks(self, request: GenerationRequest) -> bool:
        """Return whether the answer of the chat may begin with thoughts."""
        variables = {**self._own_vars, **request.template_vars}
        return self._may_think and variables.get("enable_thinking") is not False

    def _top_logprobs(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the logprobs fields; stop tokens need them, as they come with the token's id."""
        if request.top_logprobs is None and request.stop_token_ids:
            request = replace(request, top_logprobs=0)
        return super()._top_logprobs(request)

    def _arguments(self, text: str) -> str:
        """Return arguments that llama.cpp can parse: invalid JSON becomes a JSON string."""
        try:
            orjson.loads(text)
        except orjson.JSONDecodeError:
            return orjson.dumps(text).decode()
        return text

    def _tools(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the fields of the tools.

        llama.cpp does not force a call: with ``required`` the model may answer with text first. So
        the schema of a forced call is a constraint, and the tools are a variable of the template.
        They are one beside a grammar too: llama.cpp refuses a grammar together with tools.
        """
        if not request.tools:
            return {}
        # llama.cpp passes a description to the template even if the tool has none.
        tools = [wire_tool(replace(t, description=t.description or "")) for t in request.tools]
        variables: dict[str, Any] = {"chat_template_kwargs": {"tools": tools}}
        if request.forced_grammar is not None:
            # The grammar would constrain the reasoning too.
            variables["chat_template_kwargs"]["enable_thinking"] = False
            return {**variables, **self._bound(request.forced_grammar, from_start=True)}
        if request.must_call:
            from_start = self._has_llguidance and not self.thinks(request)
            return {
                **variables,
                **schema_fields(
                    call_schema(request.tools), request.tools_param, from_start=from_start
                ),
            }
        if "grammar" in self._constraint(request):
            return variables
        for tool in tools:
            tool["function"]["parameters"] = plain_schema(tool["function"]["parameters"])
        parameters = [tool["function"]["parameters"] for tool in tools]
        check_schemas(parameters, request.tools_param)
        for offered, given in zip(request.tools, parameters, strict=True):
            for schema in objects_in(given):
                pattern = schema.get("pattern")
                if isinstance(pattern, str) and not knows_pattern(
                    pattern, offered.param or "tools"
                ):
                    del schema["pattern"]  # llama.cpp would misread it.
        return {"tools": tools, "parallel_tool_calls": request.parallel_tool_calls}

    def _lora(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the scales of all adapters by their numbers; 0 for those not in the request.

        Without this field llama.cpp may reuse a cached prompt that it has read with adapters.
        """
        known = self._spec.lora_adapters
        if missing := [name for name, _ in request.lora if name not in known]:
            raise EngineUnavailable(f"The adapter '{missing[0]}' is not loaded now.")
        if not known:
            return {}
        scales = {**dict.fromkeys(known, 0.0), **dict(request.lora)}
        return {"lora": [{"id": n, "scale": scales[name]} for n, name in enumerate(known)]}
