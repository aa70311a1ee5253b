"""Embeddings, tokens and prompts of servers."""

from __future__ import annotations

import base64
import math
from array import array
from typing import Any

import pytest

from inference_site.core.domain.deltas import (
    EmbeddingDelta,
    Finish,
    PromptDelta,
    ScoreDelta,
    TextDelta,
    TokensDelta,
)
from inference_site.core.domain.errors import GenerationFailed, InvalidRequest
from inference_site.core.domain.request import GenerationRequest, ImagePart, Message
from tests.sinks import RecordingSink
from tests.upstream_server import Talk, UpstreamServer
from tests.worker.engines.openai_upstream.conftest import Load


def embeddings(server: UpstreamServer, encode: Any) -> None:
    """Answer with the embedding [3, 4] for each input, the last one first."""

    def answer(talk: Talk) -> None:
        entries = [
            {"index": i, "embedding": encode([3.0, 4.0])} for i in range(len(talk.body["input"]))
        ]
        usage = {"prompt_tokens": len(entries)}
        talk.say(200, {"data": entries[::-1], "usage": usage})

    server.answers = [answer]


def packed(values: list[float]) -> str:
    return base64.b64encode(array("f", values).tobytes()).decode()


@pytest.mark.parametrize("encode", [list, packed], ids=["floats", "base64"])
@pytest.mark.parametrize(("flavor", "form"), [("openai", "float"), ("vllm", "base64")])
def test_embeddings_have_the_length_one_in_either_form(
    server: UpstreamServer, load: Load, encode: Any, flavor: str, form: str
) -> None:
    embeddings(server, encode)
    sink = RecordingSink()
    asked = GenerationRequest("m", operation="embed", prompts=("a", (1, 2)))
    load(flavor=flavor).run(asked, sink)
    assert server.asked[-1].path == "/v1/embeddings"
    assert server.body == {"model": "m", "input": ["a", [1, 2]], "encoding_format": form}
    vectors = [d for d in sink.deltas if isinstance(d, EmbeddingDelta)]
    assert [vector.index for vector in vectors] == [0, 1]
    assert array("f", vectors[0].vector).tolist() == pytest.approx([0.6, 0.8])
    assert math.hypot(*array("f", vectors[0].vector)) == pytest.approx(1)
    assert sink.finishes == ["stop", "stop"]
    assert sink.usage.input_tokens == 2


def test_embedding_that_is_not_finite_is_an_error(server: UpstreamServer, load: Load) -> None:
    """A model whose numbers overflow has such embeddings; JSON has no such numbers."""
    embeddings(server, lambda _: packed([math.nan, 4.0]))
    asked = GenerationRequest("m", operation="embed", prompts=("a",))
    with pytest.raises(GenerationFailed, match="sent no embeddings"):
        load(flavor="vllm").run(asked, RecordingSink())


@pytest.mark.parametrize(
    ("flavor", "fields"), [("vllm", {"truncate_prompt_tokens": -1}), ("llama_cpp", {})]
)
def test_server_that_can_cut_texts_is_asked_to(
    server: UpstreamServer, load: Load, flavor: str, fields: dict[str, int]
) -> None:
    embeddings(server, packed)
    cut = GenerationRequest("m", operation="embed", prompts=("a",), truncate=True)
    load(flavor=flavor).run(cut, RecordingSink())
    assert server.body == {"model": "m", "input": ["a"], "encoding_format": "base64", **fields}


def test_scores_are_asked_for_query_by_query_and_put_in_order(
    server: UpstreamServer, load: Load
) -> None:
    def answer(talk: Talk) -> None:
        scores = {"a": 0.25, "b": 0.75}
        results = [
            {"index": index, "relevance_score": scores[text]}
            for index, text in enumerate(talk.body["documents"])
        ]
        talk.say(200, {"results": results[::-1], "usage": {"total_tokens": 4}})

    server.answers = [answer]
    sink = RecordingSink()
    asked = GenerationRequest(
        "m", operation="rank", prompts=("a", "b", "a"), queries=("x", "x", "y")
    )
    load(flavor="vllm").run(asked, sink)
    assert [request.path for request in server.asked] == ["/v1/rerank", "/v1/rerank"]
    assert server.asked[0].body == {"model": "m", "query": "x", "documents": ["a", "b"]}
    found = {d.index: d.score for d in sink.deltas if isinstance(d, ScoreDelta)}
    assert found == {0: 0.25, 1: 0.75, 2: 0.25}
    assert [d.index for d in sink.deltas if isinstance(d, Finish)] == [0, 1, 2]
    assert sink.usage.input_tokens == 8


