"""A batch job by the `openai` SDK beside a light tenant: is a call of it refused, and what does the other one wait?

    python -m bench.batch [--parallel 64] [--calls 512] [--rounds 3] [--flex] [--engine-url URL]

One script with one key keeps 64 calls under way, streamed, without `user` and without a retry of the SDK's own, until
all are done (200 words in, 200 tokens out). A light tenant asks every 0.4 s. fairgate has its defaults but for the two
keys. `alone` is the light tenant without the job. With `--flex` the calls are of class batch, and not streamed.
"""

import argparse
import asyncio
import random
import time
from typing import Any

import openai

from bench import report
from bench.flood import HEAVY, LIGHT, LIGHT_EVERY_S, keyed, send_on_time
from bench.load import MODEL, VOCABULARY, Reply, RoundRobin
from bench.stack import Engine, Route, engine, fairgate, routes_to, run_bench

ALONE_S = 10.0


class Job:
    """So many calls, so many at once, each sent once."""

    def __init__(self, route: Route, parallel: int, calls: int, *, is_flex: bool) -> None:
        self._is_flex = is_flex
        key = route.key("batch") or "none"
        self._client = openai.AsyncOpenAI(base_url=f"{route.url}/v1", api_key=key, max_retries=0, timeout=600)
        self._rng = random.Random(route.name)
        self._left = calls
        self._parallel = parallel
        self.failures: list[str] = []
        self.done = 0

    async def run(self) -> None:
        async with self._client:
            await asyncio.gather(*(self._one_after_the_other() for _ in range(self._parallel)))

    async def _one_after_the_other(self) -> None:
        while self._left:
            self._left -= 1
            try:
                await self._call()
                self.done += 1
            except openai.OpenAIError as error:
                self.failures.append(str(error))

    async def _call(self) -> None:
        words = " ".join(self._rng.choices(VOCABULARY, k=HEAVY.words_in))
        call: dict[str, Any] = {
            "model": MODEL, "messages": [{"role": "user", "content": words}], "max_tokens": HEAVY.tokens_out,
            "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        if self._is_flex:
            await self._client.chat.completions.create(**call, service_tier="flex")
            return
        async for _ in await self._client.chat.completions.create(**call, stream=True):
            pass


async def light_beside(route: Route, job: asyncio.Task[None] | None) -> list[Reply]:
    """The light tenant's replies, for as long as the job runs, or for a while without one."""
    client = RoundRobin(route.urls)
    sent: list[asyncio.Task[Reply]] = []
    ends_s = time.monotonic() + ALONE_S
    while not job.done() if job is not None else time.monotonic() < ends_s:
        sent += await send_on_time(client, keyed(LIGHT, route, "light"), LIGHT_EVERY_S, LIGHT_EVERY_S)
    replies = await asyncio.gather(*sent)
    client.close()
    return replies


async def run_leg(route: Route, target: Engine, options: argparse.Namespace) -> dict[str, float]:
    await target.wait_idle()
    alone = await light_beside(route, None)
    job = Job(route, options.parallel, options.calls, is_flex=options.flex)
    begin_s = time.monotonic()
    beside = await light_beside(route, asyncio.create_task(job.run()))
    for failure in sorted(set(job.failures))[:5]:
        print(f"    {job.failures.count(failure)} times: {failure[:200]}", flush=True)
    return {
        "alone_ttft_p50_s": report.median([reply.ttft_s for reply in alone if reply.ok]),
        "light_ttft_p50_s": report.median([reply.ttft_s for reply in beside if reply.ok]),
        "light_ttft_p95_s": report.quantile([reply.ttft_s for reply in beside if reply.ok], 0.95),
        "light_failed": float(sum(not reply.ok for reply in beside)),
        "failed": float(len(job.failures)),
        "done": float(job.done),
        "seconds": time.monotonic() - begin_s,
    }


def batch_table(result: dict[str, Any]) -> str:
    heads = [
        "route",
        "calls done",
        "failed",
        "seconds",
        "light TTFT alone",
        "beside the job, p50",
        "p95",
        "light failed",
    ]
    rows = []
    for name, legs in result["routes"].items():
        middle = {field: report.median([leg[field] for leg in legs]) for field in legs[0]}
        worst = {field: max(leg[field] for leg in legs) for field in ("failed", "light_failed")}
        waits = [
            f"{middle[f'{field}_s'] * 1000:.0f} ms" for field in ("alone_ttft_p50", "light_ttft_p50", "light_ttft_p95")
        ]
        rows.append([name, f"{middle['done']:.0f}", f"{worst['failed']:.0f}", f"{middle['seconds']:.1f}", *waits,
                     f"{worst['light_failed']:.0f}"])  # fmt: skip
    return report.table(heads, rows)


async def run(options: argparse.Namespace) -> None:
    result: dict[str, Any] = {"parallel": options.parallel, "calls": options.calls, "routes": {}}
    async with engine(options.engine_url) as target:
        ours = fairgate(target.url, {"batch": 1, "light": 1})
        async with routes_to(target, options.routes.split(","), {"fairgate": ours}) as routes:
            for turn in range(options.rounds):
                for route in routes[turn % len(routes) :] + routes[: turn % len(routes)]:
                    result["routes"].setdefault(route.name, []).append(await run_leg(route, target, options))
    report.save("batch", result)
    print(f"\n{batch_table(result)}\n\n{report.SHARED_CORES}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="a batch job by the openai SDK beside a light tenant")
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--calls", type=int, default=512)
    parser.add_argument("--flex", action="store_true", help="calls of class batch, not streamed")
    parser.add_argument("--routes", default="direct,fairgate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine-url", help="a running vLLM; default: start the tiny one of deploy/real-vllm")
    run_bench("batch", run(parser.parse_args()))


if __name__ == "__main__":
    main()
