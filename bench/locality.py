"""What placement by cached prefix brings before several real engines, and whether it costs fairness or balance.

    python -m bench.locality --case sessions [--rounds 3] [--routes ...] [--policies fairserve,dlpm] [--quick]

Every case starts its own engines (`deploy/real-vllm`, 24,000 tokens of KV cache each, prefixes cached) on one core:
where more engines than cores find their places by themselves, some are twice as fast as others. On one core an engine
that idles makes the others faster, which no GPU does: the case `gpu` has simulated engines, each with a clock of its
own. It runs the same load
through every way to them: fairgate with its default policy or those that `--policies` names, two of its replicas with
one Redis between which each conversation alternates, the routers of `bench/peers.sh`, nginx, and clients that go round
the engines themselves (`direct`). Ways take turns within every round, in rotating order; only one runs at a time,
after a short warm-up, since gateways that are idle ask engines for their metrics too. Caches cannot be reset, so
prompts have new words for each way and round. Numbers are medians over rounds, with least and largest.

`--quick` takes one round of half the load, and says nothing but that it runs.
"""

import argparse
import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

from bench import report
from bench.fleet import simulated
from bench.flood import HEAVY, RAMP_S, Clients, keyed, run_leg, watch
from bench.load import Request, RoundRobin
from bench.shares import Tenant
from bench.stack import OUTPUT, PREEMPTIONS, PROMPT, RUNNING, BenchError, Engine, Engines, Route, engines, run_bench
from bench.talks import Outcome, Shape, hold, make_talks, tenants
from bench.upstream import OTHER_CORE
from bench.ways import WAYS, chosen, open_way

CACHE_TOKENS, BLOCK_TOKENS = 24_000, 32
QUERIED = "vllm:prefix_cache_queries_total"
FOUND = "vllm:prefix_cache_hits_total"
DONE = "vllm:request_success_total"
WARM_UP = Request(words_in=60, tokens_out=20)
WARM_UPS = 24
LIGHT_EVERY_S = 0.5
FLOOD = {"heavy": 1.0, "light": 1.0}
WEIGHTS = {"heavy": 4.0, "light": 1.0}
LEG_LIMIT_S = 400.0
SAMPLE_EVERY_S = 0.5

SESSIONS = Shape()
PRESSED = Shape(turn=200)
HOT = Shape(tenants=1, talks=48, turns=10, system=0, turn=100, pause_s=(0.0, 0.2), common=1500)
GPU = Shape(talks=40, system=2000, turn=600)
AGENTS = Shape(talks=6, turns=10, turn=150, pause_s=(0.1, 0.5), tools=True)

Measures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Options:
    """How much of each load. `scale`: of the number of conversations, and of turns."""

    scale: float
    window_s: float


@dataclass(frozen=True, slots=True)
class Leg:
    """One way in one round: where its load goes."""

    route: Route
    engines: Sequence[Engine]
    seed: str
    options: Options

    @property
    def all(self) -> Engines:
        return Engines(self.engines)

    def scaled(self, shape: Shape) -> Shape:
        scale = self.options.scale
        return replace(shape, talks=math.ceil(shape.talks * scale), turns=max(2, round(shape.turns * scale)))


@dataclass(frozen=True, slots=True)
class Column:
    """What of each leg is shown. `over`: as a multiple of what this way had in the same round."""

    head: str
    measure: str
    form: str
    over: str = ""

    def values(self, rounds: Sequence[dict[str, Measures]], way: str) -> list[float]:
        """One for each round that has it."""
        found = []
        for legs in rounds:
            value = legs.get(way, {}).get(self.measure, math.nan)
            if self.over:
                base = legs.get(self.over, {}).get(self.measure, math.nan)
                value = value / base if base else math.nan
            if not math.isnan(value):
                found.append(value)
        return found

    def cell(self, values: Sequence[float]) -> str:
        """The median, with the least and the largest."""
        if not values:
            return "-"
        middle = self.form.format(report.median(values))
        ends = [self.form.format(end) for end in (min(values), max(values))]
        return middle if ends[0] == ends[1] else f"{middle} ({ends[0]} to {ends[1]})"


def largest_over_mean(values: Sequence[float]) -> float:
    """1 is an even load; NaN of none."""
    mean = sum(values) / len(values) if values else 0.0
    return max(values) / mean if mean else math.nan


