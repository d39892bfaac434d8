"""How much is an honest tenant served beside one that breaks engines, one whose batch does, and one that fills threads?

    python -m bench.beside [--rounds 6] [--window 10]

Each round has one window alone and one beside, for each kind of neighbour, so that noise of the machine meets both. The
engine answers an honest request after 0.4 s, so it and not the processor sets how many there are. Beside uploads
and downloads of 4 MB the honest work is a batch, since files and batches share a thread. Exits with 1
if the median over the rounds is below 0.95 of alone, or if an honest request was refused.
"""

import argparse
import asyncio
import contextlib
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import openai

from bench import report
from bench.bounds import CHAT, MODEL, OVER, jsonl
from bench.load import Client
from bench.stack import Route, fairgate, process, run_bench, wait_ready
from tests.ports import free_port

HONEST, NEIGHBOUR = 16, 4
"""Requests at once."""
SETTLE_S = 1.0
LEAST = 0.95
FILE_BYTES = 4_000_000
Work = Callable[[Route], Coroutine[Any, Any, None]]


def request(route: Route, tenant: str, do: str, **fields: Any) -> bytes:
    body = json.dumps({"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": f"{do} 1"}], **fields})
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer {route.key(tenant)}\r\nContent-Length: {len(body)}"
    )
    return f"{head}\r\n\r\n{body}".encode()


async def ask_on(route: Route, tenant: str, ends: Counter[str], *whats: bytes) -> None:
    """Send requests one after another, of each kind in turn."""
    client = Client(route.url)
    while True:
        for what in whats:
            reply = await client.raw(what)
            ends[f"{tenant} {reply.status}"] += 1


async def breaks(route: Route) -> None:
    cut, closes = request(route, "neighbour", "cut", stream=True), request(route, "neighbour", "closes")
    async with asyncio.TaskGroup() as group:
        for _ in range(NEIGHBOUR):
            group.create_task(ask_on(route, "neighbour", Counter(), cut, closes))


def api_of(route: Route, tenant: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{route.url}/v1", api_key=route.key(tenant), max_retries=0)


async def batch(route: Route, tenant: str, do: str) -> None:
    """One batch after another; what is left of the last one is cancelled at the end of the window."""
    async with api_of(route, tenant) as api:
        file = await api.files.create(file=("ask.jsonl", jsonl(do, 2000)), purpose="batch")
        while True:
            made = await api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            try:
                while made.status not in OVER:
                    await asyncio.sleep(0.5)
                    made = await api.batches.retrieve(made.id)
            finally:
                with contextlib.suppress(openai.APIError):
                    await asyncio.shield(api.batches.cancel(made.id))


async def transfers(route: Route) -> None:
    content = b"x" * (FILE_BYTES // 100 - 1) + b"\n"

    async def carry() -> None:
        async with api_of(route, "neighbour") as api:
            while True:
                with contextlib.suppress(openai.APIStatusError):
                    file = await api.files.create(file=("f", content * 100), purpose="batch")
                    for _ in range(5):
                        await api.files.content(file.id)
                    await api.files.delete(file.id)

    async with asyncio.TaskGroup() as group:
        for _ in range(NEIGHBOUR):
            group.create_task(carry())


CASES: dict[str, tuple[Work, bool]] = {
    "requests that break engines": (breaks, False),
    "a batch that breaks engines": (lambda route: batch(route, "neighbour", "closes"), False),
    "uploads and downloads": (transfers, True),
}
"""Load of the neighbour, and whether the honest work is a batch."""


async def items(route: Route) -> int:
    """Lines of batches that were answered."""
    page = (await Client(route.admin).get("/metrics")).body.decode()
    return round(float(re.findall(r'fairgate_batch_items_total\{outcome="completed"\} (\S+)', page)[0]))


@contextlib.asynccontextmanager
async def under_way(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def window(route: Route, neighbour: Work | None, window_s: float, *, of_batch: bool) -> Counter[str]:
    """Count what the honest tenant was served."""
    ends = Counter[str]()
    honest = request(route, "honest", "short")
    works = [ask_on(route, "honest", ends, honest) for _ in range(0 if of_batch else HONEST)]
    works += [batch(route, "honest", "short")] if of_batch else []
    async with under_way(*works, *([neighbour(route)] if neighbour is not None else [])):
        before = await items(route)
        await asyncio.sleep(SETTLE_S)
        while of_batch and await items(route) == before:  # noqa: ASYNC110 (its file is checked first)
            await asyncio.sleep(0.1)
        before = await items(route)
        ends.clear()
        await asyncio.sleep(window_s)
        served = await items(route) - before if of_batch else ends["honest 200"]
        refused = sum(count for end, count in ends.items() if end != "honest 200")
    return Counter(served=served, refused=refused)


async def run(options: argparse.Namespace) -> bool:
    port, found = free_port(), dict[str, list[tuple[Counter[str], Counter[str]]]]()
    with tempfile.TemporaryDirectory(prefix="fairgate-bench-") as folder:
        log = Path(folder, "engine.log")
        with process([sys.executable, "-m", "bench.bounds", "engine", str(port)], log) as engine:
            await wait_ready(f"http://127.0.0.1:{port}", "/health", engine, log, 20.0)
            bounds = {"running_max": HONEST, "files_max": 100_000, "batches_max": 100_000}
            gateway = fairgate(
                f"http://127.0.0.1:{port}", {"honest": 1.0, "neighbour": 1.0}, model=MODEL, batches=bounds,
                usage=str(Path(folder, "u.db")),
            )  # fmt: skip
            async with gateway as route:
                for turn in range(options.rounds):
                    for name, (neighbour, of_batch) in CASES.items():
                        sides = [(None, 0), (neighbour, 1)][:: 1 if turn % 2 else -1]
                        pair = [Counter[str](), Counter[str]()]
                        for work, side in sides:
                            pair[side] = await window(route, work, options.window, of_batch=of_batch)
                        found.setdefault(name, []).append((pair[0], pair[1]))
                        print(f"  {name}: {pair[0]['served']} alone, {pair[1]['served']} beside", flush=True)
    rows, is_right = [], True
    for name, pairs in found.items():
        ratio = report.median([beside["served"] / alone["served"] for alone, beside in pairs])
        refused = sum(beside["refused"] for _, beside in pairs)
        counts = [str(sum(pair[side]["served"] for pair in pairs)) for side in range(2)]
        rows.append([name, *counts, f"{ratio:.3f}", str(refused)])
        is_right = is_right and ratio >= LEAST and not refused
    report.save("beside", {"cases": found, "least": LEAST})
    print(f"\n{report.table(['neighbour', 'served alone', 'beside', 'median ratio', 'refused'], rows)}\n")
    return is_right


def main() -> None:
    parser = argparse.ArgumentParser(description="an honest tenant beside neighbours that break and fill")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--window", type=float, default=10.0)
    sys.exit(0 if run_bench("bench.beside", run(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
