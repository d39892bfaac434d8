"""How full is an engine kept, and at what price? The production engine against sending everything straight to vLLM.

Closed-loop clients flood one simulated vLLM, and a light tenant sends a short request now and then. The gateway hears
of the engine by a page of metrics ten times a second, or after each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from backends.simulated.engine import EngineModel, Step
from backends.simulated.profiles import EngineProfile, profile
from policies.admission.decisions import Decision, Dispatch
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import CapacitySettings
from policies.queue.bounds import QueueLimits
from policies.request import Flow, Request, ServiceTokens
from simulation.driver import simulate
from simulation.run import Arrival, Record

BACKEND = "engine"
RAMP_S = 5.0
LIGHT = Flow("light")


@dataclass(frozen=True, slots=True)
class Case:
    """So many clients, each of whose requests has one of these lengths, in tokens; requests_max: of all of them."""

    name: str
    engine: EngineProfile
    clients: int
    lengths: Sequence[tuple[int, int]]
    tenants: int = 1
    light_every_s: float = 0.4
    window_s: float = 20.0
    requests_max: int | None = None
    policy: str = "fairserve"
    slots_known: bool = True
    seed: int = 7


@dataclass(frozen=True, slots=True)
class Pressed:
    """What one route did within the window."""

    fill: float
    running: float
    preemptions: float
    """Per thousand requests."""
    tokens_per_s: float
    light_p50_s: float
    light_p99_s: float
    waiting_mean: float
    waiting_max: int
    requests: int


class Watched(EngineModel):
    """An engine whose steps are noted: when each began, how long it took, and what it left behind."""

    def __init__(self, engine_profile: EngineProfile) -> None:
        super().__init__(engine_profile)
        self.steps: list[tuple[float, float, float, int, int]] = []

    def step(self, now: float) -> Step:
        step = super().step(now)
        after = self.gauges()
        self.steps.append((now, step.duration_s, after.kv_usage, after.running, after.waiting))
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
    limits = QueueLimits(requests_max=1_000_000, wait_s_max=1e6)
    engine = AdmissionEngine(named_policy(case.policy), limits=limits, capacity=capacity)
    engine.add_backend(BACKEND, max_num_seqs=case.engine.max_num_seqs if case.slots_known else None)
    return engine


def press(case: Case, engine: AdmissionEngine, *, steps: bool = False, network_s: float = 0.001) -> Pressed:
    """Run the case on this route; `steps`: the gateway hears of every step."""
    random, model = Random(case.seed), Watched(case.engine)
    ends_s = RAMP_S + case.window_s if case.requests_max is None else float("inf")
    sent = 0

    def request(client: int, now: float) -> Arrival:
        nonlocal sent
        sent += 1
        prompt, output = random.choice(case.lengths)
        flow = Flow(f"heavy-{client % case.tenants}")
        return Arrival(
            f"{client}-{sent}",
            flow,
            now,
            prompt,
            output,
            output_tokens_max=max(output, 1024) if len(case.lengths) > 1 else output,
        )

    def following(record: Record, now: float) -> Arrival | None:
        if (
            record.arrival.flow == LIGHT
            or now > ends_s
            or (case.requests_max is not None and sent >= case.requests_max)
        ):
            return None
        return request(int(record.arrival.id.partition("-")[0]), now + 0.0005)

    heavy = [request(client, client * 1e-5) for client in range(case.clients)]
    light = []
    if case.light_every_s:
        light = [
            Arrival(f"light-{n}", LIGHT, RAMP_S + n * case.light_every_s, 30, 20, output_tokens_max=20)
            for n in range(int(case.window_s / case.light_every_s))
        ]
    arrivals = sorted([*heavy, *light], key=lambda one: one.arrived_s)
    run = simulate(
        arrivals, engine=engine, backends={BACKEND: model}, next_arrival=following, network_s=network_s, steps=steps
    )
    begins_s = RAMP_S if case.requests_max is None else 0.0
    until_s = min(ends_s, run.ended_s)
    inside = [one for one in model.steps if begins_s <= one[0] < until_s]
    window_s = until_s - begins_s
    busy_s = sum(one[1] for one in inside)
    ttft = sorted(r.ttft_s or 0.0 for r in run.records.values() if r.arrival.flow == LIGHT) or [0.0]
    done = [r for r in run.records.values() if r.finished_s is not None and begins_s <= r.finished_s < until_s + 1e-9]
    tokens = sum(1 for r in run.records.values() for at in r.token_s if begins_s <= at < until_s + 1e-9)
    tokens += sum(
        r.arrival.prompt_tokens for r in run.records.values() if r.token_s and begins_s <= r.token_s[0] < until_s
    )
    preempted = sum(r.preemptions for r in run.records.values())
    return Pressed(
        sum(one[1] * one[2] for one in inside) / busy_s,
        sum(one[1] * one[3] for one in inside) / busy_s,
        preempted * 1000 / len(run.records),
        tokens / window_s,
        ttft[len(ttft) // 2],
        ttft[min(len(ttft) - 1, int(len(ttft) * 0.99))],
        sum(one[1] * one[4] for one in inside) / busy_s,
        max(one[4] for one in inside),
        len(done),
    )


FLOOD = [(200, 200)]
TINY = profile("tiny-cpu")
