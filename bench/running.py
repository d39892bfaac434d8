"""What one event costs with real ledgers: engines that run many requests and are short of KV.

    python -m bench.running [--rows 1x64,1x256,1x1024,64x256] [--steps 200] [--queued 1000] [--policy vtc]

CPU time of this process per event, the median over the steps of an engine; no engine, no network. A row is the number
of engines and how many requests each can run at once by its KV: 586 tokens for each, as one H100 of 600,000 tokens has
for 1,024. Time is virtual: in each step of 25 ms every running request gets a token. Three tenants keep a queue in
front of the engines. The events of a step:

    chunk        one token of one request is counted, charged and settled with its ledger
    end          a request is complete, and the next ones are looked for
    first token  the first token of a request was seen
    arrival      another request is queued
    page         an engine was scraped
    wake         10 ms have passed
"""

import argparse
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from bench import report
from policies.admission.decisions import Dispatch
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import Gauges
from policies.orders.policy_entries import POLICIES
from policies.queue.bounds import QueueLimits
from policies.request import Flow, Request, ServiceTokens

STEP_S = 0.025
TOKENS_EACH = 586
SLOTS = 1.1
"""Slots of an engine, for each request that fits into its KV."""
PROMPT_TOKENS = (50, 650)
OUTPUT_TOKENS = 300
"""Mean of lengths that are exponentially distributed."""
OUTPUT_TOKENS_MAX = 2000
TENANTS = 3
FIRST_TOKEN_STEPS = 2
PAGE_STEPS = 4
EVENTS = ("chunk", "end", "first token", "arrival", "page", "wake")


@dataclass(frozen=True)
class Row:
    engines: int
    running: int
    steps: int
    queued: int
    policy: str


class Running:
    """A request that an engine runs, and the tokens that it will still give."""

    def __init__(self, request: Request, backend: str, tokens: int) -> None:
        self.request, self.backend, self.tokens, self.done = request, backend, tokens, 0
        self.starts_in = FIRST_TOKEN_STEPS


class Stopwatch:
    """CPU time of each kind of event, group by group."""

    def __init__(self) -> None:
        self.groups: dict[str, list[float]] = {}

    def time(self, step: str, call: Callable[[Any], object], items: Iterable[Any]) -> None:
        begun_ns = time.process_time_ns()
        count = 0
        for item in items:
            call(item)
            count += 1
        if count:
            self.groups.setdefault(step, []).append((time.process_time_ns() - begun_ns) / 1e3 / count)

    def medians_us(self) -> dict[str, float]:
        return {step: report.median(groups) for step, groups in self.groups.items()}


