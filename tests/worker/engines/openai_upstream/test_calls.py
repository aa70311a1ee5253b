"""Tool calls out of the streams of servers, which make them in many ways."""

from __future__ import annotations

from typing import Any

import pytest

from inference_site.core.domain.deltas import ToolCallDelta
from inference_site.core.domain.errors import GenerationFailed
from inference_site.core.domain.request import Tool
from tests.sinks import RecordingSink
from tests.upstream_server import UpstreamServer, chunks, delta, finish, text, usage
from tests.worker.engines.openai_upstream.test_reading import chat
from worker.engines.base import Engine


def calls(sink: RecordingSink) -> list[tuple[str | None, str]]:
    """The calls of an answer: names and whole arguments."""
    found: dict[int, list[Any]] = {}
    for piece in sink.deltas:
        if isinstance(piece, ToolCallDelta):
            if piece.name is not None:
                assert piece.id
                assert piece.call == len(found)
                found[piece.call] = [piece.name, ""]
            found[piece.call][1] += piece.arguments
    return [(name, arguments) for name, arguments in found.values()]


def call(index: int | None = 0, **fields: Any) -> dict[str, Any]:
    """A chunk with a piece of a call."""
    function = {k: v for k, v in fields.items() if k != "id"}
    piece: dict[str, Any] = {"function": function, "type": "function"}
    piece |= {} if index is None else {"index": index}
    piece |= {"id": fields["id"]} if "id" in fields else {}
    return delta({"tool_calls": [piece]})


