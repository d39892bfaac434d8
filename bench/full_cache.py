"""Agents whose contexts overfill the KV cache of a real vLLM: with the working set, without it, and without a gateway.

    python -m bench.full_cache [--kv 65536] [--times 2] [--engines 1] [--window 45] [--rounds 1] [--legs ...]
                              [--layers 2] [--engine-url URL]

Each agent makes 4 to 10 calls for one task. A call repeats what was said before and adds to it, and between two calls
the agent is in a tool for 0.1 to 0.6 s; then it begins another task. `--times`: how many times the cache the contexts
of all agents are together. One more client asks a short question each second. No two legs share a prompt. `--layers`:
of the tiny model. To hold an idle context pays if the cache takes longer to compute anew than the agents' tools take;
on a fast machine that takes more layers. `--engine-url`: a vLLM of yours, whose KV tokens `--kv` states.
"""

import argparse
import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from bench import report
from bench.load import VOCABULARY, Client, Reply
from bench.sessions import Conversation, chat
from bench.stack import PREEMPTIONS, Engine, Engines, Route, engine, engines, fairgate, nginx_proxy, run_bench

CALLS = (4, 10)
FIRST_WORDS, MORE_WORDS, ANSWER_TOKENS = (700, 1500), (80, 200), (16, 40)
CONTEXT_TOKENS = 1930
"""Mean of a context over the calls of a task."""
TOOL_S = (0.1, 0.6)
ASKED_WORDS, ASKED_TOKENS, ASK_EACH_S = 30, 8, 1.0
BLOCK_TOKENS = 32
AGENTS, LIGHT = "agents", "light"
DIRECT, WITHOUT, WITH = "direct", "without", "with"


@dataclass(slots=True)
class Leg:
    """Measurements of a leg within its window. Times are seconds to the first token."""

    name: str
    window_s: float
    finished: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    starts_s: list[float] = field(default_factory=list)
    inside_s: list[float] = field(default_factory=list)
    light_s: list[float] = field(default_factory=list)
    preemptions: float = 0.0

    @property
    def cached(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)


class Load:
    """The agents and the light client on one route, until they are ended."""

    def __init__(self, route: Route, leg: Leg, agents: int, seed: int) -> None:
        self._client = Client(route.url)
        self._light = Client(route.url)
        self._route = route
        self._leg = leg
        self._seed = seed
        self.is_counted = False
        self._tasks = [asyncio.create_task(self._work(agent)) for agent in range(agents)]
        self._tasks.append(asyncio.create_task(self._ask()))

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._client.close()
        self._light.close()

    async def _work(self, agent: int) -> None:
        rng = random.Random(f"{self._seed}/{agent}")
        await asyncio.sleep(rng.uniform(0.0, 3.0))
        for task in count():
            name = f"{self._leg.name}/{self._seed}/{agent}/{task}"
            if await self._task(name, rng) and self.is_counted:
                self._leg.finished += 1

    async def _task(self, name: str, rng: random.Random) -> bool:
        conversation, calls = Conversation(name), rng.randint(*CALLS)
        words = rng.randint(*FIRST_WORDS)
        for call in range(calls):
            answer = rng.randint(*ANSWER_TOKENS)
            headers = f"x-fairgate-interaction: {name}\r\n"
            headers += "x-fairgate-end: true\r\n" if call == calls - 1 else ""
            asked = chat(self._route, AGENTS, conversation.ask(words, answer), answer, headers, usage=True)
            reply = await self._until_answered(asked)
            self._count(reply, self._leg.inside_s if call else self._leg.starts_s)
            words += answer + rng.randint(*MORE_WORDS)
            await asyncio.sleep(rng.uniform(*TOOL_S))
        return True

    async def _until_answered(self, asked: bytes) -> Reply:
        """A refused call is made again when it was told to come."""
        while not (reply := await self._client.raw(asked)).ok:
            self._leg.failed += self.is_counted
            await asyncio.sleep(reply.again_after_s)
        return reply

    async def _ask(self) -> None:
        rng = random.Random(f"{self._leg.name}/{self._seed}/light")
        while True:
            text = " ".join(rng.choices(VOCABULARY, k=ASKED_WORDS))
            asked = chat(self._route, LIGHT, [{"role": "user", "content": text}], ASKED_TOKENS)
            reply = await self._light.raw(asked)
            if self.is_counted and reply.ok:
                self._leg.light_s.append(reply.ttft_s)
            await asyncio.sleep(ASK_EACH_S)

    def _count(self, reply: Reply, times_s: list[float]) -> None:
        if self.is_counted:
            times_s.append(reply.ttft_s)
            self._leg.prompt_tokens += reply.prompt_tokens
            self._leg.cached_tokens += reply.cached_tokens


