"""Whether several gateways with one Redis give what one gives, in shares, limits, queues and throughput, and its cost.

    python -m bench.replicas [--rows skewed,kill] [--window 60] [--engine-url URL | --vllm]

Every row starts its own redis-server and replicas, one process each, before one simulated engine (`--profile`), or
before the vLLM at `--engine-url`, or the tiny one of deploy/real-vllm with `--vllm`. Service is counted by the
clients as in `bench.shares`. Engine, replicas, Redis and load share the machine: a row whose CPU is short says nothing.
"""

import argparse
import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench import report
from bench.fleet import fleet, flooded, redis_server, simulated, skewed
from bench.flood import RAMP_S, SMALL, watch
from bench.load import Client, Request
from bench.stack import OUTPUT, BenchError, Engine, engine, run_bench

FLOOD_POLICY = "vtc"
"""As in `bench.shares`: the default policy would refuse some of a flood that fills the KV cache."""
MOVES_S = 10.0
SAMPLE_EVERY_S = 0.01
BURST = 200
QUOTA = 60
THROTTLE = {"window_s": 5, "user": {"starts": 3}}
OVERLOAD = {"enter": 0.6, "leave": 0.5}
"""So that the flood is refused, and so would be whoever counts as beginning something."""
IDLE_PAIRS = 300
LARGE_PROFILE = "h100-llama3-8b"
"""An engine that is faster than what is before it."""
TENANTS, FLOWS = 1_000, 20_000
CHARGES_AT_ONCE = 250
AFTER_S = 10.0
"""Within this time after a fault shares are as before."""
TARGET_WAITING = 2


@dataclass(frozen=True, slots=True)
class Options:
    window_s: float
    outage_s: float
    clients: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `values`: what was measured, each with its limit: (name, value, limit, form)."""

    name: str
    values: Sequence[tuple[str, float, float, str]]
    detail: dict[str, Any]

    def cells(self) -> list[list[str]]:
        return [
            [f"{self.name}: {name}", form.format(limit), form.format(value), "yes" if value <= limit else "no"]
            for name, value, limit, form in self.values
        ]


OFF = "{:.1%} off"


async def run_skewed(target: Engine, options: Options) -> list[Row]:
    """4:1, all or nine tenths of each tenant's traffic on its own replicas, or moving: two and four replicas."""
    rows = []
    for replicas in (2, 4):
        kinds = {"all of it": (1.0, float("inf")), "90/10": (0.9, float("inf")), "moving": (1.0, MOVES_S)}
        async with fleet(target, replicas, policy=FLOOD_POLICY) as found:
            for kind, (share, moves_s) in kinds.items():
                where = skewed(replicas, share, moves_s)
                async with flooded(found.routes, where, options.clients) as floods:
                    got = await floods.shares(options.window_s)
                    got["failed"] = floods.failed
                await target.wait_idle()
                name = f"4:1, {replicas} replicas, skewed traffic, {kind}"
                rows.append(Row(name, [("share", got["off"], 0.05, OFF), failures(got["failed"])], got))
    return rows


def failures(count: int, most: int = 0) -> tuple[str, float, float, str]:
    return "failed requests", count, most, "{:.0f}"


async def run_kill(target: Engine, options: Options) -> list[Row]:
    """The same through a kill -9 of one replica and its restart."""
    is_dead = is_back = False

    def where(tenant: str) -> int:
        if tenant == "light" or (is_dead and not is_back):
            return 1
        return 2 if is_back else 0

    async with fleet(target, 2, policy=FLOOD_POLICY) as found, flooded(found.routes, where, options.clients) as floods:
        before = await floods.shares(options.window_s / 2)
        around = asyncio.create_task(floods.shares(options.window_s))
        await asyncio.sleep(options.window_s / 3)
        is_dead = True
        failed = floods.failed
        os.kill(found.routes[0].pid, signal.SIGKILL)
        await asyncio.sleep(options.window_s / 3)
        lost = floods.failed - failed
        await found.add()
        floods.add(found.routes[2])
        is_back = True
        during = await around
        after = await floods.shares(options.window_s)
        failed = floods.failed - lost
    values = [("share around it", during["off"], 0.10, OFF), ("share after it", after["off"], 0.05, OFF)]
    detail = {"before": before, "around": during, "after": after, "lost_with_it": lost}
    return [Row("kill -9 of one of two replicas, restart", [*values, failures(failed)], detail)]