ARGUMENTS = '{"city": "Oslo"}'


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (
            [call(id="c1", name="f", arguments=""), call(arguments='{"city": '),
             call(arguments='"Oslo"}')],
            [("f", ARGUMENTS)],
        ),
        ([call(id="c1", name="f", arguments=ARGUMENTS)], [("f", ARGUMENTS)]),
        ([call(name="f", arguments=ARGUMENTS)], [("f", ARGUMENTS)]),
        ([call(name="f", arguments={"city": "Oslo"})], [("f", '{"city":"Oslo"}')]),
        (
            [call(None, name="f", arguments='{"city": '), call(None, arguments='"Oslo"}')],
            [("f", ARGUMENTS)],
        ),
        (
            [call(id="c1", name="f", arguments='{"city": '),
             call(id="c1", name="f", arguments='"Oslo"}')],
            [("f", ARGUMENTS)],
        ),
        (
            [call(id="c1", name="f", arguments="{}"), call(id="c1", name="f", arguments="")],
            [("f", "{}")],
        ),
        (
            [call(None, id="a", name="f", arguments="{}"),
             call(None, id="b", name="f", arguments="{}")],
            [("f", "{}"), ("f", "{}")],
        ),
        (
            [call(None, name="f", arguments="{}"), call(None, name="f", arguments="{}")],
            [("f", "{}"), ("f", "{}")],
        ),
        (
            [call(0, id="a", name="f", arguments="{}"), call(0, id="b", name="g", arguments="{}")],
            [("f", "{}"), ("g", "{}")],
        ),
        (
            [call(0, id="a", name="f", arguments="{}"), call(1, id="b", name="g", arguments="{}")],
            [("f", "{}"), ("g", "{}")],
        ),
        (
            [call(3, id="a", name="f", arguments="{"), call(5, id="b", name="g", arguments="{"),
             call(3, arguments="}"), call(5, arguments="}")],
            [("f", "{}"), ("g", "{}")],
        ),
        (
            [call(0, id="a", name="f", arguments=""), call(1, id="b", name="g", arguments='{"b"'),
             call(0, arguments='{"a": 1}'), call(1, arguments=": 2}")],
            [("f", '{"a": 1}'), ("g", '{"b": 2}')],
        ),
        (
            [call(0, id="a", name="f", arguments=""), call(1, id="b", name="g", arguments='{"b"'),
             call(1, arguments=": 2}")],
            [("f", "{}"), ("g", '{"b": 2}')],
        ),
        ([call(id="a", arguments='{"a"'), call(name="f", arguments=": 1}")], [("f", '{"a": 1}')]),
        ([call(id="a", name="f")], [("f", "{}")]),
        ([call(id="a", name="f", arguments=None)], [("f", "{}")]),
        (
            [call(None, name="f", arguments=""), call(None, name="g", arguments="{}")],
            [("f", "{}"), ("g", "{}")],
        ),
        (
            [call(None, name="f", arguments={}), call(None, name="f", arguments={})],
            [("f", "{}"), ("f", "{}")],
        ),
        (
            [call(0, id="a", name="f", arguments=""), call(0, id="b", name="g"),
             call(0, arguments="{}")],
            [("f", "{}"), ("g", "{}")],
        ),
        (
            [call(0, id="a", name="f", arguments="{}"), call(1, id="a", name="g", arguments="{}")],
            [("f", "{}"), ("g", "{}")],
        ),
    ],
    ids=["in pieces", "whole", "without an id", "arguments as an object", "without an index",
         "name repeated", "name repeated after the end", "two by their ids", "two whole ones",
         "two with the index 0", "two", "interleaved", "the second first", "the first without any",
         "name later", "without arguments", "null", "two without an index",
         "two with empty objects", "two with the index 0 in pieces",
         "two with one id"],
)  # fmt: skip
def test_calls_come_out_the_same_whatever_the_server_does(
    server: UpstreamServer, engine: Engine, sent: list[Any], expected: list[tuple[str, str]]
) -> None:
    server.answers = [chunks(*sent, finish("tool_calls"), usage())]
    sink = chat(engine, tools=(Tool("f", None, {}), Tool("g", None, {})))
    assert calls(sink) == expected
    assert sink.finishes == ["tool_calls"]
    pieces = [d for d in sink.deltas if isinstance(d, ToolCallDelta)]
    assert len({piece.id for piece in pieces if piece.id}) == len(expected)
    assert [piece.call for piece in pieces] == sorted(piece.call for piece in pieces)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (
            [call(id="c1", name="get_"), call(name="weat"), call(name="her", arguments='{"city":'),
             call(arguments=' "Oslo"}')],
            [("get_weather", ARGUMENTS)],
        ),
        (
            [call(id="c1", name="get_", arguments=""), call(id="c1", name="time", arguments=""),
             call(id="c1", arguments=ARGUMENTS)],
            [("get_time", ARGUMENTS)],
        ),
        (
            [call(0, id="a", name="get"), call(0, name="_time"), call(1, id="b", name="get"),
             call(1, name="_weather", arguments=ARGUMENTS)],
            [("get_time", "{}"), ("get_weather", ARGUMENTS)],
        ),
        (
            [call(0, id="a", name="get"), call(0, name="get", arguments="{}")],
            [("get", "{}")],
        ),
        (
            [call(0, id="a", name="get"), call(1, id="b", name="get_time", arguments="{}")],
            [("get", "{}"), ("get_time", "{}")],
        ),
        (
            [call(0, id="a", name="get"), call(0, id="b", name="_time", arguments="{}")],
            [("get", "{}"), ("_time", "{}")],
        ),
        ([call(0, id="a", name="get_")], [("get_", "{}")]),
    ],
    ids=["without id", "with id", "two", "a name that another begins with, repeated",
         "a name that another begins with, alone", "another id", "nothing follows"],
)  # fmt: skip
def test_a_name_may_come_in_pieces(
    server: UpstreamServer, engine: Engine, sent: list[Any], expected: list[tuple[str, str]]
) -> None:
    server.answers = [chunks(*sent, finish("tool_calls"), usage())]
    names = ("get", "get_weather", "get_time")
    sink = chat(engine, tools=tuple(Tool(name, None, {}) for name in names))
    assert calls(sink) == expected


def test_calls_with_the_finish_reason_stop_are_calls(
    server: UpstreamServer, engine: Engine
) -> None:
    server.answers = [chunks(call(name="f", arguments="{}"), finish("stop"), usage())]
    assert chat(engine, tools=(Tool("f", None, {}),)).finishes == ["tool_calls"]
    server.answers = [chunks(call(name="f"), finish("stop"), usage())]
    tools = (Tool("f", None, {}), Tool("f_of_x", None, {}))
    for must_call in (False, True):
        assert chat(engine, tools=tools, must_call=must_call).finishes == ["tool_calls"]


def test_call_that_a_stop_text_cuts_is_no_call(server: UpstreamServer, engine: Engine) -> None:
    tools = (Tool("f", None, {}),)
    cut = call(name="f", arguments='{"city": "')
    server.answers = [chunks(cut, finish("tool_calls"), usage())]
    assert chat(engine, tools=tools, stop=("Oslo",)).finishes == ["length"]
    server.answers = [chunks(call(name="f", arguments=ARGUMENTS), finish("tool_calls"), usage())]
    assert chat(engine, tools=tools, stop=("Bergen",)).finishes == ["tool_calls"]
    other = call(1, name="f", arguments=ARGUMENTS)
    server.answers = [chunks(cut, other, finish("tool_calls"), usage())]
    assert chat(engine, tools=tools, stop=("Oslo",)).finishes == ["length"]


