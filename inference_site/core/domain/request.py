"""The request that an engine runs: messages or prompts, sampling, tools and constraints.

Messages are the turns of a conversation, as a chat template receives them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import groupby
from typing import Any, Literal

MAX_FUNCTIONS = 1024
"""The most functions of one request, those of its tools with several functions included."""
_NAME_LENGTH = 64
"""The most characters of a function's name that models and their templates are known to take."""
_DIGEST_LENGTH = 8

Role = Literal["system", "user", "assistant", "tool"]
_CUSTOM_TOOL_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made; ``arguments`` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text between media."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image by its URL: http(s) until the worker has fetched it, then ``data:``.

    ``param`` names the field of the request it came from, for errors.
    """

    url: str
    param: str


@dataclass(frozen=True, slots=True)
class AudioPart:
    """Audio: a file of this format, in base64."""

    audio: str
    format: Literal["wav", "mp3"]
    param: str


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file that the worker replaces by its text or image: stored, sent with the request, or at
    an http(s) URL.

    One of ``file_id``, ``content`` and ``url`` is there. ``file_id`` is a file of the project;
    ``content`` is base64.
    """

    param: str
    file_id: str | None = None
    content: str | None = None
    filename: str | None = None
    url: str | None = None


Part = TextPart | ImagePart | AudioPart | FilePart


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of the conversation, as the model's chat template receives it.

    A turn with media has ``parts``, in order, and no ``text``. Otherwise ``text`` is None only for
    an assistant turn with calls and no text. A turn of the role ``tool`` is the result of the call
    ``tool_call_id``. ``reasoning`` is the assistant's reasoning before its answer.
    """

    role: Role
    text: str | None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    parts: tuple[Part, ...] = ()
    reasoning: str | None = None

    @property
    def all_text(self) -> str:
        """The text of the turn, or the texts between its media."""
        texts = (part.text for part in self.parts if isinstance(part, TextPart))
        return "".join(texts) if self.parts else self.text or ""


def drop_oldest_turns(
    messages: Sequence[Message], lengths: Sequence[float], excess: float
) -> tuple[Message, ...]:
    """Return the messages without the oldest turns, which together have at least this length.

    Used when a conversation is too long for its model. ``lengths`` are those of the messages in
    any unit: characters, bytes or tokens. At least one turn is dropped, if there is one before the
    last message of the user; that message and all after it stay. System messages stay, too.
    """
    last_turn = max((i for i, m in enumerate(messages) if m.role == "user"), default=0)
    dropped: set[int] = set()
    dropped_length = 0.0
    for position in range(last_turn):
        message = messages[position]
        if message.role == "system":
            continue
        # A turn is dropped up to the next message of the user: templates require that a
        # conversation starts with the user, and a result needs its call.
        if message.role == "user" and dropped and dropped_length >= excess:
            break
        dropped.add(position)
        dropped_length += lengths[position]
    return tuple(message for i, message in enumerate(messages) if i not in dropped)


@dataclass(frozen=True, slots=True)
class History:
    """The messages of a request in three parts.

    ``leading`` are the instructions at the beginning, which stay; ``middle`` is what is summarised;
    ``newest`` is what the model has not answered yet, which stays.
    """

    leading: tuple[Message, ...]
    middle: tuple[Message, ...]
    newest: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Compaction:
    """When a request is compacted, and what of it.

    ``threshold``: the number of tokens of the prompt from which on it is compacted; 0 means now.
    ``summary_tokens`` is the most tokens of the summary. ``instructions`` is the number of first
    messages that belong to this request only; ``leading`` counts them and those after them that
    stay. ``has_summary``: the message after these is an earlier summary. ``keeps_newest``: what
    the model has not answered stays as it is. ``is_whole_answer``: the summary is all that is asked
    for, and the instructions apply to it. ``counts``: the engine can render the prompt, so that its
    tokens can be counted.
    """

    threshold: int
    summary_tokens: int
    instructions: int = 0
    leading: int = 0
    has_summary: bool = False
    keeps_newest: bool = True
    is_whole_answer: bool = False
    counts: bool = False

    def split(self, messages: Sequence[Message]) -> History:
        """Return the three parts of the messages."""
        end = len(messages)
        if self.keeps_newest:
            while end > self.leading and messages[end - 1].role != "assistant":
                end -= 1
            # Results of tools stay with their calls, which are in the message before them.
            if end > self.leading and end < len(messages) and messages[end].role == "tool":
                end -= 1
            if end == self.leading and self.has_summary and end < len(messages):
                end += 1
        leading, rest = messages[: self.leading], messages[self.leading :]
        cut = end - self.leading
        return History(tuple(leading), tuple(rest[:cut]), tuple(rest[cut:]))

    def without_oldest(
        self, messages: Sequence[Message], lengths: Sequence[int], excess: int
    ) -> tuple[Message, ...]:
        """Return the messages without the oldest that would be summarised, ``excess`` of length.

        For a conversation that certainly exceeds the context: it will be compacted, and no summary
        can read all of it. An earlier summary stays.
        """
        history = self.split(messages)
        first = self.leading + (self.has_summary and bool(history.middle))
        end, dropped = first, 0
        while end < self.leading + len(history.middle) and dropped < excess:
            dropped += lengths[end]
            end += 1
        return (*messages[:first], *messages[end:])


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampler settings. ``None`` means "the model's own default"; 0 means 0.

    ``repetition_penalty`` multiplies (1 is off); the presence and frequency penalties subtract.
    ``dry_*`` is the DRY sampler ("don't repeat yourself"), ``xtc_*`` "exclude top choices"; they
    are off unless ``dry_multiplier`` or ``xtc_probability`` is above 0. ``logit_bias`` has pairs of
    a token id of the served model and a number that is added to its logit.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: tuple[str, ...] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def over(self, defaults: Sampling) -> Sampling:
        """Return these settings, with the defaults for those that are not set."""
        if self == _UNSET:
            return defaults
        if defaults == _UNSET:
            return self
        left_out = {
            name: value
            for name in self.__slots__
            if getattr(self, name) in (None, ()) and (value := getattr(defaults, name)) is not None
        }
        return replace(self, **left_out) if left_out else self


_UNSET = Sampling()


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call; ``parameters`` is the JSON schema of its arguments.

    ``is_custom``: it stands for a custom tool (see ``custom_tool``), whose text must match the
    ``grammar``, if there is one. ``is_strict``: calls that the model chooses to make must match the
    schema; forced calls always must. ``param`` is the field of the client's request that the schema
    came from, if it is known.
    """

    name: str
    description: str | None
    parameters: dict[str, Any]
    is_custom: bool = False
    grammar: Constraint | None = None
    is_strict: bool = False
    param: str = field(default="", compare=False)


