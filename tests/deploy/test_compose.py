"""docker-compose.yml: what an engine would refuse, and what the others of the file may ask the gateway."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gateway.config.load import load_config
from tests.deploy.composition import services
from tests.deploy.dockerfile import ROOT, context, steps
from tests.deploy.nginx import NGINX, nginx_config
from tests.waiting import WAIT_S

PROFILES = ("gpu", "cpu", "gpu-replicas", "cpu-replicas", "observability")


def test_the_context_of_the_image_is_there_and_its_build_is_understood() -> None:
    assert [name for name in context() if not (ROOT / name).exists()] == []
    assert {name for name, _ in steps()} == {"WORKDIR", "COPY", "RUN"}
    copied = [source for name, text in steps() if name == "COPY" for source in text.split()[:-1]]
    assert set(copied) <= {".", *context()}


def test_what_is_mounted_into_a_read_only_container_is_a_file_or_folder_that_ships() -> None:
    """Compose writes inline configs and secrets into the container, and refuses to where it may not."""
    for name, service in services().items():
        assert not service.keys() & {"configs", "secrets"}, name
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (ROOT / source).exists(), volume


@pytest.mark.parametrize("profile", PROFILES)
def test_each_profile_has_what_it_depends_on(profile: str) -> None:
    there = {name: service for name, service in services().items() if profile in service["profiles"]}
    assert there
    for service in there.values():
        for other, terms in service.get("depends_on", {}).items():
            assert other in there or terms.get("required") is False
    ports = [port for service in there.values() for port in service.get("ports", [])]
    assert len(ports) == len(set(ports))


@pytest.mark.parametrize(("token", "admin"), [("", "127.0.0.1:8190"), ("a-token-of-some-length", "0.0.0.0:8190")])
def test_only_with_a_token_do_others_reach_the_admin_listener(
    token: str, admin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gateway", "replica"):
        for variable, value in services(FAIRGATE_ADMIN_TOKEN=token)[name]["environment"].items():
            monkeypatch.setenv(variable, value)
        config = load_config(ROOT / "deploy/config.compose.yaml")
        assert config.admin == admin
        assert config.admin_token is not None
        assert (config.admin_token.get_secret_value() == token) == bool(token)


def test_only_replicas_believe_what_is_said_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    said = services()
    assert "ports" not in said["replica"], "nobody but the balancer reaches it"
    for name, trusted in (("gateway", ("127.0.0.1/32",)), ("replica", ("0.0.0.0/0",))):
        monkeypatch.delenv("FAIRGATE_BALANCER", raising=False)
        for variable, value in said[name]["environment"].items():
            monkeypatch.setenv(variable, value)
        assert load_config(ROOT / "deploy/config.compose.yaml").trusted_proxies == trusted


def test_the_ports_of_what_only_watches_are_for_this_machine() -> None:
    for name in ("prometheus", "grafana"):
        assert all(port.startswith("127.0.0.1:") for port in services()[name]["ports"])


@pytest.mark.parametrize(
    ("name", "variable"), [("prometheus", "FAIRGATE_ADMIN_TOKEN"), ("grafana", "GRAFANA_PASSWORD")]
)
def test_what_lacks_its_secret_says_so_and_does_not_start(name: str, variable: str) -> None:
    service = services()[name]
    done = subprocess.run(
        service["entrypoint"], env=service["environment"], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode
    assert f"set {variable}" in done.stderr


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_nginx_takes_the_config_of_the_balancer(tmp_path: Path) -> None:
    command = [str(NGINX), "-t", "-q", "-p", tmp_path, "-c", nginx_config(tmp_path, {})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
