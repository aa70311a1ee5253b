"""More models than a host has room for: they take turns, and every request is answered."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from inference_site.catalogue.catalogue import DEMO_FILE
from tests.served_stack import ROOT, ServedStack, served_stack, wait_until

pytestmark = pytest.mark.timeout(300)

NAMES = ("a", "b", "c", "d")
MODELS = """
  a: {engine: scripted, slots: 2, load_ms: 100, min_resident: 1}
  b: {engine: scripted, slots: 2, load_ms: 100, min_resident: 1}
  c: {engine: scripted, slots: 2, load_ms: 100, min_resident: 1}
  d: {engine: scripted, slots: 2, load_ms: 100, min_resident: 1}
  kept: {engine: scripted, slots: 2, pinned: true}
  lonely: {engine: scripted, slots: 2, exclusive_with: [a, b, c, d]}
  embeds: {file: "{demo}", embedding: mean, threads: 1, context_length: 512, exclusive_with: [a]}
"""
SLEEPERS = """
  light:
    engine: command
    command: "{program} {{socket}} {{api_key}} {log}"
    flavor: vllm
    sleep: 1
    exclusive_with: [deep]
  deep:
    engine: command
    command: "{program} {{port}} {{api_key}} {log}"
    flavor: vllm
    sleep: 2
"""
PROGRAM = f"{sys.executable} {ROOT}/tests/sleeping_server.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the servers that sleep write what they are told."""
    return tmp_path_factory.mktemp("told") / "log"


@pytest.fixture(scope="module")
def stack(told: Path) -> Iterator[ServedStack]:
    with served_stack(
        MODELS.replace("{demo}", str(DEMO_FILE)) + SLEEPERS.format(program=PROGRAM, log=told),
        START_MODELS="kept",
        LOAD_ON_DEMAND="true",
        LOAD_WAIT_S="120",
        MAX_LOADED_MODELS="3",
        EMBEDDING_MODEL="embeds",
    ) as running:
        running.sql("UPDATE accounts_apikey SET scopes = '{inference,models:write}'")
        yield running


def statuses(http: httpx.Client) -> dict[str, str]:
    listed = http.get("/v1/models").json()["data"]
    return {model["id"]: model["status"] for model in listed}


def ask(http: httpx.Client, model: str, sleep_ms: int = 200) -> int:
    steps = json.dumps([{"text": "x"}, {"sleep_ms": sleep_ms}, {"text": "y"}])
    body = {"model": model, "messages": [{"role": "user", "content": steps}]}
    answer = http.post("/v1/chat/completions", json=body, timeout=120)
    if answer.status_code == 200:
        assert answer.json()["choices"][0]["message"]["content"] == "xy"
    return int(answer.status_code)


def test_models_take_turns_and_nobody_is_refused(stack: ServedStack) -> None:
    over, most = threading.Event(), 0

    def look() -> None:
        nonlocal most
        with stack.http() as http:
            while not over.wait(0.1):
                most = max(most, sum(s == "loaded" for s in statuses(http).values()))

    def be_a_client(number: int) -> list[int]:
        with stack.http() as http:
            return [ask(http, NAMES[(number + turn) % 4]) for turn in range(6)]

    looking = threading.Thread(target=look)
    looking.start()
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(be_a_client, range(8)))
    over.set()
    looking.join()
    assert told == [[200] * 6] * 8
    assert most == 3
    with stack.http() as http:
        assert statuses(http)["kept"] == "loaded"


def test_a_model_with_a_run_on_it_stays_until_that_ends(stack: ServedStack) -> None:
    def long(model: str) -> int:
        with stack.http() as http:
            return ask(http, model, sleep_ms=4000)

    with ThreadPoolExecutor(4) as pool, stack.http() as http:
        runs = [pool.submit(long, model) for model in ("a", "b")]
        wait_until(lambda: [statuses(http)[m] for m in "ab"] == ["loaded"] * 2, 60, "two models")
        assert ask(http, "c") == 200
        assert [run.result() for run in runs] == [200, 200]


def test_models_that_exclude_each_other_are_not_loaded_together(stack: ServedStack) -> None:
    with stack.http() as http:
        assert ask(http, "a") == 200
        assert ask(http, "lonely") == 200
        # What the API shows is a second old at most.
        wait_until(lambda: statuses(http)["lonely"] == "loaded", 60, "the view of its state")
        assert all(statuses(http)[name] == "unloaded" for name in NAMES)
        assert ask(http, "b") == 200
        wait_until(lambda: statuses(http)["lonely"] == "unloaded", 60, "its leaving")


def test_a_search_has_its_model_loaded_in_place_of_that_of_its_response(stack: ServedStack) -> None:
    client = stack.client()
    file = client.files.create(file=("fjords.txt", b"The fjord is long."), purpose="assistants")
    store = client.vector_stores.create(name="one", file_ids=[file.id])
    wait_until(lambda: client.vector_stores.retrieve(store.id).status == "completed", 60, "index")
    search = {"name": "file_search", "arguments": ['{"query": "fjord"}']}
    made = client.responses.create(
        model="a",
        input=json.dumps([{"tool_call": search}]),
        tools=[{"type": "file_search", "vector_store_ids": [store.id]}],
        include=["file_search_call.results"],
        max_tool_calls=1,
    )
    assert made.status == "completed"
    [call] = made.output
    assert call.type == "file_search_call"
    assert [result.filename for result in call.results or ()] == ["fjords.txt"]


def test_a_server_that_can_sleep_does_so_instead_of_ending(stack: ServedStack, told: Path) -> None:
    with stack.http() as http:
        light, deep = pid(http, "light"), pid(http, "deep")
        assert pid(http, "light") == light
        wait_until(lambda: states(http, "deep") == ["sleeping"], 10, "it is seen asleep")
        wait_until(lambda: statuses(http)["deep"] == "unloaded", 10, "the view of its state")
        assert pid(http, "deep") == deep
        assert told.read_text().splitlines() == [
            f"{light} /sleep?level=1",
            f"{deep} /sleep?level=2",
            f"{light} /wake_up",
            f"{light} /sleep?level=1",
            f"{deep} /wake_up",
            f'{deep} /collective_rpc {{"method":"reload_weights"}}',
            f"{deep} /reset_prefix_cache",
        ]


def test_a_server_that_was_killed_asleep_is_started_by_the_next_request(stack: ServedStack) -> None:
    with stack.http() as http:
        light, _ = pid(http, "light"), pid(http, "deep")
        psutil.Process(light).kill()
        assert pid(http, "light") != light


def test_a_model_that_sleeps_is_unloaded_on_command(stack: ServedStack) -> None:
    with stack.http() as http:
        light, _ = pid(http, "light"), pid(http, "deep")
        wait_until(lambda: states(http, "light") == ["sleeping"], 10, "it is seen asleep")
        assert http.post("/v1/models/unload", json={"model": "light"}).status_code == 200
        wait_until(lambda: not psutil.pid_exists(light), 20, "its server has ended")
        wait_until(lambda: states(http, "light") == [], 10, "nothing is announced")


def pid(http: httpx.Client, model: str) -> int:
    """The number of the process that has answered."""
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    answer = http.post("/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["choices"][0]["message"]["content"])


def states(http: httpx.Client, model: str) -> list[str]:
    """The states of a model in the workers."""
    events = http.get(f"/v1/models/{model}/events").text
    told = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    return [worker["state"] for worker in told[-1]["workers"]]
