"""What a proxy adds to the time of a request at half load.

    python -m bench.latency [--rounds 3] [--seconds 4] [--proxies nginx,fairgate,...]

Half load is half of the requests per second that fairgate handles when saturated, sent at random times; a proxy that
cannot handle so many gets half of what it can. wrk's timers tick once a millisecond: requests come a few at a time, the
more the higher the load, and wait for each other. The same load goes straight to the upstream in every round: what is
added is the difference of the two medians, and of the two 99th percentiles. Requests of 1 kB, not streamed.
"""

import argparse
import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from bench import report
from bench.cpu import CASES, TURN_LIMIT_S, WARM_UP_S
from bench.proxies import PROXIES, SLOW, chosen, open_routes
from bench.stack import BenchError, Route, run_bench
from bench.upstream import Case, echo_upstream
from bench.wrk import Counted, wrk

CASE = CASES[0]
PAUSE_S = 0.05
"""Mean time between two requests of one connection: long beside an answer's, so that the rate holds."""


async def at_rate(route: Route, per_s: float, seconds: float) -> Counted:
    """So many requests a second, at random times."""
    connections = max(1, round(per_s * PAUSE_S))
    return await wrk(route, replace(CASE, connections=connections), seconds, pause_ms=int(PAUSE_S * 1000))


async def saturation(route: Route, case: Case, seconds: float) -> float:
    """Requests per second in a closed loop."""
    await wrk(route, case, WARM_UP_S)
    return (await wrk(route, case, seconds)).requests / seconds


async def measure(route: Route, direct: Route, per_s: float, seconds: float) -> dict[str, float]:
    """The same load straight to the upstream, then through the proxy. Raises BenchError."""
    base, through = await at_rate(direct, per_s, seconds), await at_rate(route, per_s, seconds)
    if not through.requests:
        raise BenchError(f"{route.name} answered nothing within {seconds:g} s")
    return {
        "per_s": through.requests / seconds,
        "p50_s": through.p50_s - base.p50_s,
        "p99_s": through.p99_s - base.p99_s,
        "direct_p50_s": base.p50_s,
        "direct_p99_s": base.p99_s,
        "errors": through.errors,
    }


def latency_table(result: dict[str, Any]) -> str:
    heads = ["proxy", "requests per second", "added, p50", "added, p99", "direct, p50", "direct, p99", "errors"]
    rows = []
    for name, row in result["proxies"].items():
        times = [f"{row[field] * 1000:.2f} ms" for field in ("p50_s", "p99_s", "direct_p50_s", "direct_p99_s")]
        rows.append([name, f"{row['per_s']:,.0f}", *times, f"{row['errors']:.0f}"])
    return report.table(heads, rows)


async def run(options: argparse.Namespace) -> None:
    names = chosen(options.proxies)
    if "fairgate" not in names:
        raise BenchError("fairgate's saturation sets the load: it must be among the proxies")
    runs: dict[str, list[dict[str, float]]] = {}
    async with AsyncExitStack() as stack:
        upstream_url = await stack.enter_async_context(echo_upstream(CASE))
        routes = await open_routes(stack, names, upstream_url)
        direct = Route("direct", upstream_url)
        most = {name: await saturation(route, CASE, options.seconds) for name, route in routes.items()}
        for turn in range(options.rounds):
            order = [name for name in routes if not (turn and name in SLOW)]
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                per_s = min(most[name], most["fairgate"]) / 2
                try:
                    async with asyncio.timeout(TURN_LIMIT_S):
                        run = await measure(routes[name], direct, per_s, options.seconds)
                except (BenchError, TimeoutError) as error:
                    print(f"  round {turn + 1}, {name}: not measured: {error!r}", flush=True)
                    continue
                runs.setdefault(name, []).append(run)
                print(f"  round {turn + 1}, {name}: {run['p50_s'] * 1e3:.2f} ms at {run['per_s']:.0f}/s", flush=True)
    medians = {
        name: {field: report.median([each[field] for each in rounds]) for field in rounds[0]}
        for name, rounds in runs.items()
    }
    result = {"rounds": options.rounds, "seconds": options.seconds, "saturation": most, "proxies": medians}
    report.save("latency", result)
    print(f"\n{latency_table(result)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="added latency at half load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="measured per proxy and round")
    parser.add_argument("--proxies", default=",".join(PROXIES))
    run_bench("bench.latency", run(parser.parse_args()))


if __name__ == "__main__":
    main()
