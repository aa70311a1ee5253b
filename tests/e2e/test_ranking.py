"""``/v1/rerank``, ``/v2/rerank`` and ``/v1/score``: documents compared with a query."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

QUERY = "what is the capital of japan"
DOCUMENTS = ["oslo is the capital of norway", "tokyo is the capital", "a pirate tells a story"]


def rerank(http: httpx.Client, path: str = "/v1/rerank", **body: Any) -> dict[str, Any]:
    """The answer, which must be good."""
    asked = {"model": "reranker", "query": QUERY, "documents": DOCUMENTS, **body}
    response = http.post(path, json=asked)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def scores(answer: dict[str, Any]) -> dict[int, float]:
    """The scores by the documents' places in the request."""
    return {result["index"]: result["relevance_score"] for result in answer["results"]}


def score(http: httpx.Client, one: Any, two: Any) -> list[float]:
    """The scores of ``/v1/score``."""
    response = http.post("/v1/score", json={"model": "reranker", "text_1": one, "text_2": two})
    assert response.status_code == 200, response.text
    assert [entry["object"] for entry in response.json()["data"]] == ["score"] * len(
        response.json()["data"]
    )
    return [entry["score"] for entry in response.json()["data"]]


def test_the_best_document_comes_first_with_its_text(http: httpx.Client) -> None:
    answer = rerank(http)
    assert answer["object"] == "list"
    assert answer["model"] == "reranker"
    assert answer["id"].startswith("rerank-")
    found = [result["relevance_score"] for result in answer["results"]]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 3
    for result in answer["results"]:
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    tokens = answer["usage"]["prompt_tokens"]
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens} | {
        "completion_tokens": 0
    }
    assert tokens > 3 * len(QUERY.split())


def test_a_document_has_the_same_score_alone_and_among_many(http: httpx.Client) -> None:
    among = scores(rerank(http, documents=[f"{DOCUMENTS[n % 3]} a" for n in range(70)]))
    assert sorted(among) == list(range(70))
    alone = scores(rerank(http, documents=[f"{DOCUMENTS[1]} a"]))
    assert alone[0] == pytest.approx(among[1], abs=1e-3)
    assert alone[0] == pytest.approx(among[67], abs=1e-3)


def test_cohere_and_jina_fields(http: httpx.Client) -> None:
    best = rerank(http, path="/v2/rerank", top_n=1, return_documents=False)
    [result] = best["results"]
    assert result == {"index": rerank(http)["results"][0]["index"]} | {
        "relevance_score": result["relevance_score"]
    }
    texts = [{"text": text, "title": "of the client"} for text in DOCUMENTS]
    assert scores(rerank(http, documents=texts)) == pytest.approx(scores(rerank(http)), abs=1e-3)
    asked = {"model": "reranker", "query": QUERY, "documents": texts}
    ignored = http.post("/v1/rerank", json=asked).headers["x-unsupported-params"]
    assert ignored == "documents[].title"


def test_scores_of_pairs_are_those_of_a_ranking(http: httpx.Client) -> None:
    ranked = scores(rerank(http))
    one_with_each = score(http, QUERY, DOCUMENTS)
    assert one_with_each == pytest.approx([ranked[n] for n in range(3)], abs=1e-3)
    queries = [QUERY, "tokyo", "tokyo"]
    pair_by_pair = score(http, queries, DOCUMENTS)
    assert pair_by_pair[0] == pytest.approx(ranked[0], abs=1e-3)
    assert pair_by_pair[2] == pytest.approx(score(http, "tokyo", DOCUMENTS[2])[0], abs=1e-3)
    assert score(http, [QUERY], DOCUMENTS[0]) == pytest.approx([ranked[0]], abs=1e-3)


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/v1/rerank", {"documents": []}, "documents", None),
        ("/v1/rerank", {"query": ""}, "query", None),
        ("/v1/rerank", {"query": None}, "query", None),
        ("/v1/rerank", {"top_n": 0}, "top_n", None),
        ("/v1/rerank", {"documents": ["tokyo " * 600]}, "documents", "context_length_exceeded"),
        ("/v1/rerank", {"query": "tokyo " * 600}, "query", "context_length_exceeded"),
        ("/v1/rerank", {"documents": ["x" * 200_000]}, "documents", "context_length_exceeded"),
        ("/v1/rerank", {"model": "demo"}, "model", "unsupported_model"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2", "invalid_value"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1", "empty_array"),
        ("/v1/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2", "array_above_max_length"),
        (
            "/v1/score",
            {"text_1": "tokyo " * 600, "text_2": "a"},
            "text_1",
            "context_length_exceeded",
        ),
        (
            "/v1/score",
            {"text_1": "a", "text_2": ["b", "x" * 200_000]},
            "text_2",
            "context_length_exceeded",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}]},
            "model",
            "unsupported_model",
        ),
        ("/v1/embeddings", {"input": "Hi"}, "model", "unsupported_model"),
    ],
)
def test_what_cannot_be_ranked_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any], param: str | None, code: str | None
) -> None:
    asked = {"model": "reranker", **body}
    if path == "/v1/rerank":
        asked = {"query": QUERY, "documents": DOCUMENTS, **asked}
    response = http.post(path, json=asked)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    if param:
        assert error["param"] == param
    if code:
        assert error["code"] == code
