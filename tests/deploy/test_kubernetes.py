"""The manifests, as kustomize renders them, are what Kubernetes takes in several of its versions, and keep what
docs/deploying.md says of them."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway.config.load import load_config
from gateway.telemetry.metric_families import FAMILIES
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
VERSIONS = ("1.29", "1.31", "1.33", "1.35", "1.37")
COMPONENTS = ("outside", "prometheus-operator", "gateway-api", "keda")
FOLDERS = ("base", "overlays/redis-replicas", "overlays/simulated")
DRAIN_S = 30
Resource = dict[str, Any]


@cache
def rendered(folder: str | Path) -> list[Resource]:
    """Return what the real kustomize, a program of its own or inside kubectl, makes of a folder."""
    if shutil.which("kustomize"):
        command = ["kustomize", "build"]
    elif shutil.which("kubectl"):
        command = ["kubectl", "kustomize"]
    else:
        pytest.skip("neither kustomize nor kubectl is installed")
    done = subprocess.run([*command, KUBERNETES / folder], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def one(folder: str, kind: str, name: str = "fairgate") -> Resource:
    [found] = [each for each in rendered(folder) if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return copy.deepcopy(found)


def pods(folder: str) -> list[Resource]:
    kinds = ("Deployment", "StatefulSet")
    return [each["spec"]["template"] for each in rendered(folder) if each["kind"] in kinds]


# --- what Kubernetes takes ---


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_each_version_takes_all_of_it(folder: str, version: str) -> None:
    assert rendered(folder)
    for resource in rendered(folder):
        kubernetes_validate.validate(resource, version, strict=True)


def test_every_file_belongs_to_something_that_is_rendered() -> None:
    folders = [*FOLDERS, *components()]
    for folder in folders:
        said = yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text())
        named = {Path(name).name for name in said["resources"] if name.endswith(".yaml")}
        named |= {patch["path"] for patch in said.get("patches", [])}
        named |= {file for each in said.get("configMapGenerator", []) for file in each["files"]}
        assert {path.name for path in (KUBERNETES / folder).glob("*.yaml")} == named | {"kustomization.yaml"}
    assert {path.parent for path in KUBERNETES.rglob("*.yaml")} == {KUBERNETES / folder for folder in folders}


# --- what runs ---


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_pod_may_do_nothing_that_it_need_not(folder: str) -> None:
    assert one(folder, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in pods(folder):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"].keys() == {"memory"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_gateway_is_probed_drained_and_reloaded(folder: str) -> None:
    deployment = one(folder, "Deployment")
    spec = deployment["spec"]["template"]["spec"]
    [gateway] = spec["containers"]
    paths = {kind: gateway[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    assert {port["name"]: port["containerPort"] for port in gateway["ports"]} == {"http": 8080, "admin": 8190}
    [command, seconds] = gateway["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert spec["terminationGracePeriodSeconds"] > int(seconds) + DRAIN_S
    [mount] = [each for each in gateway["volumeMounts"] if each["name"] == "config"]
    assert "subPath" not in mount, "a file that is mounted by itself never changes"
    [volume] = [each for each in spec["volumes"] if each["name"] == "config"]
    assert volume == {"name": "config", "configMap": {"name": "fairgate"}}
    assert f"{mount['mountPath']}/config.yaml" == gateway["args"][-1]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_config_is_one_that_the_gateway_takes(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(one(folder, "ConfigMap")["data"]["config.yaml"])
    [gateway] = one(folder, "Deployment")["spec"]["template"]["spec"]["containers"]
    for variable in gateway["env"]:
        monkeypatch.setenv(variable["name"], "secret")
    config = load_config(file)
    assert (config.listen, config.admin) == ("0.0.0.0:8080", "0.0.0.0:8190")
    assert config.admin_token is not None
    assert config.drain_s == DRAIN_S
    assert (config.state.redis_url is not None) == (folder != "base")


def test_replicas_are_spread_scaled_and_not_all_taken_at_once() -> None:
    folder = "overlays/redis-replicas"
    deployment = one(folder, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert "replicas" not in deployment["spec"], "else each apply would undo what the autoscaler did"
    scaler = one(folder, "HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "fairgate"}
    assert scaler["minReplicas"] >= 2
    spread = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    selectors = [each["labelSelector"]["matchLabels"] for each in spread]
    selectors += [one(folder, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"]]
    selectors += [
        one(folder, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        one(folder, "Service")["spec"]["selector"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    redis = one(folder, "StatefulSet", "redis")["spec"]["template"]["metadata"]["labels"]
    for name in ("redis", "fairgate-to-redis"):
        policy = one(folder, "NetworkPolicy", name)["spec"]
        to = policy["podSelector"]["matchLabels"].items()
        assert to <= (redis if name == "redis" else labels).items()


def test_each_component_adds_one_resource_about_the_gateway(tmp_path: Path) -> None:
    folders = {name: os.path.relpath(KUBERNETES / name, tmp_path) for name in ("base", *components())}
    base = folders.pop("base")
    said = {"resources": [base], "components": [*folders.values()]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(said))
    added = {each["kind"]: each for each in rendered(tmp_path) if each not in rendered("base")}
    assert added.keys() == {"NetworkPolicy", "PodMonitor", "HTTPRoute", "ScaledObject"}
    kubernetes_validate.validate(added["NetworkPolicy"], VERSIONS[0], strict=True)
    labels = one("base", "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert added["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    allowed = {port["port"] for rule in added["NetworkPolicy"]["spec"]["egress"] for port in rule["ports"]}
    assert allowed == {443, 5432, 6432, 4318}

    monitor = added["PodMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    [gateway] = one("base", "Deployment")["spec"]["template"]["spec"]["containers"]
    [endpoint] = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in gateway["ports"]}
    assert endpoint["authorization"]["credentials"] == gateway["env"][0]["valueFrom"]["secretKeyRef"]

    [rule] = added["HTTPRoute"]["spec"]["rules"]
    [port] = one("base", "Service")["spec"]["ports"]
    assert rule["backendRefs"] == [{"name": "fairgate", "port": port["port"]}]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}, "else long answers are cut"

    scaler = added["ScaledObject"]["spec"]
    engine = one("overlays/simulated", "StatefulSet", "vllm")
    assert scaler["scaleTargetRef"] == {key: engine[key] for key in ("apiVersion", "kind")} | {"name": "vllm"}
    assert scaler["minReplicaCount"] == 0
    [trigger] = scaler["triggers"]
    said = re.fullmatch(r'sum\((\w+)\{pool="(\w+)"\}\)', trigger["metadata"]["query"])
    assert said is not None
    [pool] = yaml.safe_load(one("base", "ConfigMap")["data"]["config.yaml"])["pools"]
    assert said[1] in FAMILIES
    assert said[2] == pool["name"]
    assert all(isinstance(value, str) for value in trigger["metadata"].values()), "KEDA takes text only"


def components() -> list[str]:
    return [f"components/{name}" for name in COMPONENTS]


def test_redis_is_the_one_of_compose() -> None:
    [container] = one("overlays/redis-replicas", "StatefulSet", "redis")["spec"]["template"]["spec"]["containers"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert container["image"] == compose["x-images"]["redis"].partition("@")[0]
    ours, theirs = (command[-1].replace("$$", "$").split("exec ")[1] for command in (
        container["command"], compose["services"]["redis"]["command"]
    ))  # fmt: skip
    assert ours.split() == theirs.split()
