"""The processes under test: the engine, nginx as a plain proxy, fairgate; started on free ports and ended by us."""

# The files below are a few bytes each and are touched before any load runs.
# ruff: noqa: ASYNC240

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import uvloop
import yaml

from bench.load import MODEL, Client
from gateway.config.sections.keys import hash_key
from tests.ports import free_port

Result = TypeVar("Result")

ROOT = Path(__file__).resolve().parent.parent
SERVE = ROOT / "deploy" / "real-vllm" / "serve.sh"
COMPILED = ROOT / "build" / "compiled"
PLUG_IN = ["env", f"PYTHONPATH={COMPILED}", "VLLM_PLUGINS=fairgate"] if COMPILED.is_dir() else []
FIRST = ["nice", "-n", "-10"] if os.geteuid() == 0 else []
"""Prefix of a proxy's command, for nginx as for fairgate, as the units in `deploy/` give both precedence: vLLM's
processes poll, and a proxy that waits for their core leaves the engine idle."""
ENGINE_START_S = 180.0
PROXY_START_S = 120.0
IDLE_S = 120.0
SCRAPES_MAX = 3
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
PREEMPTIONS = "vllm:num_preemptions_total"
KV_USAGE = "vllm:kv_cache_usage_perc"
PROMPT = "vllm:prompt_tokens_total"
OUTPUT = "vllm:generation_tokens_total"
SAMPLE = re.compile(r"^(vllm:\w+)\{[^}]*\} (\S+)$", re.M)


class BenchError(Exception):
    """A process of the benchmark did not start or did not come to rest; the message says which and where to look."""


def run_bench(name: str, main: Coroutine[Any, Any, Result]) -> Result:
    """Runs a benchmark on uvloop. SIGTERM ends it as an error would, so that none of its processes is left behind."""

    async def until_terminated() -> Result:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await main

    try:
        return uvloop.run(until_terminated())
    except BenchError as error:
        raise SystemExit(f"{name}: {error}") from None
    except asyncio.CancelledError:
        raise SystemExit(f"{name}: terminated") from None


@contextlib.contextmanager
def process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command while the block runs; SIGTERM at the end, then SIGKILL."""
    with log.open("ab") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, process_group=0)
        try:
            yield child
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


async def wait_ready(url: str, path: str, child: subprocess.Popen[bytes], log: Path, limit_s: float) -> None:
    """Waits until GET `path` answers 200. Raises BenchError when the process ends or the limit passes."""
    client = Client(url)
    deadline_s = time.monotonic() + limit_s
    while (await client.get(path)).status != 200:
        if child.poll() is not None or time.monotonic() > deadline_s:
            raise BenchError(f"{' '.join(child.args)} is not ready:\n{log.read_text()[-3000:]}")
        await asyncio.sleep(0.2)
    client.close()


def tree(pid: int) -> list[int]:
    """A process and its living descendants."""
    found, todo = [], [pid]
    while todo:
        current = todo.pop()
        found.append(current)
        for task in Path(f"/proc/{current}/task").iterdir():
            todo += map(int, (task / "children").read_text().split())
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds, user and system, that a process and its living descendants have used."""
    total = 0
    for member in tree(pid):
        # The command name in the second field may hold spaces: count fields behind its closing bracket.
        fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS_PER_S


def memory_bytes(pid: int) -> int:
    """Memory of a process and its living descendants; what they share is counted once (PSS)."""
    pages = [Path(f"/proc/{member}/smaps_rollup").read_text() for member in tree(pid)]
    return sum(int(line.split()[1]) * 1024 for page in pages for line in page.splitlines() if line.startswith("Pss:"))


