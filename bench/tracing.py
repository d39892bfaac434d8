"""CPU per request with tracing off and on, as multiples of off in the same run.

    python -m bench.tracing [--rounds 5] [--seconds 3]

As `bench.cpu` does for requests of 1 kB: the upstream is nginx with its echo module, the load comes from wrk, and what
is compared takes turns. `off, again` is a second gateway without tracing: what it differs by is noise. Spans go to a
receiver that answers 200 and reads nothing of them.

A ratio of two loads tells nothing below a twentieth on a machine whose clock is shared. So what tracing does is also
done alone, span by span and with the thread that sends, and its CPU time is told in microseconds a request.
"""

import argparse
import time
from contextlib import AsyncExitStack

from aiohttp import web

from bench import report
from bench.cpu import CASES, WARM_UP_S, measure
from bench.settled import record_of
from bench.stack import BenchError, Route, fairgate, run_bench
from bench.upstream import MODEL, PROXY_CORE, echo_upstream
from bench.wrk import TENANT
from gateway.telemetry.span_export import SPANS_WAITING_MAX, SpanExport
from gateway.telemetry.trace import Sampler

WAYS: dict[str, float | None] = {"off": None, "off, again": None, "1 %": 0.01, "all": 1.0}


ALONE_ROUNDS = 15
HEADERS = [
    (b"host", b"gateway.example:8000"),
    (b"authorization", b"Bearer sk-0123456789"),
    (b"content-type", b"application/json"),
    (b"content-length", b"1024"),
]


def alone_us(ratio: float, collector: str, requests: int) -> float:
    """CPU time that tracing adds to a request, on the loop and in the thread that sends: the median of rounds."""
    added = []
    for _ in range(ALONE_ROUNDS):
        plain_s = _ended_without_s(requests)
        spans = SpanExport(collector, {})
        traced_s = _ended_with_s(spans, Sampler(ratio), requests)
        if spans.lost:
            raise BenchError(f"{spans.lost} spans were lost")
        added.append((traced_s - plain_s) / requests * 1e6)
    return report.median(added)


def _ended_without_s(requests: int) -> float:
    records = [record_of(number) for number in range(requests)]
    begun_s = time.process_time()
    while records:
        records.pop()
        HEADERS.copy()
    return time.process_time() - begun_s


def _ended_with_s(spans: SpanExport, sampler: Sampler, requests: int) -> float:
    records = [record_of(number) for number in range(requests)]
    begun_s = time.process_time()
    while records:
        record = records.pop()  # nobody keeps one that has ended
        record.trace = sampler.begin(HEADERS)
        if record.trace is not None:
            record.trace.passed_on(HEADERS.copy())
        spans.ended(record, "fairserve")
    spans.close()
    return time.process_time() - begun_s


async def receiver(stack: AsyncExitStack) -> str:
    async def take(request: web.Request) -> web.Response:
        await request.read()
        return web.Response()

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/v1/traces", take)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def run(options: argparse.Namespace) -> None:
    case, found = CASES[0], {name: [] for name in WAYS}  # type: dict[str, list[float]]
    alone: dict[str, float] = {}
    async with AsyncExitStack() as stack:
        upstream_url = await stack.enter_async_context(echo_upstream(case))
        for name, ratio in WAYS.items():
            if ratio:
                requests = round(min(20_000, SPANS_WAITING_MAX // 2 / ratio))
                alone[name] = alone_us(ratio, f"{upstream_url}/v1/chat/completions", requests)
        collector = await receiver(stack)
        routes: dict[str, Route] = {}
        for name, ratio in WAYS.items():
            fields = {} if ratio is None else {"tracing": {"endpoint": collector, "sample_ratio": ratio}}
            gateway = fairgate(upstream_url, {TENANT: 1.0}, "openai", MODEL, cpu=PROXY_CORE, concurrency=4096, **fields)
            routes[name] = await stack.enter_async_context(gateway)
        for turn in range(options.rounds):
            order = list(WAYS)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                run = await measure(routes[name], case, options.seconds, 0.0 if turn else WARM_UP_S)
                found[name].append(run["us"])
                print(f"  round {turn + 1}, {name}: {run['us']:.1f} us, {run['errors']:.0f} errors", flush=True)
    rows = []
    for name, us in found.items():
        ratios = [mine / off for mine, off in zip(us, found["off"], strict=True)]
        done_alone = f"{alone[name]:.2f} us" if name in alone else ""
        rows.append([name, f"{report.median(us):.1f} us", f"{report.median(ratios):.3f}", done_alone])
    print(f"\n{report.table(['tracing', 'CPU per request', 'times off', 'tracing alone'], rows)}\n")
    report.save("tracing", {"rounds": options.rounds, "seconds": options.seconds, "us": found, "alone_us": alone})


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU per request with tracing off and on")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="measured per way and round")
    run_bench("bench.tracing", run(parser.parse_args()))


if __name__ == "__main__":
    main()