def test_ids_of_the_server_are_kept(server: UpstreamServer, engine: Engine) -> None:
    server.answers = [chunks(call(id="functions.f:0", name="f", arguments="{}"), finish())]
    sink = chat(engine, tools=(Tool("f", None, {}),))
    assert next(d.id for d in sink.deltas if isinstance(d, ToolCallDelta)) == "functions.f:0"


def test_what_is_said_beside_a_call_that_must_come_is_dropped(
    server: UpstreamServer, engine: Engine
) -> None:
    server.answers = [chunks(text("Sure!"), call(name="f", arguments="{}"), finish(), usage())]
    sink = chat(engine, tools=(Tool("f", None, {}),), must_call=True)
    assert (sink.text, calls(sink)) == ("", [("f", "{}")])


def test_a_call_that_must_come_and_does_not_is_a_failure(
    server: UpstreamServer, engine: Engine
) -> None:
    server.answers = [chunks(text("No."), finish(), usage())]
    with pytest.raises(GenerationFailed, match="made no call"):
        chat(engine, tools=(Tool("f", None, {}),), must_call=True)


def test_a_call_of_another_tool_is_not_the_required_one(
    server: UpstreamServer, engine: Engine
) -> None:
    other = call(0, id="c1", name="g", arguments="{}")
    server.answers = [chunks(other, finish("tool_calls"))]
    with pytest.raises(GenerationFailed, match="no call"):
        chat(engine, tools=(Tool("f", None, {}),), must_call=True)
    wanted = call(1, id="c2", name="f", arguments=ARGUMENTS)
    server.answers = [chunks(other, call(0, arguments=""), wanted, finish("tool_calls"))]
    sink = chat(engine, tools=(Tool("f", None, {}),), must_call=True)
    assert calls(sink) == [("f", ARGUMENTS)]


def test_a_call_of_a_tool_that_is_not_allowed_is_dropped(
    server: UpstreamServer, engine: Engine
) -> None:
    other = call(0, id="c1", name="g", arguments="{}")
    wanted = call(1, id="c2", name="f", arguments=ARGUMENTS)
    server.answers = [chunks(other, wanted, finish("tool_calls"))]
    sink = chat(engine, tools=(Tool("f", None, {}),), only_tools=True)
    assert calls(sink) == [("f", ARGUMENTS)]
    server.answers = [chunks(text("No."), other, finish("tool_calls"))]
    sink = chat(engine, tools=(Tool("f", None, {}),), only_tools=True)
    assert (calls(sink), sink.text, sink.finishes) == ([], "No.", ["stop"])


@pytest.mark.parametrize(
    "sent",
    [
        [call(0, id="a", name="f", arguments='{"a"'), call(0, arguments=": 1}"),
         call(1, id="b", name="g", arguments="{"), call(1, arguments="}")],
        [call(0, id="a", name="f", arguments='{"a"'), call(1, id="b", name="g", arguments="{}"),
         call(0, arguments=": 1}")],
        [call(None, id="a", name="f", arguments='{"a": 1}'),
         call(None, id="b", name="g", arguments="{}")],
    ],
    ids=["one after the other", "in turns", "without an index"],
)  # fmt: skip
def test_one_call_is_the_last_where_calls_are_not_parallel(
    server: UpstreamServer, engine: Engine, sent: list[Any]
) -> None:
    server.answers = [chunks(*sent, finish("tool_calls"), usage())]
    tools = (Tool("f", None, {}), Tool("g", None, {}))
    sink = chat(engine, tools=tools, parallel_tool_calls=False)
    assert calls(sink) == [("f", '{"a": 1}')]
    assert sink.finishes == ["tool_calls"]


def test_one_call_without_arguments_has_one_empty_object(
    server: UpstreamServer, engine: Engine
) -> None:
    sent = [call(0, id="a", name="f"), call(1, id="b", name="g", arguments="{}")]
    server.answers = [chunks(*sent, finish("tool_calls"), usage())]
    tools = (Tool("f", None, {}), Tool("g", None, {}))
    assert calls(chat(engine, tools=tools, parallel_tool_calls=False)) == [("f", "{}")]
