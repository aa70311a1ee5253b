"""Fields that requests of chat completions and of responses share.

Sampler fields on the wire, the same for every endpoint that generates.

``temperature``, ``top_p``, the presence and frequency penalties, ``logit_bias`` and ``seed`` are
the API reference's; the others are extensions, named as local engines and their clients do.

Constrained output on the wire: ``response_format`` and the extension ``grammar``.

Source: API reference, "Structured outputs"; ``grammar`` as mistral.rs and llama.cpp have it.

The shapes in which tools and parts of contents come: chat's, which nests, and that of responses.

Clients send one where the other is meant. Each function takes what it knows to the shape of its
name, and leaves everything else as it is, for the wire models to refuse.

Content parts of messages. Source: API reference, "Chat completions", ``messages``.

Fields of tools that chat completions and responses share.

Fields under a second name: chat's in a response, and those of other servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag

from inference_site.api.payload import WireRequest
from inference_site.catalogue.sampler_fields import Bias, SamplerFields
from inference_site.errors.api_errors import InvalidRequestError

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _stop_kind(value: object) -> str:
    return "texts" if isinstance(value, list) else "text"


_StopText = Annotated[str, Field(min_length=1)]


StopTexts = Annotated[
    Annotated[_StopText, Tag("text")]
    | Annotated[list[_StopText], Field(max_length=4), Tag("texts")],
    Discriminator(_stop_kind),
]

ManyStopTexts = Annotated[
    Annotated[_StopText, Tag("text")]
    | Annotated[list[_StopText], Field(max_length=16), Tag("texts")],
    Discriminator(_stop_kind),
]
"""Of endpoints whose clients send more than OpenAI's four: evaluation harnesses, Ollama's."""


Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=16),
]


ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
"""``flex`` waits behind all others; the rest are one."""


EndUser = Annotated[str, Field(max_length=512, pattern=r"^[^\x00]*$")]
"""Who the caller asks for; kept on the generation, where PostgreSQL takes no NUL."""


class LoraAdapter(WireRequest):
    """``lora[]``: one of the model's adapters, and how much of it is applied.

    It is named, or has the number of ``GET /lora-adapters``, as in llama-server.
    """

    name: str | None = None
    id: Annotated[int, Field(ge=0)] | None = None
    scale: float = 1.0


def _lora_kind(value: object) -> str:
    return "adapters" if isinstance(value, list) else "name"


LoraField = Annotated[
    Annotated[str, Tag("name")]
    | Annotated[list[LoraAdapter], Field(max_length=16), Tag("adapters")],
    Discriminator(_lora_kind),
]


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=1_000)]


class ServerFields(WireRequest):
    """Fields of vLLM's that are passed on to servers which have them."""

    logprob_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=256)]
        | None
    ) = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: int | None = None
    vllm_xargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None


class TokenReportFields(WireRequest):
    """Fields of vLLM's that ask for the tokens of an answer and of its prompt.

    ``return_tokens_as_token_ids`` names the tokens of log probabilities ``token_id:ID``.
    """

    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class SamplingFields(SamplerFields, ServerFields):
    """Omitted values come from the model's record, then the site's; an explicit 0 is honoured."""

    logit_bias: dict[str, Bias] | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=64)] | None
    ) = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    lora: LoraField | None = None
    timings: bool | None = None


class TextFormat(WireRequest):
    """``{"type": "text"}``: no constraint."""

    type: Literal["text"]


class JsonObjectFormat(WireRequest):
    """``{"type": "json_object"}``: any JSON object; llama-server takes a ``schema`` here too."""

    type: Literal["json_object"]
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class JsonSchema(WireRequest):
    """``response_format.json_schema``. The schema is always enforced, ``strict`` or not."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")] = Field(default_factory=dict)
    strict: bool | None = None


class JsonSchemaFormat(WireRequest):
    """``{"type": "json_schema", "json_schema": {…}}``."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class Grammar(WireRequest):
    """``grammar``: ``value`` is text, or an object for ``json_schema`` and ``llguidance``."""

    type: Literal["regex", "lark", "gbnf", "json_schema", "llguidance"]
    value: str | dict[str, Any]


def _grammar_kind(value: object) -> str:
    return "text" if isinstance(value, str) else "object"


GrammarField = Annotated[
    Annotated[str, Tag("text")] | Annotated[Grammar, Tag("object")], Discriminator(_grammar_kind)
]


Choices = Annotated[list[str], Field(min_length=1, max_length=1_000)]


class StructuredOutputs(WireRequest):
    """``structured_outputs`` as vLLM has it; one of its fields is given."""

    json_schema: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class ConstraintFields(WireRequest):
    """Extensions that bind the answer's text; at most one is given, and no format beside it."""

    grammar: GrammarField | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None


_TOOLS = ("function", "custom")
_FILE = ("file_data", "file_id", "filename")
_TEXTS = ("input_text", "output_text")


def flat_tool(tool: Any) -> Any:
    """Return ``{"type": "function", "function": {…}}`` as a tool of responses.

    So it does with ``tool_choice``, with ``allowed_tools`` and with the format of a custom tool.
    """
    if not isinstance(tool, dict):
        return tool
    kind = tool.get("type")
    nested = tool.get(kind) if kind in (*_TOOLS, "allowed_tools", "grammar") else None
    if not isinstance(nested, dict):
        return tool
    return {**{key: value for key, value in tool.items() if key != kind}, **nested, "type": kind}


