"""How far the engine's own queue grows when many requests arrive at once.

    python -m bench.burst [--arrivals 200] [--rounds 3] [--engine-url URL]

All requests are written within a few milliseconds, faster than any scrape; the engine's waiting gauge is read every
10 ms until the last reply. vLLM updates it once per step, so a queue that comes and goes within one step is not seen.
"""

import argparse
import asyncio
from dataclasses import asdict
from typing import Any

from bench import report
from bench.flood import HEAVY, SMALL, keyed, open_routes, watch
from bench.load import Client, Request
from bench.stack import Engine, Route, engine, run_bench

SAMPLE_EVERY_S = 0.01
LIMIT_S = 120.0
LOADS = {
    "200 in, 200 out": HEAVY,
    "40 in, 16 out": SMALL,
    "40 in, 16 out, not streamed": Request(**asdict(SMALL) | {"stream": False}),
}


async def run_burst(route: Route, target: Engine, request: Request, arrivals: int) -> dict[str, float]:
    """Send a burst on a route. Return the largest waiting gauge, and the seconds until the last reply."""
    await target.wait_idle()
    loop = asyncio.get_running_loop()
    client = Client(route.url)
    async with watch(target, SAMPLE_EVERY_S) as waiting:
        begin_s = loop.time()
        tasks = [asyncio.create_task(client.send(keyed(request, route, "heavy"))) for _ in range(arrivals)]
        done, late = await asyncio.wait(tasks, timeout=LIMIT_S)
        spent_s = loop.time() - begin_s
    client.abandon(started=True)
    if late:
        await asyncio.wait(late)
    client.close()
    failed = len(late) + sum(not task.result().ok for task in done)
    return {"waiting_max": max(waiting), "samples": len(waiting), "spent_s": spent_s, "failed": failed}


def burst_table(result: dict[str, Any]) -> str:
    heads = ["each request", "route", "engine waiting, max", "samples", "all answered in", "failed"]
    rows = []
    for load, routes in result["loads"].items():
        for name, row in routes.items():
            ends = [f"{row['samples']:.0f}", f"{row['spent_s']:.1f} s", f"{row['failed']:.0f}"]
            rows.append([load, name, f"{row['waiting_max']:.0f}", *ends])
    return report.table(heads, rows)


async def run(options: argparse.Namespace) -> None:
    result: dict[str, Any] = {"arrivals": options.arrivals, "rounds": options.rounds, "loads": {}}
    names = options.routes.split(",")
    async with engine(options.engine_url) as target, open_routes(target, names) as routes:
        for load, request in LOADS.items():
            result["loads"][load] = {}
            for route in routes:
                print(f"burst, {load}, {route.name}", flush=True)
                runs = [await run_burst(route, target, request, options.arrivals) for _ in range(options.rounds)]
                result["loads"][load][route.name] = {
                    "waiting_max": max(run["waiting_max"] for run in runs),
                    "samples": sum(run["samples"] for run in runs),
                    "spent_s": report.median([run["spent_s"] for run in runs]),
                    "failed": sum(run["failed"] for run in runs),
                }
    report.save("burst", result)
    print(f"\n{burst_table(result)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="the engine's queue in a burst of arrivals")
    parser.add_argument("--arrivals", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--routes", default="direct,fairgate")
    parser.add_argument("--engine-url", help="a running vLLM; default: start the tiny one of deploy/real-vllm")
    run_bench("burst", run(parser.parse_args()))


if __name__ == "__main__":
    main()