@contextlib.asynccontextmanager
async def route_to(name: str, targets: Sequence[Engine]) -> AsyncIterator[Route]:
    """The way of this leg. Several engines are reached through nginx in turns where there is no gateway."""
    urls = [target.url for target in targets]
    if name == DIRECT and len(urls) == 1:
        yield Route(name, urls[0])
    elif name == DIRECT:
        async with nginx_proxy(*urls) as route:
            yield route
    else:
        policy = {"name": "fairserve", "working_set": name == WITH}
        async with fairgate(urls, dict.fromkeys((AGENTS, LIGHT), 1.0), policy=policy) as route:
            yield route


async def run_leg(name: str, targets: Sequence[Engine], agents: int, options: argparse.Namespace, seed: int) -> Leg:
    """A third of the window goes by before anything counts."""
    leg, together = Leg(name, options.window), Engines(targets)
    async with route_to(name, targets) as route:
        load = Load(route, leg, agents, seed)
        try:
            await asyncio.sleep(options.window / 3)
            before = await together.gauges(PREEMPTIONS)
            load.is_counted = True
            await asyncio.sleep(options.window)
            load.is_counted = False
            leg.preemptions = (await together.gauges(PREEMPTIONS))[PREEMPTIONS] - before[PREEMPTIONS]
        finally:
            await load.end()
    await together.wait_idle()
    return leg


def legs_table(legs: Sequence[Leg]) -> str:
    heads = [
        "leg", "tasks finished", "prompt cached", "first token of a call inside, p50 / p95", "of a start",
        "of a light question", "refused", "preempted",
    ]  # fmt: skip
    rows = [
        [
            leg.name, str(leg.finished), f"{leg.cached:.2f}", both(leg.inside_s), both(leg.starts_s), both(leg.light_s),
            str(leg.failed), f"{leg.preemptions:.0f}",
        ]
        for leg in legs
    ]  # fmt: skip
    return report.table(heads, rows)


def both(times_s: Sequence[float]) -> str:
    return f"{report.quantile(times_s, 0.5):.2f} / {report.quantile(times_s, 0.95):.2f} s"


async def run(options: argparse.Namespace) -> None:
    agents = max(1, round(options.times * options.kv * options.engines / CONTEXT_TOKENS))
    flags = ["--num-gpu-blocks-override", str(options.kv // BLOCK_TOKENS), "--max-num-seqs", "128"]
    flags += ["--hf-overrides", json.dumps({"num_hidden_layers": options.layers})]
    legs: list[Leg] = []
    async with contextlib.AsyncExitStack() as stack:
        if options.engine_url:
            targets = [await stack.enter_async_context(engine(options.engine_url))]
        else:
            targets = await stack.enter_async_context(engines([flags] * options.engines))
        for seed in range(options.rounds):
            for name in options.legs:
                legs.append(await run_leg(name, targets, agents, options, seed))
                print(f"  {legs_table(legs[-1:]).splitlines()[-1]}", flush=True)
    result: dict[str, Any] = {
        "kv_tokens": options.kv,
        "agents": agents,
        "layers": None if options.engine_url else options.layers,
        "legs": [asdict(leg) for leg in legs],
    }
    report.save("full_cache", result)
    print(f"\n{agents} agents, {options.engines} x {options.kv:,} tokens of KV\n\n{legs_table(legs)}\n")
    print(f"{report.SHARED_CORES}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="agents that overfill the KV cache of a real vLLM")
    parser.add_argument("--kv", type=int, default=65_536, help="KV tokens of each engine")
    parser.add_argument("--times", type=float, default=2.0, help="contexts of all agents over the KV of all engines")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--window", type=float, default=45.0, help="seconds that count")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2, help="of the model: more take longer to compute a prompt")
    parser.add_argument("--engine-url", help="use this running vLLM instead of starting engines")
    parser.add_argument("--legs", type=lambda text: text.split(","), default=[DIRECT, WITHOUT, WITH])
    run_bench("full_cache", run(parser.parse_args()))


if __name__ == "__main__":
    main()