def nested_tool(tool: Any) -> Any:
    """Return ``{"type": "function", "name": …}`` as a tool of chats, like ``flat_tool``."""
    if not isinstance(tool, dict):
        return tool
    kind = tool.get("type")
    known = {"allowed_tools": "mode", "grammar": "definition"}.get(str(kind), "name")
    if kind not in (*_TOOLS, "allowed_tools", "grammar") or kind in tool or known not in tool:
        return tool
    return {"type": kind, kind: {key: value for key, value in tool.items() if key != "type"}}


def response_part(part: Any) -> Any:
    """Return a part of a content as responses have it."""
    match part:
        case {"type": _}:
            pass
        case {"text": str()}:
            return {**part, "type": "input_text"}
    match part:
        case {"type": "image_url" | "input_image", "image_url": {"url": url, **rest}}:
            return {**rest, "type": "input_image", "image_url": url}
        case {"type": "image_url", "image_url": str()}:
            return {**part, "type": "input_image"}
        case {"type": "file", "file": {**file}}:
            return {**file, "type": "input_file"}
        case _:
            return part


def chat_part(part: Any) -> Any:
    """Return a part of a content as chats have it."""
    match part:
        case {"type": str(kind), "text": text} if kind in _TEXTS:
            return {"type": "text", "text": text}
        case {"type": "input_image", "image_url": str(url)}:
            detail = {"detail": part["detail"]} if part.get("detail") else {}
            return {"type": "image_url", "image_url": {"url": url, **detail}}
        case {"type": "image_url", "image_url": str(url)}:
            return {"type": "image_url", "image_url": {"url": url}}
        case {"type": "input_file"}:
            return {"type": "file", "file": {key: part[key] for key in _FILE if key in part}}
        case {"type": _}:
            return part
        case {"text": str()}:
            return {**part, "type": "text"}
        case _:
            return part


class TextPart(WireRequest):
    """A content part of type ``text``."""

    type: Literal["text"]
    text: str


class RefusalPart(WireRequest):
    """A content part of type ``refusal``: what an assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


class ImageUrl(WireRequest):
    """``image_url`` of an image part: a ``data:`` or http(s) URL. ``detail`` is a hint."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(WireRequest):
    """A content part of type ``image_url``."""

    type: Literal["image_url"]
    image_url: ImageUrl


class InputAudio(WireRequest):
    """``input_audio`` of an audio part: base64 of a file."""

    data: str
    format: Literal["wav", "mp3"]


class AudioPart(WireRequest):
    """A content part of type ``input_audio``."""

    type: Literal["input_audio"]
    input_audio: InputAudio


class InputFile(WireRequest):
    """``file`` of a file part: base64 or a ``data:`` URL."""

    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class FilePart(WireRequest):
    """A content part of type ``file``."""

    type: Literal["file"]
    file: InputFile


Part = Annotated[
    TextPart | ImagePart | AudioPart | FilePart | RefusalPart,
    Field(discriminator="type"),
    BeforeValidator(chat_part),
]


def _content_kind(value: object) -> str:
    return "parts" if isinstance(value, list) else "text"


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Tag("parts")],
    Discriminator(_content_kind),
]


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class TextInput(WireRequest):
    """``format`` of a custom tool that takes any text."""

    type: Literal["text"]


class GrammarDefinition(WireRequest):
    """A grammar of what a custom tool takes: llguidance's Lark, or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: str


class GrammarInput(GrammarDefinition):
    """``format`` of a custom tool of responses that takes texts of a grammar."""

    type: Literal["grammar"]


class NestedGrammarInput(WireRequest):
    """The same of chats."""

    type: Literal["grammar"]
    grammar: GrammarDefinition


CustomFormat = Annotated[
    TextInput | GrammarInput, Field(discriminator="type"), BeforeValidator(flat_tool)
]
NestedCustomFormat = Annotated[
    TextInput | NestedGrammarInput, Field(discriminator="type"), BeforeValidator(nested_tool)
]


RequestT = TypeVar("RequestT", bound=WireRequest)


def officially_named(
    body: RequestT,
    meant: Mapping[str, tuple[str, Any]],
    objects: Mapping[str, WireRequest] | None = None,
) -> RequestT:
    """Return the body with its second names taken to the official ones.

    ``meant`` has for each second name the path of the official field and what it is to be; None
    where nothing was sent. ``objects`` are those of a path that was not sent. Raise
    InvalidRequestError where both were sent and differ.
    """
    fields: dict[str, Any] = {}
    for name, (path, value) in meant.items():
        if value is None:
            continue
        field, _, inner = path.partition(".")
        given = fields.get(field, getattr(body, field, None))
        official = getattr(given, inner, None) if inner else given
        if official is not None and official != value:
            raise InvalidRequestError(
                f"Invalid '{name}': it differs from '{path}', which means the same.", param=name
            )
        holder = given or (objects or {}).get(field)
        fields[field] = holder.model_copy(update={inner: value}) if inner and holder else value
    named = body.model_copy(update={**dict.fromkeys(meant), **fields})
    named.model_fields_set.difference_update(meant)
    return named
