"""Limits and interactions over several gateways: the production tables and script, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count

from policies.admission.decisions import Decision, Dispatch
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import Gauges
from policies.interactions import Interactions
from policies.limits.quotas import Quota, Quotas
from policies.limits.throttle import Ceilings, ThrottleSettings
from policies.replicas.messages import ReplicaView
from policies.replicas.pool_replica import PoolReplica
from policies.replicas.schedule import DEADLINE_S, START_S, Schedule
from policies.replicas.tenant_replica import TenantReplica
from policies.request import NO_CLAIM, Claim, Flow, RejectReason, Request, ServiceTokens
from tests.kit.typed_script_store import TypedScriptStore

ANSWER_S = 0.5
"""How long an engine takes for any request."""
WAY_S = 0.0005
LOOK_S = 0.001


class Gateway:
    def __init__(self, name: str, quota: Quota, *, refuses_alone: bool, workers: int) -> None:
        self.name = name
        quotas, interactions = Quotas(quota), Interactions()
        throttle = ThrottleSettings(user=Ceilings(starts=5), app_user=Ceilings(), app=Ceilings())
        self.engine = AdmissionEngine(
            named_policy("fairserve", throttle=throttle), quotas=quotas, interactions=interactions
        )
        self.engine.add_backend("b", max_num_seqs=32)
        self.tenants = TenantReplica(quotas, interactions, [self.engine], refuses_alone=refuses_alone, workers=workers)
        self.schedules = {"*": Schedule(self.tenants, start_s=START_S), "pool": Schedule(PoolReplica(self.engine))}


class Gateways:
    """Some gateways and their store, in virtual time."""

    def __init__(
        self,
        number: int,
        quota: Quota,
        *,
        is_down: Callable[[float], bool] = lambda now: False,
        refuses_alone: bool = False,
        workers: int = 1,
    ) -> None:
        self.gateways = [
            Gateway(f"gateway-{n}", quota, refuses_alone=refuses_alone, workers=workers) for n in range(number)
        ]
        self.dispatched_s: dict[str, float] = {}
        self.refused: dict[str, RejectReason] = {}
        self._is_down = is_down
        self.flush()
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = count()
        for n, gateway in enumerate(self.gateways):
            for name, schedule in gateway.schedules.items():
                self.at(0.001 * n, lambda now, g=gateway, k=name, s=schedule: self._look(g, k, s, now))

    def flush(self) -> None:
        """Let the store lose all."""
        self._stores = {"*": TypedScriptStore(), "pool": TypedScriptStore()}

    def at(self, when_s: float, happens: Callable[[float], None]) -> None:
        heappush(self._heap, (when_s, next(self._serial), happens))

    def run(self, until_s: float) -> None:
        while self._heap[0][0] < until_s:
            now, _, happens = heappop(self._heap)
            happens(now)

    def arrive(self, n: int, request: Request, now: float) -> None:
        gateway = self.gateways[n]
        self._carry_out(gateway, gateway.engine.arrived(request, now), now)

    def _carry_out(self, gateway: Gateway, decisions: Sequence[Decision], now: float) -> None:
        for decision in decisions:
            if isinstance(decision, Dispatch):
                self.dispatched_s[decision.id] = now
                self.at(now + ANSWER_S, lambda at, id=decision.id: self._answered(gateway, id, at))
            else:
                self.refused[decision.id] = decision.reason

    def _answered(self, gateway: Gateway, request_id: str, now: float) -> None:
        self._carry_out(gateway, gateway.engine.finished(request_id, ServiceTokens(10, 5), now), now)

    def _look(self, gateway: Gateway, name: str, schedule: Schedule, now: float) -> None:
        if schedule.due_s() > now:
            self.at(now + LOOK_S, lambda at: self._look(gateway, name, schedule, at))
            return
        number, told = schedule.ask(now)
        heard: ReplicaView | None = None
        if not self._is_down(now):
            heard = self._stores[name].exchange(gateway.name, number, told, int(now * 1000) + 10**9)

        def ended(at: float) -> None:
            decisions = schedule.lost(at) if heard is None else schedule.answered(heard, at)
            self._carry_out(gateway, decisions, at)
            self._carry_out(gateway, gateway.tenants.decisions_of(gateway.engine), at)
            self._look(gateway, name, schedule, at)

        self.at(now + (DEADLINE_S if heard is None else WAY_S), ended)


def asks(request_id: str, now: float, claim: Claim = NO_CLAIM) -> Request:
    return Request(request_id, Flow("tenant", "app", "user"), 1.0, 10, 5, now, claim=claim)


def traffic(gateways: Gateways, per_s: float, until_s: float, seed: int = 0) -> None:
    rng, serial = random.Random(seed), count()

    def happens(now: float) -> None:
        gateways.arrive(rng.randrange(len(gateways.gateways)), asks(f"r{next(serial)}", now), now)
        gateways.at(now + rng.expovariate(per_s), happens)

    gateways.at(0.5, happens)
    gateways.run(until_s)


def test_a_limit_per_minute_is_one_of_all_gateways() -> None:
    gateways = Gateways(4, Quota(requests_per_minute=60))
    traffic(gateways, 10.0, 120.0)
    first = sum(at < 60.0 for at in gateways.dispatched_s.values())
    assert first == 60
    # What was admitted in the minute before fades as the second one goes on.
    assert 58 <= len(gateways.dispatched_s) - first <= 60
    assert set(gateways.refused.values()) == {RejectReason.RATE_LIMITED}


def test_a_store_that_answers_late_at_the_start_lets_no_gateway_use_the_limit_for_itself() -> None:
    gateways = Gateways(4, Quota(requests_per_minute=60), is_down=lambda now: now < 10.0)
    traffic(gateways, 50.0, 55.0)
    times = gateways.dispatched_s.values()
    assert (len(times), min(times) > 10.0) == (60, True)


def test_workers_that_never_heard_their_hub_have_an_equal_part_of_a_limit_after_a_while() -> None:
    gateways = Gateways(4, Quota(requests_per_minute=60), is_down=lambda now: True, workers=4)
    traffic(gateways, 50.0, 55.0)
    times = gateways.dispatched_s.values()
    assert len(times) == 60
    assert 10.0 < min(times) < 20.0, "nobody waits for a store that does not come"


def test_without_the_store_limits_may_be_made_to_refuse() -> None:
    gateways = Gateways(2, Quota(requests_per_minute=600), is_down=lambda now: 10.0 < now < 20.0, refuses_alone=True)
    traffic(gateways, 5.0, 30.0)
    times = gateways.dispatched_s.values()
    assert not any(12.0 < at < 20.0 for at in times)
    assert any(at > 21.0 for at in times)


def test_a_store_that_was_flushed_learns_the_counts_again() -> None:
    gateways = Gateways(2, Quota(requests_per_minute=60))
    gateways.at(3.0, lambda now: gateways.flush())
    traffic(gateways, 10.0, 60.0)
    # What was reserved may be counted twice. What both counted in the round of the loss may be taken for one count.
    assert 50 <= len(gateways.dispatched_s) <= 60 + 2


def test_an_interaction_goes_on_at_another_gateway_under_overload() -> None:
    """A flood fills all slots; its user is beyond the limit of starts; the agent's calls change gateway each time."""
    gateways = Gateways(2, Quota())
    agent = Claim(id="task", explicit=True)

    def flood(now: float) -> None:
        for gateway in gateways.gateways:
            gateway.engine.backend_changed("b", Gauges(now, 32, 0, 0.99, 10_000, 16), now)
        for n in range(40):
            gateways.arrive(0, asks(f"flood-{now}-{n}", now), now)
            gateways.arrive(1, asks(f"flood'-{now}-{n}", now), now)

    def call(n: int) -> Callable[[float], None]:
        return lambda now: gateways.arrive(n % 2, asks(f"call-{n}", now, agent), now)

    gateways.at(0.5, call(0))
    for n in range(1, 8):
        gateways.at(n + 0.5, flood)
        gateways.at(n + 0.9, call(n))
    gateways.run(60.0)
    assert RejectReason.OVER_USER_LIMIT in gateways.refused.values()
    assert not [name for name in gateways.refused if name.startswith("call")]
    assert all(f"call-{n}" in gateways.dispatched_s for n in range(8))
    known = [gateway.engine.interactions for gateway in gateways.gateways]
    assert [len(interactions) for interactions in known] == [1, 1]
    # Each as of its own last call, so that the next would come after it: the eighth was at the second gateway.
    again = asks("again", 60.0, agent), asks("again'", 60.0, agent)
    for interactions, request in zip(known, again, strict=True):
        interactions.arrived(request, 60.0)
    assert [request.progress.stage for request in again] == [7 + 1, 8 + 1]