async def run_quota(target: Engine, options: Options) -> list[Row]:
    """A per-minute limit of 60 over four replicas."""
    async with fleet(target, 4, quota={"requests_per_minute": QUOTA}) as found:
        clients = [Client(route.url) for route in found.routes]
        one = Request(20, 1, stream=False, key=found.routes[0].key("heavy"))
        statuses: list[int] = []
        for number in range(QUOTA * 2):
            replies = await asyncio.gather(*(clients[(number + each) % 4].send(one) for each in range(2)))
            statuses += [reply.status for reply in replies]
        for client in clients:
            client.close()
    admitted = statuses.count(200)
    other = len(statuses) - admitted - statuses.count(429)
    values = [("off the limit of 60", abs(admitted - QUOTA), 2, "{:.0f}"), failures(other)]
    return [Row("60 a minute over four replicas", values, {"admitted": admitted, "sent": len(statuses)})]


async def run_interaction(target: Engine, options: Options) -> list[Row]:
    """Interactions begun on replica 1 and continued on replica 2, while large requests overload the engine."""
    flood = Request(900, 300, key="", usage=True)
    refused, begun, overloaded, failed = 0, 0, 0, 0
    async with fleet(target, 2, throttle=THROTTLE, overload=OVERLOAD) as found:
        clients = [Client(route.url) for route in found.routes]
        stopping = False

        async def press(number: int) -> None:
            nonlocal overloaded
            key = found.routes[0].key("heavy")
            while not stopping:
                reply = await clients[number % 2].send(Request(**asdict(flood) | {"key": key}))
                overloaded += reply.status == 429
                if not reply.ok:
                    await asyncio.sleep(0.2)

        pressure = [asyncio.create_task(press(number)) for number in range(options.clients)]
        deadline_s = asyncio.get_running_loop().time() + options.window_s
        number = 0
        while asyncio.get_running_loop().time() < deadline_s:
            number += 1
            call = Request(30, 10, key=found.routes[0].key("light"), interaction=f"talk-{number}")
            first = await clients[0].send(call)
            if not first.ok:
                await asyncio.sleep(0.1)
                continue
            begun += 1
            for at in (1, 0, 1):
                reply = await clients[at].send(call)
                refused += reply.status == 429
                failed += not reply.ok and reply.status != 429
        stopping = True
        for client in clients:
            client.abandon(started=True)
        await asyncio.wait(pressure)
        for client in clients:
            client.close()
    detail = {"interactions": begun, "refused_to_the_flood": overloaded}
    values = [
        ("refused", refused, 0, "{:.0f}"),
        failures(failed),
        ("never overloaded", float(not overloaded), 0, "{:.0f}"),
    ]
    return [Row(f"{begun} interactions over two replicas, overloaded", values, detail)]


async def run_burst(target: Engine, options: Options) -> list[Row]:
    """The engine's own queue when 200 requests come to four replicas at once."""
    most: list[float] = []
    async with fleet(target, 4) as found:
        for _ in range(options.rounds):
            await target.wait_idle()
            clients = [Client(route.url) for route in found.routes]
            one = Request(**asdict(SMALL) | {"key": found.routes[0].key("heavy")})
            async with watch(target, SAMPLE_EVERY_S) as waiting:
                replies = await asyncio.gather(*(clients[number % 4].send(one) for number in range(BURST)))
            most.append(max(waiting))
            for client in clients:
                client.close()
    failed = sum(not reply.ok for reply in replies)
    values = [("engine waiting", max(most), TARGET_WAITING + 4, "{:.0f}"), failures(failed)]
    return [Row("burst of 200 over four replicas", values, {"waiting_max": most})]


