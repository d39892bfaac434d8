"""What is deployed is confined, asks for a password, and is named and pinned in one place."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ConnectionError

from tests.gateway.live import WAIT_S
from tests.ports import free_port
from tests.redis_server import needed

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
PIN = ROOT / "deploy/pin-images.sh"
DIGEST = re.compile("@sha256:[0-9a-f]{64}$")


def composed(file: Path = COMPOSE) -> Any:
    return yaml.safe_load(file.read_text())


# --- images ---


def test_each_image_is_named_once() -> None:
    text = COMPOSE.read_text()
    images = composed()["x-images"].values()
    elsewhere = re.sub(r"^x-images:\n(  .*\n)*", "", text, flags=re.MULTILINE)
    assert [image for image in images if image in elsewhere] == []
    named = re.findall(r"^ *image: (.*)$", text, re.MULTILINE)
    assert {name for name in named if not name.startswith("*image-")} == {"fairgate:local"}
    assert {service["image"] for service in composed()["services"].values()} <= {*images, "fairgate:local"}


def test_the_image_of_the_gateway_is_made_from_those_images() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text()
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${BUILD_IMAGE}", "${RUN_IMAGE}"]
    assert re.findall(r"^ARG (.*)$", text, re.MULTILINE) == ["BUILD_IMAGE", "RUN_IMAGE"]
    assert re.findall(r"--from=(\S+)", text) == ["build"]
    runs = text.rpartition("\nFROM ")[2].splitlines()[1:]
    assert {"COPY --from=build /opt/fairgate /opt/fairgate", "USER 10001:10001", 'ENTRYPOINT ["fairgate"]'} < {*runs}
    assert {'CMD ["serve", "-c", "/etc/fairgate/config.yaml"]', "STOPSIGNAL SIGTERM"} < {*runs}
    assert any(line.endswith(' CMD ["fairgate", "healthcheck"]') for line in runs)
    images = composed()["x-images"]
    for service in ("gateway", "replica", "sim"):
        build = composed()["services"][service]["build"]
        assert build["args"] == {"BUILD_IMAGE": images["build"], "RUN_IMAGE": images["python"]}


def pinned(directory: Path, docker: str) -> subprocess.CompletedProcess[str]:
    """Pin the images of a copy, with this script in the place of docker."""
    stub = directory / "bin" / "docker"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text(f"#!/bin/bash\n{docker}\n")
    stub.chmod(0o755)
    path = f"{stub.parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", PIN, directory / "docker-compose.yml"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )


ASKED = '[ "$1 $2 $3 $5 $6" = "buildx imagetools inspect --format {{.Manifest.Digest}}" ] || exit 9\n'
OF_THE_NAME = ASKED + "echo sha256:$(printf '%s{salt}' \"$4\" | sha256sum | cut -d' ' -f1)"


def test_images_are_pinned_and_pinned_again(tmp_path: Path) -> None:
    file = tmp_path / "docker-compose.yml"
    shutil.copy(COMPOSE, file)
    seen = []
    for salt in ("a", "b"):
        assert pinned(tmp_path, OF_THE_NAME.replace("{salt}", salt)).returncode == 0
        images = composed(file)["x-images"]
        assert all(DIGEST.search(image) for image in images.values())
        assert {name: DIGEST.sub("", image) for name, image in images.items()} == {
            name: DIGEST.sub("", image) for name, image in composed()["x-images"].items()
        }
        for service in composed(file)["services"].values():
            assert service["image"] in {*images.values(), "fairgate:local"}
        seen.append(set(images.values()))
    assert not seen[0] & seen[1]
    unpinned = re.sub("@sha256:[0-9a-f]{64}", "", file.read_text())
    assert unpinned == re.sub("@sha256:[0-9a-f]{64}", "", COMPOSE.read_text()), "nothing else is changed"


@pytest.mark.parametrize(
    "docker", ["exit 1", "echo no digest", 'case "$4" in nginx*) exit 1;; esac\n' + OF_THE_NAME], ids=str
)
def test_what_cannot_be_pinned_changes_nothing(tmp_path: Path, docker: str) -> None:
    shutil.copy(COMPOSE, tmp_path / "docker-compose.yml")
    assert pinned(tmp_path, docker).returncode != 0
    assert (tmp_path / "docker-compose.yml").read_text() == COMPOSE.read_text()


def test_every_package_of_the_image_is_installed_by_its_hash() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install[^&\n]*", text)
    assert len(installs) == 3
    assert [command for command in installs if "--require-hashes" not in command] == []
    ours, all_of_them = (entries(ROOT / file) for file in ("deploy/requirements.lock", "requirements.lock"))
    assert [name for name in ours if ours[name] != all_of_them.get(name)] == [], "run: make lock"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[^a-z0-9-]", dependency)[0] for dependency in project["dependencies"]}
    assert names <= {name.partition("==")[0].partition("[")[0] for name in ours}
    assert not any(name.startswith(("pytest==", "mypy==")) for name in ours)


def entries(lock: Path) -> dict[str, str]:
    """What is said of each package, with its hashes."""
    found = re.split(r"\n(?=\S)", lock.read_text().strip())
    return {entry.split()[0]: entry for entry in found}


# --- containers ---


@pytest.mark.parametrize("name", ["gateway", "replica", "balancer", "sim", "redis", "prometheus", "grafana"])
def test_a_container_may_do_nothing_that_it_need_not(name: str) -> None:
    service = composed()["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"] in ("10001:10001", "nginx", "redis", "nobody", "472:0")
    assert service["pids_limit"] <= 256
    assert re.fullmatch("[1-4]g|512m", service["mem_limit"])
    assert all(":size=" in mount for mount in service["tmpfs"])


# --- the Redis ---


def command_of_redis() -> list[str]:
    """As compose hands it to the container."""
    return [part.replace("$$", "$") for part in composed()["services"]["redis"]["command"]]


async def started(directory: Path, environment: Mapping[str, str]) -> tuple[asyncio.subprocess.Process, int]:
    """The real server, on a free port, by the command of the container."""
    wrapper, port = directory / "redis-server", free_port()
    where = f"--port {port} --bind 127.0.0.1 --dir {directory}"
    wrapper.write_text(f'#!/bin/sh\nexec {needed("redis-server")} {where} "$@"\n')
    wrapper.chmod(0o755)
    path = f"{directory}:{os.environ['PATH']}"
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command_of_redis(), env={"PATH": path, **environment}, stdout=asyncio.subprocess.DEVNULL, stderr=pipe
    )
    return process, port


async def test_redis_asks_for_the_password(tmp_path: Path) -> None:
    process, port = await started(tmp_path, {"REDISCLI_AUTH": "secret"})
    try:
        async with asyncio.timeout(WAIT_S):
            assert await answer(port, "secret") == "PONG"
        for password in (None, "wrong"):
            assert await answer(port, password) != "PONG"
        state = composed()["services"]["replica"]["environment"]["FAIRGATE_STATE"]
        assert state == "redis://:${REDIS_PASSWORD:-}@redis:6379/0"
        assert composed()["services"]["redis"]["environment"] == {"REDISCLI_AUTH": "${REDIS_PASSWORD:-}"}
        kind, check = composed()["services"]["redis"]["healthcheck"]["test"]
        assert kind == "CMD-SHELL"
        for password, is_well in (("secret", True), ("wrong", False)):
            line = check.replace("redis-cli", f"redis-cli -p {port}")
            health = await asyncio.create_subprocess_shell(
                line, env={**os.environ, "REDISCLI_AUTH": password}, stderr=asyncio.subprocess.DEVNULL
            )
            assert (await health.wait() == 0) == is_well
    finally:
        process.kill()
        await process.communicate()


async def answer(port: int, password: str | None) -> str:
    """What it says to a PING, once it listens."""
    while True:
        once = Retry(NoBackoff(), 0)
        async with Redis(host="127.0.0.1", port=port, password=password, decode_responses=True, retry=once) as client:
            try:
                return "PONG" if await client.ping() else ""
            except AuthenticationError as error:
                return str(error)
            except ConnectionError:
                await asyncio.sleep(0.01)


async def test_redis_does_not_start_without_a_password(tmp_path: Path) -> None:
    process, _ = await started(tmp_path, {"REDISCLI_AUTH": ""})
    async with asyncio.timeout(WAIT_S):
        _, said = await process.communicate()
    assert process.returncode
    assert b"set REDIS_PASSWORD" in said
