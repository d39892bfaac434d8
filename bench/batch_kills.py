"""Is an item of a batch lost, done twice or charged twice, over an hour of kills?

    python -m bench.batch_kills [--minutes 60] [--every 60] [--database sqlite|postgresql]

One tenant has two jobs of `/v1/batches` under way at any time, by the `openai` SDK, and cancels one in ten. Another one
streams an answer now and then. At random moments the gateway is killed (-9) and started again. In the end each line of
each job must have one result, and the usage of the tenant must be that of the answers in its files. A slow simulated
engine, so that all of it takes little CPU. Exits with 1 if something is wrong.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections import Counter
from functools import partial
from typing import Any

import openai

from bench import report
from bench.load import VOCABULARY, Client, Request
from bench.soak import MODEL, TENANTS
from bench.stack import run_bench
from bench.usage import Killable, counted, running
from tests.postgres_server import PostgresServer

JOBS = 2
LINES_MAX = 60
BOUNDS = {"running_max": 12, "files_max": 1_000_000, "batches_max": 1_000_000}
CANCELLED = 0.1
LOOK_S = 2.0
OVER = ("completed", "failed", "expired", "cancelled")
CHAT: Any = "/v1/chat/completions"
LIGHT = Request(20, 8, key=f"bench-key-of-{TENANTS[1]}", model=MODEL)


def lines(rng: random.Random) -> bytes:
    """A file of requests."""
    found = []
    for number in range(rng.randint(1, LINES_MAX)):
        words = " ".join(rng.choices(VOCABULARY, k=rng.randint(5, 60)))
        body = {"model": MODEL, "messages": [{"role": "user", "content": words}], "max_tokens": rng.randint(20, 300)}
        found.append(json.dumps({"custom_id": f"item-{number}", "method": "POST", "url": CHAT, "body": body}))
    return "\n".join(found).encode()


async def work(api: openai.AsyncOpenAI, seed: int, until_s: float, made: set[str]) -> None:
    """One job after another. What fails because the gateway is gone is asked again."""
    rng = random.Random(seed)
    while time.monotonic() < until_s:
        with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError):
            file = await api.files.create(file=("ask.jsonl", lines(rng)), purpose="batch")
            batch = await api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            made.add(batch.id)
            cancels_s = time.monotonic() + rng.uniform(0, 10) if rng.random() < CANCELLED else float("inf")
            while batch.status not in OVER:
                await asyncio.sleep(LOOK_S)
                look = api.batches.cancel if time.monotonic() > cancels_s else api.batches.retrieve
                batch = await look(batch.id)


async def ask_now_and_then(url: str, until_s: float, ends: Counter[str]) -> None:
    client, rng = Client(url), random.Random(1)
    while time.monotonic() < until_s:
        ends[(await client.send(LIGHT)).failure or "whole"] += 1
        await asyncio.sleep(rng.expovariate(2.0))
    client.close()


async def kill(gateway: Killable, every_s: float, until_s: float) -> None:
    """Now and then. Whoever has something under way has the rest of the time to end it."""
    while time.monotonic() < until_s:
        await asyncio.sleep(random.uniform(0, 2 * every_s))
        await gateway.end(signal.SIGKILL)
        await gateway.start()


async def check(api: openai.AsyncOpenAI, made: set[str]) -> tuple[Counter[str], Counter[str]]:
    """What is wrong with the jobs, and what their answers have used."""
    found, used = Counter[str](), Counter[str]()

    async def items(file: str | None) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (await api.files.content(file)).text.splitlines()] if file else []

    async for batch in api.batches.list(limit=100):
        made.discard(batch.id)
        asked = [one["custom_id"] for one in await items(batch.input_file_id)]
        answered, errors = await items(batch.output_file_id), await items(batch.error_file_id)
        came = Counter([one["custom_id"] for one in answered + errors])
        found.update(
            {
                f"jobs {batch.status}": 1,
                "items": len(asked),
                "items answered": len(answered),
                "items lost": sum(not came[one] for one in asked),
                "items twice": came.total() - len(came),
                "items in error of jobs that were not cancelled": len(errors) * (batch.status != "cancelled"),
                "files out of order": sum(
                    [one["custom_id"] for one in results] != [one for one in asked if one in ids]
                    for results in (answered, errors)
                    for ids in [{one["custom_id"] for one in results}]
                ),
            }
        )
        for one in answered:
            usage = one["response"]["body"]["usage"]
            used.update(requests=1, input_tokens=usage["prompt_tokens"], output_tokens=usage["completion_tokens"])
    found["jobs lost"] = len(made)
    return found, used


async def run(options: argparse.Namespace) -> bool:
    made, ends = set[str](), Counter[str]()
    async with contextlib.AsyncExitStack() as stack:
        server = None
        if options.database == "postgresql":
            server = await stack.enter_async_context(PostgresServer())
        start = partial(running, "" if server is None else server.url, engines=1, profile="a10g-llama2-7b")
        gateway, database = await stack.enter_async_context(start(batches=BOUNDS))
        url = f"http://127.0.0.1:{gateway.gate.port}"
        api = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=gateway.gate.keys[0], max_retries=8)
        await stack.enter_async_context(api)
        until_s = time.monotonic() + options.minutes * 60
        jobs = [work(api, seed, until_s, made) for seed in range(JOBS)]
        await asyncio.gather(*jobs, ask_now_and_then(url, until_s, ends), kill(gateway, options.every, until_s))
        while any([batch.status not in OVER async for batch in api.batches.list(limit=100)]):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        found, used = await check(api, made)
        await gateway.end(signal.SIGTERM)
        sums = await asyncio.to_thread(counted, database)
    charged = Counter[str]()
    for (tenant, _, model), own in sums.items():
        if tenant == TENANTS[0] and model == MODEL:
            charged += own
    result = {"minutes": options.minutes, "kills": len(gateway.killed_s), "database": options.database} | found
    result |= {f"{name} charged twice": charged[name] - used[name] for name in used}
    print(report.table(["", "count"], [[name, str(count)] for name, count in result.items()]))
    print(f"\nlight tenant: {dict(ends)}")
    report.save("batch_kills", result | {"light": ends})
    wrong = ("lost", "twice", "out of order", "in error", "failed", "expired")
    return not any(count for name, count in result.items() if any(word in name for word in wrong))


def main() -> None:
    parser = argparse.ArgumentParser(description="whether batches survive kills")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills, in the mean")
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="sqlite")
    sys.exit(0 if run_bench("bench.batch_kills", run(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
