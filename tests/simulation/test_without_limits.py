"""Where no limit is configured nobody is refused by one: a tenant that is alone is served, and a batch job waits behind
itself.

With everything as it comes, in virtual time, before an engine whose KV cache is overloaded most of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import profile
from lab.lab_driver import simulate
from policies.admission.decisions import Reject
from policies.admission.engine import AdmissionEngine
from policies.request import Claim, Flow
from simulation.run import Arrival, Record, SimulationResult
from tests.policies.making import policy_with

PROMPT_TOKENS, OUTPUT_TOKENS = 400, 40


def arrival(tenant: str, number: int, now: float, user: str = "") -> Arrival:
    """A question: nothing that would be inside an interaction."""
    return Arrival(
        f"{tenant}/{number}", Flow(tenant, "default", user), now, PROMPT_TOKENS, OUTPUT_TOKENS, 4 * OUTPUT_TOKENS,
        claim=Claim(f"{tenant}-{number}", 1, begins=True),
    )  # fmt: skip


def run(
    first: list[Arrival], follow: Callable[[Record, float], Arrival | None] = lambda record, now: None
) -> SimulationResult:
    engine = AdmissionEngine(policy_with("fairserve"))
    engine.add_backend("only", max_num_seqs=32)
    return simulate(
        sorted(first, key=lambda one: one.arrived_s),
        engine=engine, backends={"only": EngineModel(profile("demo"))}, next_arrival=follow,
    )  # fmt: skip


def refused(ran: SimulationResult, tenant: str) -> list[Reject]:
    return [one for _, one in ran.decisions if isinstance(one, Reject) and one.id.startswith(f"{tenant}/")]


def closed_loop(
    tenant: str, parallel: int, calls: int
) -> tuple[list[Arrival], Callable[[Record, float], Arrival | None]]:
    """So many calls, so many at once."""
    sent = parallel

    def follow(record: Record, now: float) -> Arrival | None:
        nonlocal sent
        if record.arrival.flow.tenant != tenant or sent >= calls:
            return None
        sent += 1
        return arrival(tenant, sent, now)

    return [arrival(tenant, number + 1, 0.001 * number) for number in range(parallel)], follow


@pytest.mark.parametrize("parallel", [16, 64, 256, 1024])
def test_who_is_alone_is_never_refused(parallel: int) -> None:
    first, follow = closed_loop("alone", parallel, 2 * parallel)
    ran = run(first, follow)
    assert refused(ran, "alone") == []
    assert {record.outcome for record in ran.records.values()} == {"completed"}
    assert len(ran.records) == 2 * parallel


LIGHT = [arrival("light", number, 0.5 + 0.5 * number) for number in range(30)]


@cache
def light_first_token_s() -> float:
    """How long a light tenant waits that is alone, at the most."""
    return longest_first_token_s(run(LIGHT))


def longest_first_token_s(ran: SimulationResult) -> float:
    waits = [record.ttft_s for name, record in ran.records.items() if name.startswith("light/")]
    return max(wait for wait in waits if wait is not None)


def test_a_batch_job_beside_a_light_tenant_waits_and_is_not_refused() -> None:
    first, follow = closed_loop("batch", 64, 600)
    ran = run([*first, *LIGHT], follow)
    assert refused(ran, "batch") == refused(ran, "light") == []
    assert len(ran.records) == 600 + len(LIGHT)
    waits = [r.dispatched_s - r.arrival.arrived_s for r in ran.records.values() if r.dispatched_s is not None]
    assert max(waits) < 30.0
    assert longest_first_token_s(ran) < light_first_token_s() + 1.0
