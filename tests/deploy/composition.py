"""The services of one profile of docker-compose.yml as processes, each in network, mounts and user of its own.

What is said of a container holds here: command, environment, user, read-only disk, capabilities, volumes, names,
health, replicas, and how it is stopped. Bounds on memory and processes do not: they need control groups.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.container import Container, Image, Mount, Sandbox
from tests.deploy.network import Network
from tests.waiting import WAIT_S

NOT_HELD = {"build", "mem_limit", "pids_limit", "ports", "profiles", "restart"}
READ = {
    "cap_drop", "command", "depends_on", "deploy", "environment", "healthcheck", "image", "networks", "read_only",
    "security_opt", "stop_grace_period", "stop_signal", "tmpfs", "user", "volumes",
}  # fmt: skip
_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?::([-+])([^}]*))?\})")


class Service:
    """One container of a service: it can be stopped, killed and started again, with an address of its own each time."""

    def __init__(self, name: str, number: int, said: Mapping[str, Any], image: Image, composition: Composition) -> None:
        self.name = f"{name}-{number}"
        self._names = [name, *said.get("networks", {}).get("default", {}).get("aliases", [])]
        self._said = said
        self._image = image
        self._composition = composition
        self._container: Container | None = None
        self._namespace = self.address = ""

    @property
    def container(self) -> Container:
        assert self._container is not None, f"{self.name} has not been started"
        return self._container

    async def start(self) -> None:
        """And wait until it is healthy, if it says how to ask for that."""
        network = self._composition.network
        self._namespace, self.address = await network.join()
        sandbox = Sandbox(
            self._image.root,
            self._said.get("user", self._image.user),
            self._image.workdir,
            {**self._image.environment, **self._said.get("environment", {})},
            self._composition.mounts(self.name, self._said),
            self._namespace,
            read_only=self._said.get("read_only", False),
            powerless=self._said.get("cap_drop") == ["ALL"]
            and self._said.get("security_opt") == ["no-new-privileges:true"],
        )
        command = self._image.entrypoint + (self._said.get("command") or self._image.command)
        log = self._composition.folder / f"{self.name}.log"
        self._container = Container(self.name, sandbox, command, log)
        await self._container.start()
        for name in self._names:
            network.names.setdefault(name, set()).add(self.address)

    async def is_healthy(self) -> bool:
        """By its own check; True if there is none."""
        check = self._health()
        if not check:
            return True
        return bool(self.container.pid) and (await self.container.execute(check))[0] == 0

    async def until_healthy(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while not await self.is_healthy():
                if not self.container.is_running:
                    raise RuntimeError(f"{self.name} has ended:\n{self.container.said[-4000:]}")
                await asyncio.sleep(0.1)

    async def stop(self) -> int:
        """As the engine does: the image's signal, then the time that the file gives it. Its exit status."""
        self.container.signal(self._said.get("stop_signal", self._image.stop_signal))
        grace_s = float(self._said.get("stop_grace_period", "10s").removesuffix("s"))
        try:
            return await self.container.ended(grace_s)
        finally:
            await self.remove()

    async def remove(self) -> None:
        """End it at once, in whatever state it is; nobody answers to its address or its names any more."""
        if self._container is not None:
            await self._container.remove()
        for name in self._names:
            self._composition.network.names.get(name, set()).discard(self.address)
        if self._namespace:
            await self._composition.network.leave(self._namespace)
            self._namespace = ""

    def _health(self) -> list[str]:
        said = self._said.get("healthcheck", {})
        if said.get("disable"):
            return []
        kind, *command = said.get("test", ["CMD", *self._image.health])
        return ["sh", "-c", *command] if kind == "CMD-SHELL" else command


class Composition:
    """`async with Composition(file, profile, image, folder, environment) as composition`: all of it runs, in the order
    that the file gives. Needs root."""

    def __init__(
        self,
        file: Path,
        profile: str,
        image: Callable[[str], Awaitable[Image]],
        folder: Path,
        environment: Mapping[str, str],
    ) -> None:
        """`folder`: where volumes and output are kept. `environment`: for the variables of the file."""
        self.folder = folder
        self.network = Network()
        self.services: dict[str, list[Service]] = {}
        self._image = image
        self._home = file.parent
        said = interpolated(yaml.safe_load(file.read_text()), environment)
        self._said = {
            name: each for name, each in said["services"].items() if profile in each.get("profiles", [profile])
        }
        for name, service in self._said.items():
            if unknown := service.keys() - READ - NOT_HELD:
                raise ValueError(f"{file}: {name}: {', '.join(sorted(unknown))}: not understood here")

    async def __aenter__(self) -> Composition:
        await self.network.__aenter__()
        try:
            for name in self._ordered():
                await self._start(name)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            for service in self.all():
                await service.remove()
        finally:
            await self.network.__aexit__()

    def all(self) -> list[Service]:
        return [service for services in self.services.values() for service in services]

    def mounts(self, name: str, said: Mapping[str, Any]) -> list[Mount]:
        """Of one container: what every engine gives it, then what the file says."""
        own = self.folder / name
        own.mkdir(exist_ok=True)
        (own / "hosts").write_text("127.0.0.1 localhost\n")
        (own / "resolv.conf").write_text("nameserver 127.0.0.11\noptions ndots:0\n")
        mounts = [Mount(f"/etc/{file}", own / file, read_only=True) for file in ("hosts", "resolv.conf")]
        for each in said.get("tmpfs", []):
            target, _, options = each.partition(":size=")
            mounts.append(Mount(target, size=options or "64m"))
        for each in said.get("volumes", []):
            source, target, *mode = each.split(":")
            path = self._home / source if source.startswith(".") else self._volume(source)
            mounts.append(Mount(target, path.resolve(), read_only=mode == ["ro"]))
        return mounts

    def _volume(self, name: str) -> Path:
        path = self.folder / "volumes" / name
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)  # an engine gives a new volume the owner that the folder has in the image
        return path

    async def _start(self, name: str) -> None:
        said = self._said[name]
        for other, terms in said.get("depends_on", {}).items():
            if terms["condition"] == "service_healthy":
                for service in self.services.get(other, []):
                    await service.until_healthy()
        image = await self._image(said["image"])
        self.services[name] = []
        for number in range(1, said.get("deploy", {}).get("replicas", 1) + 1):
            service = Service(name, number, said, image, self)
            self.services[name].append(service)
            await service.start()

    def _ordered(self) -> list[str]:
        """Each after those that it depends on."""
        found: list[str] = []
        while len(found) < len(self._said):
            ready = [
                name
                for name, said in self._said.items()
                if name not in found and not (said.get("depends_on", {}).keys() & self._said.keys()) - set(found)
            ]
            assert ready, "a circle of services that depend on each other"
            found += ready
        return found


def interpolated(value: Any, environment: Mapping[str, str]) -> Any:
    """With the variables filled in as compose does."""

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
