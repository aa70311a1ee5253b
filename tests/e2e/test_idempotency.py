"""``Idempotency-Key``: what is sent twice runs once, and is answered alike."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.earlier import earlier
from tests.e2e.keys import make_key
from tests.e2e.scripts import ENDLESS, events, frames, replay_raw, slow
from tests.e2e.test_audio import sound
from tests.served_stack import ServedStack, wait_until
from tests.upstream_server import UpstreamServer

CHAT = "/v1/chat/completions"


def body(text: str = "Hi", model: str = "demo", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "max_tokens": 30, **fields}


def keyed(key: str) -> dict[str, str]:
    return {"Idempotency-Key": key}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_sent_again_gets_the_same_answer(
    http: httpx.Client, stream: bool
) -> None:
    asked = body(stream=stream, temperature=1.5)
    first, second = (http.post(CHAT, json=asked, headers=keyed(f"same-{stream}")) for _ in range(2))
    assert first.status_code == second.status_code == 200
    if stream:  # Comments come when it takes long.
        assert frames(first) == frames(second)
    else:
        assert first.content == second.content
    for name in ("content-type", "x-model"):
        assert first.headers[name] == second.headers[name]


def test_a_cancel_waits_for_the_end_before_its_answer_is_remembered(http: httpx.Client) -> None:
    asked = {"model": "scripted", "input": ENDLESS, "background": True}
    made = http.post("/v1/responses", json=asked).json()
    path = f"/v1/responses/{made['id']}/cancel"
    first, second = (http.post(path, json={}, headers=keyed(made["id"])) for _ in range(2))
    assert first.json()["status"] == "cancelled"
    assert first.content == second.content


def test_it_runs_once_however_many_send_it_at_once(stack: ServedStack) -> None:
    key = make_key(stack)
    asked = body(slow(10), "scripted")

    def send(_: int) -> httpx.Response:
        return http.post(CHAT, json=asked, headers=keyed("once"))

    with key.http(stack) as http, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(send, range(8)))
    done = {answer.content for answer in answers if answer.status_code == 200}
    busy = [answer for answer in answers if answer.status_code != 200]
    assert len(done) == 1
    assert {answer.json()["error"]["code"] for answer in busy} <= {"idempotency_in_progress"}
    rows = stack.sql("SELECT 1 FROM generations_generation WHERE api_key_id = %s", key.id)
    assert len(rows) == 1


def test_who_sends_it_again_while_it_runs_reads_all_of_it(stack: ServedStack) -> None:
    asked = body(slow(30, 50), "scripted", stream=True)
    with stack.http() as http, http.stream("POST", CHAT, json=asked, headers=keyed("join")) as one:
        lines = one.iter_lines()
        begun = [next(lines) for _ in range(6)]
        again = http.post(CHAT, json=asked, headers=keyed("join")).text.splitlines()
        whole = [*begun, *lines]
    assert [line for line in again if line.startswith("data:")] == [
        line for line in whole if line.startswith("data:")
    ]


def test_another_request_with_the_same_key_is_refused(http: httpx.Client) -> None:
    http.post(CHAT, json=body("one"), headers=keyed("reused"))
    answer = http.post(CHAT, json=body("two"), headers=keyed("reused"))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("Idempotency-Key", "idempotency_key_reused")


def test_other_api_keys_have_keys_of_their_own(stack: ServedStack) -> None:
    ids = []
    for _ in range(2):
        with make_key(stack).http(stack) as http:
            ids.append(http.post(CHAT, json=body(), headers=keyed("shared")).json()["id"])
    assert ids[0] != ids[1]


def test_a_request_that_was_refused_may_be_mended(http: httpx.Client) -> None:
    for fields in ({"temperature": 9}, {"model": "no-such"}):
        wrong = http.post(CHAT, json={**body(), **fields}, headers=keyed("mended"))
        assert wrong.status_code in (400, 404)
    assert http.post(CHAT, json=body(), headers=keyed("mended")).status_code == 200


def cut_off(http: httpx.Client, asked: dict[str, Any], key: str) -> str:
    """Send it, read a little and leave; return the request's id."""
    with http.stream("POST", CHAT, json=asked, headers=keyed(key)) as first:
        next(first.iter_lines())
    return str(first.headers["x-request-id"])


def test_who_was_cut_off_and_sends_it_again_gets_all_of_it(stack: ServedStack) -> None:
    key = make_key(stack)
    asked = body(slow(20, 100), "scripted", stream=True)
    with key.http(stack) as http:
        cut_off(http, asked, "cut")
        again = http.post(CHAT, json=asked, headers=keyed("cut"))
    assert again.text.count('"content":"x "') == 20
    assert again.text.endswith("data: [DONE]\n\n")
    rows = stack.sql("SELECT status FROM generations_generation WHERE api_key_id = %s", key.id)
    assert rows == [("completed",)]