class Engine:
    """A running vLLM, seen through its metrics."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = Client(url)

    async def gauges(self, *names: str) -> dict[str, float]:
        """The named series, each summed over its labels. A scrape of a few names costs the engine 1 to 2 ms.

        Raises BenchError if the engine does not answer: a scrape that is lost must not read as zero.
        """
        query = "&".join(f"name[]={name}" for name in names)
        for _ in range(SCRAPES_MAX):
            reply = await self.client.get(f"/metrics/?{query}")
            if reply.ok:
                break
        else:
            raise BenchError(f"the engine at {self.url} does not tell its metrics: {reply.failure}")
        found = dict.fromkeys(names, 0.0)
        for name, value in SAMPLE.findall(reply.body.decode()):
            if name in found:
                found[name] += float(value)
        return found

    async def wait_idle(self) -> None:
        """Waits until nothing runs or waits, in three scrapes in a row. Raises BenchError after two minutes."""
        deadline_s = time.monotonic() + IDLE_S
        quiet = 0
        while quiet < 3:
            busy = await self.gauges(RUNNING, WAITING)
            quiet = 0 if any(busy.values()) else quiet + 1
            if time.monotonic() > deadline_s:
                raise BenchError(f"the engine at {self.url} does not come to rest: {busy}")
            await asyncio.sleep(0.1)


class Engines:
    """Several of them, seen as one."""

    def __init__(self, members: Sequence[Engine]) -> None:
        self.members = members

    async def gauges(self, *names: str) -> dict[str, float]:
        """The named series, each summed over the engines."""
        found = [await member.gauges(*names) for member in self.members]
        return {name: sum(each[name] for each in found) for name in names}

    async def wait_idle(self) -> None:
        """Waits until none of them runs anything. Raises BenchError after two minutes for one of them."""
        for member in self.members:
            await member.wait_idle()


@dataclass(frozen=True, slots=True)
class Route:
    """A way to the engine: the proxy's process (0 without a proxy) and each tenant's key."""

    name: str
    url: str
    pid: int = 0
    keys: tuple[tuple[str, str], ...] = ()
    admin: str = ""
    """Address of the admin listener; "" for a proxy without one."""

    def key(self, tenant: str) -> str:
        return dict(self.keys).get(tenant, "")


@contextlib.asynccontextmanager
async def engine(url: str | None, flags: Sequence[str] = ()) -> AsyncIterator[Engine]:
    """The engine at `url`, or one of our own with these `vllm serve` flags on a free port, warmed up."""
    if url:
        yield Engine(url.rstrip("/"))
        return
    async with engines([flags]) as started:
        yield started[0]


@contextlib.asynccontextmanager
async def engines(flags: Sequence[Sequence[str]]) -> AsyncIterator[list[Engine]]:
    """One engine of our own for each list of further `vllm serve` flags, all started at once.

    They have fairgate's plug-in if fairgate is compiled, which is when there is a folder with a distribution of it.
    """
    with tempfile.TemporaryDirectory(prefix="fairgate-bench-") as folder, contextlib.ExitStack() as stack:
        starting = []
        for own in flags:
            port = free_port()
            log = Path(folder, f"engine-{port}.log")
            child = stack.enter_context(process([*PLUG_IN, str(SERVE), str(port), *own], log))
            starting.append((f"http://127.0.0.1:{port}", child, log))
        for url, child, log in starting:
            await wait_ready(url, "/health", child, log, ENGINE_START_S)
        yield [Engine(url) for url, _, _ in starting]


NGINX_CONF = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{ worker_connections 24000; }}
http {{
    access_log off;
    client_body_buffer_size 256k;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    keepalive_requests 10000000;
    {http}
}}
"""

PLAIN_PROXY = """
    upstream engine {{ {servers} keepalive 512; keepalive_requests 10000000; keepalive_timeout 4s; }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 600s;
        }}
    }}
"""


@contextlib.asynccontextmanager
async def nginx(http: str, port: int, ready: str) -> AsyncIterator[int]:
    """Runs nginx with the given servers in its http block; yields its pid once `ready` answers on `port`."""
    binary = shutil.which("nginx") or "/usr/sbin/nginx"
    with tempfile.TemporaryDirectory(prefix="fairgate-bench-") as folder:
        conf = Path(folder, "nginx.conf")
        conf.write_text(NGINX_CONF.format(folder=folder, http=http))
        log = Path(folder, "out.log")
        with process([*FIRST, binary, "-c", str(conf), "-e", str(log)], log) as child:
            await wait_ready(f"http://127.0.0.1:{port}", ready, child, log, PROXY_START_S)
            yield child.pid


