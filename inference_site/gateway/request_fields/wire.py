"""Wire models of the fields that several endpoints share. The API apps import them.

Sources: the API reference, "Chat completions" and "Structured outputs"; for extensions, the server
that a model names. Clients send tools and content parts in the shape of chat completions, which
nests, where the flat shape of responses is meant, and the other way round: ``flat_tool`` and the
functions beside it convert what they know and leave everything else for the models to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag

from inference_site.catalogue.operator_settings import Bias, SamplerFields
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.payload import NO_NUL, WireRequest

RequestT = TypeVar("RequestT", bound=WireRequest)

CallId = Annotated[str, Field(min_length=1, max_length=16_384)]
"""The id of a call. A server may have made it: LiteLLM puts Gemini's signatures into ids."""

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _text_or_list(value: object) -> str:
    """The discriminator of fields that are a text or a list."""
    return "list" if isinstance(value, list) else "text"


_StopText = Annotated[str, Field(min_length=1)]


StopTexts = Annotated[
    Annotated[_StopText, Tag("text")]
    | Annotated[list[_StopText], Field(max_length=4), Tag("list")],
    Discriminator(_text_or_list),
]

ManyStopTexts = Annotated[
    Annotated[_StopText, Tag("text")]
    | Annotated[list[_StopText], Field(max_length=16), Tag("list")],
    Discriminator(_text_or_list),
]
"""For endpoints whose clients (evaluation harnesses, Ollama's) send more than OpenAI's four."""


Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=16),
]


ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]
"""``fast`` is another name of ``priority``; ``scale`` and ``ultrafast`` are served as usual."""


EndUser = Annotated[str, Field(max_length=512, pattern=NO_NUL)]
"""The end user whom the client names. It is stored in PostgreSQL, which accepts no NUL."""


class LoraAdapter(WireRequest):
    """``lora[]``: one of the model's adapters, and the scale with which it is applied.

    It has its name, or its number in ``GET /lora-adapters``, as in llama-server.
    """

    name: str | None = None
    id: Annotated[int, Field(ge=0)] | None = None
    scale: float = 1.0


LoraField = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[LoraAdapter], Field(max_length=16), Tag("list")],
    Discriminator(_text_or_list),
]


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=1_000)]


class ServerFields(WireRequest):
    """Fields of vLLM that are passed on to model servers which have them."""

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
    """Fields of vLLM that ask for the tokens of an answer and of its prompt.

    ``return_tokens_as_token_ids`` names the tokens of log probabilities ``token_id:ID``.
    """

    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class SamplingFields(SamplerFields, ServerFields):
    """Sampler fields of every endpoint that generates.

    ``temperature``, ``top_p``, the presence and frequency penalties, ``logit_bias`` and ``seed``
    are the API reference's; the others are extensions, named as local engines name them. Omitted
    values come from the model's entry, then from the site's settings; an explicit 0 is honoured.
    """

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
    """``grammar`` of mistral.rs; ``value`` is an object for ``json_schema`` and ``llguidance``."""

    type: Literal["regex", "lark", "gbnf", "json_schema", "llguidance"]
    value: str | dict[str, Any]


GrammarField = Annotated[
    Annotated[str, Tag("text")] | Annotated[Grammar, Tag("object")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "object"),
]


Choices = Annotated[list[str], Field(min_length=1, max_length=1_000)]


class StructuredOutputs(WireRequest):
    """``structured_outputs`` of vLLM; exactly one of its fields is given."""

    json_schema: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class ConstraintFields(WireRequest):
    """Extensions that constrain the answer's text; two of them, or one and a format, must be equal.

    ``grammar`` is that of mistral.rs and llama.cpp, ``json_schema`` that of llama.cpp and SGLang,
    ``regex`` and ``ebnf`` are SGLang's; the others are vLLM's.
    """

    grammar: GrammarField | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None


_TOOLS = ("function", "custom")
_FILE = ("file_data", "file_id", "filename")
_TEXTS = ("input_text", "output_text")


def flat_tool(tool: Any) -> Any:
    """Return ``{"type": "function", "function": {…}}`` as a tool of responses.

    It also converts ``tool_choice``, ``allowed_tools`` and the format of a custom tool.
    """
    if not isinstance(tool, dict):
        return tool
    kind = tool.get("type")
    nested = tool.get(kind) if kind in (*_TOOLS, "allowed_tools", "grammar") else None
    if not isinstance(nested, dict):
        return tool
    return {**{key: value for key, value in tool.items() if key != kind}, **nested, "type": kind}


def nested_tool(tool: Any) -> Any:
    """Return ``{"type": "function", "name": …}`` as a tool of chats, as ``flat_tool`` inverted."""
    if not isinstance(tool, dict):
        return tool
    kind = tool.get("type")
    known = {"allowed_tools": "mode", "grammar": "definition"}.get(str(kind), "name")
    if kind not in (*_TOOLS, "allowed_tools", "grammar") or kind in tool or known not in tool:
        return tool
    return {"type": kind, kind: {key: value for key, value in tool.items() if key != "type"}}


def response_part(part: Any) -> Any:
    """Return a content part as a part of responses."""
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
    """Return a content part as a part of chats."""
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
    """A content part of type ``refusal``, which an assistant gave instead of an answer."""

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
    """``file`` of a file part: base64 or a ``data:`` URL, an uploaded file, or an http(s) URL."""

    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None
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


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Tag("list")],
    Discriminator(_text_or_list),
]


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class TextInput(WireRequest):
    """``format`` of a custom tool that takes any text."""

    type: Literal["text"]


class GrammarDefinition(WireRequest):
    """The grammar of a custom tool's input: llguidance's Lark, or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: str


class GrammarInput(GrammarDefinition):
    """``format`` of a custom tool with a grammar, in responses."""

    type: Literal["grammar"]


class NestedGrammarInput(WireRequest):
    """``format`` of a custom tool with a grammar, in chats."""

    type: Literal["grammar"]
    grammar: GrammarDefinition


CustomFormat = Annotated[
    TextInput | GrammarInput, Field(discriminator="type"), BeforeValidator(flat_tool)
]
NestedCustomFormat = Annotated[
    TextInput | NestedGrammarInput, Field(discriminator="type"), BeforeValidator(nested_tool)
]


def apply_aliases(
    body: RequestT,
    aliases: Mapping[str, tuple[str, Any]],
    objects: Mapping[str, WireRequest] | None = None,
) -> RequestT:
    """Return the body with the values of alias fields moved to the official fields.

    ``aliases`` has for each alias the path of the official field and its value, None if the alias
    was not sent. ``objects`` are the objects to create for paths whose outer field was not sent.
    Raise InvalidRequestError if both were sent and differ.
    """
    fields: dict[str, Any] = {}
    for name, (path, value) in aliases.items():
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
    named = body.model_copy(update={**dict.fromkeys(aliases), **fields})
    named.model_fields_set.difference_update(aliases)
    return named
