"""Streams that run, beside long prompts that end with one token: a real vLLM alone, and behind fairgate.

    python -m bench.prefill_flood [--streams 12] [--flood 24] [--rounds 3] [--window 10]

An honest tenant keeps 12 streams open (30 words in, 400 tokens out) and has nothing that waits. A flood sends prompts
of 2,100 words with one output token into the slots that are left. Each round has a window of the streams alone and one
beside the flood, on each route, in rotating order: `direct`, `without` and `with` the setting `prefill_parts`. Output
is the engine's counter, less one token for each answer of the flood.
"""

import argparse
import asyncio
from dataclasses import dataclass

from bench import report
from bench.flood import RAMP_S, Clients, keyed
from bench.load import Client, Request
from bench.stack import OUTPUT, PROMPT, Engine, Route, engine, fairgate, routes_to, run_bench

STREAM = Request(words_in=30, tokens_out=400)
PROMPTS = Request(words_in=2100, tokens_out=1)
FLAGS = ("--num-gpu-blocks-override", "2049")
"""65,000 tokens of KV: slots and prefill are scarce here, not the cache."""
HEADS = ["route", "streams alone, tokens/s", "beside the flood", "of alone", "prompt tokens/s of the flood", "failed"]


@dataclass(slots=True)
class Leg:
    """Measurements of the engine in one window."""

    output_per_s: float
    prompt_per_s: float
    failed: int


async def run_leg(route: Route, target: Engine, streams: int, flood: int, window_s: float) -> Leg:
    """Return what the engine did for these clients."""
    await target.wait_idle()
    honest, other = Client(route.url), Client(route.url)
    loads = [
        Clients(honest, [keyed(STREAM, route, "heavy")] * streams),
        Clients(other, [keyed(PROMPTS, route, "light")] * flood),
    ]
    try:
        await asyncio.sleep(RAMP_S)
        before, done = await target.gauges(PROMPT, OUTPUT), loads[1].completed
        begin_s = asyncio.get_running_loop().time()
        await asyncio.sleep(window_s)
        after, ended = await target.gauges(PROMPT, OUTPUT), loads[1].completed
        spent_s = asyncio.get_running_loop().time() - begin_s
    finally:
        for load in reversed(loads):
            if load.tasks:
                await load.stop()
        honest.close()
        other.close()
    return Leg(
        (after[OUTPUT] - before[OUTPUT] - (ended - done)) / spent_s,
        (after[PROMPT] - before[PROMPT]) / spent_s,
        sum(len(load.failures) for load in loads),
    )


async def run(options: argparse.Namespace) -> None:
    async with engine(None, FLAGS) as target:
        gateways = {
            name: fairgate(target.url, {"heavy": 1, "light": 1}, policy={"name": "fairserve", "prefill_parts": is_on})
            for name, is_on in (("without", False), ("with", True))
        }
        async with routes_to(target, ["direct", *gateways], gateways) as routes:
            legs: dict[str, list[tuple[Leg, Leg]]] = {route.name: [] for route in routes}
            for turn in range(options.rounds + 1):
                window_s = options.window if turn else 1.0  # the first requests pay for lazy set-up
                for route in routes[turn % 3 :] + routes[: turn % 3]:
                    alone = await run_leg(route, target, options.streams, 0, window_s)
                    beside = await run_leg(route, target, options.streams, options.flood, window_s)
                    if turn:
                        legs[route.name].append((alone, beside))
                        print(f"  round {turn} {route.name}: alone {alone}, beside {beside}", flush=True)
    print(f"\n{report.table(HEADS, [row(name, pairs) for name, pairs in legs.items()])}\n")


def row(name: str, pairs: list[tuple[Leg, Leg]]) -> list[str]:
    """Return the medians of one route's rounds."""
    alone_s, beside_s, ratio, prompts = (
        report.median(each)
        for each in (
            [alone.output_per_s for alone, _ in pairs],
            [beside.output_per_s for _, beside in pairs],
            [beside.output_per_s / alone.output_per_s for alone, beside in pairs],
            [beside.prompt_per_s for _, beside in pairs],
        )
    )
    failed = sum(alone.failed + beside.failed for alone, beside in pairs)
    return [name, f"{alone_s:,.0f}", f"{beside_s:,.0f}", f"{ratio:.2f}", f"{prompts:,.0f}", str(failed)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--flood", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=10.0)
    run_bench("prefill_flood", run(parser.parse_args()))


if __name__ == "__main__":
    main()
