"""Agents in virtual time: calls of interactions before one engine, whose cache they fill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policies.admission.decisions import Decision
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import Gauges
from policies.capacity.working_set import WorkingSet
from policies.queue.bounds import QueueLimits
from policies.request import Claim, Request, ServiceTokens
from policies.tree.pool_tree import PoolTree
from tests.policies.making import dispatched, make_request, pool_of

K = 10_000
HOLD_S = 5.0
SIZES = [4**power for power in range(8)]


def call(
    tenant: str,
    interaction: str,
    prompt: int,
    *,
    user: str = "",
    ends: bool = False,
    serial: int = 0,
    arrived_s: float = 0.0,
) -> Request:
    """A call of an interaction that its client names."""
    claim = Claim(interaction, ends=ends, explicit=True)
    id = f"{interaction}.{serial}"
    return make_request(tenant, user=user, id=id, prompt=prompt, claim=claim, arrived_s=arrived_s)


def teach(engine: AdmissionEngine, tenants: Sequence[str] = "abc") -> None:
    """The rate of prefill is known, and so are apps whose calls always return."""
    for _ in range(50):
        engine.backends["one"].prefill_rate.observed(K, HOLD_S)
        for tenant in tenants:
            for tokens in SIZES:
                kind = engine.working_set.kinds.get_or_create(make_request(tenant, prompt=tokens))
                kind.return_rate.learn(1.0)


def working_set(tree: PoolTree, batch_share: float = 0.0) -> WorkingSet:
    """The working set of `K` tokens of a pool without engines."""
    found = WorkingSet(tree)
    found.capacity_tokens, found.hold_s, found.first_start = K, HOLD_S, lambda: None
    found.batch_share = batch_share
    return found


class Pool:
    """An engine of `K` tokens of KV with slots for everything, of which the rate of prefill is known."""

    def __init__(self, *, policy: str = "fairserve", limits: QueueLimits | None = None, **settings: Any) -> None:
        self.engine = pool_of("one", policy=named_policy(policy, **settings), slots=64, limits=limits)
        self.set = self.engine.working_set
        self.now = 0.0
        teach(self.engine)
        self.scraped()

    def scraped(self) -> list[str]:
        gauges = Gauges(self.now, running=0, waiting=0, kv_capacity_tokens=K, kv_usage=0.1)
        return dispatched(self.engine.backend_changed("one", gauges, self.now))

    def asks(self, request: Request) -> list[str]:
        return self._started(self.engine.arrived(request, self.now))

    def answers(self, request: Request, *, output: int = 10) -> list[str]:
        service = ServiceTokens(request.prompt_tokens, output)
        return self._started(self.engine.finished(request.id, service, self.now))

    def _started(self, decisions: Sequence[Decision]) -> list[str]:
        """The requests that start by these decisions, and by the first token of each that does."""
        started = dispatched(decisions)
        for id in started:
            started += dispatched(self.engine.progressed(id, 1, self.now))
        return started

    def serves(self, request: Request, *, output: int = 10) -> list[str]:
        """A call that starts at once, and its answer."""
        assert self.asks(request) == [request.id]
        return self.answers(request, output=output)

    def after(self, seconds: float) -> list[str]:
        self.now += seconds
        return dispatched(self.engine.woke(self.now))


def full(pool: Pool, *, tenant: str = "a") -> Request:
    """Three interactions of one tenant that take nine tenths of the cache: two are in a tool, and this call of the
    first one is under way.
    """
    for number in (0, 2, 1):
        pool.serves(call(tenant, f"{tenant}{number}", 3000), output=0)
        pool.now += 0.001
    under_way = call(tenant, f"{tenant}0", 3000, serial=1)
    assert pool.asks(under_way) == [under_way.id]
    return under_way
