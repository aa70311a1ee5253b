"""Sounds, rankings, scores and moderations are requests as all others are.

Each has a row with its usage and cost, lines in the logs, and the limits of its key and project.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.keys import MadeKey, make_budget, make_key
from tests.e2e.test_audio import OPENAIS, SPEECH, said, sound
from tests.served_stack import ServedStack, wait_until
from tests.upstream_server import Answer, Talk, UpstreamServer, chunks

HEARD = {"text": "Hello.", "usage": {"type": "tokens", "input_tokens": 14, "output_tokens": 3}}
SPOKEN = (
    {"type": "speech.audio.delta", "audio": "AAAA"},
    {"type": "speech.audio.done", "usage": {"input_tokens": 5, "output_tokens": 70}},
)
SAY = {"voice": "alloy", "input": "x" * 40}


def whole(answer: dict[str, Any]) -> Answer:
    """Answer with this object."""
    return lambda talk: talk.say(200, answer)


def ranked(talk: Talk) -> None:
    """Rank the documents, each the better the later it comes, without a report of tokens."""
    count = len(talk.body["documents"])
    talk.say(200, {"results": [{"index": n, "relevance_score": n} for n in range(count)]})


def judged(talk: Talk) -> None:
    """Flag nothing."""
    verdict = {"flagged": False, "categories": {}, "category_scores": {}}
    talk.say(200, {"results": [verdict] * len(talk.body["input"])})


@dataclass(frozen=True)
class Endpoint:
    """An endpoint: a request to it, what the model's server answers, and what that counts as.

    ``cost`` is in millionths. ``files`` makes the request a form.
    """

    path: str
    kind: str
    body: dict[str, Any]
    answer: Answer
    tokens: tuple[int, int]
    cost: int
    files: Callable[[], dict[str, Any]] | None = None

    @property
    def model(self) -> str:
        return str(self.body["model"])

    def send(self, http: httpx.Client) -> httpx.Response:
        """Send the request; return the answer, whole."""
        if self.files is None:
            return http.post(self.path, json=self.body)
        return http.post(self.path, data=self.body, files=self.files())


def hearing(path: str, kind: str, answer: Answer, **more: Any) -> Endpoint:
    tokens = more.pop("tokens")
    return Endpoint(
        f"/v1/audio/{path}",
        kind,
        {"model": "sounds", **more},
        answer,
        tokens,
        2 * tokens[0] + 10 * tokens[1],
        lambda: {"file": ("a.wav", sound(), "audio/wav")},
    )


PAIRS = {"query": "q" * 20, "documents": ["a" * 40, "b" * 40]}
TEXTS = {"text_1": "q" * 20, "text_2": ["a" * 40, "b" * 40]}
ENDPOINTS = {
    "transcription": hearing("transcriptions", "transcription", whole(HEARD), tokens=(14, 3)),
    "streamed transcription": hearing(
        "transcriptions",
        "transcription",
        chunks(*OPENAIS, done=False),
        tokens=(9, 3),
        stream="true",
    ),
    "translation": hearing("translations", "translation", whole(HEARD), tokens=(14, 3)),
    "speech": Endpoint(
        "/v1/audio/speech", "speech", {"model": "sounds", **SAY}, said(SPEECH), (10, 0), 20
    ),
    "speech as events": Endpoint(
        "/v1/audio/speech",
        "speech.events",
        {"model": "sounds", "stream_format": "sse", **SAY},
        chunks(*SPOKEN, done=False),
        (5, 70),
        710,
    ),
    "rerank": Endpoint("/v1/rerank", "rerank", {"model": "ranker", **PAIRS}, ranked, (30, 0), 120),
    "Cohere's rerank": Endpoint(
        "/v2/rerank", "rerank", {"model": "ranker", **PAIRS}, ranked, (30, 0), 120
    ),
    "score": Endpoint("/v1/score", "score", {"model": "ranker", **TEXTS}, ranked, (30, 0), 120),
    "moderation": Endpoint(
        "/v1/moderations",
        "moderation",
        {"model": "judge", "input": ["a" * 40, "b" * 40]},
        judged,
        (20, 0),
        60,
    ),
}
EACH = pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)


def rows_of(stack: ServedStack, key: MadeKey) -> list[dict[str, Any]]:
    """The generations of a key, in order."""
    ids = stack.sql(
        "SELECT public_id FROM generations_generation WHERE api_key_id = %s ORDER BY id", key.id
    )
    return [stack.row(public_id) for [public_id] in ids]


def wait_for_cost(stack: ServedStack, key: MadeKey, endpoint: Endpoint) -> dict[str, Any]:
    """The usage of the key's project, once the request is accounted."""
    found: list[dict[str, Any]] = []

    def is_accounted() -> bool:
        with key.http(stack) as http:
            answer = http.get("/v1/usage", params={"start_time": int(time.time()) - 3600})
        found[:] = [one for bucket in answer.json()["data"] for one in bucket["results"]]
        return bool(found)

    wait_until(is_accounted, 120, f"{endpoint.kind} is accounted")
    return found[-1]


