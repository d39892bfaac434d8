"""What one decision costs, with a long queue of many flows.

    python -m bench.scheduler [--policies vtc,fcfs] [--flows 10000] [--requests 1000000] [--cycles 20000] [--engines 1]

CPU time of this process, the median over groups of 100 requests; no engine, no network. A request is decided (`pop` and
the charge at dispatch), charged twice as it streams, settled at its end, and another one of its flow is pushed, so that
the queue keeps its length. The last columns are the whole `AdmissionEngine` around it: arrived, dispatched, progressed
twice, finished; `idle` with nothing queued before it; `woke` is a wake after 20 ms in which nothing has happened, while
every engine is full (`--engines 300 --flows 1000 --requests 1000`). Every policy has a process of its own, whose memory
is shown.
"""

import argparse
import multiprocessing
import random
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from bench import report
from policies.admission.decisions import Dispatch
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.capacity.gauges import CapacitySettings
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Blocked, Obstacle
from policies.orders.order import Selection
from policies.orders.policy_entries import POLICIES
from policies.placements.placement import EngineLoad
from policies.queue.bounds import QueueLimits
from policies.request import Flow, Request, ServiceTokens

GROUP = 100
"""Requests timed together, and dispatched at once."""
WAKES = 500
SHAPES = {"tenants": 1, "users": 100}
"""Flows per tenant: each flow a tenant of its own, or a hundred users in each tenant."""
OUTPUT_TOKENS = (10, 20)
PREFIX_BLOCKS = 8
"""Of a prompt, where there are several engines."""
SLOTS = 16
"""Of each of several engines: all are full while requests wait."""


@dataclass(frozen=True)
class Load:
    policy: str
    shape: str
    flows: int
    requests: int
    cycles: int
    engines: int = 1


class Anywhere:
    """A cluster in which everything fits."""

    engines = (BackendLedger("b", CapacitySettings()),)

    def with_room(self, request: Request) -> Sequence[EngineLoad] | Blocked:
        return self.engines

    def obstacle_at(self, request: Request, engine: str) -> Obstacle | None:
        return None

    def reserve(self, blocked: Blocked) -> str | None:
        return None

    def loads(self) -> dict[str, int]:
        return {"b": 0}


class Stopwatch:
    """CPU time per request of each step, group by group."""

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


class Source:
    """Requests of every flow in turn, of random length."""

    def __init__(self, load: Load) -> None:
        per_tenant = SHAPES[load.shape]
        self.flows = [Flow(f"tenant-{n // per_tenant}", "app", f"user-{n % per_tenant}") for n in range(load.flows)]
        self.rng = random.Random(1)
        self.made = 0
        self.has_prefixes = load.engines > 1

    def request(self, flow: Flow | None = None) -> Request:
        flow = flow if flow is not None else self.flows[self.made % len(self.flows)]
        self.made += 1
        return Request(
            f"req_{self.made:013x}", flow, 1.0, self.rng.randrange(1, 2000), 500, 0.0, prefix=self._prefix(flow)
        )

    def _prefix(self, flow: Flow) -> tuple[int, ...]:
        """A conversation of the flow, with another question at its end."""
        if not self.has_prefixes:
            return ()
        talk = hash(flow) ^ self.rng.randrange(4)
        return (*[talk + block for block in range(PREFIX_BLOCKS - 1)], self.made)


def policy_of(load: Load) -> Policy:
    settings = {"requests_per_minute": 100_000} if load.policy == "rpm" else {}
    return named_policy(load.policy, flows_max=2 * load.flows, **settings)


