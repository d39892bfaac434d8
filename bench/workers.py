"""Whether several workers without a Redis give what one gateway gives: shares, limits, and throughput for each core.

    python -m bench.workers [--rows shares,limit,throughput] [--window 60] [--rounds 3] [--seconds 5] [--cores 0,1]

`shares`: tenants of weight 4 and 1 flood a simulated engine, with all connections of each at one worker: at different
ones, and at the same one. `limit`: 60 requests a minute, sent to both workers at once. `throughput`: requests of 1 kB
that are answered at once, by one worker that has the first of `--cores` to itself, and by two that have both; they take
turns. Upstream (nginx) and load (wrk) run on the second core. With two cores they take part of it from the workers, so
that the ratio of requests per second says too little: `by CPU` is what two cores give by what a request costs,
supervisor and hub included.
"""

import argparse
import asyncio
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

from bench import report
from bench.fleet import FAIR_RATIO, WEIGHTS, simulated
from bench.flood import RAMP_S
from bench.load import Client, Connection, Request
from bench.replicas import OFF, QUOTA, Row, failures, replicas_table
from bench.shares import Tenant
from bench.stack import BenchError, Engine, Route, cpu_s, fairgate, run_bench
from bench.upstream import Case, echo_upstream
from bench.wrk import TENANT, wrk

WORKERS = 2
CONNECTIONS_TRIED = 2_000
NAME_CHARACTERS = 16
"""Of a request's id: they name the process that served it."""
SCALING = 1.6


async def clients_of(route: Route, count: int) -> list[Client]:
    """One for each worker, with so many connections there."""
    found: dict[str, Client] = {}
    probe = Request(5, 1, stream=False, key=route.key("light"))
    for _ in range(CONNECTIONS_TRIED):
        client = Client(route.url)
        connection = Connection(client.host, client.port)
        reply = await connection.send(probe.encode(f"{client.host}:{client.port}", client.rng))
        client = found.setdefault(reply.request_id[:NAME_CHARACTERS], client)
        if len(client.idle) < count:
            client.idle.append((asyncio.get_running_loop().time(), connection))
        else:
            connection.close()
        if len(found) == WORKERS and all(len(each.idle) == count for each in found.values()):
            for each in found.values():  # while they are looked for, those found first grow old
                each.idle = [(asyncio.get_running_loop().time(), connection) for _, connection in each.idle]
            return list(found.values())
    raise BenchError(f"of {CONNECTIONS_TRIED} connections, {count} to each of {WORKERS} workers were not found")


async def run_shares(target: Engine, options: argparse.Namespace) -> list[Row]:
    """How far the ratio of what both tenants get is from 4:1."""
    rows = []
    for name, places in (("at a worker of its own", (0, 1)), ("both at one worker", (0, 0))):
        async with fairgate(target.url, WEIGHTS, policy="vtc", workers=WORKERS) as route:
            clients = await clients_of(route, 2 * options.clients)
            tenants = {
                tenant: Tenant([route], tenant, 1, options.clients, made=[clients[place]])
                for tenant, place in zip(WEIGHTS, places, strict=True)
            }
            await asyncio.sleep(RAMP_S)
            before = {each: tenant.service() for each, tenant in tenants.items()}
            await asyncio.sleep(options.window)
            got = {each: tenant.service() - before[each] for each, tenant in tenants.items()}
            failed = sum(tenant.failed for tenant in tenants.values())
            await asyncio.gather(*(tenant.stop() for tenant in tenants.values()))
        ratio = got["heavy"] / max(1, got["light"])
        values = [("share", abs(ratio / FAIR_RATIO - 1), 0.05, OFF), failures(failed)]
        rows.append(Row(f"4:1, every connection of a tenant {name}", values, {"service": got, "ratio": ratio}))
        await target.wait_idle()
    return rows


