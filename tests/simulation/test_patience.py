"""A refusal must serve somebody: who is alone, or waits for less than patience, is queued; a flood waits behind itself.
A client that is refused gets in at its first return, and is served no later than by waiting.

With everything as it comes, in virtual time, before an engine whose KV cache is overloaded most of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from backends.simulated.engine import EngineModel
from backends.simulated.profiles import profile
from policies.admission.decisions import Reject
from policies.admission.engine import AdmissionEngine
from policies.limits.ceilings import ThrottleSettings
from policies.limits.throttle import RETRY_S_MAX
from policies.request import Claim, Flow, Refusal
from simulation.driver import simulate
from simulation.run import Arrival, Record, Run
from tests.policies.making import policy_with

PROMPT_TOKENS, OUTPUT_TOKENS = 400, 40
PATIENCE_S = ThrottleSettings().patience_s


def arrival(tenant: str, number: int, now: float, user: str = "") -> Arrival:
    """A question: nothing that would be inside an interaction."""
    return Arrival(
        f"{tenant}/{number}", Flow(tenant, "default", user), now, PROMPT_TOKENS, OUTPUT_TOKENS, 4 * OUTPUT_TOKENS,
        claim=Claim(f"{tenant}-{number}", 1, begins=True),
    )  # fmt: skip


def run(first: list[Arrival], follow: Callable[[Record, float], Arrival | None] = lambda record, now: None) -> Run:
    engine = AdmissionEngine(policy_with("fairserve"))
    engine.add_backend("only", max_num_seqs=32)
    return simulate(
        sorted(first, key=lambda one: one.arrived_s),
        engine=engine, backends={"only": EngineModel(profile("demo"))}, next_arrival=follow,
    )  # fmt: skip


def refused(ran: Run, tenant: str) -> list[Reject]:
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


def obeying(parallel: int, calls: int, patience_s: float = PATIENCE_S) -> Run:
    """Two tenants with so many calls each, so many at once, that come back when a refusal says so."""
    loops = {tenant: closed_loop(tenant, parallel, calls) for tenant in ("one", "two")}
    throttle = ThrottleSettings(patience_s=patience_s)
    engine = AdmissionEngine(policy_with("fairserve", throttle=throttle))
    engine.add_backend("only", max_num_seqs=32)

    def follow(record: Record, now: float) -> Arrival | None:
        before = record.arrival
        if record.outcome == "completed":
            return loops[before.flow.tenant][1](record, now)
        last = engine.recent.last(before.id)
        assert last is not None
        decision = last.decision
        assert isinstance(decision, Reject)
        return replace(before, id=f"{before.id} again", arrived_s=now + decision.retry_after_s)

    return simulate(
        sorted([one for first, _ in loops.values() for one in first], key=lambda one: one.arrived_s),
        engine=engine, backends={"only": EngineModel(profile("demo"))}, next_arrival=follow,
    )  # fmt: skip


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


def longest_first_token_s(ran: Run) -> float:
    waits = [record.ttft_s for name, record in ran.records.items() if name.startswith("light/")]
    return max(wait for wait in waits if wait is not None)


def test_a_batch_job_beside_a_light_tenant_waits_and_is_not_refused() -> None:
    first, follow = closed_loop("batch", 64, 600)
    ran = run([*first, *LIGHT], follow)
    assert refused(ran, "batch") == refused(ran, "light") == []
    assert len(ran.records) == 600 + len(LIGHT)
    waits = [r.dispatched_s - r.arrival.arrived_s for r in ran.records.values() if r.dispatched_s is not None]
    assert max(waits) < PATIENCE_S
    assert longest_first_token_s(ran) < light_first_token_s() + 1.0


def test_a_flood_beyond_patience_is_refused_and_what_is_let_in_is_served() -> None:
    flood = [arrival("flood", number, number / 80) for number in range(80 * 60)]
    others = [arrival("other", number, 0.5 * number, user=f"u{number % 5}") for number in range(120)]
    ran = run([*flood, *others])
    assert refused(ran, "other") == []
    turned_away = [one for one in refused(ran, "flood") if one.reason is Refusal.OVER_USER_LIMIT]
    assert len(turned_away) > len(flood) // 4
    assert all(1.0 <= one.retry_after_s <= RETRY_S_MAX for one in turned_away)
    assert [one for one in refused(ran, "flood") if one.reason is Refusal.QUEUE_TIMEOUT] == []
    served = [record for record in ran.records.values() if record.dispatched_s is not None]
    waits = [r.dispatched_s - r.arrival.arrived_s for r in served if r.dispatched_s is not None]
    assert max(waits) < 2 * PATIENCE_S, "and what is let in is served"


def test_floods_that_obey_get_in_at_their_first_return_before_a_queue_would_have_served_them() -> None:
    tries: dict[str, list[Record]] = {}
    for record in obeying(700, 1400).records.values():
        tries.setdefault(record.arrival.id.partition(" ")[0], []).append(record)
    outcomes = {id: [str(one.outcome) for one in each] for id, each in tries.items()}
    assert sum(len(each) > 1 for each in outcomes.values()) > 100
    assert {tuple(each) for each in outcomes.values()} == {("completed",), ("over_user_limit", "completed")}
    last = {id: each[-1] for id, each in tries.items()}
    waits = [
        one.dispatched_s - tries[id][0].arrival.arrived_s for id, one in last.items() if one.dispatched_s is not None
    ]
    unlimited = obeying(700, 1400, patience_s=3600.0).records.values()
    without = [one.dispatched_s - one.arrival.arrived_s for one in unlimited if one.dispatched_s is not None]
    assert len(waits) == len(without) == 2 * 1400
    returns = [each[1].arrival.arrived_s - each[0].arrival.arrived_s for each in tries.values() if len(each) > 1]
    assert max(returns) + PATIENCE_S < 1.2 * max(without)
    assert max(waits) < max(without) + max(returns)
    assert sum(waits) < 1.1 * sum(without)
