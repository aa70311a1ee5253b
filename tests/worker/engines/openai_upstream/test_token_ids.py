"""Token ids, and log probabilities of prompts, of a server that tells them: vLLM's forms."""

from __future__ import annotations

from typing import Any

import pytest

from inference_site.core.domain.deltas import AnswerTokens, PromptTokens, RankedLogprob, TextDelta
from inference_site.core.domain.errors import GenerationFailed
from inference_site.core.domain.request import GenerationRequest, Message
from tests.sinks import RecordingSink
from tests.upstream_server import Talk, UpstreamServer, chunks, finish, text, usage
from tests.worker.engines.openai_upstream.conftest import Load

HELLO = (Message("user", "Hello"),)


def chat(load: Load, **fields: Any) -> RecordingSink:
    """What a chat with a vLLM comes to."""
    sink = RecordingSink()
    load(flavor="vllm").run(GenerationRequest("m", messages=HELLO, **fields), sink)
    return sink


def entry(token: str, *top: str) -> dict[str, Any]:
    """A log probability as vLLM tells it."""
    others = [{"token": other, "logprob": -2.0} for other in top]
    return {"token": token, "logprob": -1.0, "bytes": list(token.encode()), "top_logprobs": others}


def test_ids_come_before_the_text_that_they_stand_for(server: UpstreamServer, load: Load) -> None:
    first, second = text("a"), text("b")
    first["prompt_token_ids"] = [7, 8]
    first["choices"][0]["token_ids"] = [1, 2]
    second["choices"][0]["token_ids"] = [3]
    end = finish()
    end["choices"][0]["token_ids"] = [9]
    server.answers = [chunks(first, second, end, usage())]
    found = chat(load, token_ids=True).deltas
    assert server.body["return_token_ids"] is True
    assert found[0] == PromptTokens((7, 8))
    assert [d.ids for d in found if isinstance(d, AnswerTokens)] == [(1, 2), (3,), (9,)]
    assert found.index(AnswerTokens((3,))) < found.index(TextDelta("b"))


def test_tokens_named_by_ids_are_passed_on(server: UpstreamServer, load: Load) -> None:
    named = text("a", logprobs={"content": [entry("token_id:5", "token_id:5", "token_id:6")]})
    server.answers = [chunks(named, finish(), usage())]
    sink = chat(load, top_logprobs=1, tokens_as_ids=True)
    assert server.body["return_tokens_as_token_ids"] is True
    [piece] = [d for d in sink.deltas if isinstance(d, TextDelta)]
    assert piece.logprobs[0].token == "token_id:5"


def test_each_token_that_is_asked_for_is_shown(server: UpstreamServer, load: Load) -> None:
    told = text("a", logprobs={"content": [entry("a", "a", "b", "c")]})
    server.answers = [chunks(told, finish(), usage())]
    sink = chat(load, top_logprobs=0, extensions={"logprob_token_ids": [1, 2]})
    assert server.body["logprob_token_ids"] == [1, 2]
    [piece] = [d for d in sink.deltas if isinstance(d, TextDelta)]
    assert [other.token for other in piece.logprobs[0].top] == ["a", "b", "c"]


def test_the_end_token_has_an_entry(server: UpstreamServer, load: Load) -> None:
    ended = finish()
    ended["choices"][0]["logprobs"] = {"content": [entry("<|im_end|>")]}
    server.answers = [chunks(text("a", logprobs={"content": [entry("a")]}), ended, usage())]
    sink = chat(load, top_logprobs=0)
    told = [e.token for d in sink.deltas if isinstance(d, TextDelta) for e in d.logprobs]
    assert told == ["a", "<|im_end|>"]
    assert sink.text == "a"


def test_tokens_of_a_stop_text_have_no_entries(server: UpstreamServer, load: Load) -> None:
    ended = finish()
    ended["choices"][0] |= {"logprobs": {"content": [entry("END")]}, "stop_reason": "END"}
    server.answers = [chunks(text("a", logprobs={"content": [entry("a")]}), ended, usage())]
    sink = chat(load, top_logprobs=0, stop=("END",))
    told = [e.token for d in sink.deltas if isinstance(d, TextDelta) for e in d.logprobs]
    assert told == ["a"]


RANKED = {"5": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}, "6": {"logprob": -2}}
OF_PROMPT = {"prompt_token_ids": [4, 5], "prompt_logprobs": [None, RANKED]}


def told(body: dict[str, Any]) -> Any:
    """Answers a request for a prompt's log probabilities with this."""
    return lambda talk: talk.say(200, body)


def test_a_prompt_is_asked_about_before_its_answer(server: UpstreamServer, load: Load) -> None:
    ends = (finish(), finish(index=1))
    server.answers = [told(OF_PROMPT), chunks(text("a"), *ends, usage())]
    sink = chat(load, prompt_logprobs=1, top_logprobs=2, choices=2)
    about, answer = (one.body for one in server.asked[-2:])
    assert (about["prompt_logprobs"], about["max_tokens"], about["n"]) == (1, 1, 1)
    assert not {"stream", "logprobs", "top_logprobs"} & about.keys()
    assert "prompt_logprobs" not in answer
    ranked = {5: RankedLogprob(-0.5, 1, "x"), 6: RankedLogprob(-2, None, "")}
    assert sink.deltas[:2] == [PromptTokens((4, 5), n, (None, ranked)) for n in (0, 1)]
    assert sink.text == "a"


def test_each_prompt_of_a_completion_has_its_own(server: UpstreamServer, load: Load) -> None:
    server.answers = [told({"choices": [OF_PROMPT, OF_PROMPT]}), chunks(usage())]
    sink = RecordingSink()
    asked = GenerationRequest(
        "m", operation="complete", prompts=("a", "b"), prompt_logprobs=0, choices=2
    )
    with pytest.raises(GenerationFailed):  # It sends no answer here.
        load(flavor="vllm").run(asked, sink)
    assert [d.index for d in sink.deltas if isinstance(d, PromptTokens)] == [0, 1, 2, 3]


@pytest.mark.parametrize("body", [{}, {**OF_PROMPT, "prompt_logprobs": [{"x": 1}]}])
def test_an_answer_without_them_fails(
    server: UpstreamServer, load: Load, body: dict[str, Any]
) -> None:
    server.answers = [told(body)]
    with pytest.raises(GenerationFailed, match="log probabilities"):
        chat(load, prompt_logprobs=1)


def test_a_cancelled_run_asks_no_further(server: UpstreamServer, load: Load) -> None:
    sink = RecordingSink()

    def leave(talk: Talk) -> None:
        sink.cancelled = True
        talk.say(200, OF_PROMPT)

    server.answers = [leave]
    asked = GenerationRequest("m", messages=HELLO, prompt_logprobs=1)
    load(flavor="vllm").run(asked, sink)
    assert len(server.asked) == 1
