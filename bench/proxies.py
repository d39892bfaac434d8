"""The proxies that are compared: nginx as the yardstick, fairgate, a minimal one on aiohttp, and the peers.

`bench/peers.sh` installs the peers. All of them run as their documentation says, as one process, with logs down to
warnings, and with limits of their own set so high that none holds a request back.
"""

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import yaml

from bench.ports import free_port
from bench.stack import BenchError, Route, fairgate, nginx_proxy, process, wait_ready
from bench.upstream import MODEL, PROXY_CORE
from bench.wrk import TENANT
from gateway.http.sockets import connections_allowed

PEERS_HOME = Path(os.environ.get("FAIRGATE_PEERS", Path.home() / ".cache" / "fairgate" / "peers"))
PEER_START_S = 120.0
CONCURRENT = 32_768
# Of these a short round says enough: they spend a hundred times as much as the others.
SLOW = frozenset({"litellm", "portkey"})
PORTKEY = PEERS_HOME / "portkey" / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"

# (command, path that says ready, header fields that every request needs)
Start = tuple[list[str], str, tuple[tuple[str, str], ...]]


def vllm_router(port: int, upstream_urls: Sequence[str], policy: str = "round_robin") -> Start:
    command = [str(PEERS_HOME / "vllm-router" / "bin" / "vllm-router"), "--worker-urls", *upstream_urls]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--policy", policy, "--log-level", "warning", "--worker-startup-check-interval", "1"]
    return [*command, "--max-concurrent-requests", str(CONCURRENT)], "/health", ()


def sglang_router(port: int, upstream_urls: Sequence[str], policy: str = "round_robin") -> Start:
    command = [str(PEERS_HOME / "sglang-router" / "bin" / "smg"), "launch", "--worker-urls", *upstream_urls]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--policy", policy, "--log-level", "warn", "--worker-startup-check-interval", "1"]
    return [*command, "--max-concurrent-requests", str(CONCURRENT)], "/health", ()


def _litellm(port: int, upstream_url: str, folder: Path) -> Start:
    target = {"model": f"openai/{MODEL}", "api_base": f"{upstream_url}/v1", "api_key": "none"}
    config = folder / "litellm.yaml"
    config.write_text(yaml.safe_dump({"model_list": [{"model_name": MODEL, "litellm_params": target}]}))
    key = f"sk-{secrets.token_hex(24)}"  # it does not start without one
    command = ["env", f"LITELLM_MASTER_KEY={key}", "LITELLM_LOCAL_MODEL_COST_MAP=True", "LITELLM_LOG=ERROR"]
    command += [str(PEERS_HOME / "litellm" / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--num_workers", "1", "--telemetry", "False"]
    return command, "/health/liveliness", (("Authorization", f"Bearer {key}"),)


def _portkey(port: int, upstream_url: str, folder: Path) -> Start:
    command = ["env", "NODE_ENV=production", "TRUSTED_CUSTOM_HOSTS=127.0.0.1", shutil.which("node") or "node"]
    target = (("x-portkey-provider", "openai"), ("x-portkey-custom-host", f"{upstream_url}/v1"))
    return [*command, str(PORTKEY), f"--port={port}", "--headless"], "/", target


def _aiohttp(port: int, upstream_url: str, folder: Path) -> Start:
    return [sys.executable, "-m", "bench.aiohttp_proxy", str(port), upstream_url], "/health", ()


STARTS: dict[str, Callable[[int, str, Path], Start]] = {
    "aiohttp": _aiohttp,
    "vllm-router": lambda port, url, _: vllm_router(port, [url]),
    "sglang-router": lambda port, url, _: sglang_router(port, [url]),
    "portkey": _portkey,
    "litellm": _litellm,
}
OURS: dict[str, str | None] = {"fairgate": None, "fairgate-vtc": "vtc"}
"""By policy; None: the default."""
SPEAK_TLS = ("nginx", "fairgate")
PROXIES = ("nginx", *OURS, *STARTS)


def is_installed(peer: str) -> bool:
    """Whether `bench/peers.sh` has put this peer there; if not, it is said."""
    if (PEERS_HOME / peer / ".installed").exists():
        return True
    print(f"{peer} is left out: not installed (bash bench/peers.sh)", flush=True)
    return False


def chosen(names: str) -> list[str]:
    """The named proxies, with commas; those that are not installed are left out, and it is said. Raises BenchError."""
    found = []
    for name in names.split(","):
        if name not in PROXIES:
            raise BenchError(f"no proxy {name!r}; there are {', '.join(PROXIES)}")
        if name in ("nginx", *OURS, "aiohttp") or is_installed(name):
            found.append(name)
    return found


@contextlib.asynccontextmanager
async def proxy(name: str, upstream_url: str, tls: dict[str, str] | None = None) -> AsyncIterator[Route]:
    """The named proxy in front of an upstream, on its core. `tls`: with this certificate, of those that can."""
    if name == "nginx":
        running = nginx_proxy(upstream_url, cpu=PROXY_CORE, tls=tls)
    elif name in OURS:
        most = connections_allowed()  # all of them from one address, which has half of them by default
        running = fairgate(
            *(upstream_url, {TENANT: 1}), engine_type="openai", model=MODEL, cpu=PROXY_CORE, concurrency=CONCURRENT,
            tls=tls, policy=OURS[name], limits={"connections_max": most, "client_connections_max": most},
        )  # fmt: skip
    elif tls is not None:
        raise BenchError(f"{name} is not set up for TLS; there are {', '.join(SPEAK_TLS)}")
    else:
        running = started(name, lambda port, folder: STARTS[name](port, upstream_url, folder), PROXY_CORE)
    async with running as route:
        yield route


@contextlib.asynccontextmanager
async def started(name: str, start: Callable[[int, Path], Start], cpu: int | None = None) -> AsyncIterator[Route]:
    """Runs a peer until the block ends; `start` says how, given a free port and a folder for its files."""
    with tempfile.TemporaryDirectory(prefix="fairgate-bench-") as folder:
        port, log = free_port(), Path(folder, "out.log")
        command, ready, headers = start(port, Path(folder))
        with process(command, log, cpu) as child:
            url = f"http://127.0.0.1:{port}"
            await wait_ready(url, ready, child, log, PEER_START_S)
            yield Route(name, url, child.pid, headers=headers)


async def open_routes(
    stack: AsyncExitStack, names: list[str], upstream_url: str, tls: dict[str, str] | None = None
) -> dict[str, Route]:
    """Every named proxy at once: who is not asked anything costs next to nothing. One that fails is left out."""
    routes: dict[str, Route] = {}
    for name in names:
        try:
            routes[name] = await stack.enter_async_context(proxy(name, upstream_url, tls))
        except BenchError as error:
            print(f"{name} is left out: {error}", flush=True)
    return routes
