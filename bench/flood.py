"""What a light tenant feels while a heavy one floods, on three routes to the same engine.

    python -m bench.flood [--case flood|small] [--clients 64,200] [--rounds 3] [--window 20] [--slots 6]
        [--engine-url URL]

The engine on a core of its own, and gateways with the load on the other:

    taskset -c 0 bash deploy/real-vllm/serve.sh 8000      and then, on another terminal
    taskset -c 1 python -m bench.flood --engine-url http://127.0.0.1:8000

`flood`: a heavy tenant keeps N streams open (200 words in, 200 tokens out); a light one sends a short request (30 words
in, 20 tokens out) every 0.4 s, on time whether or not the last has ended, and its time to first token counts from when
it was due. `small`: 128 closed-loop clients, 40 words in, 16 tokens out. Routes take turns within every round, in
rotating order, and the engine comes to rest between any two. Numbers are medians over rounds.
"""

import argparse
import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench import report
from bench.load import Client, Reply, Request
from bench.stack import (
    KV_USAGE,
    OUTPUT,
    PREEMPTIONS,
    PROMPT,
    WAITING,
    Engine,
    Engines,
    Route,
    cpu_s,
    engine,
    fairgate,
    routes_to,
    run_bench,
)  # fmt: skip

HEAVY = Request(words_in=200, tokens_out=200)
LIGHT = Request(words_in=30, tokens_out=20)
SMALL = Request(words_in=40, tokens_out=16)
LIGHT_EVERY_S = 0.4
SMALL_CLIENTS = 128
RAMP_S = 5.0
# A light request that has no reply by then counts as failed.
LIGHT_LIMIT_S = 60.0


@dataclass(slots=True)
class Leg:
    """Measurements of one route in one window."""

    route: str
    window_s: float
    light_ttft_s: list[float]
    requests: int
    failures: list[str]
    prompt_tokens: float
    output_tokens: float
    preemptions: float
    waiting_max: float
    kv_fill: float
    """Mean of the samples of the engine's KV usage."""
    proxy_cpu_s: float

    @property
    def failed(self) -> int:
        return len(self.failures)

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.window_s

    @property
    def output_per_s(self) -> float:
        return self.output_tokens / self.window_s

    @property
    def tokens_per_s(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.window_s


class Clients:
    """Closed-loop clients: each sends its next request as soon as the last is answered."""

    def __init__(self, client: Client, requests: list[Request]) -> None:
        self.client = client
        self.completed = 0
        self.failures: list[str] = []
        self.stopping = False
        self.tasks = [asyncio.create_task(self._keep_sending(request)) for request in requests]

    async def _keep_sending(self, request: Request) -> None:
        while not self.stopping:
            reply = await self.client.send(request)
            if reply.ok:
                self.completed += 1
            elif not self.stopping:
                self.failures.append(reply.failure)
                await asyncio.sleep(reply.again_after_s)

    async def stop(self) -> None:
        """Ends the load: what has begun to answer may finish (so that the engine counts its preemptions)."""
        self.stopping = True
        self.client.abandon(started=False)
        _, late = await asyncio.wait(self.tasks, timeout=LIGHT_LIMIT_S)
        if late:
            self.client.abandon(started=True)
            await asyncio.wait(late)


async def send_on_time(client: Client, request: Request, every_s: float, window_s: float) -> list[asyncio.Task[Reply]]:
    """Sends one request every `every_s` for `window_s`, never waiting for replies."""
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    replies = []
    for tick in range(int(window_s / every_s)):
        due_s = begin_s + tick * every_s
        await asyncio.sleep(due_s - loop.time())
        replies.append(asyncio.create_task(client.send(request, due_s)))
    await asyncio.sleep(begin_s + window_s - loop.time())
    return replies


@contextlib.asynccontextmanager
async def watch(target: Engine | Engines, every_s: float, gauge: str = WAITING) -> AsyncIterator[list[float]]:
    """Collects one of the engine's gauges while the block runs."""
    seen: list[float] = []

    async def sample() -> None:
        while True:
            seen.append((await target.gauges(gauge))[gauge])
            await asyncio.sleep(every_s)

    task = asyncio.create_task(sample())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])


