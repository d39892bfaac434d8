"""The interleaved run: each workload through each gateway in turn, rotated, beside one engine for each."""

from __future__ import annotations

# ruff: noqa: ASYNC240 folders are made before any load runs
import asyncio
import contextlib
import gzip
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tenantbench import __version__
from tenantbench.engine_model import Profile
from tenantbench.engine_server import MODEL
from tenantbench.events import CHARACTERS_PER_TOKEN, Event, read_events
from tenantbench.gateway import GatewayError, Target, free_port, process, read, started, version_of, wait_ready
from tenantbench.load import Driver, HttpTransport, Rejected
from tenantbench.machine import CLIENT_CORES, Watch, comparability_set
from tenantbench.metrics import OTHERS_MAX, Run, measure, reasons_void
from tenantbench.workloads import LIGHT, workload

DRAIN_S = 30.0
ROUND_SEED = 1_000


@dataclass(frozen=True)
class EngineKind:
    """An engine that `tenantbench engine` serves, and its size."""

    name: str
    profile: Profile
    characters_per_token: int
    build: str


ENGINES = {
    "simulated": EngineKind("simulated", Profile(), CHARACTERS_PER_TOKEN, f"tenantbench {__version__}"),
    # 9 to 10 ms of CPU time for a step of 8 sequences, on one core of an EPYC
    "llama": EngineKind(
        "llama", Profile(8, 16_384, 2_048, 512, step_s=0.01, logs_waste=False), 1, "xllamacpp, 8 layers of 256"
    ),
}


@dataclass
class Options:
    """The arguments of `tenantbench run`."""

    gateways: list[str]
    workloads: list[str]
    engine: str
    seconds: float
    rounds: int
    seed: int
    out: Path
    subject: str
    even_if_loaded: bool
    url: list[str]
    engine_url: str
    keys: dict[str, str]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def take_log(engine_url: str, http: aiohttp.ClientSession) -> tuple[bool, list[dict[str, Any]]]:
    """Return whether the engine is idle, and its events since the last call."""
    async with http.get(f"{engine_url}/tenantbench/log") as response:
        body = await response.json()
    return bool(body["idle"]), body["events"]


async def drain(engine_url: str, http: aiohttp.ClientSession) -> tuple[bool, list[dict[str, Any]]]:
    """Wait until the engine is idle; a gateway may still hold requests that nobody waits for."""
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + DRAIN_S
    while True:
        is_idle, more = await take_log(engine_url, http)
        rows += more
        if (is_idle and not more) or time.monotonic() > deadline:
            return is_idle, rows
        await asyncio.sleep(0.2)


async def warm_up(transport: HttpTransport, route: int) -> bool:
    """Ask until a gateway answers: a first request is slow, and what the last workload broke must have healed."""
    deadline = time.monotonic() + DRAIN_S
    while time.monotonic() < deadline:
        with contextlib.suppress(Rejected, aiohttp.ClientError):
            return bool([piece async for piece in transport.ask(LIGHT, "", "warm-up", 1, route)])
        await asyncio.sleep(0.5)
    return False


async def cell(options: Options, target: Target, name: str, round_number: int) -> dict[str, Any]:
    """Run one workload through one gateway and return its metrics. The raw records are written beside."""
    kind = ENGINES[options.engine]
    work = workload(name, options.seconds, options.seed + ROUND_SEED * round_number, kind.profile)
    label = f"{target.name} {name} round {round_number + 1}"
    transport = HttpTransport(target.urls, target.keys, MODEL)
    driver = Driver(work, transport, kind.characters_per_token)
    try:
        async with aiohttp.ClientSession() as http:
            is_warm = all([await warm_up(transport, route) for route in range(len(target.urls))])
            is_idle, _ = await drain(target.engine_url, http)
            watch = Watch(target.pids)

            def progress(now_s: float, requests: int) -> None:
                watch.sample()
                if int(now_s) % 5 == 0:
                    say(f"{label}: {now_s:.0f} of {work.seconds:.0f} s, {requests} requests")

            origin_s = await driver.run(progress)
            cpu_s, others = watch.read()
            _, rows = await drain(target.engine_url, http)
    finally:
        await transport.close()
    events = read_events(rows, origin_s)
    run = Run(work, driver.records, events, kind.profile)
    void = reasons_void(driver.lags_s, others)
    if not is_idle or not is_warm:
        void.append("before the load, the engine was not idle or the gateway did not answer")
    values = measure(run, cpu_s if target.pids else None, watch.rss_bytes if target.pids else None)
    write_raw(options.out / "raw" / f"{target.name}-{name}-{round_number + 1}.jsonl.gz", run, events)
    say(f"{label}: done{''.join(f'; VOID: {reason}' for reason in void)}")
    return {"gateway": target.name, "workload": name, "round": round_number + 1, "requests": len(run.records),
            "others": round(others, 3), "void": void, "metrics": values}  # fmt: skip