def test_what_nobody_came_back_for_in_time_runs_anew(stack: ServedStack) -> None:
    key = make_key(stack)
    asked = body(slow(10, 2000), "scripted", stream=True)
    statement = "SELECT status FROM generations_generation WHERE api_key_id = %s ORDER BY id"
    with key.http(stack) as http:
        cut_off(http, asked, "late-cut")
        wait_until(lambda: stack.sql(statement, key.id) == [("cancelled",)], 120, "cancelled")
        cut_off(http, asked, "late-cut")
    assert len(stack.sql(statement, key.id)) == 2


def test_of_those_who_repeat_what_failed_one_runs(stack: ServedStack) -> None:
    key = make_key(stack)
    asked = body('[{"fail": "once"}]', "scripted")
    with key.http(stack) as http, ThreadPoolExecutor(8) as pool:
        assert http.post(CHAT, json=asked, headers=keyed("failed")).status_code == 500
        again = pool.map(
            lambda _: http.post(CHAT, json=asked, headers=keyed("failed")).status_code, range(8)
        )
        answers = list(again)
    rows = stack.sql("SELECT count(*) FROM generations_generation WHERE api_key_id = %s", key.id)
    assert set(answers) <= {500, 409}
    # Those who come while it runs again are told how that run ended.
    assert 2 <= rows[0][0] <= 1 + answers.count(500)


def test_stored_objects_are_made_once(stack: ServedStack, client: openai.OpenAI) -> None:
    sent: Any = {"extra_headers": keyed("stored")}
    conversations = {client.conversations.create(**sent).id for _ in range(2)}
    assert len(conversations) == 1
    sent = {"extra_headers": keyed("background")}
    runs = {
        client.responses.create(model="demo", input="Hi", background=True, **sent).id
        for _ in range(2)
    }
    assert len(runs) == 1


def test_a_form_that_is_sent_again_has_another_boundary(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    sent: Any = {"purpose": "user_data", "extra_headers": keyed("uploaded")}
    first = client.files.create(file=("a.txt", b"a" * 3_000_000), **sent)
    assert client.files.create(file=("a.txt", b"a" * 3_000_000), **sent) == first
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=("a.txt", b"b" * 3_000_000), **sent)
    assert refused.value.code == "idempotency_key_reused"
    client.files.delete(first.id)


def test_a_sound_that_is_sent_again_is_transcribed_once(
    client: openai.OpenAI, odd: UpstreamServer
) -> None:
    odd.answers = [lambda talk: talk.say(200, {"text": f"heard {len(odd.asked)}"})]
    sent: Any = {"model": "sounds", "file": ("a.wav", sound()), "extra_headers": keyed("heard")}
    texts = {client.audio.transcriptions.create(**sent).text for _ in range(2)}
    assert len(texts) == 1


def test_the_official_clients_own_keys_are_taken(stack: ServedStack) -> None:
    with stack.client().with_options(max_retries=0) as client:
        ids = {
            client.responses.create(model="demo", input="Hi", extra_headers=keyed("response")).id
            for _ in range(2)
        }
    assert len(ids) == 1


def test_a_key_must_be_well_formed(http: httpx.Client) -> None:
    answer = http.post(CHAT, json=body(), headers=keyed("x" * 256))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Idempotency-Key"


def test_an_answer_that_is_kept_no_longer_is_said_so(stack: ServedStack) -> None:
    with stack.http() as http:
        first = http.post(CHAT, json=body(), headers=keyed("late")).json()
        with stack.redis() as redis:
            redis.delete(*redis.keys(f"*{first['id']}*"))
        again = http.post(CHAT, json=body(), headers=keyed("late"))
    assert again.status_code == 409
    assert again.json()["error"]["code"] == "idempotency_expired"


