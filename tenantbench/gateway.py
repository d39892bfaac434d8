"""Gateways as `gateways/NAME.toml` describes them: installed, started, awaited and stopped."""

from __future__ import annotations

# Files of a few lines are read and written here before any load runs.
# ruff: noqa: ASYNC240
import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import aiohttp

from tenantbench.engine_server import MODEL
from tenantbench.machine import GATEWAY_CORES, on_cores
from tenantbench.workloads import WEIGHTS

FOLDER = Path(__file__).parent / "gateways"
HOME = Path(os.environ.get("TENANTBENCH_HOME", Path.home() / ".cache" / "tenantbench"))
KEYS = {tenant: f"tenantbench-key-of-{tenant}" for tenant in WEIGHTS}
START_S, STOP_S = 120.0, 10.0


class GatewayError(Exception):
    """A gateway is not described, not installed or did not start; the message says what to do."""


@dataclass(frozen=True)
class Gateway:
    name: str
    home: Path
    description: dict[str, Any]
    variables: dict[str, str]

    @property
    def keys(self) -> dict[str, str]:
        """Return a key for each tenant; of gateways without tenants, one key for all."""
        only = self.description["start"].get("key")
        return dict.fromkeys(KEYS, only) if only else KEYS


def described() -> dict[str, Gateway]:
    """Return all gateways by name; those with variants as NAME-VARIANT."""
    found = {}
    for path in sorted(FOLDER.glob("*.toml")):
        description = tomllib.loads(path.read_text())
        for variant, variables in description.get("variants", {"": {}}).items():
            name = f"{path.stem}-{variant}" if variant else path.stem
            found[name] = Gateway(name, HOME / path.stem, description, variables)
    return found


def read(name: str) -> Gateway:
    """Raises GatewayError."""
    known = described()
    if name not in known:
        raise GatewayError(f"no gateway {name!r}; there are {', '.join(known)}")
    return known[name]


def install(gateway: Gateway) -> None:
    """Install from PyPI into an environment of its own, or say what Debian package is missing."""
    packages = gateway.description.get("install", {})
    if pypi := packages.get("pypi"):
        subprocess.run([sys.executable, "-m", "venv", gateway.home], check=True)
        subprocess.run([gateway.home / "bin" / "pip", "install", "--quiet", *pypi], check=True)
    elif debian := packages.get("debian"):
        print(f"{gateway.name}: apt-get install {' '.join(debian)}")
    else:
        print(f"{gateway.name}: {gateway.description['url']}")


def executable(gateway: Gateway, command: str) -> str:
    """Raises GatewayError."""
    path = [gateway.home / "bin", Path(sys.executable).parent, *os.environ["PATH"].split(os.pathsep), "/usr/sbin"]
    if found := shutil.which(command, path=os.pathsep.join(map(str, path))):
        return found
    raise GatewayError(f"{gateway.name}: {command} is not installed; run: tenantbench install {gateway.name}")


def version_of(gateway: Gateway) -> str:
    """Return the gateway's title, with what it says of its version where the title has none. Raises GatewayError."""
    title, command = str(gateway.description["title"]), gateway.description.get("version")
    if not command:
        return title
    ask = [executable(gateway, command[0]), *command[1:]]
    said = subprocess.run(ask, capture_output=True, text=True, timeout=START_S, check=False)
    return f"{title}: {(said.stdout or said.stderr).strip()}"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def process(
    command: list[str], log: Path, env: dict[str, str] | None = None, cores: set[int] = GATEWAY_CORES
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process group of its own; it is asked to end, and then killed."""
    with log.open("ab") as out, on_cores(cores):
        child = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, process_group=0,
            cwd=log.parent, env=os.environ | (env or {}),
        )  # fmt: skip
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


async def wait_ready(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    """Raises GatewayError."""
    deadline = time.monotonic() + START_S
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with http.get(url, timeout=aiohttp.ClientTimeout(5)) as response:
                    if response.status < 400:
                        return
            if child.poll() is not None:
                break
            await asyncio.sleep(0.1)
    tail = log.read_text(errors="replace")[-1000:]
    raise GatewayError(f"{url} did not answer within {START_S:.0f} s, or its process ended; {log} ends with:\n{tail}")


@dataclass(frozen=True)
class Target:
    """Instances of one gateway that run before one engine. Without `pids` their CPU and memory are unknown."""

    name: str
    urls: list[str]
    engine_url: str
    keys: dict[str, str]
    pids: set[int]


def variables_of(gateway: Gateway, engine: str, folder: Path, slots: int) -> dict[str, str]:
    values = {"engine": engine, "engine_host": engine.removeprefix("http://"), "model": MODEL}
    values |= {"slots": str(slots), "folder": str(folder), **gateway.variables}
    for tenant, key in KEYS.items():
        values[f"sha256_{tenant}"] = hashlib.sha256(key.encode()).hexdigest()
    return values


@contextlib.asynccontextmanager
async def started(gateway: Gateway, engine: str, folder: Path, slots: int) -> AsyncIterator[Target]:
    """Run two instances of a gateway before one engine while the block runs. Raises GatewayError."""
    start = gateway.description["start"]
    if not start.get("command"):
        yield Target(gateway.name, [engine, engine], engine, gateway.keys, set())
        return
    common = variables_of(gateway, engine, folder, slots) | {"shared_port": str(free_port())}
    urls, pids = [], set()
    with contextlib.ExitStack() as stack:
        for beside in gateway.description.get("beside", []):
            command = [Template(part).substitute(common) for part in beside["command"]]
            command[0] = executable(gateway, command[0])
            folder.mkdir(parents=True, exist_ok=True)
            pids.add(stack.enter_context(process(command, folder / "beside.log")).pid)
        for instance in ("one", "two"):
            own = folder / instance
            own.mkdir(parents=True, exist_ok=True)
            values = common | {"folder": str(own), "port": str(free_port()), "port2": str(free_port())}
            for file in gateway.description.get("files", []):
                (own / file["path"]).write_text(Template(file["text"]).substitute(values))
            command = [Template(part).substitute(values) for part in start["command"]]
            command[0] = executable(gateway, command[0])
            env = {name: Template(value).substitute(values) for name, value in start.get("env", {}).items()}
            if command[0].startswith(str(gateway.home)):
                env["PYTHONPATH"] = ""  # what this tool runs on is no part of a gateway
            child = stack.enter_context(process(command, own / "gateway.log", env))
            ready = Template(start["ready"]).substitute(values)
            await wait_ready(ready, child, own / "gateway.log")
            urls.append(f"http://127.0.0.1:{values['port']}")
            pids.add(child.pid)
        yield Target(gateway.name, urls, engine, gateway.keys, pids)