def write_raw(path: Path, run: Run, events: list[Event]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        for record in run.records:
            file.write(json.dumps({"client": asdict(record)}) + "\n")
        for event in events:
            file.write(json.dumps({"engine": event.row()}) + "\n")


@contextlib.asynccontextmanager
async def engine(kind: EngineKind, folder: Path) -> AsyncIterator[str]:
    """Run an engine while the block runs; yields its URL."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [sys.executable, "-m", "tenantbench", "engine", "--port", str(port), "--kind", kind.name]
    root = str(Path(__file__).parents[1])
    with process(command, folder / "engine.log", {"PYTHONPATH": root}, CLIENT_CORES) as child:
        await wait_ready(f"http://127.0.0.1:{port}/health", child, folder / "engine.log")
        yield f"http://127.0.0.1:{port}"


async def check_idle(options: Options) -> None:
    """Refuse to measure on a machine that does other work."""
    watch = Watch(set())
    await asyncio.sleep(1)
    _, others = watch.read()
    if others > OTHERS_MAX:
        text = f"others use {100 * others:.0f} % of this machine's cores; {100 * OTHERS_MAX:.0f} % are allowed"
        if not options.even_if_loaded:
            raise GatewayError(f"{text}; wait, or mark every number void with --even-if-loaded")
        say(f"{text}: the numbers will be void")


async def open_targets(options: Options, stack: contextlib.AsyncExitStack, result: dict[str, Any]) -> list[Target]:
    """Start every gateway with an engine of its own; note their versions, and why others are left out."""
    if options.url:
        return [Target(options.gateways[0], options.url, options.engine_url, options.keys, set())]
    os.sched_setaffinity(0, CLIENT_CORES)
    targets, folder = [], options.out.absolute() / "processes"
    kind = ENGINES[options.engine]
    for name in options.gateways:
        own = contextlib.AsyncExitStack()
        try:
            gateway = read(name)
            version = version_of(gateway)
            url = await own.enter_async_context(engine(kind, folder / name))
            target = await own.enter_async_context(started(gateway, url, folder / name, kind.profile.slots))
        except (GatewayError, OSError) as error:
            await own.aclose()
            result["left_out"][name] = str(error)
            say(f"{name} is left out: {error}")
            continue
        stack.push_async_callback(own.aclose)
        targets.append(target)
        result["gateways"][name] = version
        say(f"{name} is ready")
    return targets


async def run(options: Options) -> dict[str, Any]:
    """Run all cells and return the result, which is written after each. Raises GatewayError."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # ends gateways and engines too
    await check_idle(options)
    kind = ENGINES[options.engine]
    size = asdict(kind.profile)
    same = comparability_set(engine=kind.build, profile=size, seconds=options.seconds, seed=options.seed)
    result: dict[str, Any] = {"tenantbench": __version__, "comparability": same, "gateways": {}, "left_out": {}}
    result["cells"] = []
    options.out.mkdir(parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as stack:
        targets = await open_targets(options, stack, result)
        turn = 0
        for round_number in range(options.rounds):
            for name in options.workloads:
                for target in [*targets[turn % len(targets) :], *targets[: turn % len(targets)]] if targets else []:
                    if name == "W9" and len(target.urls) < 2:
                        continue
                    result["cells"].append(await cell(options, target, name, round_number))
                    result["load"] = os.getloadavg()
                    (options.out / "result.json").write_text(json.dumps(result, indent=1))
                turn += 1
    return result