ConstraintKind = Literal["json_object", "json_schema", "gbnf", "lark", "regex", "llguidance"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A schema or grammar that the answer's text must match.

    ``source`` is the schema as JSON text for ``json_schema``, a llguidance grammar as JSON text for
    ``llguidance``, the grammar or expression itself for the others, and empty for ``json_object``.
    ``param`` is the field of the client's request that it came from. ``named`` has the fields
    ``name``, ``description`` and ``strict`` that a client sends with a schema.
    """

    kind: ConstraintKind
    source: str
    param: str
    named: dict[str, Any] = field(default_factory=dict, hash=False)


Operation = Literal[
    "chat", "complete", "embed", "rank", "moderate", "tokenize", "detokenize", "render",
    "transcribe", "translate", "speak",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class AudioFile:
    """A sound to hear: base64 of a file, and the ending of its name, by its content."""

    content: str
    ending: str


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request to an engine, which does not depend on the API that the client used.

    ``operation`` names the method of the engine. ``chat`` and ``render`` take ``messages``; the
    others take ``prompts``, each of which is text or token ids. Prompts are completed without a
    chat template; with a ``suffix``, by the text between prompt and suffix. ``other_files``, pairs
    of a name and a text, come before such a prompt. Each prompt has ``choices`` answers, sampled
    from one prefill; the index of an answer is prompt × choices + choice. ``rank`` compares each
    prompt with its query: ``queries`` has one for all prompts, or one for each. ``moderate`` judges
    each prompt, or the one message; with a ``guard`` the model is asked in a chat
    (``worker.runtime.guards``). ``transcribe`` and ``translate`` hear the ``audio``, and ``speak``
    says the one prompt; ``fields`` are the other fields of their requests, and with ``streams`` the
    answer has events.

    Length: ``max_output_tokens=None`` means "until the context is full". With ``lowers_max_output``
    a limit that a server refuses as too high is lowered, once. ``stop`` has texts and
    ``stop_token_ids`` tokens that end an answer and are not in the output. ``ignore_eos`` continues
    after the model's end-of-sequence token (for benchmarks) where ``goes_on_after_eos`` says so.
    ``reasoning_budget`` ends the reasoning after this number of tokens. ``truncate`` drops the
    oldest turns, but no instructions, when the context is too short, the end of a text to embed,
    and of a text with a ``suffix`` what is far from its gap. With ``compaction`` the worker has
    the model summarise the oldest turns first, and then answer what is left.

    Log probabilities: ``top_logprobs=None`` means none; 0 means those of the chosen tokens only.
    ``echo`` puts each prompt before its answers, with the log probabilities of its tokens if they
    are requested; with it ``max_output_tokens`` may be 0. ``token_ids`` has the engine feed
    ``PromptTokens`` and ``AnswerTokens``; ``prompt_logprobs`` has it feed ``PromptTokens`` with
    this number of the likeliest tokens at each position. ``tokens_as_ids`` names the tokens of log
    probabilities ``token_id:ID``.

    Prompt: ``template_vars`` are variables of the chat template and take precedence over those of
    the model's entry. ``prompt_template`` names another template than the model's own.
    ``response_prefix`` is the start of the answer and not part of the output.
    ``add_generation_prompt=False`` omits the template's start of an answer. ``cache_prompt=False``
    disables the prompt cache. ``lora`` has pairs of an adapter of the model and its scale.

    Tools: with ``must_call`` the answer is a call of one of the ``tools`` and nothing else;
    otherwise the model chooses. With ``only_tools`` calls of others are dropped: the client does
    not allow them in this answer, though earlier messages may have such calls.

    ``return_progress`` has engines that can do so feed ``PromptProgress`` during the prefill.
    ``running_usage`` has the engine feed ``Usage`` before each piece of the answer.
    ``add_special_tokens=False`` omits the tokens that start every prompt of the model, and
    ``token_texts`` returns the texts of tokens; both apply to ``tokenize``. ``extensions`` are
    fields of vLLM, for engines that have them.
    """

    model: str
    messages: tuple[Message, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    max_output_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    choices: int = 1
    top_logprobs: int | None = None
    constraint: Constraint | None = None
    template_vars: dict[str, Any] = field(default_factory=dict)
    reasoning_budget: int | None = None
    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    parallel_tool_calls: bool = True
    operation: Operation = "chat"
    prompts: tuple[str | tuple[int, ...], ...] = ()
    queries: tuple[str, ...] = ()
    suffix: str | None = None
    other_files: tuple[tuple[str, str], ...] = ()
    response_prefix: str = ""
    add_generation_prompt: bool = True
    cache_prompt: bool = True
    lora: tuple[tuple[str, float], ...] = ()
    truncate: bool = False
    compaction: Compaction | None = None
    echo: bool = False
    return_progress: bool = False
    running_usage: bool = False
    add_special_tokens: bool = True
    token_texts: bool = False
    prompt_template: str = ""
    token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: int | None = None
    extensions: dict[str, Any] = field(default_factory=dict)
    guard: str = ""
    audio: AudioFile | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    streams: bool = False
    lowers_max_output: bool = False
    only_tools: bool = False

    @property
    def has_parts(self) -> bool:
        """Whether a message has parts, such as images and sounds, in place of one text."""
        return any(message.parts for message in self.messages)

    @property
    def answers(self) -> int:
        """The number of answers to all prompts; each has exactly one ``Finish``."""
        return self.choices * (len(self.prompts) or 1)

    @property
    def goes_on_after_eos(self) -> bool:
        """Whether the answer goes on after the model's end-of-sequence token.

        A constrained answer, or a call that must come, ends where it is whole.
        """
        return self.ignore_eos and self.constraint is None and not self.must_call

    @property
    def forced_grammar(self) -> Constraint | None:
        """The grammar of the only tool, if it is a custom tool that the model must call.

        If the model may choose a tool, the grammar is only part of the prompt.
        """
        return self.tools[0].grammar if self.must_call and len(self.tools) == 1 else None

    @property
    def tools_param(self) -> str:
        """The field of the client's request with the schema of the only tool, or with all tools."""
        return (self.tools[0].param if len(self.tools) == 1 else "") or "tools"

    @property
    def scores_prompts(self) -> bool:
        """Whether the log probabilities of the prompts' tokens are requested with ``echo``."""
        return self.echo and self.top_logprobs is not None

    @property
    def names_prompt_tokens(self) -> bool:
        """Whether the tokens of the prompts are requested."""
        return self.token_ids or self.prompt_logprobs is not None

    @property
    def query_of_each(self) -> tuple[str, ...]:
        """The query with which each prompt of ``rank`` is compared."""
        return self.queries if len(self.queries) > 1 else self.queries * len(self.prompts)

    def comparisons(self, most: int) -> Iterator[tuple[str, int, list[str]]]:
        """Yield the parts of ``rank``: a query, the index of its first prompt, ``most`` prompts."""
        first = 0
        for query, group in groupby(self.query_of_each):
            end = first + len(list(group))
            for start in range(first, end, most):
                texts = self.prompts[start : min(start + most, end)]
                yield query, start, [str(text) for text in texts]
            first = end

    @property
    def subject(self) -> str:
        """The field of the client's request with the model's input, for errors."""
        if self.operation in ("embed", "moderate", "speak"):
            return "input"
        if self.operation == "rank":
            return "documents"
        return "prompt" if self.prompts else "messages"


def custom_tool(name: str, description: str | None, grammar: Constraint | None = None) -> Tool:
    """Return the function that stands for a custom tool, which takes one text and no JSON.

    Models know only functions. The function has the text as its one argument. Its description
    contains the grammar. ``worker.runtime.tool_calls`` decodes the arguments of the calls.
    """
    if grammar is not None:
        note = f"Its input is a text of this {grammar.kind} grammar:\n{grammar.source}"
        description = f"{description}\n\n{note}" if description else note
    return Tool(name, description, _CUSTOM_TOOL_SCHEMA, is_custom=True, grammar=grammar)


def custom_arguments(text: str) -> str:
    """Return the arguments of a call of a custom tool's function with this text."""
    return json.dumps({"input": text}, ensure_ascii=False)


def function_name(name: str, namespace: str | None, kind: str) -> str:
    """Return the name by which a model calls a tool, unless another tool has the same one.

    It has only letters, digits, ``_`` and ``-``, and at most 64 of them.
    """
    joint = "" if (namespace or "").endswith("__") else "__"
    whole = re.sub(r"[^A-Za-z0-9_-]", "_", f"{namespace}{joint}{name}" if namespace else name)
    return whole if len(whole) <= _NAME_LENGTH else distinct_name(whole, name, namespace, kind)


def short_name(name: str) -> str:
    """Return the name by which a model calls a client's function: a long one ends in a digest."""
    return name if len(name) <= _NAME_LENGTH else distinct_name(name, name, None, "function")


def distinct_name(usual: str, name: str, namespace: str | None, kind: str) -> str:
    """Return a name that no other tool has: ``usual``, shortened, and a digest of the tool."""
    identity = "\0".join((kind, namespace or "", name))
    digest = sha256(identity.encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"{usual[: _NAME_LENGTH - _DIGEST_LENGTH - 1]}_{digest}"


def objects_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every JSON object in a schema, including itself."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)


def nearest_to_gap(request: GenerationRequest, share: float) -> GenerationRequest:
    """Return the request with this share of its texts, what is nearest to the gap.

    The first of the other files are left out. If not even prefix and suffix fit, the suffix keeps
    at most a quarter of the bytes, as in llama-server.
    """
    [prompt] = request.prompts
    assert isinstance(prompt, str)
    before, after = prompt.encode(), (request.suffix or "").encode()
    sizes = [len(f"{name}{text}".encode()) for name, text in request.other_files]
    size = int((len(before) + len(after) + sum(sizes)) * share)
    if len(before) + len(after) > size:
        after = after[: size // 4]
        before = before[max(0, len(before) + len(after) - size) :]
    first, room = len(sizes), size - len(before) - len(after)
    while first and (room := room - sizes[first - 1]) >= 0:
        first -= 1
    prefix, suffix = (text.decode(errors="ignore") for text in (before, after))
    return replace(
        request, prompts=(prefix,), suffix=suffix, other_files=request.other_files[first:]
    )
