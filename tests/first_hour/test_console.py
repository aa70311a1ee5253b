"""From nothing to a served model in the console, and what becomes of it: without a restart."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.hub_server import Hub
from tests.served_stack import ServedStack, wait_until

pytestmark = pytest.mark.timeout(400)
ADMIN = "/admin/model_store"


@pytest.fixture(scope="module")
def console(stack: ServedStack) -> Iterator[httpx.Client]:
    """The browser of the administrator."""
    found = re.search(r"password: (\S+)", stack.text())
    assert found
    with httpx.Client(base_url=stack.url, timeout=60) as opened:
        send(opened, "/admin/login/", username="admin", password=found[1])
        yield opened


def send(console: httpx.Client, address: str, **form: str) -> str:
    """Fill in the form of a page; return the page that it leads to."""
    token = re.search(r'csrfmiddlewaretoken" value="([^"]+)', console.get(address).text)
    assert token
    answer = console.post(address, data={**form, "csrfmiddlewaretoken": token[1]})
    assert answer.status_code == 302, re.findall(r"errorlist.*?</ul>", answer.text, re.DOTALL)
    return console.get(answer.headers["Location"]).text


def model(stack: ServedStack, name: str) -> Any:
    """What the API says of a model; None if there is none."""
    with stack.http() as http:
        shown = http.get(f"/v1/models/{name}")
        return shown.json() if shown.status_code == 200 else None


def is_loaded(stack: ServedStack, name: str) -> bool:
    return (model(stack, name) or {}).get("status") == "loaded"


def test_a_model_is_pulled_served_changed_and_removed(
    stack: ServedStack, console: httpx.Client
) -> None:
    text = send(
        console, f"{ADMIN}/pull/add/", reference="org/repo:Q8_0", revision="main", model_id="mine"
    )
    assert "Pulling org/repo:Q8_0" in text
    wait_until(lambda: is_loaded(stack, "mine"), 120, "the model is pulled and served")
    client = stack.client()
    assert client.completions.create(model="mine", prompt="Once", max_tokens=3).usage
    page = console.get("/admin/fleet/models/mine/").text
    for part in ("Q8_0", "llama", "3.8 MiB", "the database", "no price set"):
        assert part in page, part

    [(pk,)] = stack.sql("SELECT id FROM model_store_storedmodel WHERE model_id = 'mine'")
    entry = {"engine": "llama_cpp", "file": "hf:org/repo/tiny.Q8_0.gguf", "is_listed": "on"}
    change = f"{ADMIN}/storedmodel/{pk}/change/"
    send(console, change, **entry, aliases="ours", price_input="2")
    wait_until(lambda: model(stack, "ours") is not None, 120, "the alias is known")
    assert is_loaded(stack, "mine"), "a price and an alias need no new load"
    assert "2.00 USD" in console.get("/admin/fleet/models/mine/").text

    send(console, change, **entry, context_length="64")
    wait_until(
        lambda: is_loaded(stack, "mine") and refuses_as_too_long(client), 120, "it is loaded anew"
    )

    send(console, f"{ADMIN}/storedmodel/{pk}/delete/", post="yes")
    wait_until(lambda: model(stack, "mine") is None, 120, "it is gone")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="mine", prompt="Once", max_tokens=3)


def refuses_as_too_long(client: openai.OpenAI) -> bool:
    try:
        client.completions.create(model="mine", prompt="Once upon a time " * 60, max_tokens=1)
    except openai.BadRequestError as exc:
        return exc.code == "context_length_exceeded"
    except openai.InternalServerError:  # It is being loaded.
        return False
    return False


def test_a_model_of_another_server_is_added_and_its_worker_serves_it(
    stack: ServedStack, console: httpx.Client
) -> None:
    more = f"base_url: {stack.url}/v1\nmodel: demo\napi_key: {stack.key}"
    send(
        console,
        f"{ADMIN}/storedmodel/add/",
        model_id="twin",
        engine="openai_upstream",
        is_listed="on",
        more=more,
    )
    wait_until(lambda: is_loaded(stack, "twin"), 120, "it is served")
    message: Any = {"role": "user", "content": "Hello"}
    done = stack.client().chat.completions.create(model="twin", messages=[message], max_tokens=4)
    assert done.choices[0].message.content


# --- An operator who is not the owner of the host ------------------------------------------------


def refused(console: httpx.Client, address: str, **form: str) -> str:
    """Fill in a form; return what it says is wrong."""
    token = re.search(r'csrfmiddlewaretoken" value="([^"]+)', console.get(address).text)
    assert token
    answer = console.post(address, data={**form, "csrfmiddlewaretoken": token[1]})
    assert answer.status_code == 200, "it was accepted"
    return html.unescape(" ".join(re.findall(r"errorlist.*?</ul>", answer.text, re.DOTALL)))


def test_a_file_that_is_no_model_is_not_pulled(
    stack: ServedStack, console: httpx.Client, hub: Hub
) -> None:
    said = refused(console, f"{ADMIN}/pull/add/", reference="org/repo/evil.so", revision="main")
    assert "evil.so is no model file" in said
    hub.files["evil.Q2_K.gguf"] = b"\x7fELF" + b"\0" * 200_000
    send(console, f"{ADMIN}/pull/add/", reference="org/repo:Q2_K", revision="main")
    state = "SELECT state, error FROM model_store_pull WHERE reference = 'org/repo:Q2_K'"
    wait_until(lambda: stack.sql(state)[0][0] in ("failed", "completed"), 60, "the pull ends")
    assert stack.sql(state) == [
        ("failed", "evil.Q2_K.gguf is no model file: it is neither GGUF nor GGML.")
    ]
    assert not [*stack.data_dir.rglob("evil*")]


@pytest.mark.parametrize(
    ("engine", "more", "why"),
    [
        ("ctransformers", "model_type: gpt2\nlib: org/repo/tiny.Q8_0.gguf", "should be 'avx'"),
        ("ctransformers", "model_type: gpt2\nlib: {data}/models/org/evil.so", "should be 'avx'"),
        ("llama_cpp", "chat_template: {data}/secret_key", "Could not find a chat template"),
        ("llama_cpp", "chat_template: /proc/self/environ", "Could not find a chat template"),
        ("llama_cpp", "chat_template: ../secret_key.jinja", "not in the directory of models"),
        ("llama_cpp", "prompt_templates: {{x: ../s.jinja}}", "not in the directory of models"),
        ("llama_cpp", "mmproj: org/repo/evil.so", "must end in .gguf"),
        ("llama_cpp", "draft_model: ../api_key", "not in the directory of models"),
        ("llama_cpp", "lora_adapters: {{x: /etc/passwd}}", "not in the directory of models"),
        ("openai_upstream", "base_url: http://127.0.0.2:9/v1", "is not public"),
        ("openai_upstream", "base_url: http://localhost:9/v1", "is not public"),
        (
            "openai_upstream",
            "base_url: http://127.0.0.1/v1\napi_key_env: X",
            "only the models file",
        ),
    ],
)
def test_an_entry_names_no_code_no_file_of_the_host_and_no_service_of_its_network(
    stack: ServedStack, console: httpx.Client, engine: str, more: str, why: str
) -> None:
    more = more.format(data=stack.data_dir)
    form = {"model_id": "evil", "engine": engine, "file": "org/repo/tiny.Q8_0.gguf", "more": more}
    assert why in refused(console, f"{ADMIN}/storedmodel/add/", **form)
    assert stack.sql("SELECT 1 FROM model_store_storedmodel WHERE model_id = 'evil'") == []


def test_entries_of_before_that_break_a_rule_are_not_served_and_say_why(
    stack: ServedStack, console: httpx.Client
) -> None:
    file = "hf:org/repo/tiny.Q4_K_M.gguf"
    rows = {
        "old-lib": {"engine": "ctransformers", "file": file, "lib": "org/evil.so"},
        "old-reader": {"file": file, "chat_template": str(stack.data_dir / "secret_key")},
        "old-good": {"file": file, "chat_template": "{{ messages[0].content }}"},
    }
    for id_, entry in rows.items():
        stack.sql(
            "INSERT INTO model_store_storedmodel (model_id, entry, created_at, updated_at) "
            "VALUES (%s, %s, now(), now())",
            id_,
            json.dumps(entry),
        )
    wait_until(lambda: is_loaded(stack, "old-good"), 120, "the good one is served")
    assert model(stack, "old-lib") is None
    assert model(stack, "old-reader") is None
    shown = console.get("/admin/fleet/").text
    assert "Models that are not served" in shown
    assert "old-lib" in shown
    assert "Could not find a chat template" in shown
    with stack.http() as http:
        chat = {"model": "old-good", "messages": [{"role": "user", "content": "Hello"}]}
        assert http.post("/v1/chat/render", json=chat).json()["prompt"] == "Hello"
    stack.sql("DELETE FROM model_store_storedmodel WHERE model_id LIKE 'old-%%'")


def test_the_answer_of_a_service_is_not_on_the_page_of_a_model(
    stack: ServedStack, console: httpx.Client
) -> None:
    class Inner(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(500)
            self.end_headers()
            self.wfile.write(b"inner-secret")

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Inner) as inner:
        Thread(target=inner.serve_forever, args=(0.01,), daemon=True).start()
        more = f"base_url: http://127.0.0.1:{inner.server_port}/v1"
        form = {"model_id": "inner", "engine": "openai_upstream", "is_listed": "on", "more": more}
        send(console, f"{ADMIN}/storedmodel/add/", **form)
        page = "/admin/fleet/models/inner/"
        wait_until(lambda: "answers with status 500" in console.get(page).text, 60, "its fault")
        assert "inner-secret" not in console.get(page).text
        inner.shutdown()
    stack.sql("DELETE FROM model_store_storedmodel WHERE model_id = 'inner'")


def test_processes_of_models_have_no_secrets_in_their_environment(stack: ServedStack) -> None:
    worker = psutil.Process(stack.pid_of("worker"))
    secrets = {"SECRET_KEY", "DATABASE_URL", "HF_TOKEN"}
    given = worker.environ()
    assert secrets <= given.keys()
    children = worker.children(recursive=True)
    assert stack.server_of("tiny.q4_k_m") in children
    for process in children:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        for name in secrets:
            assert given[name].encode() not in environment, (name, process.cmdline())


def test_the_page_of_a_model_shows_what_its_server_takes_tells_and_writes(
    console: httpx.Client,
) -> None:
    page = "/admin/fleet/models/tiny.q4_k_m/"
    wait_until(lambda: "Log of its server on" in console.get(page).text, 60, "its log")
    wait_until(lambda: "requests running: 0" in console.get(page).text, 60, "its telemetry")
    text = console.get(page).text
    assert "listening on http://127.0.0.1:" in text
    assert re.search(r'data-label="Memory of its server" class="num">\d+', text)
