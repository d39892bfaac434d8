"""What changes when a pool goes on under another configuration or after a restart, or what waits goes on in another
pool? What stays?

What waits keeps its place, what runs goes on, and what was counted and learned counts on. A policy is replaced only
where its own settings changed: the new one takes in what waits and what runs, and goes on with the counters of the old
one where both count the same. Where they do not (another cost of a token, say), all tenants begin equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from policies.admission.deciding import REMEMBERED, Remembered
from policies.admission.decisions import Decision
from policies.admission.engine import AdmissionEngine
from policies.admission.policy import Policy
from policies.capacity.gauges import CapacitySettings
from policies.capacity.output_lengths import OutputLengths
from policies.capacity.overload import OverloadSettings
from policies.interactions import Interactions
from policies.limits.quotas import Quotas
from policies.plain_data import Learned, fields
from policies.queue.bounds import QueueLimits
from policies.request import Request, ServiceTokens, State, of_batch
from policies.tree.terms import Tree

VERSION: Final = 2
Read = list[tuple[Learned, Any]]
"""The parts of an admission engine that learn, each with what was read for it."""
MOVED_MAX: Final = 32
"""Requests that move at once: there may be thousands, and streams must not wait for that."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is configured for one pool.

    Attributes:
        slots: by engine, how many sequences it runs at once; None: that is learned.
        policy: the one to go on with; None: the present one.
        interactions, quotas: what all pools count together; None: the present ones. Their own settings are set there.
    """

    limits: QueueLimits
    capacity: CapacitySettings
    overload: OverloadSettings
    slots: Mapping[str, int | None]
    policy: Policy | None = None
    interactions: Interactions | None = None
    quotas: Quotas | None = None
    tree: Tree | None = None
    remembered: Remembered = REMEMBERED


def take_over(engine: AdmissionEngine, setup: Setup, now: float) -> Sequence[Decision]:
    """Go on under this configuration. What waits is not judged again by limits that it passed when it came."""
    time = engine.catch_up(now)
    requests = engine.requests
    engine.limits = requests.waiting.limits = setup.limits
    engine.capacity = setup.capacity
    engine.recent.set(setup.remembered.decisions_max)
    if isinstance(requests.lengths, OutputLengths):
        requests.lengths.populations_max = setup.remembered.lengths_max
    engine.overload.settings = setup.overload
    for name, ledger in engine.backends.items():
        ledger.set(setup.capacity, max_num_seqs=setup.slots.get(name))
    if setup.interactions is not None:
        engine.interactions = requests.interactions = setup.interactions
    if setup.quotas is not None and engine.quotas is not setup.quotas:
        engine.quotas = requests.quotas = setup.quotas
        for request in _present(engine):
            if request.progress.state is not State.UNDECIDED:
                setup.quotas.admitted(request, time)
    if setup.policy is not None:
        _hand_over(engine, setup.policy, time)
    if setup.tree is not None and setup.tree != requests.tree.terms:
        _regroup(engine, setup.tree)
    engine.room.changed()
    return engine.woke(now)


def reweigh(engine: AdmissionEngine, weights: Mapping[str, float]) -> None:
    """These tenants have these weights from now on. What waits goes by them, what runs is charged by the old ones."""
    weights = {**weights, **{of_batch(tenant): weight for tenant, weight in weights.items()}}
    engine.requests.waiting.reweigh(weights)
    engine.requests.tenants.reweigh(weights)
    engine.requests.tree.reweigh(weights)
    for order in engine.policy.queues().values():
        if order.backlog is not None:
            order.backlog.reweigh(weights)


def remove_backend(engine: AdmissionEngine, name: str, now: float) -> Sequence[Decision]:
    """An engine on which nothing of ours runs is no longer there."""
    assert not engine.backends[name].leases
    del engine.backends[name]
    engine.policy.forget_engine(name, now + engine.set_back_s)
    engine.room.changed()
    return engine.woke(now)


def snapshot(engine: AdmissionEngine) -> dict[str, object]:
    """What was learned, as plain data that JSON can represent."""
    learned = {name: part.snapshot() for name, part in engine.policy.order.learned.items()}
    return {"version": VERSION, "interactions": engine.interactions.paces.snapshot(), "policy": learned}


def read(engine: AdmissionEngine, learned: object) -> Read:
    """What `adopt` takes of a snapshot. ValueError, saying why, if it is not valid."""
    version, interactions, policy = fields(learned, "version", "interactions", "policy")
    if version != VERSION:
        raise ValueError(f"version {version!r:.20}; this is version {VERSION}")
    own, paces = engine.policy.order.learned, engine.interactions.paces
    found = zip(own.values(), fields(policy, *own), strict=True) if policy else ()
    return [(paces, paces.read(interactions)), *[(part, part.read(content)) for part, content in found]]


def adopt(read: Read) -> None:
    """Take over what was seen more of in a snapshot: of another gateway, or of this one before a restart."""
    for part, theirs in read:
        part.adopt(theirs)


def stranded(engine: AdmissionEngine) -> list[Request]:
    """Some of the requests that wait though no engine is in service, the oldest first. No tenant has more of them than
    another, as long as both have any."""
    found: list[Request] = []
    if engine.is_served:
        return found
    for request in engine.requests.waiting.in_turns():
        if request.progress.state is State.QUEUED:  # about others an answer is awaited
            found.append(request)
            if len(found) == MOVED_MAX:
                break
    found.sort(key=_arrival)
    return found


def has_place(engine: AdmissionEngine, request: Request) -> bool:
    """Is there room in the queue for it, such that nobody gives way?"""
    return engine.requests.waiting.giving_way(request, 0.0) == []


def move(source: AdmissionEngine, target: AdmissionEngine, request: Request, moved: Request, now: float) -> None:
    """A queued request goes on waiting elsewhere, as `moved`: what it is to the target, with the progress that it has.

    Until then it may wait as long as before. It is not judged again by limits that it passed when it came. The target
    decides nothing yet: it must be woken.
    """
    wait = moved.progress.wait
    assert wait is not None
    source.requests.handed_over(request, source.catch_up(now))
    moved.progress.norm = 0.0
    now = target.catch_up(now)
    target.requests.taken_in(moved, now)
    target.requests.waits.goes_on(wait, now)
    target.requests.waits_on(moved, now)


def _present(engine: AdmissionEngine) -> list[Request]:
    """What waits, and what runs."""
    return [*engine.requests.waiting.requests.values(), *[lease.request for lease in engine.requests.leases.values()]]


def _regroup(engine: AdmissionEngine, tree: Tree) -> None:
    """What waits and runs is present in this tree from now on. What tenants have received counts as it did."""
    requests = engine.requests
    waiting = [each for each in requests.waiting.requests.values() if each.progress.state is State.QUEUED]
    requests.tree.regroup(tree, waiting, [(lease.request, lease.held_tokens) for lease in requests.leases.values()])
    for order in engine.policy.queues().values():
        while order.backlog is not None and order.backlog.full:
            order.backlog.wake_at(_may_begin)


def _hand_over(engine: AdmissionEngine, policy: Policy, now: float) -> None:
    """O(waiting + running + remembered tenants and flows)."""
    before, requests = engine.policy, engine.requests
    backlogs = [order.backlog for order in before.queues().values() if order.backlog is not None]
    usual = [(backlog.usual, backlog.usual_of_flow) for backlog in backlogs]
    leases = list(requests.leases.values())
    queues = before.queue(""), policy.queue("")
    if before.order.units != policy.order.units or None in queues:
        # What runs is charged anew: the new policy counts it otherwise. Else its charge stays, and no sum is rounded.
        for lease in leases:
            before.give_up(lease.request, now)
    for backlog, (of_tenants, of_flows) in zip(backlogs, usual, strict=True):
        backlog.usual, backlog.usual_of_flow = of_tenants, of_flows
    for lease in leases:
        policy.go_on_with(lease.request, lease.backend, now)
    present = requests.waiting.requests.values()
    waiting = [each for each in present if each.progress.state is State.QUEUED and not each.progress.rests]
    for request in sorted(waiting, key=_arrival):
        policy.push(request, now)
    # Last: to be queued is to be counted and lifted, and these were so before.
    policy.order.resume(before.order)
    for name, known in before.queues().items():
        order = policy.queue(name)
        if order is None or order.backlog is None or known.backlog is None or order.units[0] != known.units[0]:
            continue
        order.backlog.resume(known.backlog, with_flows=order.units[1] == known.units[1])
    for lease in leases:
        received = ServiceTokens(lease.request.prompt_tokens, lease.charged_tokens)
        policy.charge(lease.request, received, now, final=False)
    engine.policy = requests.policy = policy
    engine.room.follow(policy)


def _may_begin(request: Request) -> bool:
    return True


def _arrival(request: Request) -> float:
    return request.arrived_s
