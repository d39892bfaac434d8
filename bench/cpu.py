"""CPU a proxy spends per request and per streamed chunk, as multiples of nginx in the same run.

    python -m bench.cpu [--rounds 3] [--seconds 3] [--proxies nginx,fairgate,...] [--cases "chunk, 50/s x 200"] [--tls]

Upstream is nginx with its echo module, which answers as vLLM does; the load comes from wrk. The proxy has core 0 to
itself, everything else runs on core 1. Counted is the user and system time of the proxy's whole process tree. Cases:

- `request, 1 kB` and `request, 64 kB`: bodies of that size, answered by 600 bytes, not streamed, the proxy saturated by
  64 connections in a closed loop;
- `chunk, burst`: 100 events as fast as they go, 16 connections;
- `chunk, 50/s x 200` and `x 1000`: so many streams of 100 events, 50 events a second each, starts spread over 2 s.

LiteLLM and Portkey take part in one round of 5 s, with 8 connections, which keep them busy. fairgate runs with
everything on: keys, policy, ledger, metrics, access log to a file. Within a case all proxies run at once and take turns
under load, so that what is compared is measured within seconds.

--tls: clients speak TLS to nginx and fairgate, with one certificate and OpenSSL's own choice of ciphers, on connections
that are kept. Written as `cpu-tls`.
"""

import argparse
import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from bench import report
from bench.kinds import agent_call
from bench.proxies import PROXIES, SLOW, SPEAK_TLS, chosen, open_routes
from bench.stack import BenchError, Route, certificate, cpu_s, run_bench
from bench.upstream import Case, echo_upstream
from bench.wrk import reply_bytes, wrk

REQUEST, PACED = "request, 1 kB", "chunk, 50/s x 200"
CASES = (
    Case(REQUEST, connections=64),
    Case("request, 64 kB", connections=64, body_bytes=64_000),
    Case("call of an agent, 20 turns", connections=64, text=agent_call(1).decode()),
    Case("chunk, burst", connections=16, events=100),
    Case(PACED, connections=200, events=100, pace_s=0.02, spread_ms=2000),
    Case("chunk, 50/s x 1000", connections=1000, events=100, pace_s=0.02, spread_ms=2000),
)
WARM_UP_S = 1.0
# Enough to keep a slow one busy, few enough that it answers within a short round.
SLOW_CONNECTIONS = 8
SLOW_SECONDS = 5.0
# With more than these, a slow one does what it does with fewer.
CONNECTIONS_TELLING = 200
# Every proxy of a case must be able to start, answer and end; a peer that hangs must not hold up the rest.
TURN_LIMIT_S = 90.0


async def measure(route: Route, case: Case, seconds: float, warm_up_s: float) -> dict[str, float]:
    """CPU microseconds per request, or per event, of one proxy under one load. Raises BenchError."""
    if route.name in SLOW:
        case, seconds = replace(case, connections=SLOW_CONNECTIONS), max(seconds, SLOW_SECONDS)
    size = await reply_bytes(route, case)
    if warm_up_s:
        await wrk(route, case, warm_up_s)
    before = cpu_s(route.pid)
    counted = await wrk(route, case, seconds)
    spent_s = cpu_s(route.pid) - before
    # Streams in bytes rather than whole replies: those that wrk cut at its end have cost CPU too.
    units = counted.read_bytes / size * case.events if case.events else counted.requests
    if not units:
        raise BenchError(f"{route.name} answered nothing within {seconds:g} s")
    return {"us": spent_s / units * 1e6, "per_s": units / seconds, "busy": spent_s / seconds, "errors": counted.errors}


async def run_case(
    case: Case, names: list[str], rounds: int, seconds: float, *, tls: bool
) -> dict[str, dict[str, float]]:
    """One load on every proxy, the order rotating; slow ones take part in the first round only."""
    runs: dict[str, list[dict[str, float]]] = {}
    if case.connections > CONNECTIONS_TELLING:
        names = [name for name in names if name not in SLOW]
    async with AsyncExitStack() as stack:
        upstream_url = await stack.enter_async_context(echo_upstream(case))
        files = stack.enter_context(certificate()) if tls else None
        routes = await open_routes(stack, names, upstream_url, files)
        for turn in range(rounds):
            order = [name for name in routes if not (turn and name in SLOW)]
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                try:
                    async with asyncio.timeout(TURN_LIMIT_S):
                        run = await measure(routes[name], case, seconds, 0.0 if turn else WARM_UP_S)
                except (BenchError, TimeoutError, OSError) as error:
                    print(f"  {case.name}, round {turn + 1}, {name}: not measured: {error!r}", flush=True)
                    continue
                runs.setdefault(name, []).append(run | {"round": turn})
                print(f"  {case.name}, round {turn + 1}, {name}: {run['us']:.1f} us", flush=True)
    return condense(runs)


def condense(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians over rounds; the ratio to nginx is the median of the rounds' own ratios."""
    found = {}
    nginx = {run["round"]: run["us"] for run in runs.get("nginx", [])}
    for name, rounds in runs.items():
        found[name] = {field: report.median([run[field] for run in rounds]) for field in ("us", "per_s", "busy")}
        found[name]["errors"] = sum(run["errors"] for run in rounds)
        ratios = [run["us"] / nginx[run["round"]] for run in rounds if run["round"] in nginx]
        found[name]["times_nginx"] = report.median(ratios)
    return found


def cpu_table(result: dict[str, Any]) -> str:
    heads = ["case", "proxy", "CPU", "times nginx", "handled per second", "core used", "errors"]
    rows = []
    for case, proxies in result["cases"].items():
        for name, row in proxies.items():
            ends = [f"{row['per_s']:,.0f}", f"{row['busy']:.0%}", f"{row['errors']:.0f}"]
            rows.append([case, name, f"{row['us']:,.1f} us", f"{row['times_nginx']:.2f}", *ends])
    return report.table(heads, rows)


async def run(options: argparse.Namespace) -> None:
    names = chosen(options.proxies or ",".join(SPEAK_TLS if options.tls else PROXIES))
    cases = [case for case in CASES if options.cases is None or case.name in options.cases]
    result: dict[str, Any] = {"rounds": options.rounds, "seconds": options.seconds, "cases": {}}
    for case in cases:
        result["cases"][case.name] = await run_case(case, names, options.rounds, options.seconds, tls=options.tls)
    report.save("cpu-tls" if options.tls else "cpu", result)
    print(f"\n{cpu_table(result)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU per request and per chunk, times nginx")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="measured per proxy, case and round")
    parser.add_argument("--proxies", help=f"with commas; default: all, which are {', '.join(PROXIES)}")
    parser.add_argument("--tls", action="store_true", help=f"clients speak TLS to {' and '.join(SPEAK_TLS)}")
    parser.add_argument("--cases", action="append", choices=[case.name for case in CASES], help="default: all")
    run_bench("bench.cpu", run(parser.parse_args()))


if __name__ == "__main__":
    main()