class World:
    """An admission engine, and engines that are as simple as can be."""

    def __init__(self, row: Row) -> None:
        self.row, self.rng, self.watch, self.now, self.made = row, random.Random(1), Stopwatch(), 0.0, 0
        limits = QueueLimits(queue_requests_max=100_000, queue_wait_s_max=1e6)
        self.engine = AdmissionEngine(named_policy(row.policy), limits=limits)
        self.fills: list[float] = []
        """Part of all KV that was in use, at each step."""
        self.requests: dict[str, Request] = {}
        self.running: dict[str, Running] = {}
        self.names = [f"b{number}" for number in range(row.engines)]
        for name in self.names:
            self.engine.add_backend(name, max_num_seqs=round(SLOTS * row.running))
        for name in self.names:
            self.page(name)

    def noted(self, decisions: Iterable[Any]) -> None:
        for decision in decisions:
            assert isinstance(decision, Dispatch), decision
            tokens = min(OUTPUT_TOKENS_MAX, 1 + int(self.rng.expovariate(1 / OUTPUT_TOKENS)))
            self.running[decision.id] = Running(self.requests.pop(decision.id), decision.backend, tokens)

    def request(self) -> Request:
        self.made += 1
        flow = Flow(f"tenant-{self.made % TENANTS}", "app", f"user-{self.made % 100}")
        request = Request(
            f"req_{self.made:013x}", flow, 1.0, self.rng.randrange(*PROMPT_TOKENS), OUTPUT_TOKENS_MAX, self.now
        )
        self.requests[request.id] = request
        return request

    # --- events ---

    def chunk(self, one: Running) -> None:
        one.done += 1
        self.noted(self.engine.progressed(one.request.id, 1, self.now))

    def first_token(self, one: Running) -> None:
        self.now += 1e-6
        one.done = 1
        self.noted(self.engine.progressed(one.request.id, 1, self.now))

    def end(self, one: Running) -> None:
        self.now += 1e-6
        del self.running[one.request.id]
        self.noted(self.engine.finished(one.request.id, ServiceTokens(one.request.prompt_tokens, one.done), self.now))

    def arrival(self, request: Request) -> None:
        self.now += 1e-6
        self.noted(self.engine.arrived(request, self.now))

    def page(self, name: str) -> None:
        held = sum([one.request.prompt_tokens + one.done for one in self.running.values() if one.backend == name])
        self.paged((name, held))

    def paged(self, page: tuple[str, int]) -> None:
        name, held = page
        capacity, running = TOKENS_EACH * self.row.running, len(self.running)
        gauges = Gauges(
            self.now, running=running, waiting=0, kv_usage=held / capacity, kv_capacity_tokens=capacity, block_size=16
        )
        self.noted(self.engine.backend_changed(name, gauges, self.now))

    def wake(self, _: None) -> None:
        self.now += 1e-6
        self.noted(self.engine.woke(self.now))

    def step(self, number: int) -> None:
        """Run one step of every engine. The time within it is shorter than that after which tokens are charged."""
        self.now = number * STEP_S
        time, everybody = self.watch.time, list(self.running.values())
        streams = [one for one in everybody if one.starts_in <= 0]
        starts = [one for one in everybody if one.starts_in == 1]
        for one in everybody:
            one.starts_in -= 1
        time("chunk", self.chunk, streams)
        time("charging", lambda _: self.engine.catch_up(self.now), [None])
        time("end", self.end, [one for one in streams if one.done >= one.tokens])
        time("first token", self.first_token, starts)
        time("arrival", self.arrival, [self.request() for _ in range(self.row.queued - self.engine.queued)])
        if number % PAGE_STEPS == 0:
            held = dict.fromkeys(self.names, 0)
            for one in self.running.values():
                held[one.backend] += one.request.prompt_tokens + one.done
            time("page", self.paged, held.items())
        time("wake", self.wake, [None])
        held_tokens = sum([one.request.prompt_tokens + one.done for one in self.running.values()])
        self.fills.append(held_tokens / (TOKENS_EACH * self.row.running * self.row.engines))
        if streams:
            groups = self.watch.groups
            groups["chunk"][-1] += groups["charging"][-1] / len(streams)


def measure(row: Row) -> dict[str, float]:
    """Microseconds of CPU by event, and how many requests ran at each engine."""
    world = World(row)
    warm = 2 * OUTPUT_TOKENS
    for number in range(1, warm):
        world.step(number)
    world.watch.groups.clear()
    world.fills.clear()
    for number in range(warm, warm + row.steps):
        world.step(number)
    return {**world.watch.medians_us(), "running": len(world.running) / row.engines, "kv": report.median(world.fills)}


def running_table(rows: list[dict[str, Any]]) -> str:
    heads = ["engines", "running at each", "KV in use", *(f"{event}, us" for event in EVENTS)]
    cells = [
        [
            str(row["engines"]),
            f"{row['us']['running']:.0f}",
            f"{row['us']['kv']:.3f}",
            *(f"{row['us'].get(event, 0):.1f}" for event in EVENTS),
        ]
        for row in rows
    ]
    return report.table(heads, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1x64,1x256,1x1024,64x256", help="engines x requests that fit into each")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--queued", type=int, default=1000)
    parser.add_argument("--policy", default="vtc", choices=list(POLICIES))
    options = parser.parse_args()
    rows = []
    spawned = multiprocessing.get_context("spawn")
    for text in options.rows.split(","):
        engines, _, running = text.partition("x")
        if not (engines.isdecimal() and running.isdecimal() and int(engines) and int(running)):
            parser.error(f"--rows: {text} is not ENGINESxRUNNING")
        row = Row(int(engines), int(running), options.steps, options.queued, options.policy)
        with ProcessPoolExecutor(1, mp_context=spawned) as fresh:
            rows.append({"engines": row.engines, "us": fresh.submit(measure, row).result()})
        print(f"{text}: {rows[-1]['us']}", file=sys.stderr, flush=True)
    report.save("running", {**vars(options), "rows": rows})
    print(running_table(rows))


if __name__ == "__main__":
    main()