@contextlib.asynccontextmanager
async def engine_measures(members: Sequence[Engine]) -> AsyncIterator[Measures]:
    """What engines did while the block runs, by their own metrics: filled in at its end."""
    names = (QUERIED, FOUND, DONE, PREEMPTIONS, PROMPT, OUTPUT)
    measures: Measures = {}
    before = [await member.gauges(*names) for member in members]
    async with contextlib.AsyncExitStack() as stack:
        running = [await stack.enter_async_context(watch(member, SAMPLE_EVERY_S, RUNNING)) for member in members]
        yield measures
    after = [await member.gauges(*names) for member in members]
    did = {name: [late[name] - early[name] for early, late in zip(before, after, strict=True)] for name in names}
    total = {name: sum(each) for name, each in did.items()}
    measures["engine_cached"] = total[FOUND] / total[QUERIED] if total[QUERIED] else math.nan
    mean_running = [sum(seen) / max(1, len(seen)) for seen in running]
    measures["requests_skew"] = largest_over_mean(did[DONE])
    measures["running_skew"] = largest_over_mean(mean_running)
    for number, (requests, mean) in enumerate(zip(did[DONE], mean_running, strict=True)):
        measures |= {f"requests_{number}": requests, f"running_{number}": mean}
    measures["preemptions"] = total[PREEMPTIONS]
    measures["tokens"] = total[PROMPT] + total[OUTPUT]


def tell(failures: Sequence[str]) -> None:
    for failure, times in Counter(failures).items():
        print(f"    failed {times} times: {failure}", flush=True)


async def talk(leg: Leg, shape: Shape, name: str = "") -> Outcome:
    """All conversations of this shape, with words of their own."""
    outcome = await hold(make_talks(shape, f"{leg.seed}{name}"), leg.route, shape.answer)
    tell(outcome.failures())
    return outcome


async def run_talks(leg: Leg, shape: Shape) -> Measures:
    async with engine_measures(leg.engines) as measures:
        outcome = await talk(leg, shape)
    return measures | outcome.measures() | {"tokens_per_s": measures["tokens"] / outcome.wall_s}


async def run_sessions(leg: Leg) -> Measures:
    return await run_talks(leg, leg.scaled(SESSIONS))


async def run_gpu(leg: Leg) -> Measures:
    return await run_talks(leg, leg.scaled(GPU))


async def run_pressed(leg: Leg) -> Measures:
    return await run_talks(leg, leg.scaled(PRESSED.filling(2 * len(leg.engines) * CACHE_TOKENS)))


async def run_hot(leg: Leg) -> Measures:
    return await run_talks(leg, leg.scaled(HOT))


async def run_agents(leg: Leg) -> Measures:
    """The same agents alone, then beside a flood."""
    shape = leg.scaled(AGENTS)
    alone = await talk(leg, shape, "/alone")
    async with flooding(leg, 64), engine_measures(leg.engines) as measures:
        flooded = await talk(leg, shape, "/flooded")
    measures |= flooded.measures() | {f"alone_{name}": value for name, value in alone.measures().items()}
    return measures | {"kept": flooded.cached_share / alone.cached_share if alone.cached_share else math.nan}


@contextlib.asynccontextmanager
async def flooding(leg: Leg, streams: int) -> AsyncIterator[None]:
    """A tenant keeps so many streams open while the block runs."""
    client = RoundRobin(leg.route.urls)
    clients = Clients(client, [keyed(HEAVY, leg.route, "heavy")] * streams)
    try:
        await asyncio.sleep(RAMP_S)
        yield
    finally:
        client.abandon(started=True)
        await clients.stop()
        client.close()


async def run_light(leg: Leg, streams: int | None = None) -> Measures:
    """A light tenant beside a flood, on time; a flood that is refused waits as long as it is told to, up to 5 s.

    Without a number, the flood has 64 streams for each engine: as many in all would not fill three of them.
    """
    requests = [keyed(HEAVY, leg.route, "heavy")] * (streams or 64 * len(leg.engines))
    async with engine_measures(leg.engines) as measures:
        got = await run_leg(leg.route, leg.all, requests, LIGHT_EVERY_S, leg.options.window_s)
    tell(got.failures)
    return measures | {
        "light_ttft_p50_s": report.median(got.light_ttft_s),
        "light_ttft_p95_s": report.quantile(got.light_ttft_s, 0.95),
        "tokens_per_s": got.tokens_per_s,
        "refused": got.refused,
        "failed": got.failed - got.refused,
    }


async def run_unlike(leg: Leg) -> Measures:
    return await run_light(leg, 100)


