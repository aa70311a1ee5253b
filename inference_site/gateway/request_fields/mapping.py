"""From the fields and contents that several endpoints share to the values of the domain."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from inference_site.core.domain import request as domain
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import Constraint, GenerationRequest, Tool
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.payload import shown_name
from inference_site.gateway.request_fields.constraint import check_tools
from inference_site.gateway.request_fields.wire import (
    AudioPart,
    Content,
    FilePart,
    GrammarDefinition,
    ImagePart,
    InputFile,
    LoraAdapter,
    Part,
    RefusalPart,
    SamplingFields,
    ServerFields,
    TextPart,
    TokenReportFields,
)

_PDF = "JVBERi0"
"""How the base64 of a PDF begins."""


def to_content(content: Content, where: str) -> tuple[str | None, tuple[domain.Part, ...]]:
    """Return the text, or None and the parts. ``where`` is the path of the content in the request.

    Raise InvalidRequestError for files that are neither text nor an image.
    """
    if isinstance(content, str):
        return content, ()
    return join_parts([to_part(part, f"{where}[{i}]") for i, part in enumerate(content)])


def join_parts(parts: Sequence[domain.Part]) -> tuple[str | None, tuple[domain.Part, ...]]:
    """Return the text of the parts; None and the parts if any is not text."""
    texts = [part.text for part in parts if isinstance(part, domain.TextPart)]
    return ("".join(texts), ()) if len(texts) == len(parts) else (None, tuple(parts))


def to_part(part: Part, where: str) -> domain.Part:
    """Return a content part. Raise InvalidRequestError."""
    match part:
        case TextPart():
            return domain.TextPart(part.text)
        case RefusalPart():
            return domain.TextPart(part.refusal)
        case ImagePart():
            return to_image(part.image_url.url, f"{where}.image_url.url")
        case AudioPart():
            sound = part.input_audio
            return domain.AudioPart(sound.data, sound.format, f"{where}.input_audio.data")
        case FilePart():
            return to_file(part.file, f"{where}.file")


def to_image(url: str, where: str) -> domain.ImagePart:
    """Return an image. Raise InvalidRequestError for a URL that is not http(s) or ``data:``."""
    if _scheme_of(url) not in ("http", "https", "data"):
        raise InvalidRequestError(
            f"Invalid '{where}': expected an http(s) URL or a 'data:' URL.",
            param=where,
            code="invalid_image_url",
        )
    return domain.ImagePart(url, where)


def _scheme_of(url: str) -> str:
    try:
        return urlsplit(url).scheme.lower()
    except ValueError:
        return ""


def to_file(file: InputFile, where: str) -> domain.Part:
    """Return the text of a file, after its name, or its image, or the file for the worker to read.

    Raise InvalidRequestError.
    """
    if file.file_id is not None:
        return domain.FilePart(f"{where}.file_id", file.file_id)
    if file.file_url is not None:
        where = f"{where}.file_url"
        if _scheme_of(file.file_url) not in ("http", "https"):
            raise InvalidRequestError(
                f"Invalid '{where}': expected an http(s) URL.", param=where, code="invalid_file_url"
            )
        return domain.FilePart(where, filename=file.filename, url=file.file_url)
    if file.file_data is None:
        raise InvalidRequestError(
            f"Missing required parameter: '{where}.file_data'.",
            param=f"{where}.file_data",
            code="missing_required_parameter",
        )
    where = f"{where}.file_data"
    if file.file_data.startswith("data:image/"):
        return to_image(file.file_data, where)
    data = file.file_data
    encoded = data.partition(",")[2] if data.startswith("data:") else data
    if encoded.startswith(_PDF):
        return domain.FilePart(where, content=encoded, filename=file.filename)
    try:
        text = base64.b64decode(encoded, validate=True).decode("utf-8")
    except ValueError as exc:  # No base64, or no UTF-8.
        raise InvalidRequestError(
            f"Invalid '{where}': expected base64 of a PDF, of a text in UTF-8, or of an image with "
            "its type in a 'data:' URL.",
            param=where,
            code="unsupported_file",
        ) from exc
    return domain.TextPart(f"{file.filename}:\n{text}\n" if file.filename else text)


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """Which tools the model sees, and whether it must call one of them.

    ``is_legacy``: they came as ``functions``, and the answer has a ``function_call``.
    ``only_tools``: it may call no others, as the client has chosen among its tools.
    Raise InvalidRequestError for tools beyond the bounds of schemas.
    """

    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    is_legacy: bool = False
    only_tools: bool = False

    def __post_init__(self) -> None:
        check_tools(self.tools, "functions" if self.is_legacy else "tools")


def select_tools(
    tools: tuple[Tool, ...], names: list[str], param: str = "tool_choice", among: str = "tools"
) -> tuple[Tool, ...]:
    """Return the tools with these names: a model that does not see the others cannot call them.

    ``param`` is the path of the name, with ``{}`` for its position in a list of names. Raise
    InvalidRequestError for a name that no tool has.
    """
    known = {tool.name for tool in tools}
    for position, name in enumerate(names):
        if name not in known:
            param = param.format(position)
            raise InvalidRequestError(
                f"Invalid value for '{param}': there is no tool named '{shown_name(name)}' in "
                f"'{among}'.",
                param=param,
            )
    return tuple(tool for tool in tools if tool.name in names)


def to_grammar(given: GrammarDefinition | None, param: str = "tools") -> Constraint | None:
    """Return the constraint on the input of a custom tool, None for any text."""
    return None if given is None else Constraint(given.syntax, given.definition, param)


def require_stream_for_options(stream_options: object, stream: bool | None) -> None:
    """Raise InvalidRequestError for ``stream_options`` without a stream."""
    if stream_options is not None and not stream:
        raise InvalidRequestError(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
        )


def to_sampled_request(body: SamplingFields, spec: ModelSpec) -> GenerationRequest:
    """Return a request with these fields and without a prompt. Raise InvalidRequestError."""
    biases = body.logit_bias or {}
    for token in biases:
        if not (token.isdecimal() and len(token) <= 10 and int(token) < 2**31):
            param = f"logit_bias.{shown_name(token)}"
            raise InvalidRequestError(
                f"Invalid '{param}': the name is not a token id.", param=param
            )
    sampling = body.to_sampling({int(token): bias for token, bias in biases.items()})
    extensions = {name: getattr(body, name) for name in ServerFields.model_fields}
    tag = getattr(getattr(body, "structured_outputs", None), "structural_tag", None)
    extensions["structural_tag"] = tag if tag is None or isinstance(tag, str) else json.dumps(tag)
    return GenerationRequest(
        model=spec.id,
        sampling=spec.forced_sampling.over(sampling.over(spec.sampling)),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        cache_prompt=body.cache_prompt is not False,
        lora=_lora(body, spec),
        extensions={name: value for name, value in extensions.items() if value is not None},
    )


def with_token_report(
    asked: GenerationRequest, fields: TokenReportFields, *, stream: bool
) -> GenerationRequest:
    """Return the request with the token report that these fields ask for, by vLLM's rules.

    Raise InvalidRequestError.
    """
    if fields.prompt_logprobs is not None and stream:
        raise InvalidRequestError(
            "Invalid 'prompt_logprobs': it cannot be used together with 'stream'.",
            param="prompt_logprobs",
        )
    if "logprob_token_ids" in asked.extensions and asked.top_logprobs is None:
        raise InvalidRequestError(
            "Invalid 'logprob_token_ids': it is only allowed together with 'logprobs'.",
            param="logprob_token_ids",
        )
    return replace(
        asked,
        token_ids=bool(fields.return_token_ids),
        tokens_as_ids=bool(fields.return_tokens_as_token_ids),
        prompt_logprobs=fields.prompt_logprobs,
    )


def _lora(body: SamplingFields, spec: ModelSpec) -> tuple[tuple[str, float], ...]:
    """Return the adapters and their scales; a bare name is one adapter with scale 1."""
    match body.lora:
        case None:
            return spec.lora
        case str(name):
            wanted: tuple[tuple[str, float], ...] = ((name, 1.0),)
        case adapters:
            known = tuple(spec.lora_adapters)
            wanted = tuple(
                (_adapter_name(adapter, known, f"lora[{number}]"), adapter.scale)
                for number, adapter in enumerate(adapters)
            )
    if unknown := [name for name, _ in wanted if name not in spec.lora_adapters]:
        raise InvalidRequestError(
            f"Invalid 'lora': the model `{spec.id}` has no adapter {unknown[0][:100]!r}; it has "
            f"{', '.join(spec.lora_adapters) or 'none'}.",
            param="lora",
        )
    return wanted


def _adapter_name(adapter: LoraAdapter, known: tuple[str, ...], param: str) -> str:
    if adapter.name is not None:
        return adapter.name
    if adapter.id is None:
        raise InvalidRequestError(
            f"Missing required parameter: '{param}.name'.",
            param=f"{param}.name",
            code="missing_required_parameter",
        )
    if adapter.id >= len(known):
        raise InvalidRequestError(
            f"Invalid '{param}.id': there is no adapter {adapter.id}.", param=f"{param}.id"
        )
    return known[adapter.id]


def to_choices(n: int | None, spec: ModelSpec, param: str = "n") -> int:
    """Return the number of answers to each prompt. Raise InvalidRequestError for too many.

    All run at once, so there can be no more than the model has slots.
    """
    if n is None or n == 1:
        return 1
    if n > spec.slots:
        raise InvalidRequestError(
            f"Invalid '{param}': the model `{spec.id}` can give at most {spec.slots} choices.",
            param=param,
            code="integer_above_max_value",
        )
    return n


def to_reasoning_budget(ours: int | None, theirs: int | None) -> int | None:
    """Return the most tokens of reasoning: ``reasoning_budget``, or vLLM's name for it."""
    return theirs if ours is None else ours


def to_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop texts."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def to_template_vars(
    switches: Mapping[str, Any], *variables: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the variables of the chat template.

    ``switches`` are the fields ``enable_thinking``, ``reasoning_effort`` and ``verbosity``;
    ``variables`` the fields that hold variables. The switches win.
    """
    merged: dict[str, Any] = {}
    for values in variables:
        merged |= values or {}
    effort = switches.get("reasoning_effort")
    if effort is not None:
        merged["enable_thinking"] = effort != "none"
    return merged | {name: value for name, value in switches.items() if value is not None}


def text_constraint(constraint: Constraint | None, plan: ToolPlan) -> Constraint | None:
    """Return the constraint on the text; None if the answer must be a tool call.

    Libraries that decode an answer into a class send its schema as the format and as a tool. Raise
    InvalidRequestError for a constraint of another field, which would apply to the call.
    """
    if constraint is None or not plan.must_call:
        return constraint
    if not constraint.param.startswith(("response_format", "text.format")):
        raise InvalidRequestError(
            f"Invalid '{constraint.param}': an answer that must be a tool call cannot match it.",
            param=constraint.param,
        )
    return None
