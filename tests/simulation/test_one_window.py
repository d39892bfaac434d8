"""Agents under load, in virtual time: nobody freezes in one flow, and who asks little waits as under plain VTC."""

from __future__ import annotations

from functools import cache
from math import ceil
from random import Random
from statistics import median

import pytest

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import EngineProfile
from lab.lab_driver import simulate
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.request import NO_CLAIM, Claim, Flow
from simulation.run import Arrival, Record, SimulationResult

ENGINE = EngineProfile(
    name="16 slots", block_size=16, num_gpu_blocks=2001, max_model_len=8192, max_num_seqs=16,
    max_num_batched_tokens=2048, base_s=0.02, per_prefill_token_s=2e-5, per_seq_s=2e-4, per_context_token_s=0.0,
)  # fmt: skip
LIGHT_EVERY_S = 1.0


class Agents:
    """Agents that call again at once: each of its own flow or all of one, with interactions of so many calls."""

    def __init__(self, tenant: str, agents: int, calls: int, *, users: int = 1, begin_s: float = 0.5) -> None:
        self.tenant = tenant
        self.begin_s = [Random(agents).random() * begin_s for _ in range(agents)]
        self._calls = calls
        self._users = users
        self._made = [0] * agents

    def call(self, agent: int, now: float) -> Arrival:
        made = self._made[agent] = self._made[agent] + 1
        interaction, stage = divmod(made - 1, self._calls)
        name = f"{self.tenant}-{agent}-{interaction}"
        claim = Claim(name, ends=stage == self._calls - 1, explicit=True) if self._calls > 1 else NO_CLAIM
        user = f"u{agent % self._users}" if self._users > 1 else ""
        return Arrival(f"{self.tenant}/{agent}/{made}", Flow(self.tenant, "", user), now, 200, 60, claim=claim)


def run(policy: str, groups: tuple[Agents, ...], light: Flow | None, until_s: float) -> SimulationResult:
    by_tenant = {group.tenant: group for group in groups}
    admission = AdmissionEngine(named_policy(policy))
    admission.add_backend("engine", max_num_seqs=ENGINE.max_num_seqs)
    arrivals = [group.call(agent, at_s) for group in groups for agent, at_s in enumerate(group.begin_s)]
    if light is not None:
        arrivals += [
            Arrival(f"light/{n}", light, n * LIGHT_EVERY_S, 100, 30) for n in range(ceil(until_s / LIGHT_EVERY_S))
        ]

    def following(record: Record, now: float) -> Arrival | None:
        tenant, agent, *_ = record.arrival.id.split("/")
        return by_tenant[tenant].call(int(agent), now) if now < until_s and tenant in by_tenant else None

    return simulate(
        sorted(arrivals, key=lambda arrival: arrival.arrived_s),
        engine=admission,
        backends={"engine": EngineModel(ENGINE)},
        next_arrival=following,
    )


def waits_s(found: SimulationResult, name: str, since_s: float = 0.0) -> list[float]:
    return sorted(
        record.ttft_s
        for id, record in found.records.items()
        if id.startswith(f"{name}/") and record.ttft_s is not None and record.arrival.arrived_s >= since_s
    )


@cache
def one_flow(policy: str, begin_s: float) -> tuple[float, float]:
    """Least over median answers of an agent, and the longest wait: one tenant alone, without user names."""
    found = run(policy, (Agents("agents", 40, 1_000_000, begin_s=begin_s),), None, 120.0)
    answers = dict.fromkeys(range(40), 0)
    for id, record in found.records.items():
        answers[int(id.split("/")[1])] += record.outcome == "completed"
    return min(answers.values()) / median(answers.values()), waits_s(found, "agents")[-1]


@pytest.mark.parametrize("begin_s", [0.5, 60.0], ids=["at once", "one after another"])
def test_no_agent_freezes_in_one_flow(begin_s: float) -> None:
    least, longest_s = one_flow("fairserve", begin_s)
    plain_least, plain_longest_s = one_flow("vtc", begin_s)
    assert least >= 0.9 * plain_least
    assert longest_s <= 3 * plain_longest_s


@pytest.mark.parametrize("calls", [10, 1_000_000], ids=["short interactions", "endless interactions"])
@pytest.mark.parametrize("flood", [0, 60])
def test_a_light_tenant_beside_agents_goes_next_as_under_plain_vtc(calls: int, flood: int) -> None:
    """Once the agents have used their window, each light request goes as if there were none.

    Nothing else starts while it waits. How long it waits says less: that is when a slot falls free, and answers of one
    length end together or one after another.
    """
    groups = (Agents("agents", 60, calls), *((Agents("flood", flood, 1),) if flood else ()))
    for policy in ("fairserve", "vtc"):
        records = run(policy, groups, Flow("light"), 60.0).records
        starts_s = [one.dispatched_s for one in records.values() if one.dispatched_s is not None]
        light = [one for id, one in records.items() if id.startswith("light/") and one.arrival.arrived_s >= 25.0]
        assert len(light) == 35
        for one in light:
            assert one.dispatched_s is not None
            assert not any(one.arrival.arrived_s < start_s < one.dispatched_s for start_s in starts_s)


def test_a_light_user_of_a_tenant_of_agents_waits_as_under_plain_vtc() -> None:
    def p50_s(policy: str) -> float:
        groups = (Agents("agents", 40, 10, users=40),)
        return median(waits_s(run(policy, groups, Flow("agents", "", "light"), 90.0), "light", 20.0))

    assert p50_s("fairserve") <= 1.5 * p50_s("vtc")