async def run_throughput(target: Engine, options: Options) -> list[Row]:
    """Output tokens of two replicas over those of one process, in turns."""
    window_s = max(5.0, options.window_s / 3)
    ratios = []
    for _ in range(options.rounds):
        tokens = []
        for replicas in (1, 2):
            where = random.Random(1)
            state = {"state": "memory"} if replicas == 1 else {}
            async with fleet(target, replicas, policy=FLOOD_POLICY, **state) as found:
                pick = lambda tenant, rng=where, count=replicas: rng.randrange(count)  # noqa: E731
                async with flooded(found.routes, pick, options.clients):
                    before = (await target.gauges(OUTPUT))[OUTPUT]
                    begin_s = asyncio.get_running_loop().time()
                    await asyncio.sleep(window_s)
                    after = (await target.gauges(OUTPUT))[OUTPUT]
                    tokens.append((after - before) / (asyncio.get_running_loop().time() - begin_s))
        ratios.append(tokens[1] / tokens[0])
    lost = 1 - report.median(ratios)
    return [Row("two replicas, throughput", [("lost of one process's", lost, 0.02, "{:.1%}")], {"ratios": ratios})]


async def run_cost(target: Engine, options: Options) -> list[Row]:
    """Commands in Redis per request, as many small ones as the machine can; what is added to one when idle."""
    async with simulated(LARGE_PROFILE) as large, fleet(large, 2) as found:
        clients = [Client(route.url) for route in found.routes]
        done, stopping = 0, False

        async def keep_sending(number: int) -> None:
            nonlocal done
            one = Request(**asdict(SMALL) | {"key": found.routes[0].key("heavy"), "stream": False})
            while not stopping:
                reply = await clients[number % 2].send(one)
                done += reply.ok

        tasks = [asyncio.create_task(keep_sending(number)) for number in range(2 * options.clients)]
        await asyncio.sleep(RAMP_S)
        before, done_before = found.redis.calls(), done
        await asyncio.sleep(max(5.0, options.window_s / 3))
        calls, requests = found.redis.calls() - before, done - done_before
        stopping = True
        await asyncio.wait(tasks)
        for client in clients:
            client.close()
    busy = Row(
        "two replicas, busy", [("Redis commands per request", calls / max(1, requests), 0.5, "{:.2f}")],
        {"commands": calls, "requests": requests},
    )  # fmt: skip
    return [busy, await _idle_latency(target)]


async def _idle_latency(target: Engine) -> Row:
    await target.wait_idle()
    async with fleet(target, 1) as shared, fleet(target, 1, state="memory") as alone:
        routes = {"redis": shared.routes[0], "memory": alone.routes[0]}
        clients = {name: Client(route.url) for name, route in routes.items()}
        took: dict[str, list[float]] = {"redis": [], "memory": []}
        for pair in range(IDLE_PAIRS):
            for name in list(took) if pair % 2 else reversed(list(took)):
                one = Request(20, 1, stream=False, key=routes[name].key("heavy"))
                begin_s = time.perf_counter()  # the loop's own clock counts milliseconds
                reply = await clients[name].send(one)
                if reply.ok:
                    took[name].append(1000 * (time.perf_counter() - begin_s))
        for client in clients.values():
            client.close()
    p50 = {name: report.median(times) for name, times in took.items()}
    added = p50["redis"] - p50["memory"]
    return Row("a request when idle", [("added, p50", added, 0.3, "{:.2f} ms")], {"p50_ms": p50})


async def run_outage(target: Engine, options: Options) -> list[Row]:
    """Redis stands still under load, and goes on."""
    async with (
        fleet(target, 2, policy=FLOOD_POLICY) as found,
        flooded(found.routes, skewed(2), options.clients) as floods,
    ):
        before = await floods.shares(options.window_s / 2)
        os.kill(found.redis.pid, signal.SIGSTOP)
        during = await floods.shares(options.outage_s)
        os.kill(found.redis.pid, signal.SIGCONT)
        await asyncio.sleep(AFTER_S)
        after = await floods.shares(options.window_s)
        failed = floods.failed
    values = [("share meanwhile", during["off"], 0.15, OFF), ("share 10 s after it", after["off"], 0.05, OFF)]
    detail = {"before": before, "during": during, "after": after}
    return [Row(f"Redis stopped for {options.outage_s:.0f} s", [*values, failures(failed)], detail)]