def test_the_oldest_answers_of_a_project_are_forgotten(stack: ServedStack) -> None:
    """The stack of these tests keeps 40 of each project, and looks after every 32."""
    key = make_key(stack)

    def create(number: int) -> str:
        made = http.post("/v1/conversations", json={}, headers=keyed(f"bound-{number}"))
        return str(made.json()["id"])

    background = {"model": "scripted", "input": "[]", "background": True}
    with key.http(stack) as http:
        first = create(0)
        assert create(0) == first
        run = http.post("/v1/responses", json=background, headers=keyed("bound-run"))
        others = [create(number) for number in range(1, 80)]
        kept = stack.sql(
            "SELECT count(*) FROM idempotency_keyedrequest "
            "WHERE project_id = %s AND kept_bytes > 0",
            key.project_id,
        )
        assert 40 <= kept[0][0] <= 40 + 32
        assert [create(60), create(79)] == [others[59], others[-1]]
        assert create(0) != first
        again = http.post("/v1/responses", json=background, headers=keyed("bound-run"))
    assert (run.status_code, again.json()["error"]["code"]) == (200, "idempotency_expired")
    assert _runs(stack, key.id) == 1


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}])
def test_a_deleted_response_is_not_read_through_its_key(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    asked = {"model": "scripted", "input": "secret", **fields}
    key = keyed(f"deleted-{len(str(fields))}")
    answer = http.post("/v1/responses", json=asked, headers=key)
    [response_id] = set(re.findall("resp_[0-9a-f]{32}", answer.text))
    path = f"/v1/responses/{response_id}"
    wait_until(lambda: http.get(path).json()["status"] == "completed", 120, "its end")
    assert http.delete(path).status_code == 200
    again = http.post("/v1/responses", json=asked, headers=key)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "idempotency_expired")
    assert response_id not in again.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("damage", ["log", "first entry"])
def test_a_stored_response_whose_log_is_lost_is_answered_from_its_items(
    stack: ServedStack, http: httpx.Client, stream: bool, damage: str
) -> None:
    asked = {"model": "scripted", "input": slow(5), "stream": stream}
    key = keyed(f"lost-{stream}-{len(damage)}")
    first = http.post("/v1/responses", json=asked, headers=key)
    [response_id] = set(re.findall("resp_[0-9a-f]{32}", first.text))
    stored = http.get(f"/v1/responses/{response_id}").json()
    lose(stack, response_id, damage)
    again = http.post("/v1/responses", json=asked, headers=key)
    assert again.status_code == 200, again.text
    final = events(frames(again))[-1]["response"] if stream else again.json()
    assert final == stored
    replayed = replay_raw(http, response_id)
    assert events(replayed)[-1]["response"] == stored


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_it_runs_once_a_day(stack: ServedStack, path: str) -> None:
    key, header = make_key(stack), keyed("day")
    asked = body(slow(20), "scripted") if path == CHAT else {"model": "scripted", "input": slow(20)}
    with key.http(stack) as http, ThreadPoolExecutor(1) as pool:
        first = pool.submit(http.post, path, json=asked, headers=header)
        wait_until(lambda: _runs(stack, key.id) == 1, 120, "its row")
        meanwhile = http.post(path, json=asked, headers=header)
        later = http.post(path, json=asked, headers=header)
        answers = [first.result().content, meanwhile.content, later.content]
        assert len(set(answers)) == 1, answers
        assert _runs(stack, key.id) == 1
        with stack.redis() as redis:
            assert list(redis.scan_iter("*idempoten*", count=10_000)) == []
        with earlier(stack, "created_at", "1 day", "api_key_id", key.id):
            stack.sql(
                "UPDATE idempotency_keyedrequest SET created_at = created_at - '1 day'::interval "
                "WHERE api_key_id = %s",
                key.id,
            )
            assert http.post(path, json=asked, headers=header).content != answers[0]
    assert _runs(stack, key.id) == 2


def test_what_writes_is_done_once_however_many_send_it_at_once(stack: ServedStack) -> None:
    key = make_key(stack)

    def send(_: int) -> httpx.Response:
        return http.post("/v1/conversations", json={"metadata": {"a": "b"}}, headers=keyed("made"))

    with key.http(stack) as http, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(send, range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    made = "SELECT count(*) FROM responses_api_conversation WHERE project_id = %s"
    assert stack.sql(made, key.project_id)[0][0] == 1


def test_an_answer_is_not_kept_once_its_response_is_deleted(stack: ServedStack) -> None:
    key = make_key(stack)
    asked = {"model": "scripted", "input": "[]", "background": True, "instructions": "secret"}
    kept = "SELECT body FROM idempotency_keyedrequest WHERE api_key_id = %s"
    with key.http(stack) as http:
        made = http.post("/v1/responses", json=asked, headers=keyed("secret")).json()
        assert "secret" in stack.sql(kept, key.id)[0][0]
        assert http.delete(f"/v1/responses/{made['id']}").status_code == 200
    assert stack.sql(kept, key.id) == [("",)]


def _runs(stack: ServedStack, api_key_id: int) -> int:
    statement = "SELECT count(*) FROM generations_generation WHERE api_key_id = %s"
    return int(stack.sql(statement, api_key_id)[0][0])


def lose(stack: ServedStack, response_id: str, what: str) -> None:
    """Lose the log of a response, or its beginning, as a Redis that was flushed."""
    with stack.redis() as client:
        log = f"{{{response_id}}}:log"
        entries: Any = client.xrange(log)
        assert len(entries) > 1
        if what == "log":
            client.delete(log)
        else:
            client.xdel(log, entries[0][0])
