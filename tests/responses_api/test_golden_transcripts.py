"""Golden transcripts: fixed deltas give exactly these events, in this order.

A file of ``golden/`` is what a client gets, with ids and times made alike. After a change that is
meant, write them anew with ``WRITE_GOLDEN=1`` and read the difference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from inference_site.core.domain.compaction import CompactedContext
from inference_site.core.domain.deltas import (
    CompactionDelta,
    Delta,
    Finish,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    Usage,
)
from inference_site.core.domain.errors import GenerationFailed
from inference_site.runs.streams.batches import Ending
from responses_api.assembler import ResponseAssembler, ResponseAssembly
from responses_api.client_tools import offer_tools
from responses_api.events import DONE, accepted_frames, decode
from responses_api.wire.objects import OutputItem
from responses_api.wire.requests import ResponseRequest
from tests.responses_api.deltas import begun, call, logprob, new_assembler, new_response
from tests.responses_api.validation import StreamCheck

FOLDER = Path(__file__).parent / "golden"
USAGE = Usage(20, 12, 8, 3)
BOOM = GenerationFailed("boom")
WEATHER = {"type": "function", "name": "look", "parameters": {"type": "object"}}

End = Callable[[ResponseAssembler], Ending]


class ReadableAssembly(ResponseAssembly):
    """The content of its compactions is their summary."""

    def seal_compaction(self, context: CompactedContext, output: Sequence[OutputItem]) -> str:
        return context.summary


def failed(assembler: ResponseAssembler) -> Ending:
    return assembler.fail(BOOM)


@dataclass
class Script:
    """The deltas of the engine, the fields of the request, and the end."""

    deltas: Sequence[Delta]
    fields: dict[str, Any] = field(default_factory=dict)
    end: End = ResponseAssembler.complete


SCRIPTS = {
    "text": Script([TextDelta("Hello"), TextDelta(' "you"\n'), Finish("stop"), USAGE]),
    "reasoning_and_text": Script(
        [ReasoningDelta("Hm"), ReasoningDelta("."), TextDelta("Yes"), Finish("stop"), USAGE]
    ),
    "reasoning_with_summary": Script(
        [ReasoningDelta("First. More.\n\n"), ReasoningDelta("Then? Yes."), TextDelta("Yes"),
         Finish("stop"), USAGE],
        {"reasoning": {"summary": "concise", "context": "auto"}},
    ),
    "refusal": Script([RefusalDelta("I can"), RefusalDelta("not."), Finish("stop"), USAGE]),
    "compaction": Script(
        [CompactionDelta(CompactedContext("So far.")), TextDelta("Yes"), Finish("stop"), USAGE]
    ),
    "two_parallel_calls": Script(
        [*call(0, "look", '{"at":', '"x"}'), *call(1, "look", '{"at":"y"}'),
         Finish("tool_calls"), USAGE],
        {"tools": [WEATHER]},
    ),
    "call_without_arguments": Script(
        [TextDelta("Wait."), *call(0, "look"), Finish("tool_calls"), USAGE]
    ),
    "custom_tool": Script(
        [*call(0, "run", "print(", "1)\n", is_custom=True), Finish("tool_calls"), USAGE],
        {"tools": [{"type": "custom", "name": "run"}]},
    ),
    "namespaced_call": Script(
        [*call(0, "mcp__notes__add", '{"text":"x"}'), Finish("tool_calls"), USAGE],
        {"tools": [{"type": "namespace", "name": "mcp__notes", "description": "Notes",
                    "tools": [{"type": "function", "name": "add"}]}]},
    ),
    "typed_tools": Script(
        [*call(0, "shell", '{"commands":["ls",', '"pwd"],"timeout_ms":500}'),
         *call(1, "local_shell", '{"command":["ls"]}'),
         *call(2, "apply_patch", '{"type":"update_file","path":"a","diff":"@@', '\\n-a\\n+b"}'),
         *call(3, "tool_search", '{"query":"mail"}'),
         *call(4, "shell", '{"wrong":1}'),
         Finish("tool_calls"), USAGE],
        {"tools": [{"type": "shell"}, {"type": "local_shell"}, {"type": "apply_patch"},
                   {"type": "tool_search", "execution": "client"}]},
    ),
    "length_in_a_shell_call": Script(
        [*call(0, "shell", '{"commands":["ls","rm'), Finish("length"), USAGE],
        {"tools": [{"type": "shell"}]},
    ),
    "length": Script(
        [TextDelta("Once"), TextDelta(" upon"), Finish("length"), USAGE], {"max_output_tokens": 8}
    ),
    "length_in_a_call": Script([*call(0, "look", '{"at"'), Finish("length"), USAGE]),
    "empty": Script([Finish("stop"), USAGE]),
    "log_probabilities": Script(
        [
            TextDelta("Hé", logprobs=(logprob("H", -0.5, "H", "J"), logprob("é", -0.25))),
            TextDelta("!", logprobs=(logprob("!", -0.125),)),
            Finish("stop"),
            USAGE,
        ],
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ),
    "failure_before_output": Script([], end=failed),
    "failure_after_output": Script([Usage(20), TextDelta("Hel"), TextDelta("lo")], end=failed),
    "cancelled": Script(
        [Usage(20), ReasoningDelta("Hm"), TextDelta("Hel")], end=ResponseAssembler.cancel
    ),
    "background": Script(
        [TextDelta("Hi"), Finish("stop"), USAGE],
        {"background": True, "conversation": "conv_1", "metadata": {"a": "b"}},
    ),
}  # fmt: skip
_ID = re.compile(r"(msg|rs|fc|ctc|sh|lsh|apc|tsc|cmp)_[0-9a-f]{32}")


def alike(text: str) -> str:
    """The text with numbered ids and a fixed time of the end."""
    names: dict[str, str] = {}

    def named(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"{match[1]}_{len(names) + 1:024}")

    text = _ID.sub(named, text)
    return re.sub(r'("completed_at": ?)\d+', r"\g<1>1700000001", text)


@pytest.mark.parametrize("name", SCRIPTS)
def test_transcript_is_as_it_was(name: str) -> None:
    script = SCRIPTS[name]
    given = ResponseRequest.model_validate({"input": "x", **script.fields})
    offered = offer_tools(given.tools or (), project_id=1)
    assembler = new_assembler(
        new_response(**script.fields),
        ReadableAssembly,
        routes={name: asdict(route) for name, route in offered.routes.items()},
    )
    frames = begun(assembler, script.deltas)
    ending = script.end(assembler)
    frames += ending.frames
    body = orjson.dumps(orjson.loads(ending.body), option=orjson.OPT_INDENT_2).decode()
    told = alike(b"".join(frames).decode() + f": without a stream: {ending.status}\n{body}\n")
    path = FOLDER / f"{name}.sse"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(told, encoding="utf-8")
    assert told == path.read_text(encoding="utf-8")
    check = StreamCheck()
    for frame in frames[:-1]:
        check.take(decode(frame))
    check.end()
    assert frames[-1] == DONE


def test_no_transcript_is_left_over() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(SCRIPTS)


@pytest.mark.parametrize("background", [False, True])
def test_what_is_sent_on_acceptance_is_the_beginning_of_the_stream(background: bool) -> None:
    response = new_response(background=background)
    assert list(new_assembler(response).begin())[:2] == accepted_frames(response)
