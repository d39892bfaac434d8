"""How full is an engine kept, and at what price? The production engine against sending everything straight to vLLM.

    python -m lab.pressure [--figures docs/figures]

Closed-loop clients flood one simulated vLLM, and a light tenant sends a short request every 0.4 s. The gateway hears of
the engine by a page of metrics ten times a second, or after each step. Nothing is drawn but lengths, from a fixed seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import NamedTuple

from backends.simulated.engine_model import EngineModel, Step
from backends.simulated.engine_profiles import EngineProfile, profile
from lab.lab_driver import simulate
from lab.plots import Series, chart
from lab.simulation_result import SimulationResult
from policies.admission.decisions import Decision, Dispatch
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import CapacitySettings
from policies.queue.bounds import QueueLimits
from policies.request import Flow, Request, ServiceTokens
from simulation.run import Arrival, Record

BACKEND = "engine"
RAMP_S = 5.0
LIGHT = Flow("light")
ANSWER_MAX = 800
"""Most that a client of answers of unlike length lets one take."""


@dataclass(frozen=True, slots=True)
class Case:
    """So many clients of so many tenants, each of whose requests has one of these lengths (prompt and answer).

    `light_every_s`: 0 for no light tenant. `requests_max`: ends after so many requests instead of after a time.
    `slots_known`: the gateway's config says how many sequences the engine runs.
    """

    engine: EngineProfile
    clients: int
    lengths: Sequence[tuple[int, int]]
    tenants: int = 1
    light_every_s: float = 0.4
    window_s: float = 20.0
    requests_max: int | None = None
    policy: str = "fairserve"
    slots_known: bool = True


class Pressed(NamedTuple):
    """Measurements of a route in the window: means over the engine's steps, and times that the light tenant sees."""

    fill: float
    running: float
    preemptions: float
    """Per thousand requests."""
    tokens_per_s: float
    light_p50_s: float
    light_p99_s: float
    waiting_max: int
    """Most that waited inside the engine."""


class _Step(NamedTuple):
    """When did a step begin, how long did it take, and what did it leave behind?"""

    began_s: float
    duration_s: float
    kv_usage: float
    running: int
    waiting: int


class Watched(EngineModel):
    """An engine whose steps are noted."""

    def __init__(self, engine_profile: EngineProfile) -> None:
        super().__init__(engine_profile)
        self.steps: list[_Step] = []

    def step(self, now: float) -> Step:
        step, after = super().step(now), self.gauges()
        self.steps.append(_Step(now, step.duration_s, after.kv_usage, after.running, after.waiting))
        return step


class Direct(AdmissionEngine):
    """No gateway: whatever comes is sent on at once."""

    def __init__(self) -> None:
        super().__init__(named_policy("fcfs"))
        self.add_backend(BACKEND)

    def arrived(self, request: Request, now: float) -> Sequence[Decision]:
        return (Dispatch(request.id, BACKEND),)

    def progressed(self, request_id: str, output_tokens: int, now: float) -> Sequence[Decision]:
        return ()

    def finished(
        self, request_id: str, service: ServiceTokens, now: float, awaits_more: bool | None = None
    ) -> Sequence[Decision]:
        return ()

    def next_wakeup(self) -> float | None:
        return None


def gateway(case: Case, capacity: CapacitySettings | None = None) -> AdmissionEngine:
    """The production engine in front of the case's."""
    limits = QueueLimits(queue_requests_max=1_000_000, queue_wait_s_max=1e6)
    engine = AdmissionEngine(named_policy(case.policy), limits=limits, capacity=capacity)
    engine.add_backend(BACKEND, max_num_seqs=case.engine.max_num_seqs if case.slots_known else None)
    return engine


