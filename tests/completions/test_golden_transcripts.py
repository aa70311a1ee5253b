"""Golden transcripts: fixed deltas give exactly these bytes, in this order.

A file of ``golden/`` is what a client gets, with ids and times fixed here: the events of a stream,
or the body of an answer that is not streamed. After a change that is meant, write them anew with
``WRITE_GOLDEN=1`` and read the difference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson
import pytest

from completions.anthropic.assembler import MessageAssembly
from completions.anthropic.server_tool_assembler import message_assembler
from completions.anthropic.server_tools import SiteFunction
from completions.assemblers.chat import ChatAssembler, ChatAssembly
from completions.assemblers.completion import CompletionAssembler, CompletionAssembly
from completions.assemblers.tokens import (
    EmbeddingAssembler,
    EmbeddingAssembly,
    TokenAssembler,
    TokenAssembly,
)
from inference_site.core.domain.deltas import (
    Delta,
    EmbeddingDelta,
    Finish,
    PromptDelta,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    TokenLogprob,
    TokensDelta,
    ToolCallDelta,
    Usage,
)
from inference_site.core.domain.errors import GenerationFailed, HookFailed
from inference_site.core.domain.request import GenerationRequest
from inference_site.core.domain.site_tools import Source, ToolResult
from inference_site.runs.kinds import Assembler

FOLDER = Path(__file__).parent / "golden"
USAGE = Usage(20, 12, 8, 3, prefill_ms=4.0, decode_ms=16.0)


@dataclass
class Script:
    """What the engine yields, how it is to be told, and what ends it.

    A tool's result is that of the site's next call; a request begins the next turn.
    """

    deltas: Sequence[Delta | ToolResult | GenerationRequest]
    options: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    kind: str = "chat"


def logprob(token: str, value: float, *others: tuple[str, float]) -> TokenLogprob:
    top = tuple(TokenLogprob(text, p, text.encode()) for text, p in ((token, value), *others))
    return TokenLogprob(token, value, token.encode(), top)


def call(n: int, name: str, *arguments: str, **rest: Any) -> list[Delta]:
    first = ToolCallDelta(n, "", id=f"call_{n}", name=name, **rest)
    return [first, *(ToolCallDelta(n, piece, **rest) for piece in arguments)]


REQUEST = GenerationRequest("demo")
LISTING = ToolResult("", {"tools": [
    {"name": "read", "description": "Reads.", "input_schema": {"type": "object"}}]})  # fmt: skip
FOUND = ToolResult(
    "…",
    {"results": [{"number": 1, "url": "https://a.example/", "title": "A", "text": "Of\n a."}]},
    [Source("https://a.example/", "A")],
)
READ = ToolResult("the text")

SCRIPTS = {
    "plain": Script([TextDelta("Hello"), TextDelta(' "you"\n'), Finish("stop"), USAGE]),
    "usage_and_timings": Script(
        [TextDelta("Hi"), Finish("length"), USAGE], {"include_usage": True, "timings": True}
    ),
    "timings_alone": Script([TextDelta("Hi"), Finish("stop"), USAGE], {"timings": True}),
    "two_choices": Script(
        [
            TextDelta("b", 1),
            TextDelta("a", 0),
            Finish("stop", 1, "\n"),
            TextDelta("A", 0),
            Finish("length", 0),
            USAGE,
        ],
        {"choices": 2, "service_tier": "flex"},
    ),
    "reasoning": Script(
        [ReasoningDelta("Hm"), ReasoningDelta("."), TextDelta("Yes"), Finish("stop"), USAGE],
        {"include_usage": True},
    ),
    "refusal": Script([RefusalDelta("I can"), RefusalDelta("not."), Finish("stop"), USAGE]),
    "tools": Script(
        [
            TextDelta("Wait."),
            *call(0, "look", '{"at":', '"x"}'),
            *call(1, "pick", "{}"),
            Finish("tool_calls"),
            USAGE,
        ]
    ),
    "custom_tool": Script(
        [*call(0, "run", "print(", "1)\n", is_custom=True), Finish("tool_calls"), USAGE]
    ),
    "function_call": Script(
        [*call(0, "look", '{"at":', '"x"}'), Finish("tool_calls"), USAGE], {"is_legacy": True}
    ),
    "logprobs": Script(
        [
            TextDelta("Hé", logprobs=(logprob("H", -0.5, ("J", -1.5)), logprob("é", -0.25))),
            TextDelta("!", logprobs=(logprob("!", -0.125),)),
            Finish("stop", stop=7),
            USAGE,
        ],
        {"logprobs": True},
    ),
    "silence": Script([Finish("stop"), USAGE]),
    "error_at_once": Script([], error=GenerationFailed("boom")),
    "error_after_start": Script(
        [Usage(20), ReasoningDelta("Hm"), TextDelta("Hel"), *call(0, "look", '{"a')],
        error=GenerationFailed("boom"),
    ),
    "error_of_a_hook": Script([TextDelta("Hel")], error=HookFailed("secret")),
    "completion": Script(
        [TextDelta("a", 0), TextDelta("b", 1), Finish("length", 0), Finish("stop", 1, "."), USAGE],
        {"echoes": ["One ", "Two "], "include_usage": True},
        kind="completion",
    ),
    "completion_logprobs": Script(
        [TextDelta("ab", logprobs=(logprob("a", -0.5, ("c", -2)), logprob("b", -1))),
         Finish("stop"), USAGE],
        {"logprobs": True, "timings": True},
        kind="completion",
    ),
    "completion_error": Script(
        [TextDelta("half")], error=GenerationFailed("boom"), kind="completion"
    ),
    "message": Script(
        [ReasoningDelta("Hm."), TextDelta("Wait"), TextDelta("."),
         *call(0, "look", '{"at":', '"x"}'), Finish("tool_calls"), USAGE],
        kind="message",
    ),
    "message_site_tools": Script(
        [LISTING, REQUEST, Usage(9), TextDelta("Now."), *call(0, "web_search", '{"query": "x"}'),
         *call(1, "docs__read", "{}"), Finish("tool_calls"), Usage(9, 5), FOUND, READ, REQUEST,
         TextDelta("So [1].\nA"), TextDelta("nd so."), Finish("stop"), USAGE],
        {"site_tools": [{"type": "web_search"}, {"type": "mcp", "server_label": "docs"}],
         "routes": {"web_search": SiteFunction(0, "web_search")},
         "unlisted": [1], "shows_listings": True},
        kind="message",
    ),
    "message_failed_tools": Script(
        [*call(0, "web_search", "{}"), *call(1, "docs__read", "{}"), Finish("tool_calls"),
         ToolResult("no", {"error_code": "invalid_tool_input"}, is_error=True),
         ToolResult("full", is_error=True), REQUEST, TextDelta("No."), Finish("length"), USAGE],
        {"site_tools": [{"type": "web_search"}, {"type": "mcp", "server_label": "docs"}],
         "routes": {"web_search": SiteFunction(0, "web_search"),
                    "docs__read": SiteFunction(1, "read", "docs")}},
        kind="message",
    ),
}  # fmt: skip


def assembler(script: Script, *, stream: bool) -> Assembler:
    shared = {"created": 1_700_000_000, "model": "demo", "stream": stream, "include_usage": False}
    if script.kind == "message":
        message = MessageAssembly("msg_1", "demo", 1, stream=stream, **script.options)
        return message_assembler(message)
    if script.kind == "chat":
        chat = {"completion_id": "chatcmpl-1", **shared, **script.options}
        return ChatAssembler(ChatAssembly(**chat))
    defaults = {"completion_id": "cmpl-1", "echoes": [""], "logprobs": False}
    return CompletionAssembler(CompletionAssembly(**{**defaults, **shared, **script.options}))


def transcript(script: Script) -> bytes:
    """Return the stream, then the answer without one, as JSON that a reader can follow."""
    streaming, whole = (assembler(script, stream=stream) for stream in (True, False))
    frames = [frame for entry in script.deltas for frame in taken(streaming, entry)]
    for entry in script.deltas:
        assert list(taken(whole, entry)) == []
    endings = [
        fold.complete() if script.error is None else fold.fail(script.error)
        for fold in (streaming, whole)
    ]
    body = orjson.dumps(orjson.loads(endings[1].body), option=orjson.OPT_INDENT_2)
    comment = f": without a stream: {endings[1].status}\n".encode()
    told = b"".join([*frames, *endings[0].frames, comment, body, b"\n"])
    return _RANDOM.sub(rb"\1...", told)


_RANDOM = re.compile(rb'((?:srvtoolu_|mcptoolu_|"signature":\s?"|gAAAA))[\w=-]+')
"""What is another text each time: ids of calls, signatures and sealed content."""


def taken(fold: Assembler, entry: Delta | ToolResult | GenerationRequest) -> Sequence[bytes]:
    """Let an assembler take an entry of a script; return its frames."""
    match entry:
        case ToolResult():
            assert fold.calls()
            return fold.add_result(entry)
        case GenerationRequest():
            assert not fold.calls()
            assert fold.next_request(entry) is not None
            return ()
        case _:
            return fold.feed(entry)


def check(name: str, told: bytes) -> None:
    path = FOLDER / name
    if os.environ.get("WRITE_GOLDEN"):
        path.write_bytes(told)
    assert told.decode() == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SCRIPTS)
def test_transcript_is_as_it_was(name: str) -> None:
    check(f"{name}.sse", transcript(SCRIPTS[name]))


def test_no_transcript_is_left_over() -> None:
    expected = {f"{name}.sse" for name in SCRIPTS} | {"embeddings.json", "tokens.json"}
    assert {path.name for path in FOLDER.iterdir()} == expected


def indented(assembler: Assembler, deltas: Sequence[Delta]) -> bytes:
    for delta in deltas:
        assert assembler.feed(delta) == ()
    body = orjson.loads(assembler.complete().body)
    return orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n"


def test_embeddings_are_as_they_were() -> None:
    third, fourth = b"\x00\x00\x40\x3f" * 2, b"\x00\x00\x00\x3f\x00\x00\x80\x3e"
    deltas: list[Delta] = [EmbeddingDelta(fourth, 1), EmbeddingDelta(third, 0), Usage(7)]
    told = [
        indented(EmbeddingAssembler(EmbeddingAssembly("demo", "float")), deltas),
        indented(EmbeddingAssembler(EmbeddingAssembly("demo", "base64")), deltas),
        indented(EmbeddingAssembler(EmbeddingAssembly("demo", "float", 1)), deltas),
    ]
    check("embeddings.json", b"".join(told))


def tokens(answer: Literal["tokens", "text", "prompt"]) -> TokenAssembler:
    return TokenAssembler(TokenAssembly(answer, "demo", 2048))


def test_tokens_are_as_they_were() -> None:
    told = [
        indented(tokens("tokens"), [TokensDelta((1, 5)), Finish("stop")]),
        indented(tokens("text"), [TextDelta("Hé"), Finish("stop")]),
        indented(tokens("prompt"), [PromptDelta("<s>Hé", (1, 5))]),
    ]
    check("tokens.json", b"".join(told))
