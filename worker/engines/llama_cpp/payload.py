"""From a generation request to the JSON that llama.cpp takes from this platform.

Beyond what any ``llama-server`` is sent, the model's entry says what the model perceives, which
adapters it has and how its turns end; and constraints are llguidance's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from inference_site.catalogue.engines.llama_cpp import FillInMarks, marks, modalities
from inference_site.domain.errors import EngineUnavailable, InvalidRequest
from inference_site.domain.messages import AudioPart, ImagePart, Part
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import Constraint, GenerationRequest, objects_in
from worker.engines.chat.families import FAMILIES
from worker.engines.chat.template import wire_tool
from worker.engines.chat.tools import call_schema, plain_schema
from worker.engines.grammars import knows_pattern
from worker.engines.llama_cpp.bounds import check_schemas
from worker.engines.llama_cpp.constraints import (
    constraint_fields,
    fields_of_tokens,
    fields_without_llguidance,
    schema_fields,
)
from worker.engines.openai_upstream.payload import Payloads
from worker.engines.openai_upstream.server import Server

ALLOWED, BANNED = "allowed_token_ids", "bad_words"
"""Fields of vLLM's; the words reach the payload as the ids of their tokens."""
_CERTAIN = 1e6
"""A bias greater than the distance between any two scores."""