class _Clients:
    """Closed-loop clients: each sends its next request half a millisecond after the last answer."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._random = Random(7)
        self._sent = 0
        self.ends_s = RAMP_S + case.window_s if case.requests_max is None else float("inf")

    def arrivals(self) -> list[Arrival]:
        case = self._case
        heavy = [self._request(client, client * 1e-5) for client in range(case.clients)]
        count = int(case.window_s / case.light_every_s) if case.light_every_s else 0
        light = [
            Arrival(f"light-{number}", LIGHT, RAMP_S + number * case.light_every_s, 30, 20, output_tokens_max=20)
            for number in range(count)
        ]
        return sorted([*heavy, *light], key=lambda one: one.arrived_s)

    def following(self, record: Record, now: float) -> Arrival | None:
        most = self._case.requests_max
        if record.arrival.flow == LIGHT or now > self.ends_s or (most is not None and self._sent >= most):
            return None
        return self._request(int(record.arrival.id.partition("-")[0]), now + 0.0005)

    def _request(self, client: int, now: float) -> Arrival:
        self._sent += 1
        lengths = self._case.lengths
        prompt, output = self._random.choice(lengths)
        flow = Flow(f"heavy-{client % self._case.tenants}")
        most = output if len(lengths) == 1 else max(output, ANSWER_MAX)
        return Arrival(f"{client}-{self._sent}", flow, now, prompt, output, output_tokens_max=most)


def press(case: Case, engine: AdmissionEngine, *, steps: bool = False, network_s: float = 0.001) -> Pressed:
    """Run the case on this route; `steps`: the gateway hears of every step."""
    model, clients = Watched(case.engine), _Clients(case)
    run = simulate(
        clients.arrivals(), engine=engine, backends={BACKEND: model}, next_arrival=clients.following, steps=steps,
        network_s=network_s,
    )  # fmt: skip
    begins_s = RAMP_S if case.requests_max is None else 0.0
    return _pressed(run, model.steps, begins_s, min(clients.ends_s, run.ended_s))


def _pressed(run: SimulationResult, steps: list[_Step], begins_s: float, ends_s: float) -> Pressed:
    inside = [step for step in steps if begins_s <= step.began_s < ends_s]
    busy_s = sum(step.duration_s for step in inside)
    records = list(run.records.values())
    light = sorted(record.ttft_s or 0.0 for record in records if record.arrival.flow == LIGHT) or [0.0]
    tokens = sum(begins_s <= at_s <= ends_s for record in records for at_s in record.token_s)
    first = [record for record in records if record.token_s and begins_s <= record.token_s[0] <= ends_s]
    tokens += sum(record.arrival.prompt_tokens for record in first)
    return Pressed(
        fill=sum(step.duration_s * step.kv_usage for step in inside) / busy_s,
        running=sum(step.duration_s * step.running for step in inside) / busy_s,
        preemptions=1000 * sum(record.preemptions for record in records) / len(records),
        tokens_per_s=tokens / (ends_s - begins_s),
        light_p50_s=light[len(light) // 2],
        light_p99_s=light[int(len(light) * 0.99)],
        waiting_max=max(step.waiting for step in inside),
    )


def _unlike() -> list[tuple[int, int]]:
    """Prompts and answers whose lengths are spread like those of chats: most are short, some are long."""
    random = Random(11)
    draw = [(random.expovariate(1 / 200), random.expovariate(1 / 180)) for _ in range(500)]
    return [(20 + min(1500, int(prompt)), 10 + min(ANSWER_MAX - 10, int(output))) for prompt, output in draw]


TINY = profile("tiny-cpu")
CASES = {
    "flood of 64, answers of 200": Case(TINY, 64, [(300, 200)]),
    "flood of 200, answers of 200": Case(TINY, 200, [(300, 200)]),
    "flood of 64, unlike answers": Case(TINY, 64, _unlike()),
    "6 slots, not configured": Case(replace(TINY, max_num_seqs=6), 64, [(300, 200)], slots_known=False),
    "nobody else, 200 in, 100 out, 64 at once": Case(
        TINY, 64, [(200, 100)], light_every_s=0.0, requests_max=512, policy="vtc"
    ),
}
FRONTIER = "flood of 64, unlike answers"
CEILINGS = (0.88, 0.92, 0.96, 0.98, 1.0)


def _row(name: str, route: str, found: Pressed, direct: Pressed) -> str:
    return (
        f"| {name} | {route} | {found.fill:.2f} | {found.fill / direct.fill:.2f} | {found.preemptions:.0f} | "
        f"{found.tokens_per_s / direct.tokens_per_s:.2f} | {1000 * found.light_p50_s:.0f} / "
        f"{1000 * found.light_p99_s:.0f} ms | {found.waiting_max} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="how full an engine is kept, and at what price")
    parser.add_argument("--figures", type=Path, help="where the frontier is drawn")
    options = parser.parse_args()
    print("| load | route | KV fill | over direct | preempted of 1,000 | tokens/s over direct | light TTFT | waiting |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, case in CASES.items():
        direct = press(case, Direct())
        print(_row(name, "direct", direct, direct))
        for route in ("pages", "steps"):
            print(_row(name, route, press(case, gateway(case), steps=route == "steps"), direct), flush=True)
    if options.figures is None:
        return
    case, series = CASES[FRONTIER], []
    direct = press(case, Direct())
    for route in ("pages", "steps"):
        found = []
        for ceiling in CEILINGS:
            pressed = press(case, gateway(case, CapacitySettings(kv_ceiling=ceiling)), steps=route == "steps")
            print(_row(f"ceiling {ceiling}", route, pressed, direct), flush=True)
            found.append(pressed)
        points = sorted((pressed.preemptions, pressed.fill) for pressed in found)
        series.append(Series(f"on {route}", points, dots=True))
    series.append(Series("direct", [(direct.preemptions, direct.fill)], dots=True))
    title = "KV fill against preemptions, ceilings 0.88 to 1 (64 clients, unlike answers)"
    figure = chart(series, title, "preemptions per 1,000 requests", "mean KV fill")
    (options.figures / "pressure-frontier.svg").write_text(figure)


if __name__ == "__main__":
    main()