@pytest.fixture(scope="module")
def browser(stack: ServedStack) -> Iterator[httpx.Client]:
    """A browser of the first user."""
    signed_in = stack.signed_in()
    yield signed_in
    signed_in.close()


@EACH
def test_each_has_a_row_a_cost_and_lines_in_the_logs(
    stack: ServedStack, odd: UpstreamServer, browser: httpx.Client, endpoint: Endpoint
) -> None:
    odd.answers, key = [endpoint.answer], make_key(stack)
    with key.http(stack) as http:
        answer = endpoint.send(http)
    assert answer.status_code == 200, answer.text
    usage = wait_for_cost(stack, key, endpoint)
    [row] = rows_of(stack, key)
    assert (row["kind"], row["model"], row["status"]) == (
        *(endpoint.kind, endpoint.model, "completed"),
    )
    assert (row["input_tokens"], row["output_tokens"]) == endpoint.tokens
    cost = pytest.approx(endpoint.cost / 1e6)
    assert float(row["cost"]) == cost
    assert (usage["num_model_requests"], usage["cost"]) == (1, cost)
    assert (usage["input_tokens"], usage["output_tokens"]) == endpoint.tokens
    request_id = answer.headers["x-request-id"]
    assert row["request_id"] == request_id
    lines = (stack.data_dir / "log" / "web.log").read_text().splitlines()
    [line] = [one for one in lines if request_id in one and " answered " in one]
    for fact in (f"path={endpoint.path}", "status=200", "method=POST"):
        assert f" {fact}" in line
    for searched in (row["public_id"], request_id):
        page = browser.get("/admin/requests/", params={"q": searched}).text
        assert f"/admin/requests/accepted/{row['id']}/" in page
        assert endpoint.path.replace("/v2", "/v1") in page


def assert_refused(
    stack: ServedStack, endpoint: Endpoint, answer: httpx.Response, status: int, code: str
) -> None:
    """Check the refusal and its line in the log of requests."""
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["code"] == code
    request_id = answer.headers["x-request-id"]

    def logged() -> list[Any]:
        return stack.sql(
            "SELECT status, error_code, path, model FROM request_log_refusal WHERE request_id = %s",
            request_id,
        )

    wait_until(logged, 120, "the refusal is logged")
    assert logged() == [(status, code, endpoint.path, endpoint.model)]


@EACH
def test_requests_a_minute_hold_for_each(
    stack: ServedStack, odd: UpstreamServer, endpoint: Endpoint
) -> None:
    odd.answers, key = [endpoint.answer], make_key(stack, requests_per_minute=1)
    with key.http(stack) as http:
        first = endpoint.send(http)
        asked = len(odd.asked)
        second = endpoint.send(http)
    assert first.status_code == 200, first.text
    for answer in (first, second):
        assert answer.headers["x-ratelimit-limit-requests"] == "1"
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert answer.headers["x-ratelimit-reset-requests"]
    assert_refused(stack, endpoint, second, 429, "rate_limit_exceeded")
    assert 1 <= int(second.headers["retry-after"]) <= 60
    assert len(odd.asked) == asked
    assert len(rows_of(stack, key)) == 1