async def run_memory(target: Engine, options: Options) -> list[Row]:
    """What 1,000 tenants with 20 flows each take in Redis, told by the production script."""
    import msgspec

    from gateway.storage.redis.redis_store import Script, pool_key
    from policies.capacity.fair_shares import Activity
    from policies.replicas.messages import Charge, ReplicaReport

    async with redis_server() as redis:
        script = redis.client.register_script(Script("exchange.lua").source)
        keys = [pool_key("bench", "replicas"), pool_key("bench", "")]
        tenants = [f"tenant-{number:04}" for number in range(TENANTS)]
        each = FLOWS // TENANTS
        flows = [f"{tenant}\x1fdefault\x1fuser-{user}" for tenant in tenants for user in range(each)]
        names = tenants + flows
        before = int(redis.client.info("memory")["used_memory"])
        for number, begin in enumerate(range(0, len(names), CHARGES_AT_ONCE)):
            charges = [Charge(name, 1e6 + 0.5, 123.25, False) for name in names[begin : begin + CHARGES_AT_ONCE]]
            told = ReplicaReport([], Activity(), [], charges, [], [], [], [], 0.0)
            script(keys=keys, args=["bench", number + 1, msgspec.msgpack.encode(told), ""])
        used = int(redis.client.info("memory")["used_memory"]) - before
        counters = list(redis.client.scan_iter(f"{keys[1]}c:*", count=1000))
        kept = sum(redis.client.pttl(key) <= 0 for key in counters[:1000])
    stated = sum(map(len, names)) + len(counters) * len(keys[1] + "c:")
    values = [
        ("bytes per flow beyond names", (used - stated) / FLOWS, 200, "{:.0f}"),
        ("names that do not expire", kept, 0, "{:.0f}"),
    ]
    detail = {"used_bytes": used, "names_bytes": stated, "counters": len(counters)}
    return [Row("1,000 tenants, 20,000 flows", values, detail)]


ROWS: dict[str, Callable[[Engine, Options], Awaitable[list[Row]]]] = {
    "skewed": run_skewed,
    "kill": run_kill,
    "quota": run_quota,
    "interaction": run_interaction,
    "burst": run_burst,
    "throughput": run_throughput,
    "cost": run_cost,
    "outage": run_outage,
    "memory": run_memory,
}
ROW_LIMIT_S = 900.0


def replicas_table(rows: list[Row]) -> str:
    return report.table(
        ["measure", "required, at most", "measured", "met"], [cell for row in rows for cell in row.cells()]
    )


async def run(arguments: argparse.Namespace) -> None:
    options = Options(arguments.window, arguments.outage, arguments.clients, arguments.rounds)
    rows: list[Row] = []
    real = arguments.vllm or arguments.engine_url
    async with engine(arguments.engine_url) if real else simulated(arguments.profile) as target:
        for name in arguments.rows:
            print(f"replicas, {name}", flush=True)
            try:
                async with asyncio.timeout(ROW_LIMIT_S):
                    new = await ROWS[name](target, options)
            except TimeoutError:
                raise BenchError(f"the row {name} took more than {ROW_LIMIT_S:.0f} s") from None
            rows += new
            print(replicas_table(new), flush=True)
    kept = {"engine": arguments.engine_url or ("vllm" if real else arguments.profile), "options": asdict(options)}
    report.save("replicas", kept | {"rows": [asdict(row) for row in rows]})
    print(f"\n{replicas_table(rows)}\n\n{report.SHARED_CORES}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="several gateways with one Redis")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=list(ROWS), help=",".join(ROWS))
    parser.add_argument("--window", type=float, default=60.0, help="seconds measured per case")
    parser.add_argument("--outage", type=float, default=30.0, help="seconds that Redis is stopped for")
    parser.add_argument("--clients", type=int, default=40, help="streams each tenant keeps open")
    parser.add_argument("--rounds", type=int, default=3, help="of what is measured in turns")
    parser.add_argument("--profile", default="demo", help="of the simulated engine")
    parser.add_argument("--engine-url", help="a running vLLM instead of a simulated engine")
    parser.add_argument("--vllm", action="store_true", help="start the tiny vLLM of deploy/real-vllm")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.rows if name not in ROWS]
    if unknown:
        parser.error(f"unknown rows: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    run_bench("bench.replicas", run(arguments))


if __name__ == "__main__":
    main()