def measure_policy(load: Load) -> dict[str, float]:
    """Microseconds of CPU per request and step, on the policy alone."""
    policy, source, watch, anywhere = policy_of(load), Source(load), Stopwatch(), Anywhere()
    for _ in range(load.requests):
        policy.push(source.request(), 0.0)
    started: list[Request] = []

    def decide(_: int) -> None:
        selection = policy.pop(0.0, anywhere)
        assert isinstance(selection, Selection)
        policy.charge(selection.request, ServiceTokens(selection.request.prompt_tokens, 0), 0.0, final=False)
        started.append(selection.request)

    def stream(request: Request) -> None:
        policy.charge(request, ServiceTokens(request.prompt_tokens, OUTPUT_TOKENS[0]), 0.0, final=False)

    def settle(request: Request) -> None:
        policy.charge(request, ServiceTokens(request.prompt_tokens, OUTPUT_TOKENS[1]), 0.0, final=True)

    for _ in range(load.cycles // GROUP):
        watch.time("pop + charge", decide, range(GROUP))
        watch.time("charge", stream, started)
        watch.time("charge, final", settle, started)
        watch.time("push", lambda request: policy.push(request, 0.0), [source.request(one.flow) for one in started])
        started.clear()
    return watch.medians_us()


def measure_engine(load: Load, *, queued: int, wakes: int = 0) -> float:
    """Microseconds of CPU per request in the whole engine, with so many queued; or of so many wakes instead."""
    limits = QueueLimits(queue_requests_max=2 * load.requests, queue_wait_s_max=1e6)
    engine, source, watch, now = AdmissionEngine(policy_of(load), limits=limits), Source(load), Stopwatch(), 0.0
    for number in range(load.engines):
        engine.add_backend(f"b{number}", max_num_seqs=(1 if load.engines == 1 else SLOTS) if queued else 1000)
    running: deque[str] = deque()

    def noted(decisions: Iterable[Any]) -> None:
        running.extend(decision.id for decision in decisions if isinstance(decision, Dispatch))

    for _ in range(queued and queued + 2 * SLOTS * load.engines):
        before = len(running)
        noted(engine.arrived(source.request(), now))
        while before < len(running):  # it starts at once, and may make room for the next
            noted(engine.progressed(running[before], 1, now))
            before += 1

    def woke(_: int) -> None:
        nonlocal now
        now += 0.02
        noted(engine.woke(now))

    for _ in range(wakes // GROUP):
        watch.time("whole", woke, range(GROUP))

    def live(request: Request) -> None:
        nonlocal now
        now += 1e-4
        noted(engine.arrived(request, now))
        oldest = running.popleft()
        noted(engine.progressed(oldest, 1, now))
        noted(engine.progressed(oldest, 10, now))
        noted(engine.finished(oldest, ServiceTokens(request.prompt_tokens, 20), now))

    for _ in range(0 if wakes else load.cycles // GROUP):
        watch.time("whole", live, [source.request() for _ in range(GROUP)])
    return watch.medians_us()["whole"]


def measure(load: Load) -> dict[str, float]:
    """Every column of one row; to be called in a process of its own."""
    steps = measure_policy(load)
    steps["engine"] = measure_engine(load, queued=load.requests)
    steps["engine, idle"] = measure_engine(load, queued=0)
    steps["woke"] = measure_engine(load, queued=min(load.requests, WAKES), wakes=WAKES)
    steps["memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return steps


def scheduler_table(rows: list[dict[str, Any]]) -> str:
    steps = [step for step in rows[0]["us"] if step != "memory_gb"]
    heads = ["policy", "flows", *(f"{step}, us" for step in steps), "memory, GB"]
    cells = [
        [row["policy"], row["shape"], *(f"{row['us'][step]:.1f}" for step in steps), f"{row['us']['memory_gb']:.1f}"]
        for row in rows
    ]
    return report.table(heads, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--flows", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--cycles", type=int, default=20_000)
    parser.add_argument("--engines", type=int, default=1, help="several: placed by cached prefix; engine columns only")
    options = parser.parse_args()
    names, shapes = options.policies.split(","), options.shapes.split(",")
    if unknown := sorted({*names} - {*POLICIES} | {*shapes} - {*SHAPES}):
        parser.error(f"unknown: {', '.join(unknown)}; policies: {', '.join(POLICIES)}; shapes: {', '.join(SHAPES)}")
    if min(options.flows, options.requests) < 1 or options.cycles < GROUP:
        parser.error(f"--flows and --requests must be at least 1, --cycles at least {GROUP}")
    rows = []
    spawned = multiprocessing.get_context("spawn")
    for name in names:
        for shape in shapes:
            load = Load(name, shape, options.flows, options.requests, options.cycles, options.engines)
            with ProcessPoolExecutor(1, mp_context=spawned) as fresh:
                rows.append({"policy": name, "shape": shape, "us": fresh.submit(measure, load).result()})
            print(f"{name}, {shape}: {rows[-1]['us']}", file=sys.stderr, flush=True)
    report.save("scheduler", {**vars(options), "rows": rows})
    print(scheduler_table(rows))


if __name__ == "__main__":
    main()
