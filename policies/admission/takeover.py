"""Takeover of a pool's state: by a new configuration, after a restart, or by another pool.

Waiting requests keep their places, running requests go on, and counts and learned statistics stay. Requests of a
removed key are rejected by `Pipeline.reject_revoked`. A policy is replaced only if its own settings changed. The new
policy adopts the waiting and running requests, and the counters of the old policy if both have equal units. Otherwise
(a changed cost of a token, say) all tenants begin equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, Final

from policies.admission.admission_core import REMEMBERED, HistoryLimits
from policies.admission.decisions import Decision
from policies.admission.engine import AdmissionEngine
from policies.admission.policy import Policy
from policies.admission.request_ledger import NO_SERVICE
from policies.capacity.gauges import CapacitySettings
from policies.capacity.output_lengths import OutputLengths
from policies.capacity.overload import OverloadSettings
from policies.interactions import Interactions
from policies.limits.quotas import Quotas
from policies.plain_data import LearnedState, fields
from policies.queue.backlog import Backlog
from policies.queue.bounds import QueueLimits
from policies.request import Request, ServiceTokens, State, of_batch
from policies.tree.terms import Tree

VERSION: Final = 2
_ARRIVED_S: Final = attrgetter("arrived_s")
Read = list[tuple[LearnedState, Any]]
"""The learning parts of an admission engine, each with its parsed snapshot."""
Weights = Mapping[str, tuple[float | None, float]]
"""Changed weights of tenants, as (before, after). Before is None for a tenant that is new in the configuration."""
MOVED_MAX: Final = 32
"""Requests that move to a fallback pool at once: thousands may wait, and streams must not stall meanwhile."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The configuration of one pool. None keeps the present `policy`, `weights`, `interactions`, `quotas` or `tree`.

    Attributes:
        slots: by engine, the sequences that it runs at once; None if that is learned.
        weights: changed weights of tenants.
        interactions, quotas: counted over all pools, and configured elsewhere.
    """

    limits: QueueLimits
    capacity: CapacitySettings
    overload: OverloadSettings
    slots: Mapping[str, int | None]
    policy: Policy | None = None
    weights: Weights | None = None
    interactions: Interactions | None = None
    quotas: Quotas | None = None
    tree: Tree | None = None
    remembered: HistoryLimits = REMEMBERED


def take_over(engine: AdmissionEngine, setup: PoolSettings, now: float) -> Sequence[Decision]:
    """Replace the configuration. Waiting requests are not checked again by limits that they passed at arrival."""
    time = engine.catch_up(now)
    requests = engine.requests
    engine.limits = requests.waiting.limits = setup.limits
    engine.capacity = setup.capacity
    engine.recent.set_max(setup.remembered.decisions_max)
    if isinstance(requests.lengths, OutputLengths):
        requests.lengths.populations_max = setup.remembered.lengths_max
    engine.overload.settings = setup.overload
    for name, ledger in engine.backends.items():
        ledger.set(setup.capacity, max_num_seqs=setup.slots.get(name))
    if setup.interactions is not None:
        engine.interactions = requests.interactions = setup.interactions
    if setup.quotas is not None and engine.quotas is not setup.quotas:
        engine.quotas = requests.quotas = setup.quotas
        for request in _all_requests(engine):
            if request.progress.state is not State.UNDECIDED:
                setup.quotas.admitted(request, time)
    if setup.policy is not None:
        _hand_over(engine, setup.policy, time)
    if setup.tree is not None and setup.tree != requests.tree.terms:
        _regroup(engine, setup.tree)
    if setup.weights is not None:
        _reweigh(engine, setup.weights)
    engine.room.changed()
    return engine.woke(now)


def _reweigh(engine: AdmissionEngine, weights: Weights) -> None:
    """Replace the weights of tenants, for waiting requests too. Running requests are charged by their old weights.

    Requests of a key with a weight of its own keep that weight.
    """
    weights = {**weights, **{of_batch(tenant): each for tenant, each in weights.items()}}
    known, tree = _present_weights(engine), engine.requests.tree
    for request in _all_requests(engine):
        request.configured_weight = _new_weight(request.flow.tenant, request.configured_weight, weights)
    configured = {name: tree.configured_weight(name, weight) for name, (_, weight) in weights.items()}
    tree.reweigh({name: _new_weight(name, weight, weights) for name, weight in configured.items()})
    _apply_weights(engine, [(backlog, name, old, _new_weight(name, old, weights)) for backlog, name, old in known])


def _new_weight(tenant: str, known: float, weights: Weights) -> float:
    """Return the new weight of a tenant, or `known` if that is the weight of a single key."""
    before, after = weights.get(tenant, (known, known))
    return after if before is None or before == known else known


def remove_backend(engine: AdmissionEngine, name: str, now: float) -> Sequence[Decision]:
    """Remove an engine on which no request of this gateway runs."""
    assert not engine.backends[name].leases
    del engine.backends[name]
    engine.policy.forget_engine(name, now + engine.set_back_s)
    engine.room.changed()
    return engine.woke(now)


def snapshot(engine: AdmissionEngine) -> dict[str, object]:
    """Return the learned statistics as plain data that JSON can represent."""
    learned = {name: part.snapshot() for name, part in engine.policy.order.learned.items()}
    paces, start = engine.interactions.paces.snapshot(), engine.requests.cold_start.snapshot()
    return {"version": VERSION, "interactions": paces, "policy": learned, "start": start}


def read(engine: AdmissionEngine, learned: object) -> Read:
    """Parse a snapshot for `adopt`. Raise ValueError, with the reason, if the snapshot is not valid."""
    version, interactions, policy = fields(learned, "version", "interactions", "policy")
    if version != VERSION:
        raise ValueError(f"version {version!r:.20}; this is version {VERSION}")
    own, paces, start = engine.policy.order.learned, engine.interactions.paces, engine.requests.cold_start
    found = list(zip(own.values(), fields(policy, *own), strict=True)) if policy else []
    if isinstance(learned, dict) and "start" in learned:  # snapshots of earlier versions have none
        found.append((start, learned["start"]))
    return [(paces, paces.read(interactions)), *[(part, part.read(content)) for part, content in found]]


def adopt(read: Read) -> None:
    """Replace statistics for which a snapshot, of another gateway or from before a restart, has more observations."""
    for part, theirs in read:
        part.adopt(theirs)


def stranded(engine: AdmissionEngine) -> list[Request]:
    """Return up to `MOVED_MAX` requests that wait while no engine is in service, the oldest first.

    Tenants contribute one request each in turn. Without a fallback pool, return nothing while an engine may still
    start.
    """
    if engine.is_served or (engine.requests.cold_start.s_max and not engine.has_fallback):
        return []
    # The others wait for an answer of other gateways.
    queued = (one for one in engine.requests.waiting.in_turns() if one.progress.state is State.QUEUED)
    return sorted(islice(queued, MOVED_MAX), key=_ARRIVED_S)


def has_place(engine: AdmissionEngine, request: Request) -> bool:
    """Return whether the queue has room for a request without evictions."""
    return engine.requests.waiting.evictions_for(request, 0.0) == []


def move(source: AdmissionEngine, target: AdmissionEngine, request: Request, moved: Request, now: float) -> None:
    """Move a queued request to another pool, where it is `moved`: a request for the target with its progress.

    The request's deadline stays. Limits that the request passed at arrival are not checked again. The target decides
    nothing yet and must be woken.
    """
    wait = moved.progress.wait
    assert wait is not None
    source.requests.handed_over(request, source.catch_up(now))
    moved.progress.norm = 0.0
    now = target.catch_up(now)
    target.requests.admitted(moved, now)
    target.requests.waits.goes_on(wait, now)
    target.requests.waits_on(moved, now)


def _all_requests(engine: AdmissionEngine) -> list[Request]:
    """Return all requests of the pool, waiting and running."""
    return [*engine.requests.waiting.requests.values(), *[lease.request for lease in engine.requests.leases.values()]]


def _regroup(engine: AdmissionEngine, terms: Tree) -> None:
    """Replace the tree, and wake all tenants that sleep in `Backlog.full`."""
    known = _present_weights(engine)
    engine.requests.regroup(terms)
    _apply_weights(engine, [(backlog, name, weight, weight) for backlog, name, weight in known])
    for backlog in _backlogs(engine):
        while backlog.full:
            backlog.wake_at(lambda request: True)


def _present_weights(engine: AdmissionEngine) -> list[tuple[Backlog, str, float]]:
    """Return the present weight of each active tenant, and of idle tenants where no tree changes that."""
    tree, found = engine.requests.tree, []
    for backlog in _backlogs(engine):
        for name in backlog.tenant_names():
            tenant = backlog.tenant(name)
            if tenant is not None and (tenant.queued or tenant.running or tree.is_flat):
                found.append((backlog, name, tree.weight(name, tree.configured_weight(name, tenant.weight))))
    return found


def _apply_weights(engine: AdmissionEngine, known: list[tuple[Backlog, str, float, float]]) -> None:
    """Give waiting requests the weights that the tree has now, and convert the leads of tenants to these weights.

    `known`: each tenant's weight until now, and the configured weight that it has while it is idle.
    """
    tree = engine.requests.tree
    engine.requests.waiting.reweigh(lambda request: tree.weight(request.flow.tenant, request.configured_weight))
    for backlog, name, before, idle in known:
        backlog.reweigh(name, before, tree.weight(name, tree.configured_weight(name, idle)))


def _backlogs(engine: AdmissionEngine) -> list[Backlog]:
    """Return the backlogs of the queues that have one."""
    return [order.backlog for order in engine.policy.queues().values() if order.backlog is not None]


def _hand_over(engine: AdmissionEngine, policy: Policy, now: float) -> None:
    """Replace the policy, and let it adopt all requests. O(waiting + running + remembered tenants and flows)."""
    before, requests = engine.policy, engine.requests
    usual = [(backlog, backlog.usual, backlog.usual_of_flow) for backlog in _backlogs(engine)]
    leases = list(requests.leases.values())
    queues = before.queue(""), policy.queue("")
    if before.order.units != policy.order.units or None in queues:
        # The new policy counts in other units, so running requests are charged anew.
        for lease in leases:
            lease.request.progress.order.charge(lease.request, NO_SERVICE, now, final=True)
    for backlog, of_tenants, of_flows in usual:
        backlog.usual, backlog.usual_of_flow = of_tenants, of_flows
    for lease in leases:
        policy.go_on_with(lease.request, lease.backend, now)
    present = requests.waiting.requests.values()
    waiting = [each for each in present if each.progress.state is State.QUEUED and not each.progress.rests]
    for request in sorted(waiting, key=_ARRIVED_S):
        policy.push(request, now)
    # After all pushes, which count and lift requests again: the old counts and counters replace those of the pushes.
    policy.order.take_over(before.order)
    for name, known in before.queues().items():
        order = policy.queue(name)
        if order is None or order.backlog is None or known.backlog is None or order.units[0] != known.units[0]:
            continue
        order.backlog.take_over(known.backlog, with_flows=order.units[1] == known.units[1])
    for lease in leases:
        received = ServiceTokens(lease.request.prompt_tokens, lease.charged_tokens)
        policy.charge(lease.request, received, now, final=False)
    engine.policy = requests.policy = policy
    engine.room.follow(policy)
