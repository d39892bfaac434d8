"""Memory and CPU of a proxy that holds 10,000 streams open, one event a second on each.

    python -m bench.memory [--streams 10000] [--seconds 5] [--proxies nginx,fairgate,...]

Memory per stream is what the proxy's whole process tree takes with all streams open, less what it took before, over the
streams: the proportional set size, so pages that processes share count once, and socket buffers of the kernel do not.
CPU is counted over `--seconds` while nothing begins or ends. A proxy needs two sockets for each stream: where the limit
of open files allows fewer streams, as many are opened as it allows.
"""

import argparse
import asyncio
import resource
from dataclasses import replace
from typing import Any

from bench import report
from bench.proxies import PROXIES, chosen, proxy
from bench.stack import BenchError, Route, cpu_s, memory_bytes, open_files, run_bench
from bench.upstream import Case, echo_upstream
from bench.wrk import running

EVENTS = 60
CASE = Case("open streams", connections=10_000, events=EVENTS, pace_s=1.0, spread_ms=5000)
WARM_CONNECTIONS = 10
FILES_SPARE = 200
OPEN_LIMIT_S = 40.0
SETTLE_S = 2.0
# What the slow ones can open within the limit, starting a few dozen a second.
STREAMS_MAX = {"litellm": 200, "portkey": 1000}


def streams_allowed(asked: int) -> int:
    """As many streams as this process, and so the proxy, may have sockets for."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    allowed = (most - FILES_SPARE) // 2 if most != resource.RLIM_INFINITY else asked
    if allowed < asked:
        print(f"the limit of open files is {most}: {allowed} streams instead of {asked}", flush=True)
    return min(asked, allowed)


async def measure(route: Route, streams: int, seconds: float) -> dict[str, float]:
    """One proxy: idle, then with all streams open. Raises BenchError."""
    case = replace(CASE, connections=streams)
    async with running(route, replace(CASE, connections=WARM_CONNECTIONS, spread_ms=0), SETTLE_S):
        await asyncio.sleep(SETTLE_S)  # what is loaded or allocated once is there before memory is compared
    await asyncio.sleep(SETTLE_S)
    idle_bytes, idle_files = memory_bytes(route.pid), open_files(route.pid)
    async with running(route, case, OPEN_LIMIT_S + SETTLE_S + seconds + EVENTS) as load:
        opened = await _opened(route, streams, idle_files)
        await asyncio.sleep(SETTLE_S)
        before = cpu_s(route.pid)
        await asyncio.sleep(seconds)
        spent_s = cpu_s(route.pid) - before
        taken_bytes = memory_bytes(route.pid) - idle_bytes
        counted = await load.stop()
    return {
        "streams": opened,
        "idle_bytes": idle_bytes,
        "bytes_per_stream": taken_bytes / opened,
        "us": spent_s / (opened * seconds) * 1e6,
        "busy": spent_s / seconds,
        "errors": counted.errors,
    }


async def _opened(route: Route, streams: int, idle_files: int) -> int:
    """How many streams are open, once all are or none comes any more. Raises BenchError if there is none."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + OPEN_LIMIT_S
    while (opened := (open_files(route.pid) - idle_files) // 2) < streams and loop.time() < until_s:  # noqa: ASYNC110
        await asyncio.sleep(0.5)
    if opened < 1:
        raise BenchError(f"{route.name} opened no stream within {OPEN_LIMIT_S:g} s")
    return min(opened, streams)


def memory_table(result: dict[str, Any]) -> str:
    heads = ["proxy", "streams", "memory per stream", "idle", "CPU per event", "core used", "errors"]
    rows = []
    for name, row in result["proxies"].items():
        sizes = [f"{row['bytes_per_stream'] / 1000:.1f} kB", f"{row['idle_bytes'] / 1e6:.0f} MB"]
        ends = [f"{row['us']:.1f} us", f"{row['busy']:.0%}", f"{row['errors']:.0f}"]
        rows.append([name, f"{row['streams']:,.0f}", *sizes, *ends])
    return report.table(heads, rows)


async def run(options: argparse.Namespace) -> None:
    streams = streams_allowed(options.streams)
    result: dict[str, Any] = {"streams": streams, "seconds": options.seconds, "proxies": {}}
    async with echo_upstream(CASE) as upstream_url:
        for name in chosen(options.proxies):
            try:
                async with proxy(name, upstream_url) as route:
                    found = await measure(route, min(streams, STREAMS_MAX.get(name, streams)), options.seconds)
            except BenchError as error:
                print(f"  {name}: not measured: {error}", flush=True)
                continue
            result["proxies"][name] = found
            print(f"  {name}: {found['bytes_per_stream'] / 1000:.1f} kB a stream", flush=True)
    report.save("memory", result)
    print(f"\n{memory_table(result)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="memory and CPU of many open streams")
    parser.add_argument("--streams", type=int, default=CASE.connections)
    parser.add_argument("--seconds", type=float, default=5.0, help="counted per proxy")
    parser.add_argument("--proxies", default=",".join(PROXIES))
    run_bench("bench.memory", run(parser.parse_args()))


if __name__ == "__main__":
    main()