async def run_weights(leg: Leg) -> Measures:
    """Both flood with more than their share of all slots; service is counted by the clients, as in `bench.shares`.

    The first streams fill the engines before anybody waits, so both tenants have as many. The one that is due more is
    then served until it has caught up, which takes some 25 s: hence ramp and window.
    """
    routes = [replace(leg.route, url=url, others=()) for url in leg.route.urls]
    turns, window_s = count(), 3 * leg.options.window_s
    floods = {name: Tenant(routes, name, 1, 128, lambda: next(turns) % len(routes)) for name in WEIGHTS}
    try:
        await asyncio.sleep(2 * leg.options.window_s)
        before = {name: tenant.service() for name, tenant in floods.items()}
        await asyncio.sleep(window_s)
        got = {name: tenant.service() - before[name] for name, tenant in floods.items()}
    finally:
        await asyncio.gather(*(tenant.stop() for tenant in floods.values()))
    fair = WEIGHTS["heavy"] / WEIGHTS["light"]
    ratio = got["heavy"] / got["light"] if got["light"] else math.nan
    failed = sum(tenant.failed for tenant in floods.values())
    return {"ratio": ratio, "off": abs(ratio / fair - 1), "tokens_per_s": sum(got.values()) / window_s} | {
        "failed": failed
    }


@dataclass(frozen=True, slots=True)
class Case:
    """One load. `text` is for a reader of its table; `slots` of each engine, none for 32 of as many as are asked for.

    `profile`: of the engine that is simulated; none for real ones.
    """

    text: str
    run: Callable[[Leg], Awaitable[Measures]]
    columns: tuple[Column, ...]
    tenants: dict[str, float]
    slots: tuple[int, ...] = ()
    profile: str = ""


CACHED = Column("prompt cached", "cached", "{:.0%}")
TTFT = (Column("TTFT p50", "ttft_p50_s", "{:.2f} s"), Column("p95", "ttft_p95_s", "{:.2f} s"))
SKEW = (
    Column("requests, largest engine over mean", "requests_skew", "{:.2f}"),
    Column("running", "running_skew", "{:.2f}"),
)
ENDS = (
    Column("preemptions", "preemptions", "{:.0f}"),
    Column("refused", "refused", "{:.0f}"),
    Column("failed", "failed", "{:.0f}"),
)
TALKS = (
    CACHED,
    Column("by the engines", "engine_cached", "{:.0%}"),
    *TTFT,
    Column("wall time", "wall_s", "{:.1f} s"),
    *SKEW,
    *ENDS,
)
LIGHT = (
    Column("light TTFT p50", "light_ttft_p50_s", "{:.3f} s"),
    Column("p95", "light_ttft_p95_s", "{:.3f} s"),
    Column("p50 over direct", "light_ttft_p50_s", "{:.2f}", "direct"),
    Column("tokens/s", "tokens_per_s", "{:,.0f}"),
    Column("over nginx", "tokens_per_s", "{:.2f}", "nginx least_conn"),
    *SKEW,
    *ENDS,
)
CASES = {
    "sessions": Case(
        "Chats of three tenants, each tenant with a system prompt of its own, which all fit into the caches.",
        run_sessions, TALKS, tenants(SESSIONS),
    ),
    "gpu": Case(
        "More and longer chats of the same kind, before simulated H100s.",
        run_gpu, TALKS, tenants(GPU), profile="h100-llama3-8b",
    ),
    "pressed": Case(
        "The same with longer turns and so many chats that the caches hold half of what they say.",
        run_pressed, TALKS, tenants(PRESSED),
    ),
    "hot": Case(
        "Calls of one tenant without a history, half of which begin with the same 1,500 tokens.",
        run_hot, (*TALKS, Column("tokens/s", "tokens_per_s", "{:,.0f}")), tenants(HOT),
    ),
    "agents": Case(
        "Agents that use tools, first alone, then beside 64 streams of another tenant.",
        run_agents,
        (
            Column("prompt cached, alone", "alone_cached", "{:.0%}"), Column("flooded", "cached", "{:.0%}"),
            Column("flooded over alone", "kept", "{:.2f}"), Column("TTFT p50, alone", "alone_ttft_p50_s", "{:.2f} s"),
            Column("flooded", "ttft_p50_s", "{:.2f} s"), *SKEW, *ENDS,
        ),
        tenants(AGENTS) | {"heavy": 1.0},
    ),
    "light": Case(
        "64 streams of one tenant for each engine, and a short request of another one every 0.5 s.",
        run_light, LIGHT, FLOOD,
    ),
    "weights": Case(
        "Two tenants with weights 4:1 and 128 streams each.",
        run_weights,
        (
            Column("service, heavy over light", "ratio", "{:.2f}"), Column("off 4:1", "off", "{:.1%}"),
            Column("service/s", "tokens_per_s", "{:,.0f}"), Column("failed", "failed", "{:.0f}"),
        ),
        WEIGHTS,
    ),
    "unlike": Case(
        "Two engines with 32 and 6 sequences at once, which nobody is told; 100 streams of one tenant, and a short "
        "request of another one every 0.5 s.",
        run_unlike, LIGHT, FLOOD, (32, 6),
    ),
}  # fmt: skip