async def run_limit(target: Engine, options: argparse.Namespace) -> list[Row]:
    """A per-minute limit of 60."""
    async with fairgate(target.url, WEIGHTS, workers=WORKERS, quota={"requests_per_minute": QUOTA}) as route:
        clients = await clients_of(route, 1)
        one = Request(20, 1, stream=False, key=route.key("heavy"))
        statuses: list[int] = []
        for _ in range(QUOTA):
            statuses += [reply.status for reply in await asyncio.gather(*(client.send(one) for client in clients))]
        for client in clients:
            client.close()
    admitted = statuses.count(200)
    values = [("off the limit of 60", abs(admitted - QUOTA), 0, "{:.0f}")]
    return [Row("60 a minute over two workers", values, {"admitted": admitted, "sent": len(statuses)})]


async def run_throughput(_: Engine, options: argparse.Namespace) -> list[Row]:
    """Of two workers over one."""
    case = Case("request, 1 kB", connections=64)
    by_clock, by_cpu, told = [], [], []
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(echo_upstream(case))
        ways: dict[int, Route] = {}
        for workers, cores in ((1, options.cores.split(",")[0]), (WORKERS, options.cores)):
            made = fairgate(url, {TENANT: 1.0}, "openai", "bench", cores, None, 1000, workers=workers)
            ways[workers] = await stack.enter_async_context(made)
            await wrk(ways[workers], case, 1.0)
        for number in range(options.rounds):
            found: dict[int, Any] = {}
            for workers in (1, WORKERS) if number % 2 else (WORKERS, 1):
                before = cpu_s(ways[workers].pid)
                counted = await wrk(ways[workers], case, options.seconds)
                found[workers] = {
                    "requests_per_s": counted.requests / options.seconds,
                    "cpu_us": 1e6 * (cpu_s(ways[workers].pid) - before) / max(1, counted.requests),
                }
            told.append(found)
            by_clock.append(found[WORKERS]["requests_per_s"] / found[1]["requests_per_s"])
            by_cpu.append(WORKERS * found[1]["cpu_us"] / found[WORKERS]["cpu_us"])
    detail = {"rounds": told, "by_clock": by_clock, "by_cpu": by_cpu}
    values = [
        ("short of 1.6, by the clock", max(0.0, SCALING - report.median(by_clock)), 0.0, "{:.2f}"),
        ("short of 1.6, by CPU", max(0.0, SCALING - report.median(by_cpu)), 0.0, "{:.2f}"),
    ]
    print(f"two workers over one: {report.median(by_clock):.2f} by the clock, {report.median(by_cpu):.2f} by CPU")
    return [Row("throughput of two workers", values, detail)]


ROWS = {"shares": run_shares, "limit": run_limit, "throughput": run_throughput}


async def run(options: argparse.Namespace) -> None:
    rows: list[Row] = []
    async with simulated(options.profile) as target:
        for name in options.rows:
            print(f"workers, {name}", flush=True)
            rows += await ROWS[name](target, options)
            print(replicas_table(rows[-1:]), flush=True)
    report.save("workers", {"options": vars(options), "rows": [asdict(row) for row in rows]})
    print(f"\n{replicas_table(rows)}\n\n{report.SHARED_CORES}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="several workers without a Redis")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=list(ROWS), help=",".join(ROWS))
    parser.add_argument("--window", type=float, default=60.0, help="seconds measured per case of `shares`")
    parser.add_argument("--clients", type=int, default=40, help="streams each tenant keeps open")
    parser.add_argument("--rounds", type=int, default=3, help="of `throughput`")
    parser.add_argument("--seconds", type=float, default=5.0, help="of load in one round")
    parser.add_argument("--cores", default="0,1", help="of the workers; one worker has the first")
    parser.add_argument("--profile", default="demo", help="of the simulated engine")
    options = parser.parse_args()
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        parser.error(f"unknown rows: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    run_bench("bench.workers", run(options))


if __name__ == "__main__":
    main()
