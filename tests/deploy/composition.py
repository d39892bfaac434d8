"""The services of docker-compose.yml as processes of this machine, each with the mounts, user and rights of its own.

What is said of a container holds here: command, environment, user, read-only disk, capabilities, volumes, health, and
how it is stopped. All are on one loopback network. Bounds on memory and processes need control groups: left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.container import Container, Image, Mount, Sandbox, run

COMPOSE = Path(__file__).parents[2] / "docker-compose.yml"
_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?::([-+])([^}]*))?\})")


def services(**environment: str) -> dict[str, Any]:
    """Return what the file says of each service, with these variables."""
    found: dict[str, Any] = interpolated(yaml.safe_load(COMPOSE.read_text()), environment)["services"]
    return found


def interpolated(value: Any, environment: Mapping[str, str]) -> Any:
    """Fill in the variables as compose does."""

    def filled(found: re.Match[str]) -> str:
        dollar, name, how, other = found.groups()
        if dollar:
            return "$"
        value = environment.get(name, "")
        return (other if value else "") if how == "+" else value or other or ""

    if isinstance(value, str):
        return _VARIABLE.sub(filled, value)
    if isinstance(value, list):
        return [interpolated(each, environment) for each in value]
    if isinstance(value, dict):
        return {key: interpolated(each, environment) for key, each in value.items()}
    return value


@asynccontextmanager
async def network() -> AsyncIterator[str]:
    """Make a network namespace that has loopback only, and delete it afterwards. Needs root."""
    name = f"fairgate-{os.getpid()}"
    await run(["ip", "netns", "add", name])
    try:
        await run(["ip", "-n", name, "link", "set", "lo", "up"])
        yield name
    finally:
        await run(["ip", "netns", "delete", name])


class Service(Container):
    """One container of a service."""

    def __init__(self, name: str, image: Image, folder: Path, namespace: str) -> None:
        """`folder`: where its output is kept. `namespace`: its network."""
        said = services()[name]
        self._said = said
        self._image = image
        own = folder / name
        own.mkdir()
        confined = (said["cap_drop"], said["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
        sandbox = Sandbox(
            image.root,
            said.get("user", image.user),
            image.workdir,
            {**image.environment, **said.get("environment", {})},
            _mounts(own, said),
            namespace,
            read_only=said["read_only"],
            powerless=confined,
        )
        super().__init__(name, sandbox, image.entrypoint + (said.get("command") or image.command), own / "log")

    async def is_healthy(self) -> bool:
        """Ask by the container's own check."""
        check = self._said.get("healthcheck", {}).get("test", ["CMD", *self._image.health])[1:]
        return bool(self.pid) and (await self.execute(check))[0] == 0

    async def stop(self) -> int:
        """Stop it as an engine does: the signal, then the time that the file gives. Return the exit status."""
        self.signal(self._said.get("stop_signal", self._image.stop_signal))
        return await self.ended(float(self._said.get("stop_grace_period", "10s").removesuffix("s")))


def _mounts(own: Path, said: Mapping[str, Any]) -> list[Mount]:
    """List what an engine gives every container, then what the file says of this one."""
    (own / "hosts").write_text("127.0.0.1 localhost engine\n")
    mounts = [Mount("/etc/hosts", own / "hosts", read_only=True)]
    for each in said["tmpfs"]:
        target, _, size = each.partition(":size=")
        mounts.append(Mount(target, size=size))
    for each in said.get("volumes", []):
        source, target, mode = each.split(":")
        mounts.append(Mount(target, (COMPOSE.parent / source).resolve(), read_only=mode == "ro"))
    return mounts