def test_tokens_that_a_server_does_not_report_are_estimated(
    server: UpstreamServer, load: Load
) -> None:
    results = [{"index": index, "relevance_score": 0.5} for index in range(2)]
    server.answers = [lambda talk: talk.say(200, {"results": results})]
    sink = RecordingSink()
    asked = GenerationRequest(
        "m", operation="rank", prompts=("x" * 40, "y" * 40), queries=("z" * 20,)
    )
    load().run(asked, sink)
    assert sink.usage.input_tokens == (40 + 20 + 40 + 20) // 4
    vectors = [{"index": index, "embedding": [3.0, 4.0]} for index in range(2)]
    server.answers = [lambda talk: talk.say(200, {"data": vectors})]
    sink = RecordingSink()
    load().run(GenerationRequest("m", operation="embed", prompts=("x" * 40, "y" * 40)), sink)
    assert sink.usage.input_tokens == 20


@pytest.mark.parametrize(
    "results",
    [
        None,
        [],
        [{"index": 0}],
        [{"index": 1, "score": 1}],
        "x",
        [{"index": 0, "relevance_score": "NaN"}],
    ],
)
def test_unreadable_scores_fail_the_run(server: UpstreamServer, load: Load, results: Any) -> None:
    server.answers = [lambda talk: talk.say(200, {"results": results})]
    asked = GenerationRequest("m", operation="rank", prompts=("a",), queries=("x",))
    with pytest.raises(GenerationFailed, match="no scores"):
        load().run(asked, RecordingSink())


def test_many_inputs_are_sent_in_several_requests(server: UpstreamServer, load: Load) -> None:
    embeddings(server, list)
    sink = RecordingSink()
    asked = GenerationRequest("m", operation="embed", prompts=("a",) * 70)
    load().run(asked, sink)
    assert [len(request.body["input"]) for request in server.asked] == [32, 32, 6]
    assert [d.index for d in sink.deltas if isinstance(d, Finish)] == list(range(70))
    assert sink.usage.input_tokens == 70


@pytest.mark.parametrize(
    "body",
    [
        b"no json",
        b"[]",
        {"data": []},
        {"data": [{"index": 0, "embedding": "!"}]},
        {"data": [{"index": 5, "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": ["a"]}]},
    ],
)
def test_what_is_no_embedding_is_a_failure(server: UpstreamServer, load: Load, body: Any) -> None:
    server.answers = [lambda talk: talk.say(200, body)]
    with pytest.raises(GenerationFailed, match="server sent"):
        load().run(GenerationRequest("m", operation="embed", prompts=("a",)), RecordingSink())


def test_a_refused_embedding_is_mapped(server: UpstreamServer, load: Load) -> None:
    server.answers = [lambda talk: talk.say(400, {"error": {"message": "Too long."}})]
    with pytest.raises(InvalidRequest, match="Too long"):
        load().run(GenerationRequest("m", operation="embed", prompts=("a",)), RecordingSink())