def locality_table(result: dict[str, Any]) -> str:
    columns = CASES[result["case"]].columns
    rows = [
        [way, *(column.cell(column.values(result["rounds"], way)) for column in columns)] for way in result["routes"]
    ]
    return report.table(["way", *(column.head for column in columns)], rows)


def engine_flags(slots: int) -> list[str]:
    # One block of them holds nothing.
    blocks = CACHE_TOKENS // BLOCK_TOKENS + 1
    return ["--enable-prefix-caching", "--num-gpu-blocks-override", str(blocks), "--max-num-seqs", str(slots)]


async def warm_up(route: Route, case: Case) -> None:
    """A few requests for what every process does only once."""
    client = RoundRobin(route.urls)
    names = [*case.tenants] * WARM_UPS
    await asyncio.gather(*(client.send(keyed(WARM_UP, route, name)) for name in names[:WARM_UPS]))
    client.close()


async def run_way(name: str, case: Case, members: Sequence[Engine], seed: str, options: Options) -> Measures | None:
    """One way in one round; None if it cannot be had or takes too long, and it is said."""
    try:
        await Engines(members).wait_idle()
        async with asyncio.timeout(LEG_LIMIT_S), open_way(name, members, case.tenants) as route:
            await warm_up(route, case)
            await Engines(members).wait_idle()
            return await case.run(Leg(route, members, f"{seed}/{name.replace(' ', '-')}", options))
    except TimeoutError:
        print(f"  {name} is left out of this round: it took more than {LEG_LIMIT_S:.0f} s", flush=True)
    except BenchError as error:
        print(f"  {name} is left out of this round: {error}", flush=True)
    return None


@contextlib.asynccontextmanager
async def opened(case: Case, slots: Sequence[int]) -> AsyncIterator[list[Engine]]:
    """The engines of this case, one for each of `slots`."""
    if not case.profile:
        async with engines([engine_flags(each) for each in slots], OTHER_CORE) as members:
            yield members
        return
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(simulated(case.profile)) for _ in slots]


async def run(arguments: argparse.Namespace) -> None:
    case = CASES[arguments.case]
    options = Options(0.5, 8.0) if arguments.quick else Options(1.0, arguments.window)
    ways = chosen(arguments.routes, arguments.policies)
    slots = case.slots or (32,) * arguments.engines
    result: dict[str, Any] = {"case": arguments.case, "slots": slots, "options": asdict(options), "routes": ways}
    rounds: list[dict[str, Measures]] = []
    async with opened(case, slots) as members:
        for turn in range(1 if arguments.quick else arguments.rounds):
            rounds.append({})
            for name in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                measures = await run_way(name, case, members, f"{arguments.case}/{turn}", options)
                if measures is None:
                    continue
                rounds[-1][name] = measures
                cells = [f"{column.head} {column.cell(column.values(rounds[-1:], name))}" for column in case.columns]
                print(f"  round {turn + 1} {name}: {', '.join(cells)}", flush=True)
            report.save(f"locality-{arguments.case}", result | {"rounds": rounds})
    print(f"\n{case.text}\n\n{locality_table(result | {'rounds': rounds})}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="several engines: cached prefixes, balance and fairness")
    names = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--routes", type=names, default=list(WAYS), help=", ".join(WAYS))
    parser.add_argument("--policies", type=names, default=[], help="of fairgate and replicas; default: the gateway's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--window", type=float, default=20.0, help="seconds measured in light and unlike; in weights thrice"
    )
    parser.add_argument("--quick", action="store_true", help="one round of half the load")
    run_bench("bench.locality", run(parser.parse_args()))


if __name__ == "__main__":
    main()
