"""The manifests of deploy/kubernetes: what they name is there, and runs as in the compose file."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]  # It has types, and does not say so.
import pytest
import yaml
from django.urls import get_resolver

from tests.deployment.compose import ROOT, service

FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
OBJECTS: list[dict[str, Any]] = [
    found
    for path in sorted(FOLDER.glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for found in yaml.safe_load_all(path.read_text())
]


# What KEDA's own resources take: https://keda.sh/docs/latest/reference/scaledobject-spec/
SCALED_OBJECT = {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "advanced", "triggers"}
BY_PROMETHEUS = {"serverAddress", "query", "threshold"}


def of_kind(*kinds: str) -> dict[str, dict[str, Any]]:
    return {found["metadata"]["name"]: found for found in OBJECTS if found["kind"] in kinds}


PODS = {name: found["spec"]["template"] for name, found in of_kind("Deployment", "Job").items()}


def test_the_kustomization_names_every_file_but_that_of_keda() -> None:
    there = {path.name for path in FOLDER.glob("*.yaml")}
    assert {*KUSTOMIZATION["resources"], "kustomization.yaml", "workers-by-queue.yaml"} == there
    images = {image["name"] for image in KUSTOMIZATION["images"]}
    assert images == {pod["spec"]["containers"][0]["image"] for pod in PODS.values()}


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize(
    "found", OBJECTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}"
)
def test_the_api_of_kubernetes_takes_it(found: dict[str, Any], version: str) -> None:
    if found["kind"] != "ScaledObject":
        kubernetes_validate.validate(found, version, strict=True)


def test_kustomize_renders_what_the_api_takes() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed here")
    command = ["kubectl", "kustomize", str(FOLDER)]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    objects = list(yaml.safe_load_all(rendered))
    assert len(objects) == len(OBJECTS) - 1
    for found in objects:
        kubernetes_validate.validate(found, "1.37", strict=True)
        assert found["kind"] == "Namespace" or found["metadata"]["namespace"] == "inference"


def test_the_ingress_leads_to_every_page_but_those_of_the_inside() -> None:
    (ingress,) = of_kind("Ingress").values()
    rules = ingress["spec"]["rules"][0]["http"]["paths"]
    open_paths = {rule["path"] for rule in rules} - {"/static"}
    routes = {"/" + str(one.pattern).partition("/")[0] for one in get_resolver().url_patterns}
    console = {"/playground", "/console"}
    assert open_paths == routes - {"/metrics", "/health"} | console


@pytest.mark.parametrize("name", PODS)
def test_what_a_pod_names_is_there(name: str) -> None:
    spec = PODS[name]["spec"]
    (container,) = spec["containers"]
    maps, claims = of_kind("ConfigMap"), of_kind("PersistentVolumeClaim")
    assert [source["configMapRef"]["name"] in maps for source in container["envFrom"]] == [True]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    for volume in volumes.values():
        assert volume.get("configMap", {"name": "models"})["name"] in maps
        claim = volume.get("persistentVolumeClaim", {"claimName": "model-files"})
        assert claim["claimName"] in claims
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


@pytest.mark.parametrize("name", of_kind("Deployment"))
def test_a_deployment_runs_what_the_compose_file_runs(name: str) -> None:
    found = of_kind("Deployment")[name]
    spec = found["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    same = service(name.partition("-")[0])
    assert container["args"][0] == same.command[2]
    assert spec["terminationGracePeriodSeconds"] >= same.stop_grace_s
    writable = {
        mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
    }
    assert {mount.partition(":")[0] for mount in same.raw["tmpfs"]} <= writable
    labels = found["spec"]["template"]["metadata"]["labels"]
    assert found["spec"]["selector"]["matchLabels"].items() <= labels.items()
    port = container["ports"][0]
    for probe in ("livenessProbe", "startupProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    ready = "/health/ready" if container["args"][0] == "worker" else "/health"
    assert container["readinessProbe"]["httpGet"] == {"path": ready, "port": port["name"]}


def test_services_budgets_and_scalers_select_what_there_is() -> None:
    labels = [pod["metadata"]["labels"] for pod in PODS.values()]
    for found in of_kind("Service").values():
        assert found["spec"]["selector"] in labels
    for found in [one for one in OBJECTS if one["kind"] == "PodDisruptionBudget"]:
        assert found["spec"]["selector"]["matchLabels"] in labels
    (scaler,) = of_kind("ScaledObject").values()
    assert scaler["spec"]["scaleTargetRef"]["name"] in of_kind("Deployment")
    assert scaler["spec"].keys() == SCALED_OBJECT
    (trigger,) = scaler["spec"]["triggers"]
    assert trigger["metadata"].keys() == BY_PROMETHEUS
    assert "inference_queue_length{" in trigger["metadata"]["query"]


def test_the_settings_are_those_of_the_site() -> None:
    known = service("web").env.keys() | service("worker").env.keys()
    assert of_kind("ConfigMap")["inference-site"]["data"].keys() <= known
