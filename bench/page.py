"""What does the page at the admin listener's root cost the gateway, and how soon is it seen?

    python -m bench.page [--tenants 200] [--engines 32] [--rate 40] [--seconds 20] [--rounds 4]

Simulated engines run in this process, requests come at a steady rate from the tenants in turns, and the page is open in
a real Chromium (headless) in every second span of time. Counted is what the gateway's process ran, in nanoseconds. The
cost of the requests varies by more than the page costs; so what the gateway itself counts for the page is told as well:
the CPU time of making it, without the writes to the socket.
First paint is what the browser says of itself: median and largest of five visits with nothing cached.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from itertools import cycle
from pathlib import Path

import aiohttp
from playwright.async_api import Browser, async_playwright

from backends.simulated.engine_profiles import profile
from backends.simulated.simulated_server import SimulatedServer
from bench import report
from bench.load import Client, Request
from bench.stack import BenchError, Route, fairgate, run_bench

MODEL = "simulated"
SLOWER = 3.0
"""Than the profile: long answers at little cost for this process."""
VISITS = 5
SETTLE_S = 2.0


@contextlib.asynccontextmanager
async def simulated(engines: int) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        urls = []
        for _ in range(engines):
            server = SimulatedServer(profile("demo"), model_names=(MODEL,), time_scale=SLOWER)
            port = await server.start("127.0.0.1", 0)
            stack.push_async_callback(server.stop)
            urls.append(f"http://127.0.0.1:{port}")
        yield urls


@contextlib.asynccontextmanager
async def load(route: Route, tenants: Sequence[str], rate: float) -> AsyncIterator[list[str]]:
    """So many requests a second from tenants in turns, while the block runs; yields what went wrong."""
    client, faults, running = Client(route.url), [], set()

    async def one(tenant: str) -> None:
        reply = await client.send(Request(40, 24, key=route.key(tenant), model=MODEL))
        if reply.failure:
            faults.append(reply.failure)

    async def steady() -> None:
        for tenant in cycle(tenants):
            task = asyncio.create_task(one(tenant))
            running.add(task)
            task.add_done_callback(running.discard)
            await asyncio.sleep(1 / rate)

    sending = asyncio.create_task(steady())
    try:
        yield faults
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        if running:
            await asyncio.wait(running, timeout=30)
        client.close()


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    if binary is None:
        raise BenchError("there is no Chromium; Debian: apt-get install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser
        await browser.close()


async def first_paints(browser: Browser, url: str) -> list[float]:
    """In milliseconds, each in a profile of its own."""
    found = []
    for _ in range(VISITS):
        page = await browser.new_page()
        await page.goto(url)
        await page.wait_for_selector("body[data-shown]")
        paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        found.append(float(await page.evaluate(paint)))
        await page.close()
    return found


def ran_s(pid: int) -> float:
    """CPU seconds of all threads of a process: finer than the ticks of 10 ms that are usually counted."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


async def busy(pid: int, seconds: float) -> float:
    """Part of a core that a process takes."""
    before, began_s = ran_s(pid), time.monotonic()
    await asyncio.sleep(seconds)
    return (ran_s(pid) - before) / (time.monotonic() - began_s)


async def measure(options: argparse.Namespace) -> dict[str, object]:
    names = [f"tenant-{number:03}" for number in range(options.tenants)]
    spans: dict[str, list[float]] = {"closed": [], "open": [], "counted": []}
    async with simulated(options.engines) as urls, chromium() as browser:
        async with fairgate(urls, dict.fromkeys(names, 1.0), model=MODEL) as route:
            async with load(route, names, options.rate) as faults:
                paints = await first_paints(browser, route.admin + "/")
                for _ in range(options.rounds):
                    await span(browser, route, options.seconds, spans)
            return {
                "tenants": options.tenants,
                "engines": options.engines,
                "rate": options.rate,
                "first_paint_ms": paints,
                "busy": spans,
                "failed": len(faults),
            }


async def span(browser: Browser, route: Route, seconds: float, found: dict[str, list[float]]) -> None:
    """So long without the page, and so long with it."""
    await asyncio.sleep(SETTLE_S)
    found["closed"].append(await busy(route.pid, seconds))
    page = await browser.new_page()
    await page.goto(route.admin + "/")
    await page.wait_for_selector("body[data-shown]")
    await asyncio.sleep(SETTLE_S)
    found["open"].append(await busy(route.pid, seconds))
    found["counted"].append(await counted(route))
    await page.close()


async def counted(route: Route) -> float:
    """Part of a core, as the gateway counts it since the page was opened."""
    async with aiohttp.ClientSession() as session, session.get(route.admin + "/events") as answer:
        await answer.content.readuntil(b"data: ")
        return float(json.loads(await answer.content.readuntil(b"\n\n"))["cost_cores"])


async def run(options: argparse.Namespace) -> None:
    found = await measure(options)
    report.save("page", found)
    paints, spans = found["first_paint_ms"], found["busy"]
    assert isinstance(paints, list)
    assert isinstance(spans, dict)
    closed, shown, counted_ = (report.median(spans[name]) for name in ("closed", "open", "counted"))
    heads = ["first paint, median", "largest", "core used, closed", "open", "counted for the page", "failed requests"]
    row = [
        f"{report.median(paints):.0f} ms",
        f"{max(paints):.0f} ms",
        f"{closed:.2%}",
        f"{shown:.2%}",
        f"{counted_:.2%}",
    ]
    print(f"\n{report.table(heads, [[*row, str(found['failed'])]])}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="what the page costs the gateway")
    parser.add_argument("--tenants", type=int, default=200)
    parser.add_argument("--engines", type=int, default=32)
    parser.add_argument("--rate", type=float, default=40.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each span")
    parser.add_argument("--rounds", type=int, default=4)
    run_bench("bench.page", run(parser.parse_args()))


if __name__ == "__main__":
    main()