async def run_leg(
    route: Route, target: Engine | Engines, requests: list[Request], light_every_s: float, window_s: float
) -> Leg:
    """Run one route under one load: ramp, window, rest. A light tenant is beside it unless `light_every_s` is 0."""
    counters = (PROMPT, OUTPUT, PREEMPTIONS)
    await target.wait_idle()
    rest = await target.gauges(*counters)
    flood, visitor = Client(route.url), Client(route.url)
    clients = Clients(flood, requests)
    late: set[asyncio.Task[Reply]] = set()
    replies: list[asyncio.Task[Reply]] = []
    try:
        await asyncio.sleep(RAMP_S)
        async with watch(target, 0.25) as waiting, watch(target, 0.25, KV_USAGE) as filled:
            cpu_before, done_before = cpu_s(route.pid) if route.pid else 0.0, clients.completed
            begin_s, before = asyncio.get_running_loop().time(), await target.gauges(*counters)
            if light_every_s:
                replies = await send_on_time(visitor, keyed(LIGHT, route, "light"), light_every_s, window_s)
            else:
                await asyncio.sleep(window_s)
            after = await target.gauges(*counters)
            spent_s = asyncio.get_running_loop().time() - begin_s
            done, cpu = clients.completed - done_before, (cpu_s(route.pid) if route.pid else 0.0) - cpu_before
        if replies:
            _, late = await asyncio.wait(replies, timeout=LIGHT_LIMIT_S)
            visitor.abandon(started=True)
    finally:
        await clients.stop()
        flood.close()
        visitor.close()
    await target.wait_idle()
    answered = [task.result() for task in replies if task not in late]
    return Leg(
        route=route.name,
        window_s=spent_s,
        light_ttft_s=[reply.ttft_s for reply in answered if reply.ok],
        requests=done,
        failures=clients.failures
        + [reply.failure for reply in answered if not reply.ok]
        + [f"no reply within {LIGHT_LIMIT_S:.0f} s"] * len(late),
        prompt_tokens=after[PROMPT] - before[PROMPT],
        output_tokens=after[OUTPUT] - before[OUTPUT],
        preemptions=(await target.gauges(PREEMPTIONS))[PREEMPTIONS] - rest[PREEMPTIONS],
        waiting_max=max(waiting, default=0.0),
        kv_fill=sum(filled) / max(1, len(filled)),
        proxy_cpu_s=cpu,
    )


def keyed(request: Request, route: Route, tenant: str) -> Request:
    """The request as this tenant sends it on this route."""
    return Request(**asdict(request) | {"key": route.key(tenant)})


async def run_rounds(
    routes: list[Route],
    target: Engine,
    request: Request,
    count: int,
    light_every_s: float,
    rounds: int,
    window_s: float,
) -> dict[str, list[Leg]]:
    """Every route once per round, the order rotating."""
    legs: dict[str, list[Leg]] = {route.name: [] for route in routes}
    for turn in range(rounds):
        for route in routes[turn % len(routes) :] + routes[: turn % len(routes)]:
            leg = await run_leg(route, target, [keyed(request, route, "heavy")] * count, light_every_s, window_s)
            legs[route.name].append(leg)
            print(f"  round {turn + 1} {route.name}: {one_line(leg)}", flush=True)
            for failure, times in Counter(leg.failures).items():
                print(f"    failed {times} times: {failure}", flush=True)
    return legs


def one_line(leg: Leg) -> str:
    ttft = f"light TTFT {report.median(leg.light_ttft_s) * 1000:.0f} ms, " if leg.light_ttft_s else ""
    return (
        f"{ttft}{leg.tokens_per_s:.0f} tokens/s, {leg.requests_per_s:.1f} requests/s, "
        f"{leg.preemptions:.0f} preemptions, {leg.failed} failed, waiting {leg.waiting_max:.0f}"
    )


def summary(legs: list[Leg]) -> dict[str, Any]:
    """Return a route's numbers: medians over rounds; the worst round for failures and the waiting gauge."""
    return {
        "light_ttft_p50_s": report.median([report.median(leg.light_ttft_s) for leg in legs]),
        "light_ttft_p95_s": report.median([report.quantile(leg.light_ttft_s, 0.95) for leg in legs]),
        "tokens_per_s": report.median([leg.tokens_per_s for leg in legs]),
        "output_per_s": report.median([leg.output_per_s for leg in legs]),
        "requests_per_s": report.median([leg.requests_per_s for leg in legs]),
        "preemptions": report.median([leg.preemptions for leg in legs]),
        "light_ttft_p99_s": report.median([report.quantile(leg.light_ttft_s, 0.99) for leg in legs]),
        "kv_fill": report.median([leg.kv_fill for leg in legs]),
        "proxy_cores": report.median([leg.proxy_cpu_s / leg.window_s for leg in legs]),
        "failed": sum(leg.failed for leg in legs),
        "waiting_max": max(leg.waiting_max for leg in legs),
        "legs": [asdict(leg) for leg in legs],
    }


def flood_table(result: dict[str, Any]) -> str:
    heads = [
        "N", "route", "light TTFT p50", "p95", "p99", "tokens/s", "output tokens/s", "KV fill", "preemptions",
        "engine waiting, max", "proxy, cores", "failed",
    ]  # fmt: skip
    rows = []
    for count, routes in result["clients"].items():
        for name, row in routes.items():
            ttft = [f"{row[f'light_ttft_{p}_s'] * 1000:.0f} ms" for p in ("p50", "p95", "p99")]
            rates = [f"{row['tokens_per_s']:,.0f}", f"{row['output_per_s']:,.0f}", f"{row['kv_fill']:.2f}"]
            ends = [
                f"{row['preemptions']:.0f}",
                f"{row['waiting_max']:.0f}",
                f"{row['proxy_cores']:.2f}",
                str(row["failed"]),
            ]
            rows.append([count, name, *ttft, *rates, *ends])
    return report.table(heads, rows)


