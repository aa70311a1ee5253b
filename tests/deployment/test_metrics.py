"""``/metrics`` of web processes, workers and beat, after real chats; and who may read it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.deployment.compose import ROOT
from tests.deployment.conftest import Site
from tests.deployment.local_site import Container
from tests.e2e.scripts import slow
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(400)  # The first test starts a whole site.


class Scrape:
    """The sum over some processes of what their metrics say now."""

    def __init__(self, site: Site, containers: Iterable[Container]) -> None:
        token = (site.local.secrets / "metrics_token").read_text()
        self._samples = [
            sample
            for container in containers
            for family in text_string_to_metric_families(_page(container, token))
            for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name with these labels."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def names(self) -> set[str]:
        return {sample.name for sample in self._samples}


def _page(container: Container, token: str) -> str:
    response = httpx.get(
        f"{container.url}/metrics", headers={"Authorization": f"Bearer {token}"}, timeout=60
    )
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    return response.text


def everything(site: Site) -> Scrape:
    return Scrape(site, [*site.webs, *site.workers, site.beat])


def added(site: Site, act: Callable[[], Any]) -> Callable[..., float]:
    """Do it, and return what tells by how much a metric has grown since."""
    before = everything(site)
    act()

    def growth(name: str, **labels: str) -> float:
        return everything(site).total(name, **labels) - before.total(name, **labels)

    return growth


def test_chats_are_counted_and_timed_where_they_run(site: Site) -> None:
    usage: list[Any] = []

    def chat() -> None:
        for web in site.webs:
            with site.local.client(web, site.key) as client:
                answer = client.chat.completions.create(
                    model="demo", messages=[{"role": "user", "content": "Hello"}]
                )
                usage.append(answer.usage)

    grown = added(site, chat)
    ended = {"model": "demo", "kind": "chat.completion", "status": "completed", "error_code": ""}
    assert grown("inference_generations_total", **ended) == 2
    for sort, attribute in (("input", "prompt_tokens"), ("output", "completion_tokens")):
        spent = sum(getattr(each, attribute) for each in usage)
        assert grown("inference_tokens_total", model="demo", sort=sort) == spent
    cached = sum(each.prompt_tokens_details.cached_tokens for each in usage)
    assert grown("inference_tokens_total", model="demo", sort="cached") == cached
    for name in ("queue_wait", "time_to_first_token", "run"):
        assert grown(f"inference_{name}_seconds_count", model="demo") == 2, name
    gaps = grown("inference_inter_token_seconds_count", model="demo")
    assert 0 < gaps < sum(each.completion_tokens for each in usage)
    assert gaps == grown("inference_inter_token_seconds_bucket", model="demo", le="+Inf")
    # A worker observes the lag after the append, when the client may have its answer already.
    wait_until(lambda: grown("inference_event_log_lag_seconds_count") >= 2)
    route = {"method": "POST", "route": "v1/chat/completions", "status": "200"}
    wait_until(lambda: grown("inference_http_requests_total", **route) == 2)
    timed = "inference_http_request_duration_seconds_count"
    wait_until(lambda: grown(timed, route="v1/chat/completions") == 2)


def test_a_client_that_leaves_is_a_cancelled_generation(site: Site) -> None:
    def leave() -> None:
        with site.local.client(site.webs[0], site.key) as client:
            stream = client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": slow(4000)}], stream=True
            )
            next(iter(stream))
            live = Scrape(site, site.webs)
            assert live.total("inference_open_streams") >= 1
            # What an earlier test has left may still be on its way to its end.
            wait_until(
                lambda: (
                    Scrape(site, site.webs[:1]).total("inference_running", model="scripted") == 1
                )
            )
            stream.close()

    grown = added(site, leave)
    wait_until(lambda: grown("inference_generations_total", status="cancelled") == 1)
    wait_until(
        lambda: (
            grown("inference_http_requests_total", route="v1/chat/completions", status="499") == 1
        )
    )


def test_requests_that_fail_are_counted_by_route_never_by_path(site: Site) -> None:
    def fail() -> None:
        with httpx.Client(base_url=site.webs[0].url, timeout=60) as client:
            client.get("/v1/responses/resp_secret")
            client.get("/v1/nothing/of/the/sort")

    grown = added(site, fail)
    wait_until(lambda: grown("inference_http_requests_total", route="unknown", status="404") == 1)
    known = {"route": "v1/responses/<str:response_id>"}
    wait_until(lambda: grown("inference_http_requests_total", **known) == 1)
    token = (site.local.secrets / "metrics_token").read_text()
    assert "resp_secret" not in _page(site.webs[0], token)


def test_a_reader_that_comes_later_is_counted(site: Site) -> None:
    def attach() -> None:
        with site.local.client(site.webs[0], site.key) as client:
            made = client.responses.create(model="scripted", input=slow(3), background=True)
        with site.local.client(site.webs[1], site.key) as client:
            events = list(client.responses.retrieve(made.id, stream=True))
        assert events[-1].type == "response.completed"

    grown = added(site, attach)
    wait_until(lambda: grown("inference_reader_attachments_total", source="log") == 1)


def test_processes_tell_what_they_are_and_when_they_last_lived(site: Site) -> None:
    told = everything(site)
    assert told.total("inference_build_info", role="web") == len(site.webs)
    assert told.total("inference_build_info", role="worker") == len(site.workers)
    assert told.total("inference_build_info", role="beat") == 1
    for worker in site.workers:
        vitals = Scrape(site, [worker])
        assert vitals.total("inference_worker_lease_renewed_timestamp_seconds") > 1.7e9
        assert vitals.total("inference_worker_slots", model="scripted", state="ready") == 4
        assert "inference_event_log_backlog_seconds" in vitals.names()
        wait_until(partial(_reports_an_idle_model_server, site, worker))
    assert Scrape(site, [site.beat]).total("inference_maintenance_done_timestamp_seconds") > 1.7e9
    web = Scrape(site, site.webs[:1])
    assert web.total("inference_live_workers", model="demo") == len(site.workers)
    assert web.total("inference_slots", model="demo") == 4 * len(site.workers)
    assert web.total("inference_queue_length", model="demo") == 0
    assert web.total("inference_scrape_ok") == 3


def _reports_an_idle_model_server(site: Site, worker: Container) -> bool:
    """A worker measures its models' servers at each heartbeat, not when it is asked."""
    vitals = Scrape(site, [worker])
    taken = vitals.total("inference_model_server_memory_bytes", model="demo")
    running = vitals.total("inference_model_server_requests_running", model="demo")
    return 2**20 < taken < 2**30 and running == 0