@contextlib.asynccontextmanager
async def nginx_proxy(*upstream_urls: str) -> AsyncIterator[Route]:
    """Run nginx as a plain proxy: one worker, nothing buffered, connections to the upstreams kept."""
    port = free_port()
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in upstream_urls)
    async with nginx(PLAIN_PROXY.format(servers=servers, port=port), port, "/health") as pid:
        yield Route("nginx", f"http://127.0.0.1:{port}", pid)


@contextlib.asynccontextmanager
async def fairgate(
    upstream_urls: str | Sequence[str],
    tenants: dict[str, float],
    model: str = MODEL,
    policy: str | dict[str, object] | None = None,
    **fields: object,
) -> AsyncIterator[Route]:
    """Run fairgate before one engine or several: keyed tenants with weights, an access log, its default policy.

    `fields` of the configuration go over the rest.
    """
    port, admin_port = free_port(), free_port()
    keys = {name: f"bench-key-of-{name}" for name in tenants}
    pool: dict[str, object] = {"name": "bench", "models": [model]}
    urls = [upstream_urls] if isinstance(upstream_urls, str) else upstream_urls
    with tempfile.TemporaryDirectory(prefix="fairgate-bench-") as folder:
        settings: dict[str, object] = {
            "listen": f"127.0.0.1:{port}",
            "admin": f"127.0.0.1:{admin_port}",
            "access_log": f"{folder}/access.log",
            "drain_s": 1,
            "pools": [pool | {"backends": [{"engine": "vllm", "url": url} for url in urls]}],
            "tenants": [
                {"name": name, "weight": weight, "keys": [hash_key(keys[name])]} for name, weight in tenants.items()
            ],
        }
        if policy is not None:
            settings["policy"] = policy
        settings |= fields
        config = Path(folder, "fairgate.yaml")
        config.write_text(yaml.safe_dump(settings))
        log = Path(folder, "fairgate.log")
        with process([*FIRST, sys.executable, "-m", "gateway.commands.main", "serve", "-c", str(config)], log) as child:
            admin = f"http://127.0.0.1:{admin_port}"
            await wait_ready(admin, "/ready", child, log, PROXY_START_S)
            yield Route("fairgate", f"http://127.0.0.1:{port}", child.pid, tuple(keys.items()), admin)
        if "Traceback" in (said := log.read_text()):
            print(f"fairgate had a fault:\n{said[-3000:]}", flush=True)


@contextlib.asynccontextmanager
async def routes_to(
    target: Engine, names: Sequence[str], gateways: dict[str, contextlib.AbstractAsyncContextManager[Route]]
) -> AsyncIterator[list[Route]]:
    """The named ones of: `direct`, `nginx` as a plain proxy, and these gateways under their names."""
    async with contextlib.AsyncExitStack() as stack:
        routes = [Route("direct", target.url)] if "direct" in names else []
        if "nginx" in names:
            routes.append(await stack.enter_async_context(nginx_proxy(target.url)))
        for name, gateway in gateways.items():
            if name in names:
                routes.append(replace(await stack.enter_async_context(gateway), name=name))
        yield routes


async def run_part(command: Sequence[str], limit_s: float, **environment: str) -> None:
    """Runs another benchmark to its end. Raises BenchError naming it if it fails or takes longer."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", *command, cwd=ROOT, env=os.environ | environment)
    try:
        status = await asyncio.wait_for(child.wait(), limit_s)
    except TimeoutError:
        child.terminate()
        await child.wait()
        raise BenchError(f"{command[0]} took more than {limit_s:.0f} s") from None
    if status:
        raise BenchError(f"it ended with status {status}: python -m {' '.join(command)}")