def test_an_error_with_the_status_200_is_an_error(
    server: UpstreamServer, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    embed = GenerationRequest("m", operation="embed", prompts=("a",))
    server.answers = [lambda talk: talk.say(200, {"error": {"message": "Too long.", "code": 400}})]
    with pytest.raises(InvalidRequest, match="Too long"):
        load().run(embed, RecordingSink())
    server.answers = [lambda talk: talk.say(200, {"error": "Unexpected endpoint."})]  # LM Studio.
    with pytest.raises(GenerationFailed, match="failed"):
        load().run(embed, RecordingSink())
    assert "Unexpected endpoint." in caplog.text


def tokenizer(server: UpstreamServer, answers: dict[str, Any]) -> None:
    """Answer each path with its object."""
    server.answers = [lambda talk: talk.say(200, answers[server.asked[-1].path])]


VLLM = {"/tokenize": {"tokens": [1, 2], "count": 2}, "/detokenize": {"prompt": "Hi"}}
LLAMA_CPP = {
    "/tokenize": {"tokens": [1, 2]},
    "/detokenize": {"content": "Hi"},
    "/apply-template": {"prompt": "Hi"},
}


@pytest.mark.parametrize(("flavor", "answers"), [("vllm", VLLM), ("llama_cpp", LLAMA_CPP)])
def test_tokens_of_texts_and_texts_of_tokens(
    server: UpstreamServer, load: Load, flavor: str, answers: dict[str, Any]
) -> None:
    tokenizer(server, answers)
    engine, sink = load(flavor=flavor), RecordingSink()
    engine.run(GenerationRequest("m", operation="tokenize", prompts=("Hi",)), sink)
    engine.run(GenerationRequest("m", operation="detokenize", prompts=((1, 2),)), sink)
    assert sink.deltas == [TokensDelta((1, 2)), Finish("stop"), TextDelta("Hi"), Finish("stop")]


def test_an_unknown_token_is_refused(server: UpstreamServer, load: Load) -> None:
    """llama-server answers with a 500, and so did the platform."""
    message = "vector::_M_range_check: __n (which is 1000000000) >= this->size() (which is 151936)"
    error = {"code": 500, "message": message, "type": "server_error"}
    server.answers = [lambda talk: talk.say(500, {"error": error})]
    engine = load(flavor="llama_cpp")
    with pytest.raises(InvalidRequest) as raised:
        engine.run(
            GenerationRequest("m", operation="detokenize", prompts=((1_000_000_000,),)),
            RecordingSink(),
        )
    assert raised.value.param == "tokens"


@pytest.mark.parametrize(("flavor", "answers"), [("vllm", VLLM), ("llama_cpp", LLAMA_CPP)])
def test_a_chat_is_rendered_as_the_server_would(
    server: UpstreamServer, load: Load, flavor: str, answers: dict[str, Any]
) -> None:
    tokenizer(server, answers)
    sink = RecordingSink()
    asked = GenerationRequest(
        "m", (Message("user", "Hi"),), operation="render", template_vars={"a": 1}
    )
    load(flavor=flavor).run(asked, sink)
    assert sink.deltas == [PromptDelta("Hi", (1, 2)), Finish("stop")]
    assert server.asked[0].body["messages"] == [{"role": "user", "content": "Hi"}]
    assert server.asked[0].body["chat_template_kwargs"] == {"a": 1}


def test_a_chat_with_images_cannot_be_rendered(server: UpstreamServer, load: Load) -> None:
    part = ImagePart("data:image/png;base64,AAAA", "messages")
    asked = GenerationRequest("m", (Message("user", None, parts=(part,)),), operation="render")
    with pytest.raises(InvalidRequest, match="cannot be rendered"):
        load(flavor="vllm").run(asked, RecordingSink())


def test_tokens_that_are_missing_are_a_failure(server: UpstreamServer, load: Load) -> None:
    tokenizer(server, {"/tokenize": {"count": 2}})
    with pytest.raises(GenerationFailed, match="no 'tokens'"):
        load(flavor="vllm").run(
            GenerationRequest("m", operation="tokenize", prompts=("Hi",)), RecordingSink()
        )


@pytest.mark.parametrize("flavor", ["vllm", "llama_cpp"])
@pytest.mark.parametrize(
    "tokens", [["a"], [None], [1.5], [1, {"id": 2}], [{"id": "a", "piece": "b"}]]
)
def test_what_is_no_token_is_a_failure(
    server: UpstreamServer, load: Load, flavor: str, tokens: list[Any]
) -> None:
    """It was an error of the site, with a traceback in the log."""
    tokenizer(server, {"/tokenize": {"tokens": tokens}})
    for with_texts in (False, True):
        asked = GenerationRequest(
            "m", operation="tokenize", prompts=("Hi",), token_texts=with_texts
        )
        with pytest.raises(GenerationFailed, match="tokens"):
            load(flavor=flavor).run(asked, RecordingSink())


def test_tokens_without_their_texts_are_a_failure(server: UpstreamServer, load: Load) -> None:
    """Of a llama-server from before it had ``with_pieces``."""
    tokenizer(server, {"/tokenize": {"tokens": [1, 2]}})
    asked = GenerationRequest("m", operation="tokenize", prompts=("Hi",), token_texts=True)
    with pytest.raises(GenerationFailed, match="no texts of tokens"):
        load(flavor="llama_cpp").run(asked, RecordingSink())
