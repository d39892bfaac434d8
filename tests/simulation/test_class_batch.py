"""Work that can wait takes what is free, and gives it back when other work comes. In virtual time."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import profile
from lab.lab_driver import simulate
from lab.service import service
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.request import Flow, of_batch
from simulation.run import Arrival, Record, SimulationResult

NIGHT = of_batch("night")


def run(
    arrivals: list[Arrival], policy: str = "fairserve", *, batch: int = 0, until_s: float = 60.0, output: int = 120
) -> tuple[SimulationResult, AdmissionEngine]:
    """`batch`: so many requests that can wait are open at any time, of answers in one piece."""
    engine = AdmissionEngine(named_policy(policy))
    engine.add_backend("one", max_num_seqs=32)
    serial, rng = count(), Random(2)

    def work(now: float) -> Arrival:
        return Arrival(
            f"b-{next(serial)}", Flow(NIGHT, "app", ""), now, 64, rng.randint(output // 2, output * 3 // 2),
            output_tokens_max=2 * output, streamed=False,
        )  # fmt: skip

    def following(record: Record, now: float) -> Arrival | None:
        return work(now) if record.arrival.flow.tenant == NIGHT and now < until_s else None

    first = [work(0.0) for _ in range(batch)]
    found = simulate(
        sorted([*first, *arrivals], key=lambda one: one.arrived_s), engine=engine,
        backends={"one": EngineModel(profile("tiny-cpu"))}, next_arrival=following,
    )  # fmt: skip
    assert {record.outcome for record in found.records.values()} <= {"completed"}
    return found, engine


def visits(per_s: float, until_s: float, tenant: str = "day") -> list[Arrival]:
    rng, now, found = Random(5), 5.0, []
    while now < until_s:
        found.append(Arrival(f"{tenant}-{len(found)}", Flow(tenant, "app", ""), now, 64, rng.randint(10, 60), 100))
        now += rng.expovariate(per_s)
    return found


def first_tokens_s(found: SimulationResult, tenant: str = "day") -> list[float]:
    return sorted(
        record.token_s[0] - record.arrival.arrived_s
        for record in found.records.values()
        if record.arrival.flow.tenant == tenant
    )


def p95(values: list[float]) -> float:
    return values[len(values) * 95 // 100]


def step_s(sequences: int, tokens_each: int) -> float:
    """How long one step of the engine takes with so many sequences."""
    engine = profile("tiny-cpu")
    return engine.base_s + sequences * (engine.per_seq_s + tokens_each * engine.per_context_token_s)


@pytest.mark.parametrize("policy", ["fairserve", "dlpm"])
def test_other_work_goes_at_once_and_the_engine_is_full(policy: str) -> None:
    until_s = 30.0
    beside, engine = run(visits(10.0, until_s), policy, batch=64, until_s=until_s)
    only, _ = run([], policy, batch=64, until_s=until_s)
    received, whole = service(beside.records.values(), 5.0, until_s), service(only.records.values(), 5.0, until_s)
    assert sum(received.values()) > 0.95 * whole[NIGHT]
    # One step is under way when it comes, and its own may hold the prompts of others.
    times = first_tokens_s(beside)
    assert times[len(times) // 2] < 3 * step_s(32, 200)
    assert p95(times) < 10 * step_s(32, 200)
    preemption = engine.requests.preemption
    assert preemption.preempted > 0
    assert preemption.wasted_tokens <= 0.05 * preemption.received_tokens + preemption.at_once_tokens


def test_who_returns_does_not_wait_for_answers_of_minutes() -> None:
    back = [Arrival(f"day-{n}", Flow("day", "app", ""), 30.0, 64, 40, 100) for n in range(32)]
    found, engine = run(back, batch=40, until_s=31.0, output=1200)
    times = first_tokens_s(found)
    alone = first_tokens_s(run(back)[0])
    # What the KV cache has no room for waits for answers of its own tenant.
    assert times[24] < 3 * max(alone[24], step_s(32, 1200))
    assert 5 <= engine.requests.preemption.preempted <= 10