def cost_table(result: dict[str, Any]) -> str:
    """Return what README says of the costs: each route under each number of streams, side by side."""
    cells = {
        "first token of a light user": lambda row, _: f"{row['light_ttft_p50_s']:.2f} s",
        "tokens per second": lambda row, _: f"{row['tokens_per_s']:,.0f}",
        "over the engine alone": lambda row, base: f"{row['tokens_per_s'] / base:.2f}",
        "cores of the proxy": lambda row, _: f"{row['proxy_cores']:.2f}",
    }
    columns = [(count, name) for count, routes in result["clients"].items() for name in routes]
    rows = []
    for what, cell in cells.items():
        found = [(result["clients"][count], name) for count, name in columns]
        rows.append([what, *(cell(of[name], of.get("direct", of[name])["tokens_per_s"]) for of, name in found)])
    return report.table(["", *(f"{name}, N={count}" for count, name in columns)], rows)


def small_table(result: dict[str, Any]) -> str:
    heads = ["answers", "route", "requests/s", "over nginx", "tokens/s", "proxy, cores", "failed"]
    rows = []
    for kind, routes in result["answers"].items():
        base = routes.get("nginx", {}).get("requests_per_s", float("nan"))
        for name, row in routes.items():
            rate = row["requests_per_s"]
            ends = [f"{row['tokens_per_s']:,.0f}", f"{row['proxy_cores']:.2f}", str(row["failed"])]
            rows.append([kind, name, f"{rate:.1f}", f"{rate / base:.3f}", *ends])
    return report.table(heads, rows)


async def run_flood(
    routes: list[Route], target: Engine, heavy: Request, counts: list[int], rounds: int, window_s: float
) -> None:
    result: dict[str, Any] = {"rounds": rounds, "window_s": window_s, "clients": {}}
    for count in counts:
        print(f"flood, N={count}", flush=True)
        legs = await run_rounds(routes, target, heavy, count, LIGHT_EVERY_S, rounds, window_s)
        result["clients"][str(count)] = {name: summary(of) for name, of in legs.items()}
    report.save("flood", result)
    print(f"\n{flood_table(result)}\n\n{cost_table(result)}\n\n{report.SHARED_CORES}\n")


async def run_small(routes: list[Route], target: Engine, rounds: int, window_s: float) -> None:
    result: dict[str, Any] = {"rounds": rounds, "window_s": window_s, "answers": {}}
    for kind, stream in (("streamed", True), ("not streamed", False)):
        print(f"small requests, {kind}", flush=True)
        request = Request(**asdict(SMALL) | {"stream": stream})
        legs = await run_rounds(routes, target, request, SMALL_CLIENTS, 0.0, rounds, window_s)
        result["answers"][kind] = {name: summary(of) for name, of in legs.items()}
    report.save("small", result)
    print(f"\n{small_table(result)}\n\n{report.SHARED_CORES}\n")


def open_routes(target: Engine, names: list[str]) -> contextlib.AbstractAsyncContextManager[list[Route]]:
    """The named routes to one engine."""
    # Nobody is throttled here, so that all routes carry the same load: that is what `bench.agents` looks at.
    return routes_to(target, names, {"fairgate": fairgate(target.url, {"heavy": 1, "light": 1})})


async def run(options: argparse.Namespace) -> None:
    flags = ("--max-num-seqs", str(options.slots)) if options.slots else ()
    async with engine(options.engine_url, flags) as target, open_routes(target, options.routes.split(",")) as routes:
        # The first requests after a start pay for lazy set-up in every process.
        for route in routes:
            await run_leg(route, target, [keyed(HEAVY, route, "heavy")] * 8, 0.0, 1.0)
        if options.case == "small":
            await run_small(routes, target, options.rounds, options.window)
        else:
            counts = [int(count) for count in options.clients.split(",")]
            heavy = replace(HEAVY, vary=options.vary)
            await run_flood(routes, target, heavy, counts, options.rounds, options.window)


def main() -> None:
    parser = argparse.ArgumentParser(description="light tenant under flood; many small requests")
    parser.add_argument("--case", choices=["flood", "small"], default="flood")
    parser.add_argument("--clients", default="64,200", help="heavy streams kept open, one run for each (flood)")
    parser.add_argument("--slots", type=int, help="sequences that an engine of our own runs; fairgate is not told")
    parser.add_argument("--routes", default="direct,nginx,fairgate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=20.0, help="seconds measured per route and round")
    parser.add_argument("--vary", type=float, default=0.0, help="part by which the lengths of heavy answers vary")
    parser.add_argument("--engine-url", help="a running vLLM; default: start the tiny one of deploy/real-vllm")
    run_bench("flood", run(parser.parse_args()))


if __name__ == "__main__":
    main()