class LlamaCppPayloads(Payloads):
    """Writes the requests for one model (see ``Payloads``).

    ``may_think``: the model's template knows of reasoning. ``stop_texts`` are the template's own.
    ``has_llguidance``: the server's build knows its grammars. ``vocabulary`` is how many tokens
    the model has.
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
        family = FAMILIES.get(spec.options.get("chat_template", ""))
        of_entry = spec.options.get("stop_texts", ())
        self._stops = (*(family.stop if family else ()), *of_entry, *stop_texts)

    def chat(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the payload of a chat. Raise InvalidRequest for what it cannot express."""
        for message in request.messages:
            for part in message.parts:
                self._check_perceived(part)
        payload = {**super().chat(request), "return_progress": True}
        if stops := [*request.stop, *self._stops]:
            payload["stop"] = stops
        return payload

    def complete(self, request: GenerationRequest, shown: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the payload of a completion. Raise InvalidRequest as ``chat`` does.

        ``shown`` are texts of special tokens that are not left out of the output.
        """
        top = self._top_logprobs(request)
        shared = self._shared(request)
        if request.constraint and "response_format" in shared:  # Which only chats have.
            raise InvalidRequest(
                "Invalid schema: it has keywords that only chat completions can be bound to here.",
                request.constraint.param,
            )
        return {
            **shared,
            **({"logprobs": top["top_logprobs"]} if top else {}),
            "prompt": [list(p) if isinstance(p, tuple) else p for p in request.prompts],
            "preserved_tokens": shown,
            "return_progress": request.return_progress,
            **(self._told_whole(request) if request.token_ids else {}),
        }

    def _told_whole(self, request: GenerationRequest) -> dict[str, Any]:
        """Return what has llama.cpp name all tokens of an answer, which it does in a whole one.

        A stream names none that have no text of their own. Of several answers only the first would
        have its tokens named. Raise InvalidRequest for these.
        """
        if request.answers > 1:
            raise InvalidRequest(
                "The tokens of one answer can be returned, not those of several.",
                "return_token_ids",
            )
        return {"stream": False, "verbose": True, "return_tokens": True}

    def token(
        self, request: GenerationRequest, prompt: Sequence[int], token: int, top: int
    ) -> dict[str, Any]:
        """Return the payload that has this token drawn after the prompt."""
        return {
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "logit_bias": [[token, _CERTAIN]],
            "logprobs": max(1, top),
            **self._lora(request),
        }

    def with_whole_prompts(self, request: GenerationRequest) -> GenerationRequest:
        """Return a completion without a suffix: that is put into texts, between the model's marks.

        ``complete`` takes only such ones.
        """
        if (suffix := request.suffix) is None:
            return request
        own = marks(self._spec) or FillInMarks("", "")
        prompts = (p if isinstance(p, tuple) else own.around(p, suffix) for p in request.prompts)
        return replace(request, prompts=tuple(prompts), suffix=None)

    def _shared(self, request: GenerationRequest) -> dict[str, Any]:
        payload = {**super()._shared(request), **self._lora(request)}
        if request.max_output_tokens is not None:
            # llama.cpp's integers hold no more, and no answer is longer.
            payload["max_tokens"] = min(request.max_output_tokens, self._context_length)
        if banned := request.extensions.get(BANNED):
            biases = payload.get("logit_bias", {})
            payload["logit_bias"] = {**biases, **dict.fromkeys(map(str, banned), False)}
        return payload

    def _constraint(self, request: GenerationRequest) -> dict[str, Any]:
        if allowed := request.extensions.get(ALLOWED):
            self._check_allowed(request)
            return fields_of_tokens(allowed)
        is_chat = request.operation in ("chat", "render")
        offers = bool(request.tools) and not request.must_call
        from_start = not is_chat or not (self._thinks(request) or offers)
        return self._bound(request.constraint, from_start=from_start)

    def _check_allowed(self, request: GenerationRequest) -> None:
        """Raise InvalidRequest for allowed tokens that are none, and for what goes with none.

        llama.cpp would answer without bounds if an id is no token. It is bound by one grammar, and
        ends thoughts by a budget with tokens of its own.
        """
        if not self._has_llguidance:
            raise InvalidRequest(
                f"'{ALLOWED}' needs a build of llama.cpp with llguidance.", ALLOWED
            )
        if max(request.extensions[ALLOWED]) >= self._vocabulary:
            raise InvalidRequest(
                f"Invalid '{ALLOWED}': it holds an id that is no token of this model.", ALLOWED
            )
        others = {
            "a forced call": request.must_call,
            "a constraint": request.constraint is not None,
            "a budget of reasoning": request.reasoning_budget is not None,
        }
        if found := next((name for name, is_there in others.items() if is_there), None):
            raise InvalidRequest(
                f"'{ALLOWED}' cannot be combined with {found} on this model.", ALLOWED
            )

    def _bound(self, constraint: Constraint | None, *, from_start: bool) -> dict[str, Any]:
        if self._has_llguidance:
            return constraint_fields(constraint, from_start=from_start)
        return fields_without_llguidance(constraint)

    def _thinks(self, request: GenerationRequest) -> bool:
        variables = {**self._own_vars, **request.template_vars}
        return self._may_think and variables.get("enable_thinking") is not False

    def _top_logprobs(self, request: GenerationRequest) -> dict[str, Any]:
        """Return how many are needed: a stop token is found by the id beside its logprob."""
        if request.top_logprobs is None and request.stop_token_ids:
            request = replace(request, top_logprobs=0)
        return super()._top_logprobs(request)

    def _arguments(self, text: str) -> str:
        """Return arguments that llama.cpp can parse: what is no JSON becomes a JSON string."""
        try:
            orjson.loads(text)
        except orjson.JSONDecodeError:
            return orjson.dumps(text).decode()
        return text

    def _tools(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the tools.

        llama.cpp does not force a call: with ``required`` the model may say something else first.
        So a forced call is a JSON schema, and the tools reach the template as a variable of its
        own. So they do beside a grammar, which says all that may come, and which llama.cpp takes
        without tools only.
        """
        if not request.tools:
            return {}
        # Templates are shown a description by llama.cpp whether there is one or not.
        tools = [wire_tool(replace(t, description=t.description or "")) for t in request.tools]
        shown: dict[str, Any] = {"chat_template_kwargs": {"tools": tools}}
        if request.forced_grammar is not None:
            shown["chat_template_kwargs"]["enable_thinking"] = False  # It would bind thoughts too.
            return {**shown, **self._bound(request.forced_grammar, from_start=True)}
        if request.must_call:
            from_start = self._has_llguidance and not self._thinks(request)
            return {
                **shown,
                **schema_fields(call_schema(request.tools), "tools", from_start=from_start),
            }
        if "grammar" in self._constraint(request):
            return shown
        for tool in tools:
            tool["function"]["parameters"] = plain_schema(tool["function"]["parameters"])
        parameters = [tool["function"]["parameters"] for tool in tools]
        check_schemas(parameters, "tools")
        for schema in objects_in(parameters):
            pattern = schema.get("pattern")
            if isinstance(pattern, str) and not knows_pattern(pattern, "tools"):
                del schema["pattern"]  # llama.cpp would read it as another one.
        return {"tools": tools, "parallel_tool_calls": request.parallel_tool_calls}

    def _lora(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the adapters by their numbers; those that are not named are not applied.

        llama.cpp gets all of them: without any it would go on from a prompt that it has read
        with adapters.
        """
        known = self._spec.lora_adapters
        if missing := [name for name, _ in request.lora if name not in known]:
            raise EngineUnavailable(f"The adapter '{missing[0]}' is not loaded now.")
        if not known:
            return {}
        scales = {**dict.fromkeys(known, 0.0), **dict(request.lora)}
        return {"lora": [{"id": n, "scale": scales[name]} for n, name in enumerate(known)]}

    def _check_perceived(self, part: Part) -> None:
        perceived = modalities(self._spec)
        match part:
            case ImagePart(param=param) if "vision" not in perceived:
                raise InvalidRequest(f"The model '{self._spec.id}' takes no images.", param)
            case AudioPart(param=param) if "audio" not in perceived:
                raise InvalidRequest(f"The model '{self._spec.id}' takes no audio.", param)