def load(client: httpx.Client, model: str) -> None:
    """Have a worker load the model."""
    asked = {"model": model}
    wait_until(lambda: client.post("/v1/models/load", json=asked).status_code == 200)
    wait_until(lambda: client.get(f"/v1/models/{model}").json()["status"] == "loaded")


def test_a_worker_tells_for_the_models_that_it_loads_at_run_time(site: Site) -> None:
    """It stays the only worker: others would have taken what it is asked."""
    (worker,) = site.local.up("worker", START_MODELS="none")
    for other in site.workers:
        other.stop()
    site.workers = [worker]
    scopes = ("--scope", "inference", "--scope", "models:write")
    key = site.local.run("migrate", "create_api_key", "--name", "loads", *scopes).stdout.strip()
    told = {"model": "scripted"}
    with httpx.Client(
        base_url=site.webs[0].url, headers={"Authorization": f"Bearer {key}"}, timeout=60
    ) as client:
        for model in ("scripted", "demo"):
            load(client, model)
        body = {"model": "scripted", "messages": [{"role": "user", "content": slow(3)}]}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    scrape = Scrape(site, [worker])
    assert scrape.total("inference_worker_slots", **told) == 4
    assert scrape.total("inference_generations_total", **told, status="completed") == 1
    assert scrape.total("inference_tokens_total", **told, sort="output") == 3


SIGNS_OF_A_PROXY = [
    *("Via", "Forwarded", "X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Host", "X-Real-IP"),
    *("X-Client-IP", "True-Client-IP", "CF-Connecting-IP", "X-Original-URL", "X-Request-Id"),
    *("CDN-Loop", "X-Amzn-Trace-Id", "X-Envoy-External-Address", "Fastly-Client-IP"),
]


def test_metrics_are_for_holders_of_the_token_and_for_peers_that_are_allowed(site: Site) -> None:
    for container in (site.webs[0], site.workers[0], site.beat):
        url = f"{container.url}/metrics"
        assert httpx.get(url, timeout=60).status_code == 200  # This machine itself.
        asked = {"User-Agent": "Prometheus/3.5", "X-Prometheus-Scrape-Timeout-Seconds": "10"}
        assert httpx.get(url, headers=asked, timeout=60).status_code == 200
        for name in SIGNS_OF_A_PROXY:
            signed = {name: "127.0.0.1"}
            assert httpx.get(url, headers=signed, timeout=60).status_code == 401, name
        proxied = {"X-Forwarded-For": "127.0.0.1"}
        wrong = {**proxied, "Authorization": "Bearer wrong"}
        assert httpx.get(url, headers=wrong, timeout=60).status_code == 401
        api_key = {**proxied, "Authorization": f"Bearer {site.key}"}
        assert httpx.get(url, headers=api_key, timeout=60).status_code == 401
        token = (site.local.secrets / "metrics_token").read_text()
        right = {**proxied, "Authorization": f"Bearer {token}"}
        assert httpx.get(url, headers=right, timeout=60).status_code == 200
    refused = httpx.get(f"{site.webs[0].url}/metrics", headers=proxied, timeout=60)
    assert refused.json()["error"]["type"] == "invalid_request_error"


BOARD = "deploy/grafana/dashboards/inference.json"


@pytest.mark.parametrize("path", [BOARD, "deploy/prometheus/alerts.yml"])
def test_the_board_and_the_alerts_ask_for_metrics_that_there_are(site: Site, path: str) -> None:
    with site.local.client(site.webs[0], site.key) as client:
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Hello"}]
        )
    text = (ROOT / path).read_text()
    if path == BOARD:
        panels = json.loads(text)["panels"]
        asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    else:
        asked = [rule["expr"] for rule in yaml.safe_load(text)["groups"][0]["rules"]]
    names = {name for expression in asked for name in re.findall(r"inference_\w+", expression)}
    assert len(names) >= 8
    assert names <= everything(site).names()
