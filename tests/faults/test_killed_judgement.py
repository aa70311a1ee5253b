"""A worker that is killed while a moderation model judges: the response is judged all the same."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.conftest import ToolsStack
from tests.image_server import ImageServer
from tests.served_stack import ServedStack
from tests.upstream_server import Talk, UpstreamServer
from tests.waiting import wait_until
from tests.web_search.played import calls, says, search


@dataclass
class Site:
    """A site whose judge waits for ``go_on`` when it is asked about a text with ``held``."""

    stack: ServedStack
    talker: UpstreamServer
    web: ImageServer
    held: str = ""
    go_on: threading.Event = field(default_factory=threading.Event)
    is_asked: threading.Event = field(default_factory=threading.Event)
    judged: list[str] = field(default_factory=list)

    def judge(self, talk: Talk) -> None:
        """Flag what has "gun" in it."""
        [text] = talk.body["input"]
        self.judged.append(text)
        if self.held and self.held in text:
            self.is_asked.set()
            assert self.go_on.wait(60)
        flagged = "gun" in text
        result = {"flagged": flagged, "categories": {}, "category_scores": {}}
        talk.say(200, {"id": "modr-1", "model": "m", "results": [result]})

    def kill_during(self, held: str) -> None:
        """Kill the worker when this text is judged; then let the judge answer."""
        assert self.is_asked.wait(60), held
        os.kill(self.stack.pid_of("worker"), signal.SIGKILL)
        self.held = ""
        self.go_on.set()


@pytest.fixture(scope="module")
def running(tools_stack: ToolsStack) -> Site:
    site = Site(tools_stack.stack, tools_stack.reader, tools_stack.web)
    tools_stack.judge.answers = [site.judge]
    return site


@pytest.fixture
def site(running: Site) -> Site:
    running.held = ""
    running.judged.clear()
    running.talker.asked.clear()
    running.go_on.clear()
    running.is_asked.clear()
    return running


def blocked(site: Site, text: str, blocks: str, held: str) -> Any:
    """Return the blocked response to a text; its worker dies while ``held`` is judged."""
    site.held = held
    client = site.stack.client()
    moderation = {"model": "judge", "policy": {blocks: {"mode": "block"}}}
    made = client.responses.create(  # type: ignore[call-overload]
        model="reader", input=text, background=True, moderation=moderation
    )
    site.kill_during(held)
    wait_until(lambda: client.responses.retrieve(made.id).status == "incomplete", timeout_s=90)
    return client.responses.retrieve(made.id)


def test_the_input_is_judged_again(site: Site) -> None:
    site.talker.answers = [says("a cat")]
    ended = blocked(site, "a gun", "input", "a gun")
    assert ended.output == []
    assert ended.moderation.input.flagged
    assert site.judged == ["a gun", "a gun"]
    assert site.talker.asked == []


def test_the_answer_of_the_next_attempt_is_the_one_that_is_judged(site: Site) -> None:
    site.talker.answers = [says("a cat"), says("a gun")]
    ended = blocked(site, "What?", "output", "a cat")
    assert (ended.output, ended.moderation.output.flagged) == ([], True)
    assert site.judged == ["What?", "a cat", "a gun"]  # The input was judged before.
    rows = site.stack.sql(
        "SELECT number, status, attempt, result FROM tool_calls_toolcall "
        "WHERE generation_id = %s ORDER BY number",
        ended.id,
    )
    assert rows == [(1_000_000, "done", 1, None), (1_000_001, "done", 2, None)]


def test_what_was_said_before_a_search_is_not_sent_before_it_is_judged(site: Site) -> None:
    def die_once(handler: Any) -> None:
        """Kill the worker during its first search; the second one finds nothing."""
        if len(site.web.asked) == 1:
            os.kill(site.stack.pid_of("worker"), signal.SIGKILL)
            return
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b'{"results": []}')

    site.web.asked.clear()
    site.web.answers["/search"] = die_once
    site.talker.answers = [calls(search("x"), said="a gun"), says("a cat")]
    stream = site.stack.client().responses.create(
        model="reader",
        input="What?",
        background=True,
        stream=True,
        tools=[{"type": "web_search"}],
        moderation={"model": "judge", "policy": {"output": {"mode": "block"}}},
    )
    events = list(stream)
    assert (len(site.web.asked), site.judged) == (2, ["What?", "a gun\na cat"])
    assert events[-1].type == "response.incomplete"
    assert [event.type for event in events if "gun" in event.model_dump_json()] == []