@EACH
def test_tokens_a_minute_hold_for_each(
    stack: ServedStack, odd: UpstreamServer, endpoint: Endpoint
) -> None:
    """The estimate of one is more than half of the limit, so the second one is refused."""
    odd.answers, key = [endpoint.answer], make_key(stack, tokens_per_minute=15)
    with key.http(stack) as http:
        first, second = endpoint.send(http), endpoint.send(http)
    assert first.status_code == 200, first.text
    assert first.headers["x-ratelimit-limit-tokens"] == "15"
    assert_refused(stack, endpoint, second, 429, "rate_limit_exceeded")
    assert "15 tokens a minute of this key" in second.json()["error"]["message"]


@EACH
def test_a_budget_of_money_ends_each(
    stack: ServedStack, odd: UpstreamServer, endpoint: Endpoint
) -> None:
    odd.answers, key = [endpoint.answer], make_key(stack)
    make_budget(stack, key, 1e-6, unit="cost")
    with key.http(stack) as http:
        assert endpoint.send(http).status_code == 200
        wait_for_cost(stack, key, endpoint)
        asked = len(odd.asked)
        refused = endpoint.send(http)
    assert_refused(stack, endpoint, refused, 429, "insufficient_quota")
    assert int(refused.headers["retry-after"]) > 0
    assert len(odd.asked) == asked
    [[spent, reserved]] = stack.sql(
        """SELECT spent, reserved FROM accounts_budgetspend spend JOIN accounts_budget budget
        ON budget.id = budget_id WHERE project_id = %s""",
        key.project_id,
    )
    assert float(spent) == pytest.approx(endpoint.cost / 1e6)
    assert reserved == 0


@EACH
@pytest.mark.parametrize(
    ("fields", "code"),
    [({"allowed_models": ["demo"]}, "model_not_allowed"), ({}, "insufficient_scope")],
    ids=["model", "scope"],
)
def test_a_key_without_the_model_or_the_scope_gets_nothing(
    stack: ServedStack, odd: UpstreamServer, endpoint: Endpoint, fields: Any, code: str
) -> None:
    odd.answers = [endpoint.answer]
    key = make_key(stack, *(["inference"] if fields else ["usage:read"]), **fields)
    asked = len(odd.asked)
    with key.http(stack) as http:
        answer = endpoint.send(http)
    assert answer.status_code == 403, answer.text
    assert answer.json()["error"]["code"] == code
    assert (len(odd.asked), rows_of(stack, key)) == (asked, [])


def test_the_estimate_of_a_sound_keeps_others_out_of_a_budget(
    stack: ServedStack, odd: UpstreamServer
) -> None:
    """A sound that is being heard has reserved what it may cost."""
    key = make_key(stack)
    make_budget(stack, key, 100)
    endpoint = ENDPOINTS["transcription"]
    codes = list[str]()

    def hear(talk: Talk) -> None:
        with key.http(stack) as other:
            codes.append(endpoint.send(other).json()["error"]["code"])
        talk.say(200, HEARD)

    odd.answers = [hear]
    with key.http(stack) as http:
        files = {"file": ("a.wav", sound(10), "audio/wav")}
        answer = http.post(endpoint.path, data=endpoint.body, files=files)
    assert answer.status_code == 200, answer.text
    assert codes == ["rate_limit_exceeded"]


@pytest.mark.parametrize("name", ["rerank", "Cohere's rerank", "score", "moderation"])
def test_the_answer_names_the_model_that_a_route_led_to(
    stack: ServedStack, odd: UpstreamServer, name: str
) -> None:
    endpoint = ENDPOINTS[name]
    odd.answers = [endpoint.answer]
    body = {**endpoint.body, "model": f"{endpoint.model}s"}
    with stack.http() as http:
        answer = http.post(endpoint.path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == answer.headers["x-model"] == endpoint.model
