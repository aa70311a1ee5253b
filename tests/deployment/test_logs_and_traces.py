"""One request through web and worker: the lines of the logs, and the spans of its trace."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.deployment.conftest import Site
from tests.deployment.local_site import Container
from tests.e2e.scripts import script
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(400)  # The first test starts a whole site.
HELLO = [{"role": "user", "content": "Hello"}]


def lines_of(containers: list[Container], **facts: Any) -> list[dict[str, Any]]:
    return [
        line
        for container in containers
        for line in container.lines()
        if facts.items() <= line.items()
    ]


def ask(site: Site, body: dict[str, Any], **headers: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {site.key}", **headers}
    return httpx.post(
        f"{site.webs[0].url}/v1/chat/completions", json=body, headers=headers, timeout=60
    )


def test_every_line_is_json_and_carries_the_ids_from_end_to_end(site: Site) -> None:
    answer = ask(site, {"model": "demo", "messages": HELLO}, **{"X-Request-Id": "end-to-end"})
    public_id, usage = answer.json()["id"], answer.json()["usage"]
    ids = {"request_id": "end-to-end", "generation_id": public_id}
    wait_until(lambda: lines_of(site.webs, **ids) and lines_of(site.workers, **ids))
    (access,) = lines_of(site.webs, **ids)
    assert access["message"] == "answered"
    expected = {"method": "POST", "path": "/v1/chat/completions", "status": 200, "model": "demo"}
    assert expected.items() <= access.items()
    assert isinstance(access["project"], int)
    assert access["duration_ms"] > 0
    (ended,) = lines_of(site.workers, **ids)
    assert ended["logger"] == "worker.runtime.run"
    assert ended["status"] == "completed"
    assert ended["output_tokens"] == usage["completion_tokens"]
    assert access["trace_id"]
    assert all(
        {"time", "level", "logger", "message"} <= line.keys()
        for container in (*site.webs, *site.workers, site.beat)
        for line in container.lines()
    )


def test_a_failure_in_the_worker_is_logged_with_the_ids_of_its_request(site: Site) -> None:
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": script({"fail": "boom"})}],
    }
    assert ask(site, body, **{"X-Request-Id": "it-fails"}).status_code == 500
    wait_until(lambda: lines_of(site.workers, request_id="it-fails", level="ERROR"))
    (line,) = lines_of(site.workers, request_id="it-fails", level="ERROR")
    assert line["generation_id"].startswith("chatcmpl-")


def test_logs_hold_no_content_and_no_secret(site: Site) -> None:
    messages = [{"role": "user", "content": "A word: xylophone"}]
    ask(site, {"model": "demo", "messages": messages, "max_tokens": 20})
    logged = "".join(c.log.read_text() for c in (*site.webs, *site.workers, site.beat))
    secrets = [path.read_text() for path in site.local.secrets.iterdir()]
    assert not any(secret in logged for secret in ("xylophone", site.key, *secrets))


def test_a_path_cannot_forge_a_line(site: Site) -> None:
    httpx.get(f"{site.webs[0].url}/v1/a%0Aforged", timeout=60)
    wait_until(lambda: lines_of(site.webs, path="/v1/a\\nforged"))


def test_a_trace_goes_from_the_request_to_the_run(site: Site) -> None:
    caller = "4bf92f3577b34da6a3ce929d0e0e4736"
    parent = f"00-{caller}-00f067aa0ba902b7-01"
    answer = ask(site, {"model": "demo", "messages": HELLO}, traceparent=parent)
    public_id, usage = answer.json()["id"], answer.json()["usage"]
    wait_until(lambda: len(site.collector.trace_of(public_id)) >= 4)
    spans = {span.name: span for span in site.collector.trace_of(public_id)}
    request = spans["POST v1/chat/completions"]
    enqueue, wait, run = spans["enqueue"], spans["queue wait"], spans["run chat.completion"]
    assert {span.trace_id for span in spans.values()} == {caller}
    assert request.parent == "00f067aa0ba902b7"
    assert enqueue.parent == request.id
    assert wait.parent == run.parent == enqueue.id
    assert (request.service, run.service) == ("inference-web", "inference-worker")
    assert request.attributes["http.response.status_code"] == 200
    assert run.attributes["model"] == "demo"
    assert run.attributes["output_tokens"] == usage["completion_tokens"]
    assert wait.end == run.start
    assert run.start < run.end


def test_a_failed_run_is_an_error_in_its_trace(site: Site) -> None:
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": script({"fail": "boom"})}],
    }
    ask(site, body)

    def failed() -> bool:
        return any(s.is_error and s.service == "inference-worker" for s in site.collector.spans)

    wait_until(failed)
